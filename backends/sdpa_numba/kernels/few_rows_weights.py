"""The weights in the kernel for few rows: scores are kept where weights go until all keys of a head are seen."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import loader, splatter, storer

from .dropout import key_dropout
from .elementary import elementary
from .finish import finisher
from .rows import at, keeps, visible
from .views import data


class Weights(NamedTuple):
    """What keeps the scores of a block, and what makes weights of the scores of all keys."""

    keep_scores: Any
    weigh: Any


@cache
def weights(sizes):
    """Return `Weights`, for an array ``(B, Hq, L, S)`` of the accumulation type that holds 0 where no row looks."""
    acc, lanes, block, size, number = sizes.acc, sizes.panel, sizes.block, itemsize(sizes.acc), np.dtype(sizes.acc).type
    load, load_one, store, splat = loader(acc, acc, lanes), loader(acc, acc), storer(acc), splatter(acc, lanes)
    exp, finish, apply_dropout, vector = elementary(acc, lanes).exp, finisher(acc), key_dropout(sizes), lanes * size
    zero, nothing = number(0), number(-np.inf)

    @part
    def copy(source, target, count):
        """Copy so many numbers."""
        done = count - count % lanes
        for x in range(0, done, lanes):
            store(target + x * size, load(source + x * size))
        for x in range(done, count):
            store(target + x * size, load_one(source + x * size))

    @part
    def place_of(p, a, b, rows, r, j):
        """Return where the weight of row r and key j goes."""
        return data(a.weights) + (((b * p.Hq + at(rows.h, r)) * p.L + at(rows.i, r)) * p.S + j) * size

    @part
    def keep_scores(p, a, b, rows, n, t, j0, low, high):
        """Keep the scores of the keys of ``[low, high)``, counted from the block's first."""
        for r in range(n):
            copy(t + (r * block + low) * size, place_of(p, a, b, rows, r, j0 + low), high - low)

    @part
    def weigh(p, a, b, rows, n, m, z, t, table):
        """Make weights of the scores that were kept: ``exp(s - m)`` times a factor, which is NaN for a row of NaN."""
        for j0 in range(0, p.S, block):
            low, high, _ = visible(rows, n, j0, min(j0 + block, p.S))
            low, high = low - j0, high - j0
            bottom, top = low - low % lanes, high + -high % lanes
            for r in range(n if low < high else 0):
                row, place = t + r * block * size, place_of(p, a, b, rows, r, j0)
                copy(place + low * size, row + low * size, high - low)
                largest = load_one(m + r * size)
                base = splat(zero if largest == nothing else largest)
                factor = number(finish(float(largest), float(load_one(z + r * size)), a.sink, at(rows.h, r))[0])
                for to in range(row + bottom * size, row + top * size, vector):
                    store(to, exp(load(to) - base) * splat(factor))
                for x in range(low, high if factor != factor else low):
                    if not keeps(p, a, rows, r, j0 + x):
                        store(row + x * size, zero)
            if p.dropout_threshold and low < high:
                apply_dropout(p, b, rows, n, t, j0, bottom, top, table)
            for r in range(n if low < high else 0):
                copy(t + (r * block + low) * size, place_of(p, a, b, rows, r, j0 + low), high - low)

    return Weights(keep_scores, weigh)
