"""Array objects seen from compiled code: an array is passed as ``id(array)``, its address, which costs nothing.

NumPy's C interface fixes the first fields of an array object: data, number of axes, shape and strides, behind the
header that every object of this Python has. The caller keeps the array alive. Zero stands for an array that is absent.
"""

from typing import NamedTuple

from .compilation import part
from .simd import load_int32, load_int64

HEADER = object.__basicsize__


class Arrays(NamedTuple):
    """The arrays of a call, each by the address of its object; 0 for what is absent."""

    query: int
    key: int
    value: int
    out: int
    lse: int
    weights: int
    prefix: int
    start: int
    stop: int
    dense: int
    bias: int
    slopes: int
    position: int
    sink: int
    m: int
    z: int


@part
def data(array):
    """Return the address of the first element."""
    return load_int64(array + HEADER)


@part
def stride(array, axis):
    """Return the bytes from one index of the axis counted from the end to the next, 0 where the axis is broadcast."""
    position = 8 * (load_int32(array + HEADER + 8) - axis)
    if position < 0 or load_int64(load_int64(array + HEADER + 16) + position) == 1:
        return 0
    return load_int64(load_int64(array + HEADER + 24) + position)


@part
def batch(array, inner, query, b):
    """Return the address where batch item `b` begins in an array with `inner` axes behind those of the batch.

    `query`, whose leading axes have the full shape, says how `b` is to be taken apart.
    """
    if array == 0:
        return 0
    address = data(array)
    shape = load_int64(query + HEADER + 16)
    for axis in range(load_int32(query + HEADER + 8) - 4, -1, -1):
        size = load_int64(shape + 8 * axis)
        inner += 1
        address += b % size * stride(array, inner)
        b //= size
    return address


@part
def arrays(query, key, value, out, others):
    """Return the arrays of a call; `others` is an int64 array of the addresses of all but four, 0 for none."""
    if others == 0:
        return Arrays(query, key, value, out, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    at = data(others)
    return Arrays(
        query, key, value, out,
        load_int64(at), load_int64(at + 8), load_int64(at + 16), load_int64(at + 24), load_int64(at + 32),
        load_int64(at + 40), load_int64(at + 48), load_int64(at + 56), load_int64(at + 64), load_int64(at + 72),
        load_int64(at + 80), load_int64(at + 88),
    )  # fmt: skip
