"""The matrix products of the gradients: slabs ``[key][lanes]``, whose lanes are rows, times packed rows."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.tiler import tiler


@cache
def multiplier(sizes, accumulate):
    """Return ``multiply(vectors, a, a_row, a_step, b, b_step, c, c_row, steps, factor)``, a product with any strides.

    It makes `tile_rows` rows of one to three vectors.
    """
    narrow, middle, wide = (tiler(sizes.acc, sizes.tile_rows, n, sizes.lanes, accumulate) for n in (1, 2, 3))
    vector = sizes.lanes * itemsize(sizes.acc)

    @part
    def multiply(vectors, a, a_row, a_step, b, b_step, c, c_row, steps, factor):
        if vectors == 3:
            wide(a, a_row, a_step, b, vector, b_step, c, c_row, steps, factor)
        elif vectors == 2:
            middle(a, a_row, a_step, b, vector, b_step, c, c_row, steps, factor)
        else:
            narrow(a, a_row, a_step, b, vector, b_step, c, c_row, steps, factor)

    return multiply


@part
def at_once(vectors):
    """Return how many of so many vectors, one after the other, a product has best."""
    return 2 if vectors == 4 else min(3, vectors)


class Products(NamedTuple):
    """The products of a tile and a block of keys."""

    score: Any
    add_keys: Any
    add_rows: Any


@cache
def products(sizes):
    """Return `Products` for this type."""
    lanes, tile_rows, size, one = sizes.lanes, sizes.tile_rows, itemsize(sizes.acc), np.dtype(sizes.acc).type(1)
    vector, multiply, add = lanes * size, multiplier(sizes, False), multiplier(sizes, True)

    @part
    def score(tile, rows, row, n, columns, t, steps, factor):
        """Fill a slab with the products of `n` rows of keys or values and the columns of a tile."""
        across = tile.vectors * vector
        v = 0
        while v < tile.vectors:
            vectors = at_once(tile.vectors - v)
            b, c = columns + v * vector, t + v * vector
            for x in range(0, n, tile_rows):
                multiply(vectors, rows + x * row, row, size, b, across, c + x * across, across, steps, factor)
            v += vectors

    @part
    def add_keys(tile, keys, row, width, u, n):
        """Add to dQ.T the products of `n` keys and their dS."""
        across = tile.vectors * vector
        v = 0
        while v < tile.vectors:
            vectors = at_once(tile.vectors - v)
            b, c = u + v * vector, tile.sums + v * vector
            for e in range(0, width, tile_rows):
                add(vectors, keys + e * size, size, row, b, across, c + e * across, across, n, one)
            v += vectors

    @part
    def add_rows(tile, t, keys, rows, target, row, width):
        """Add ``A @ B`` for a slab and the rows of a tile."""
        across, vectors = tile.vectors * vector, (width + lanes - 1) // lanes
        for x in range(0, keys, tile_rows):
            d = 0
            while d < vectors:
                n = at_once(vectors - d)
                b, c = rows + d * vector, target + x * row + d * vector
                add(n, t + x * across, across, size, b, row, c, row, tile.filled, one)
                d += n

    return Products(score, add_keys, add_rows)
