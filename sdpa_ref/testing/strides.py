"""How arrays lie in memory: the same numbers in any order, at any address, of any byte order."""

import sys
from typing import Any

import numpy as np

from sdpa_ref.testing.case_options import Array

FLIPPED: dict[str, tuple[int, ...]] = {
    "negative": (0, 1), "flipped heads": (-3,), "flipped lengths": (-2,), "flipped width": (-1,),
    "flipped": (-1, -2, -3),
}  # fmt: skip
"""Memories by the axes whose strides are negative."""
REPEATED = {"repeated": 0, "repeated heads": -3, "repeated lengths": -2, "repeated width": -1}
"""Memories by the axis whose stride is 0."""
_FEW = 4
MEMORIES = (
    "plain",
    "transposed",
    "sliced",
    "padded",
    "unaligned",
    "swapped",
    "read-only",
    "far apart",
    *FLIPPED,
    *REPEATED,
)


def stored(array: Array, memory: str) -> Array:
    """Return an array with the same numbers that lies in memory as one of `MEMORIES` says.

    Those of `REPEATED` repeat the first entry of an axis with a stride of 0, and so change the numbers.
    """
    between: Any = np.nan  # what a kernel that reads beside the array finds
    if array.dtype.kind in "biu":
        between = array.dtype == bool or np.iinfo(array.dtype).max
    if memory == "transposed":
        return np.ascontiguousarray(array.T).T
    if memory == "far apart":
        return _far_apart(array)
    if memory in FLIPPED:
        axes = tuple(axis for axis in FLIPPED[memory] if -array.ndim <= axis < array.ndim)
        return np.flip(np.flip(array, axes).copy(), axes)
    if memory == "sliced":
        wider = np.full([2 * n + 1 for n in array.shape], between, array.dtype)
        view = wider[tuple(slice(1, None, 2) for _ in array.shape)]
        view[...] = array
        return view
    if memory == "padded":
        wider = np.full([*array.shape[:-2], array.shape[-2] + 1, array.shape[-1] + 3], between, array.dtype)
        wider[..., : array.shape[-2], : array.shape[-1]] = array
        return wider[..., : array.shape[-2], : array.shape[-1]]
    if memory in REPEATED:
        axis = REPEATED[memory] if REPEATED[memory] >= -array.ndim else 0
        return np.broadcast_to(array.take(range(min(1, array.shape[axis])), axis), array.shape)
    if memory == "unaligned":
        room = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype).reshape(array.shape)
        room[...] = array
        return room
    if memory == "swapped" and array.dtype.kind == "f":
        return array.astype(array.dtype.newbyteorder())
    copy = np.array(array, order="C")
    copy.flags.writeable = memory != "read-only"
    return copy


def _far_apart(array: Array) -> Array:
    """Return a view whose last entry along an axis of few lies beyond 2**31 numbers.

    Pages that are not touched take no memory where the system reserves addresses alone; elsewhere, and where it
    refuses, or where no axis is short, so that many pages were touched, the array is a plain copy.
    """
    copy = np.array(array, order="C")
    axis = next((axis for axis, n in enumerate(array.shape) if 1 < n <= _FEW), None)
    if axis is None or not array.size or sys.platform == "win32" or sys.maxsize < 1 << 32:
        return copy
    one = copy.take([0], axis)
    step = -(-(1 << 31) // (array.shape[axis] - 1))
    strides = (*one.strides[:axis], step * array.itemsize, *one.strides[axis + 1 :])
    try:
        room = np.empty(step * (array.shape[axis] - 1) + one.size, array.dtype)
    except MemoryError:
        return copy
    view = np.lib.stride_tricks.as_strided(room, array.shape, strides)
    view[...] = array
    return view
