"""What a tile of query rows and a block of keys add to the gradients. Lanes are query rows, as in `tiles`.

The weights w are computed again from the scores s, so that nothing of size L times S is kept:

    w = exp(s - m) / z    dP = V @ dO.T    dS = w * (dP - D)    dV += w @ dO    dK += dS @ Q    dQ.T += K.T @ dS

where m and z, a row's largest score and its sum of exponentials, are those of the forward pass, and D, a number a row
too, is what the sum of w * dP over the row's keys comes to: dO times the output. The scores have the bits that they had
in the forward pass, and m is subtracted before z counts: so weights sum to 1 at every size of score.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import fma, load_int64, loader, select, splatter, storer

from . import scores
from .dropout import row_dropout
from .elementary import elementary
from .pack import transposing
from .products import products
from .rows import keeps
from .views import data


class Block(NamedTuple):
    """Addresses of a block of keys and its gradients, and whether all its numbers are finite."""

    keys: int  # [block][E_row]
    values: int  # [block][Ev_row]
    d_keys: int
    d_values: int
    finite: int


class Slopes(NamedTuple):
    """What turns scores into weights and what flows into the weights into what flows into the scores."""

    weigh: Any
    softcap_slope: Any
    product: Any
    turn_pairs: Any


@cache
def slopes(sizes):
    """Return `Slopes` for this type."""
    acc, lanes = sizes.acc, sizes.lanes
    number, size, vector = np.dtype(sizes.acc).type, itemsize(sizes.acc), lanes * itemsize(acc)
    zero, one, load, store, splat = number(0), number(1), loader(acc, acc, lanes), storer(acc), splatter(acc, lanes)
    turn_in, turn_out = transposing(acc, acc, acc, lanes)
    exp, tanh = elementary(acc, lanes)

    @part
    def weigh(tile, t, u, keys, scale, finite):
        """Turn scores into weights, and dP into dS: exactly 0 where a weight is, if all numbers are finite."""
        across = tile.vectors * vector
        nothing = splat(zero if finite else number(np.nan))
        for v in range(0, across, vector):
            m, factor, inner = load(tile.m + v), load(tile.factor + v), load(tile.inner + v)
            for x in range(v, v + keys * across, across):
                weight = exp(load(t + x) - m) * factor
                store(t + x, weight)
                slope = select(weight == nothing, splat(zero), weight * (load(u + x) - inner))
                store(u + x, slope * splat(scale))

    @part
    def softcap_slope(p, t, end, target):
        """Fill a slab with the slope of the soft cap."""
        for x in range(0, end, vector):
            y = tanh(load(t + x) / splat(number(p.softcap)))
            store(target + x, (splat(one) - y) * (splat(one) + y))

    @part
    def product(t, end, factors):
        """Multiply by a slab of factors; 0 stays 0."""
        for x in range(0, end, vector):
            y = load(t + x)
            store(t + x, select(y == splat(zero), y, y * load(factors + x)))

    @part
    def turn_pairs(p, tile, array, t, low, high, writing):
        """Copy a slab into an array ``(B, Hq, L, S)`` or from it, for the keys of ``[low, high)``."""
        across, row = tile.vectors * vector, p.S * size
        for r in range(0, tile.filled, lanes):
            place, count = data(array) + ((tile.first + r) * p.S + low) * size, min(lanes, tile.filled - r)
            if writing:
                turn_out(t + r * size, across, count, high - low, place, row, size)
            else:
                turn_in(place, row, size, count, high - low, t + r * size, across)

    return Slopes(weigh, softcap_slope, product, turn_pairs)


class Careful(NamedTuple):
    """What adds to gradients pair by pair, where a number that a row drops is not finite."""

    zero_dropped: Any
    add_carefully: Any


@cache
def careful(sizes):
    """Return `Careful` for this type."""
    acc, lanes = sizes.acc, sizes.lanes
    number, size, vector = np.dtype(sizes.acc).type, itemsize(sizes.acc), lanes * itemsize(acc)
    zero, store, load_one = number(0), storer(acc), loader(acc, acc)

    @part
    def sees(p, a, tile, r, j):
        """Return whether row r keeps key j and is not empty."""
        return load_one(tile.factor + r * size) != zero and keeps(p, a, tile.rows, r, j)

    @part
    def zero_dropped(p, a, tile, t, u, low, high):
        """Set to 0 what rows drop."""
        across = tile.vectors * vector
        for r in range(tile.vectors * lanes):
            for j in range(low, high):
                if not sees(p, a, tile, r, j):
                    store(t + (j - low) * across + r * size, zero)
                    store(u + (j - low) * across + r * size, zero)

    @part
    def add_carefully(p, a, tile, keys, t, u, j0, low, high):
        """Add to all gradients key by key, without the pairs that a row drops: their numbers are not all finite."""
        across = tile.vectors * vector
        for j in range(low, high):
            d_key, d_value = keys.d_keys + (j - j0) * p.E_row * size, keys.d_values + (j - j0) * p.Ev_row * size
            for r in range(tile.vectors * lanes):
                if not sees(p, a, tile, r, j):
                    continue
                weight = load_one(t + (j - low) * across + r * size)
                slope = load_one(u + (j - low) * across + r * size)
                if r < tile.filled:
                    for d in range(p.Ev):
                        grad, to = load_one(tile.grad_rows + (r * p.Ev_row + d) * size), d_value + d * size
                        store(to, fma(weight, grad, load_one(to)))
                    for e in range(p.E):
                        query, to = load_one(tile.query_rows + (r * p.E_row + e) * size), d_key + e * size
                        store(to, fma(slope, query, load_one(to)))
                for e in range(p.E):
                    key, to = keys.keys + ((j - j0) * p.E_row + e) * size, tile.sums + e * across + r * size
                    store(to, fma(load_one(key), slope, load_one(to)))

    return Careful(zero_dropped, add_carefully)


def block_puller(sizes, general):
    """Return ``pull_block``, without what only `general` problems need."""
    acc, lanes = sizes.acc, sizes.lanes
    number, size, block, tile_rows = np.dtype(sizes.acc).type, itemsize(sizes.acc), sizes.block, sizes.tile_rows
    vector = lanes * itemsize(acc)
    one, load, store, splat = number(1), loader(acc, acc, lanes), storer(acc), splatter(acc, lanes)
    score, add_keys, add_rows = products(sizes)
    adjust, mask, apply_dropout = scores.adjuster(sizes, None), scores.masker(sizes), row_dropout(sizes)
    weigh, softcap_slope, product, turn_pairs = slopes(sizes)
    zero_dropped, add_carefully = careful(sizes)

    @part
    def pull_block(p, a, b, tile, keys, j0, low, high, complete, work):
        """Add what a tile and the keys of ``[low, high)`` of the block at j0 have to do with each other."""
        across, bottom, top = tile.vectors * vector, low - low % tile_rows, high + -high % tile_rows
        n, scale, finite = top - bottom, number(p.scale), keys.finite != 0 and load_int64(tile.flags) != 0
        slab = block * p.width * size
        t, u, factors, kept, table = work, work + slab, work + 2 * slab, work + 3 * slab, work + 4 * slab
        query_row, grad_row, steps, here = p.E_row * size, p.Ev_row * size, p.E, (low - bottom) * across
        if general and p.final:
            steps = 0
        first_key, first_value = keys.keys + (bottom - j0) * query_row, keys.values + (bottom - j0) * grad_row
        score(tile, first_key, query_row, n, tile.query, t, steps, scale)
        score(tile, first_value, grad_row, n, tile.grad, u, p.Ev, one)
        if general:
            if p.softcap:
                softcap_slope(p, t, n * across, factors)
            adjust(p, a, b, tile.rows, tile.vectors, t, j0, bottom, min(top, p.S), table)
            if p.dropout_threshold:
                for x in range(0, n * across, vector):
                    store(kept + x, splat(one))
                apply_dropout(p, b, tile.rows, tile.vectors, kept, bottom, top)
                for x in range(0, n * across, vector):
                    store(u + x, load(u + x) * load(kept + x))
        complete &= bottom == low and top == high
        if not complete:
            mask(p.visible, tile.rows, tile.vectors, t, bottom, top, table)
        all_seen = complete and load_int64(tile.flags + 8) != 0 and not (a.keep or a.bias)
        weigh(tile, t, u, n, one if general else scale, finite)
        if general:
            if not (finite or all_seen):
                zero_dropped(p, a, tile, t + here, u + here, low, high)
            if p.dropout_threshold:
                product(t, n * across, kept)
            if a.d_bias:
                turn_pairs(p, tile, a.d_bias, u + here, low, high, True)
            if a.slope:
                turn_pairs(p, tile, a.slope, factors + here, low, high, False)
            if p.softcap or a.slope:
                product(u, n * across, factors)
            for x in range(0, n * across, vector):
                store(u + x, load(u + x) * splat(scale))
        if not (finite or all_seen):
            add_carefully(p, a, tile, keys, t + here, u + here, j0, low, high)
            return
        add_keys(tile, keys.keys + (low - j0) * query_row, query_row, p.E, u + here, high - low)
        add_rows(tile, u, n, tile.query_rows, keys.d_keys + (bottom - j0) * query_row, query_row, p.E)
        add_rows(tile, t, n, tile.grad_rows, keys.d_values + (bottom - j0) * grad_row, grad_row, p.Ev)

    return pull_block
