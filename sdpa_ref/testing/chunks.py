"""Functions of Dask arrays as functions of NumPy arrays, which are cut into chunks as odd as they come."""

import os
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

import sdpa_ref
from sdpa_ref.masks import Mask
from sdpa_ref.masks.algebra import BooleanArray

SIZES = 1, 2, 3, 5, 7, 13, 31, 61, 127, 251, 509, 1021  # of chunks: single ones, primes, and the whole axis
MOST = 5  # chunks along an axis


def over(function: Callable[..., Any], backend: str, kernel: str | None = None) -> Callable[..., Any]:
    """Return a public function that takes and returns NumPy arrays, and computes chunks of Dask arrays.

    `kernel` is the backend that computes blocks.
    """

    def computed(*arrays: Any, **options: Any) -> Any:
        from dask.base import compute

        layout = options.get("layout", "HLE")
        options |= {name: cut(options[name]) for name in ("mask", "bias") if name in options}
        result = function(*(cut(array, layout) for array in arrays), backend=kernel or backend, **options)
        state = isinstance(result, sdpa_ref.AttentionState)
        lazy = (result.output, result.lse, result._parts[1:]) if state else result
        (made,) = compute(lazy, scheduler="synchronous")
        if not state:
            return sdpa_ref.Gradients(*made) if isinstance(result, sdpa_ref.Gradients) else made
        whole = sdpa_ref.AttentionState(made[0], made[1], result.layout)._with(*made[2])
        return whole.output, whole.lse, whole

    return computed


def cut(value: Any, layout: str = "HLE") -> Any:
    """Return NumPy arrays, those in masks too, as Dask arrays; an axis of one length is cut in one way everywhere."""
    if isinstance(value, tuple):
        return tuple(cut(each, layout) for each in value)
    if isinstance(value, BooleanArray):
        return BooleanArray(cut(value.array))
    if isinstance(value, Mask) and hasattr(value, "parts"):
        return type(value)(cut(value.parts))  # type: ignore[call-arg]
    if not isinstance(value, np.ndarray):
        return value
    from dask.array import from_array

    rows = -3 if layout == "LHE" and value.ndim > 2 else -2
    chunks = [_size(n, axis - value.ndim == rows) for axis, n in enumerate(value.shape)]
    return from_array(value, chunks=tuple(chunks))


def _size(n: int, rows: bool) -> int:
    """Return how long the chunks of an axis are; a seed in the environment gives others."""
    seed = os.environ.get("SDPA_TEST_CHUNKS", "0")
    draw = zlib.crc32(f"{seed} {n} {rows}".encode())
    fitting = [size for size in SIZES if -(-n // size) <= MOST and size < n]
    sizes = [*fitting, max(1, n)]
    return sizes[draw % len(sizes)]
