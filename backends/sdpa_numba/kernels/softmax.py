"""The online softmax of a tile whose lanes are rows: running maximum m, running sum z, sum of weighted values."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import any_lane, loader, select, splatter, storer

from .elementary import elementary


class Softmax(NamedTuple):
    """What turns the scores of a tile into weights, and keeps its state."""

    update: Any
    rescale: Any
    absorb: Any
    weigh: Any


@cache
def softmax(sizes):
    """Return `Softmax` for tiles of this type."""
    acc, lanes = sizes.acc, sizes.lanes
    number, vector, load = np.dtype(sizes.acc).type, lanes * itemsize(acc), loader(acc, acc, lanes)
    store, splat = storer(acc), splatter(acc, lanes)
    exp = elementary(acc, lanes).exp
    zero, one, nothing = number(0), number(1), number(-np.inf)

    @part
    def greater(x, y):
        """Return the maximum; a NaN in x counts for nothing."""
        return select(y < x, x, y)

    @part
    def finite(m):
        """Return m, or 0 where a row has seen nothing yet, so that -inf - m stays -inf."""
        return select(m == splat(nothing), splat(zero), m)

    @part
    def update(vectors, t, keys, m, z, alpha):
        """Turn scores into weights and return whether a maximum grew; `keys` is a multiple of four."""
        row, grew = vectors * vector, False
        for v in range(0, row, vector):
            old = load(m + v)
            a, b, c, d = old, old, old, old
            for at in range(t + v, t + v + keys * row, 4 * row):
                a, b = greater(load(at), a), greater(load(at + row), b)
                c, d = greater(load(at + 2 * row), c), greater(load(at + 3 * row), d)
            new = greater(greater(a, b), greater(c, d))
            base = finite(new)
            shrink = exp(old - base)
            grew |= any_lane(shrink < splat(one))
            total = load(z + v) * shrink
            for at in range(t + v, t + v + keys * row, 4 * row):
                a, b = exp(load(at) - base), exp(load(at + row) - base)
                c, d = exp(load(at + 2 * row) - base), exp(load(at + 3 * row) - base)
                store(at, a)
                store(at + row, b)
                store(at + 2 * row, c)
                store(at + 3 * row, d)
                total = total + ((a + b) + (c + d))
            store(m + v, new)
            store(z + v, total)
            store(alpha + v, shrink)
        return grew

    @part
    def rescale(vectors, values, width, alpha):
        """Multiply the sums of weighted values by `alpha`, lane by lane."""
        row = vectors * vector
        for v in range(0, row, vector):
            factor = load(alpha + v)
            for at in range(values + v, values + v + width * row, row):
                store(at, load(at) * factor)

    @part
    def absorb(vectors, m, z, values, width, m_part, z_part, part):
        """Add the state of another set of keys: maximum, sum and values."""
        row = vectors * vector
        for v in range(0, row, vector):
            new = greater(load(m_part + v), load(m + v))
            base = finite(new)
            mine, other = exp(load(m + v) - base), exp(load(m_part + v) - base)
            store(m + v, new)
            store(z + v, load(z + v) * mine + load(z_part + v) * other)
            for d in range(v, v + width * row, row):
                store(values + d, load(values + d) * mine + load(part + d) * other)

    @part
    def weigh(vectors, t, keys, m, factor):
        """Turn scores into the final weights: exp(t - m) * factor."""
        row = vectors * vector
        for v in range(0, row, vector):
            base, scale = finite(load(m + v)), load(factor + v)
            for at in range(t + v, t + v + keys * row, row):
                store(at, exp(load(at) - base) * scale)

    return Softmax(update, rescale, absorb, weigh)
