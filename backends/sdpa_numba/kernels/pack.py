"""Packing: arrays of any type and strides become panels that the register tiles read in one stream."""

from functools import cache

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import any_lane, loader, select, splatter, storer
from sdpa_numba.vector.unrolled import transposer


@cache
def transposing(source, target, working, lanes, ahead=False):
    """Return ``turn_in`` and ``turn_out``, by which columns of `a` become rows of `b`.

    `rows` is at most `lanes`. The rows that are missing repeat the last one, and are not written where there is no room
    for them. With `ahead`, rows that follow are prefetched.
    """
    a_size, b_size = itemsize(source), itemsize(target)
    load, store = loader(source, working), storer(target)
    piece = min(lanes, 16 // itemsize(working))
    square, narrow = (transposer(source, target, working, lanes, columns) for columns in (lanes, piece))
    whole = transposer(source, target, working, lanes, lanes, whole=True, ahead=ahead)
    quarter = transposer(source, target, working, piece, lanes)

    @part
    def turn_in(a, a_row, a_column, rows, width, b, b_row):
        """Pack: row e of `b` holds column e of `a`, `lanes` numbers."""
        done = 0
        if a_column == a_size:
            done = width - width % lanes
            for e in range(0, done, lanes):
                if rows == lanes:  # the common case, in which no address needs a comparison
                    whole(a + e * a_column, a_row, lanes, b + e * b_row, b_row, lanes)
                else:
                    square(a + e * a_column, a_row, rows - 1, b + e * b_row, b_row, lanes)
            for e in range(done, width - width % piece, piece):
                narrow(a + e * a_column, a_row, rows - 1, b + e * b_row, b_row, piece)
            done = width - width % piece
        for e in range(done, width):
            for x in range(lanes):
                store(b + e * b_row + x * b_size, load(a + min(x, rows - 1) * a_row + e * a_column))

    @part
    def turn_out(a, a_row, rows, width, b, b_row, b_column):
        """Unpack: the first `rows` columns of `a`, of length `width`, become rows of `b`."""
        done = 0
        if b_column == b_size:
            done = width - width % lanes
            for e in range(0, done, lanes):
                if rows == lanes:
                    whole(a + e * a_row, a_row, lanes, b + e * b_column, b_row, lanes)
                else:
                    square(a + e * a_row, a_row, lanes, b + e * b_column, b_row, rows - 1)
            for e in range(done, width - width % piece, piece):
                quarter(a + e * a_row, a_row, piece, b + e * b_column, b_row, rows - 1)
            done = width - width % piece
        for x in range(rows):
            for e in range(done, width):
                store(b + x * b_row + e * b_column, load(a + e * a_row + x * a_size))

    return turn_in, turn_out


@cache
def value_packer(dtype, acc, lanes):
    """Return the function that packs values into parts of `lanes` columns."""
    size, source_size, zero, one = itemsize(acc), itemsize(dtype), np.dtype(acc).type(0), np.dtype(acc).type(1)
    load, load_part, store, splat = loader(dtype, acc), loader(dtype, acc, lanes), storer(acc), splatter(acc, lanes)
    half = lanes // 2
    load_half, no_half = loader(dtype, acc, half), splatter(acc, half)

    @part
    def pack_values(source, row, column, rows, width, target, target_row, target_part):
        """Copy `rows` rows of V, fill the last part with zeros, and return whether all of it is finite."""
        odd, odd_half, finite = splat(zero), no_half(zero), True  # 1 where a number is not finite
        done = width - width % lanes if column == source_size else 0
        halves = column == source_size and width - done == half
        for x in range(rows):
            address, to = source + x * row, target + x * target_row
            for _ in range(0, done, lanes):
                values = load_part(address)
                odd = select(values - values == splat(zero), odd, splat(one))
                store(to, values)
                address += lanes * source_size
                to += target_part
            if halves:
                values = load_half(address)
                odd_half = select(values - values == no_half(zero), odd_half, no_half(one))
                store(to, values)
                store(to + half * size, no_half(zero))
                continue
            for first in range(done, width, lanes):
                for d in range(lanes):
                    value = load(source + x * row + (first + d) * column) if first + d < width else zero
                    finite &= value - value == zero
                    store(to + d * size, value)
                to += target_part
        return finite and not any_lane(splat(zero) < odd) and not any_lane(no_half(zero) < odd_half)

    return pack_values
