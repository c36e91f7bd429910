"""The parameter block, the one argument of every kernel: its layout, and how the arrays of a call enter it."""

import math
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from sdpa_ref.masks import Band

from .stored import STORAGE, Pages, parts_of
from .tracing import CONSTANTS

if TYPE_CHECKING:
    from .plan import Plan

AXES, CHUNK = 8, 16
VIEW = np.dtype([("data", np.uint64), ("batch", np.int64, AXES), ("head", np.int64), ("row", np.int64),
                 ("column", np.int64)])  # fmt: skip
OF_ALL = "one axis of heads, and none of the batch"
VIEWS = {  # the arrays of the parameter block, and the axes that each has behind those of the batch
    "query": "hrc",
    "key": "hrc", "key_table": "r", "key_scale": "hrc", "key_offset": "hrc",
    "value": "hrc", "value_table": "r", "value_scale": "hrc", "value_offset": "hrc",
    "out": "hrc", "lse": "hr", "weights": "hrc",
    "m": "hr", "z": "hr",
    "prefix": "r", "start": "r", "stop": "r", "position": "r", "dense": "hrc", "bias": "hrc",
    "slopes": "h", "sink": OF_ALL,
}  # fmt: skip
COUNTS = (
    "axes", "B", "Hq", "Hkv", "L", "S", "E", "Ev", "group", "first_row",
    "first_key", "first_head", "first_entry", "fold", "tiles", "chunks", "chunk", "threshold", "seed_low", "seed_high",
    "place", "banded", *(f"band_{name}" for name in Band._fields),
)  # fmt: skip
PARAMETERS = np.dtype(
    [(name, VIEW) for name in VIEWS]
    + [("workspace", np.uint64), ("bands", np.uint64), ("out_chunks", np.int64), ("sizes", np.int64, AXES)]
    + [(name, np.int64) for name in COUNTS]
    + [(name, np.float64) for name in ("scale", "softcap", "dropout_factor", "unit")]
    + [("constants", np.float64, CONSTANTS)]
    + [(name, np.int64) for name in STORAGE]
)  # fmt: skip
"""One element is the argument of every kernel, ``Parameters`` of ``kernels/parameters.h``; all fields have 8 bytes."""

FLOWS = {"grad": "hrc", "grad_lse": "hr", "d_query": "hrc", "d_key": "hrc", "d_value": "hrc", "d_bias": "hrc"}
GRADIENT_PARAMETERS = np.dtype(PARAMETERS.descr + [(name, VIEW) for name in FLOWS])
"""The same with what kernels of gradients read and write beside it."""

NUMBERS = struct.Struct(f"={AXES + len(COUNTS)}q{4 + CONSTANTS}d{len(STORAGE)}q")


def bound(
    plan: "Plan", address: Callable[[Any], int], problem: Any, result: Any, workspace: int, bands: int = 0
) -> np.ndarray[Any, Any]:
    """Return the parameter block for arrays that all lie where the kernels run.

    Parameters
    ----------
    plan : Plan
    address : callable
        Gives the address of an array's first element.
    problem : Problem
        With `visible` as a band or as intervals, `positions`, `slopes` and `sink`, arrays all in the device's
        memory.
    result : Result
        What is to be filled.
    workspace : int
        Address of the workspace, 0 for none.
    bands : int
        Address of what `bands_of` returns, 0 for none.
    """
    visible = problem.visible
    intervals = _NO_INTERVALS if visible is None or type(visible) is Band else visible
    p, axes = problem, len(problem.form.batch)
    arrays = (
        p.query, *parts_of(p.key), *parts_of(p.value), *result, *intervals, p.positions, p.keep, p.bias, p.slopes,
        p.sink,
    )  # fmt: skip
    views = [
        _NO_VIEW if array is None else _view(array, axes, inner, address)
        for array, inner in zip(arrays, _INNER, strict=True)
    ]
    output = result.output
    out_chunks = output is not None and in_chunks(output, address(output))
    block = bytearray(b"".join((*views, _ENDS.pack(workspace, bands, out_chunks), plan.numbers)))
    return np.frombuffer(block, PARAMETERS)


def with_flows(
    parameters: np.ndarray[Any, Any], address: Callable[[Any], int], problem: Any, arrays: tuple[Any, ...]
) -> np.ndarray[Any, Any]:
    """Return the parameter block with the arrays FLOWS behind it."""
    axes = len(problem.form.batch)
    views = [
        _NO_VIEW if array is None else _view(array, axes, inner, address)
        for array, inner in zip(arrays, FLOWS.values(), strict=True)
    ]
    return np.frombuffer(bytearray(parameters.tobytes() + b"".join(views)), GRADIENT_PARAMETERS)


def bands_of(visible: Any, batch: tuple[int, ...]) -> np.ndarray[Any, Any] | None:
    """Return a band, its numbers in order, of each batch entry, or None where all have the same or there is none."""
    own = [n for n, number in enumerate(visible) if type(number) is not int] if type(visible) is Band else []
    if not own:
        return None
    same = [*visible]
    for n in own:
        same[n] = 0
    bands = np.frombuffer(bytearray(_BAND.pack(*same) * math.prod(batch)), np.int64).reshape(*batch, len(same))
    for n in own:
        bands[..., n] = visible[n]
    return bands


_BAND = struct.Struct(f"={len(Band._fields)}q")
_INNER = (*VIEWS.values(),)
_ENDS = struct.Struct("=QQq")
_NO_VIEW = bytes(VIEW.itemsize)
_NO_INTERVALS = (None, None, None)


def _view(array: Any, axes: int, inner: str, address: Callable[[Any], int]) -> bytes:
    """Return a VIEW; axes that are missing or have one entry get stride 0."""
    if type(array) is Pages:
        array = array.array
        return _ADDRESS.pack(address(array)) + _strides(array.shape[1:], array.strides[1:], axes, inner)
    return _ADDRESS.pack(address(array)) + _strides(array.shape, array.strides, axes, inner)


_ADDRESS = struct.Struct("=Q")


@lru_cache(maxsize=1024)
def _strides(shape: tuple[int, ...], strides: tuple[int, ...], axes: int, inner: str) -> bytes:
    """Return what stands in a VIEW behind the address."""
    strides = tuple(0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True))
    inner, axes = ("h", 0) if inner == OF_ALL else (inner, axes)
    strides = (0,) * (axes + len(inner) - len(strides)) + strides
    steps = dict(zip(inner, strides[axes:], strict=True))
    words = [*strides[:axes], *[0] * (AXES - axes), *(steps.get(axis, 0) for axis in "hrc")]
    return np.array(words, np.int64).tobytes()


def in_chunks(array: Any, address: int) -> bool:
    """Return whether the numbers of each row lie in whole aligned chunks of 16 bytes."""
    return address % CHUNK == 0 and _in_chunks(array.shape, array.strides, array.dtype.itemsize)


@lru_cache(maxsize=1024)
def _in_chunks(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    *outer, column = strides
    return (
        shape[-1] * itemsize % CHUNK == 0
        and (column == itemsize or 0 in shape)
        and not any(stride % CHUNK for stride, n in zip(outer, shape, strict=False) if n > 1)
    )
