"""Functions of CuPy arrays as functions of NumPy arrays, which go to the device as they lie in the host's memory."""

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import sdpa_ref
from sdpa_ref.masks import Mask
from sdpa_ref.masks.algebra import BooleanArray
from sdpa_ref.stored import Paged, Quantized

_PAGE = 256  # CuPy's memory begins at multiples of this
_FAR = 1 << 28  # bytes from the first to the last number of an array


def over(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return a public function that takes and returns NumPy arrays and computes with a backend of CuPy arrays."""

    def computed(*arrays: Any, **options: Any) -> Any:
        options |= {name: moved(options[name]) for name in ("mask", "bias", "sink", "grad_lse") if name in options}
        result = function(*map(moved, arrays), backend=backend, **options)
        if isinstance(result, sdpa_ref.AttentionState):
            return _triple(result)
        return back(result)

    return computed


def merged(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the merge of two states as `over` returns them, computed where they lie."""
    return _triple(a[2] + b[2])


def _triple(state: sdpa_ref.AttentionState) -> tuple[Any, ...]:
    """Return output and lse as NumPy arrays, and the state itself, which has more."""
    return state.output.get(), state.lse.get(), state


def back(value: Any) -> Any:
    """Return CuPy arrays, those in tuples too, as NumPy arrays."""
    if isinstance(value, tuple):
        return tuple(map(back, value))
    return value.get() if hasattr(value, "get") else value


def moved(value: Any) -> Any:
    """Return NumPy arrays, those in masks and stored keys too, as CuPy arrays of the same strides and alignment."""
    if isinstance(value, tuple):
        return tuple(map(moved, value))
    if isinstance(value, Paged):
        return Paged(moved(value.pages), value.table, value.lengths, value.layout)
    if isinstance(value, Quantized):
        if value.codes.dtype.kind not in "iu":
            raise NotImplementedError("CuPy has no float8")
        return value._map(moved)
    if isinstance(value, BooleanArray):
        return BooleanArray(moved(value.array))
    if isinstance(value, Mask) and hasattr(value, "parts"):
        return type(value)(moved(value.parts))  # type: ignore[call-arg]
    return _moved(value) if isinstance(value, np.ndarray) else value


def _moved(array: np.ndarray[Any, Any]) -> Any:
    cupy, native = sys.modules["cupy"], array.dtype.newbyteorder("=")
    if not array.size:
        return cupy.empty(array.shape, native)
    if array.dtype != native or not array.flags.aligned:
        array = array.astype(native)
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    first = array.ctypes.data + sum(step for step in reach if step < 0)
    front, span = first % _PAGE, sum(map(abs, reach)) + array.itemsize
    start = front + array.ctypes.data - first
    if span > _FAR:  # pages of the host that nobody has touched are not worth a copy
        memory = cupy.empty(front + span, np.uint8)
    else:  # what lies between the numbers goes with them
        memory = cupy.asarray(np.frombuffer(bytes(front) + ctypes.string_at(first, span), np.uint8))
    number = memory[start : start + array.itemsize].view(native)
    there = cupy.lib.stride_tricks.as_strided(number, array.shape, array.strides)
    if span > _FAR:
        there[...] = cupy.asarray(np.ascontiguousarray(array))
    return there
