"""What a tile of query rows and a block of keys add to the gradients. Lanes are query rows, as in `tiles`.

The weights w are computed again from the scores s, so that nothing of size L times S is kept:

    w = exp(s - m) / z    dP = V @ dO.T    dS = w * (dP - D)    dV += w @ dO    dK += dS @ Q    dQ.T += K.T @ dS

where m and z, a row's largest score and its sum of exponentials, are those of the forward pass, and D, a number a row
too, is what the sum of w * dP over the row's keys comes to: dO times the output. The scores have the bits that they had
in the forward pass, and m is subtracted before z counts: so weights sum to 1 at every size of score.
"""

from typing import NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import fma, lane, load_int64, loader, select, splatter, storer

from . import elementary, scores
from .pack import transposing, value_packer
from .products import functions as products
from .rows import Rows, at, keeps
from .views import batch, data, stride


class Tile(NamedTuple):
    """Query rows in the lanes of `vectors` vectors, `filled` of them real, and the addresses of their state."""

    rows: Rows
    first: int  # index of the first row in arrays (B, Hq, L)
    filled: int
    vectors: int
    flags: int  # whether all numbers of the rows are finite, and whether no row is empty
    m: int  # the largest score, inf for an empty row
    factor: int  # one by the sum of the exponentials, 0 for an empty row
    inner: int  # D, less what flows in through the lse
    query: int  # [E][lanes]
    grad: int  # [Ev][lanes]
    query_rows: int  # [row][E_row]
    grad_rows: int  # [row][Ev_row]
    sums: int  # dQ.T of one chunk of keys, [E_parts][lanes]
    whole: int  # of all chunks so far


class Block(NamedTuple):
    """Addresses of a block of keys and its gradients, and whether all its numbers are finite."""

    keys: int  # [block][E_row]
    values: int  # [block][Ev_row]
    d_keys: int
    d_values: int
    finite: int


def functions(sizes, general):
    """Return ``place_tile`` and ``pull_block`` for this type, without what only `general` problems need."""
    acc, lanes, number, size = sizes.acc, sizes.lanes, np.dtype(sizes.acc).type, itemsize(sizes.acc)
    block, tile_rows, vector = sizes.block, sizes.tile_rows, lanes * itemsize(acc)
    zero, one = number(0), number(1)
    load, store, splat, load_one = loader(acc, acc, lanes), storer(acc), splatter(acc, lanes), loader(acc, acc)
    store_flag = storer("int64")
    pack_rows, (turn_in, turn_out) = value_packer(acc, acc, lanes), transposing(acc, acc, acc, lanes)
    score, add_keys, add_rows = products(sizes)
    adjust, mask, thin = scores.functions(sizes, None)
    exp, tanh = elementary.functions(acc, lanes)

    @part
    def gather(p, array, query, b, tile, width, target, row):
        """Copy the rows of a tile, filled up with zeros, and return whether all of it is finite."""
        head, source_row, column = stride(array, 3), stride(array, 2), stride(array, 1)
        source, finite = batch(array, 3, query, b), True
        count = tile.filled if p.regular else 1
        for r in range(0, tile.filled, count):
            first, step = source + at(tile.rows.h, r) * head + at(tile.rows.i, r) * source_row, source_row
            if p.fold > 1:
                step = head
            finite &= pack_rows(first, step, column, count, width, target + r * row, row, vector)
        return finite

    @part
    def clear(first, end):
        """Set what lies there to 0."""
        for to in range(first, end, vector):
            store(to, splat(zero))

    @part
    def all_finite(rows, row, count, width):
        """Return whether so many rows are finite."""
        check, rest = splat(zero), zero
        for r in range(count):
            for x in range(rows + r * row, rows + r * row + width * size, vector):
                check = fma(load(x), splat(zero), check)
        for x in range(lanes):
            rest += lane(check, x)
        return rest == zero

    @part
    def turn(tile, rows, row, width, target):
        """Fill ``[width][lanes]`` from ``[row][width]``."""
        for r in range(0, tile.filled, lanes):
            count = min(lanes, tile.filled - r)
            turn_in(rows + r * row, row, size, count, width, target + r * size, tile.vectors * vector)

    @part
    def place_tile(p, a, b, tile, spare):
        """Fill a tile whose rows are known; an empty row becomes zeros, whatever is in it."""
        query_row, grad_row = p.E_row * size, p.Ev_row * size
        finite = gather(p, a.query, a.query, b, tile, p.E, tile.query_rows, query_row)
        finite &= gather(p, a.grad, a.query, b, tile, p.Ev, tile.grad_rows, grad_row)
        gather(p, a.output, a.query, b, tile, p.Ev, spare, grad_row)
        solid, bounded, m, factor, inner = True, True, zero, zero, zero
        for r in range(tile.vectors * lanes):
            if r < tile.filled:  # a missing row repeats the last one
                inner, m = zero, load_one(data(a.m) + (tile.first + r) * size)
                factor = load_one(data(a.factor) + (tile.first + r) * size)
                if factor == zero:
                    solid = False
                    clear(tile.query_rows + r * query_row, tile.query_rows + r * query_row + p.E * size)
                    clear(tile.grad_rows + r * grad_row, tile.grad_rows + r * grad_row + p.Ev * size)
                else:
                    total = splat(zero)
                    for d in range(r * grad_row, r * grad_row + p.Ev * size, vector):
                        total = fma(load(tile.grad_rows + d), load(spare + d), total)
                    for x in range(lanes):
                        inner += lane(total, x)
                    if a.grad_lse:
                        inner -= load_one(data(a.grad_lse) + (tile.first + r) * size)
                    bounded &= (m + factor + inner) * zero == zero
            store(tile.m + r * size, m)
            store(tile.factor + r * size, factor)
            store(tile.inner + r * size, inner)
        if not (finite or solid):
            finite = all_finite(tile.query_rows, query_row, tile.filled, p.E)
            finite &= all_finite(tile.grad_rows, grad_row, tile.filled, p.Ev)
        store_flag(tile.flags, np.int64(finite and bounded))
        store_flag(tile.flags + 8, np.int64(solid))
        turn(tile, tile.query_rows, query_row, p.E, tile.query)
        turn(tile, tile.grad_rows, grad_row, p.Ev, tile.grad)
        clear(tile.sums, tile.sums + p.E_parts * tile.vectors * vector)

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
    def level(p, t, end, target):
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
    def sees(p, a, tile, r, j):
        """Return whether row r keeps key j and is not empty."""
        return load_one(tile.factor + r * size) != zero and keeps(p, a, tile.rows, r, j)

    @part
    def forget(p, a, tile, t, u, low, high):
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
                level(p, t, n * across, factors)
            adjust(p, a, b, tile.rows, tile.vectors, t, j0, bottom, min(top, p.S), table)
            if p.dropout_threshold:
                for x in range(0, n * across, vector):
                    store(kept + x, splat(one))
                thin(p, b, tile.rows, tile.vectors, kept, bottom, top)
                for x in range(0, n * across, vector):
                    store(u + x, load(u + x) * load(kept + x))
        if not (complete and top <= p.S):
            mask(tile.rows, tile.vectors, t, bottom, top, table)
        all_seen = complete and top <= p.S and load_int64(tile.flags + 8) != 0 and not (a.keep or a.bias)
        weigh(tile, t, u, n, one if general else scale, finite)
        if general:
            if not (finite or all_seen):
                forget(p, a, tile, t + here, u + here, low, high)
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

    return place_tile, pull_block
