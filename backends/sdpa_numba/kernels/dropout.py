"""Dropout: Philox 4x32-10 for a vector of rows or keys at a time (Salmon, Moraes, Dror and Shaw, SC 2011)."""

from functools import cache

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import loader, ramp, select, splatter, storer
from sdpa_numba.vector.unrolled import transposer

from .rows import at

TABLE = 8  # vectors of memory that `key_dropout` needs


@cache
def keeper(lanes):
    """Return ``keep_bits(p, b, h, i, quad)``: which of four keys are kept, for vectors of heads, rows and fours."""
    splat = splatter("int64", lanes)

    @part
    def keep_bits(p, b, h, i, quad):
        low, half = splat(0xFFFFFFFF), splat(32)
        first, second = splat(0xD2511F53), splat(0xCD9E8D57)
        c0, c1 = (quad + splat(p.first_key // 4)) & low, (i + splat(p.first_row)) & low
        c2, c3 = (h + splat(p.first_head)) & low, splat(b + p.first_entry) & low
        k0, k1 = p.seed_low, p.seed_high
        for _ in range(10):
            x, y = first * c0, second * c2
            c0, c1 = (y >> half) ^ c1 ^ splat(k0), y & low
            c2, c3 = (x >> half) ^ c3 ^ splat(k1), x & low
            k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
        below = splat(p.dropout_threshold - 1)
        return below < c0, below < c1, below < c2, below < c3

    return keep_bits


@cache
def row_dropout(sizes):
    """Return ``apply_dropout`` for a slab whose lanes are rows."""
    acc, lanes = sizes.acc, sizes.lanes
    size, number = itemsize(sizes.acc), np.dtype(acc).type
    vector, load, store, splat = lanes * size, loader(acc, acc, lanes), storer(acc), splatter(acc, lanes)
    keep_bits, zero = keeper(lanes), number(0)
    load_rows, splat_key = loader("int64", "int64", lanes), splatter("int64", lanes)

    @part
    def apply_dropout(p, b, rows, vectors, t, j, end):
        """Apply dropout to the weights of the keys from j to `end`, both multiples of four."""
        factor = splat(number(p.dropout_factor))
        for v in range(vectors):
            h, i = load_rows(rows.h + 8 * v * lanes), load_rows(rows.i + 8 * v * lanes)
            for x in range(0, end - j, 4):
                bits = keep_bits(p, b, h, i, splat_key((j + x) // 4))
                for k in range(4):
                    to = t + ((x + k) * vectors + v) * vector
                    store(to, load(to) * select(bits[k], factor, splat(zero)))

    return apply_dropout


@cache
def key_dropout(sizes):
    """Return ``apply_dropout`` for rows whose lanes are keys; `table` is memory for `TABLE` vectors."""
    acc, lanes, block, size = sizes.acc, sizes.panel, sizes.block, itemsize(sizes.acc)
    vector, number, load, store = lanes * size, np.dtype(sizes.acc).type, loader(acc, acc, lanes), storer(acc)
    splat, splat_index, numbers = splatter(acc, lanes), splatter("int64", lanes), ramp("int64", lanes)
    keep_bits, in_turn, zero = keeper(lanes), transposer(acc, acc, acc, 4, lanes), number(0)

    @part
    def apply_dropout(p, b, rows, n, t, j0, low, high, table):
        """Apply dropout to the weights of the keys of ``[low, high)``, both multiples of the lanes."""
        factor, factors = splat(number(p.dropout_factor)), table + 4 * vector
        for r in range(n):
            h, i = splat_index(at(rows.h, r)), splat_index(at(rows.i, r))
            for x in range(low, high, 4 * lanes):
                bits = keep_bits(p, b, h, i, splat_index((j0 + x) // 4) + numbers())
                for k in range(4):
                    store(table + k * vector, select(bits[k], factor, splat(zero)))
                in_turn(table, vector, 3, factors, 4 * size, lanes)
                for y in range(0, min(4 * lanes, high - x), lanes):
                    to = t + (r * block + x + y) * size
                    store(to, load(to) * load(factors + y * size))

    return apply_dropout
