"""Array objects seen from compiled code: an array is passed as ``id(array)``, its address, which costs nothing.

NumPy's C interface fixes the first fields of an array object: data, number of axes, shape and strides, behind the
header that every object of this Python has. The caller keeps the array alive. Zero stands for an array that is absent.
"""

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.simd import load_int32, load_int64

HEADER = object.__basicsize__


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
def size(array, axis):
    """Return the length of the axis counted from the end, or for the axis 0 the number of axes."""
    if axis == 0:
        return np.int64(load_int32(array + HEADER + 8))
    return load_int64(load_int64(array + HEADER + 16) + 8 * (load_int32(array + HEADER + 8) - axis))
