"""One tile of query rows and one block of keys: lanes are query rows.

The scores of a tile are ``K @ Q.T``, keys times lanes, so that masks, maxima and sums are operations on whole vectors,
and what the softmax leaves is at once the right-hand side of ``V.T @ P``.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import any_lane, fma, load_int64, loader, select, splatter, storer
from sdpa_numba.vector.tiler import tiler

from . import pairs, scores
from .blocks import UNKNOWN
from .dropout import row_dropout
from .pack import transposing
from .rows import Rows, at, keeps
from .softmax import softmax
from .views import batch, data, stride


class Tile(NamedTuple):
    """Query rows in the lanes of `vectors` vectors, `filled` of them real, and the addresses of their state.

    Where the number at `fresh` is not 0, no keys were seen yet, and nothing lies at `sums`.
    """

    rows: Rows
    filled: int
    vectors: int
    queries: int
    factor: int
    m: int
    z: int
    sums: int
    whole_m: int
    whole_z: int
    whole_sums: int
    fresh: int


@cache
def multiplier(sizes, accumulate):
    """Return ``multiply(vectors, a, a_row, a_step, b, c, steps, factor)``: a product of one to three vectors' width."""
    narrow, middle, wide = (
        tiler(sizes.acc, sizes.tile_rows, n, sizes.lanes, accumulate, None, sizes.products) for n in (1, 2, 3)
    )
    size = itemsize(sizes.acc)
    vector = sizes.lanes * size

    @part
    def multiply(vectors, a, a_row, a_step, b, c, steps, factor):
        if vectors == 3:
            wide(a, a_row, a_step, b, vector, 3 * vector, c, 3 * vector, steps, factor)
        elif vectors == 2:
            middle(a, a_row, a_step, b, vector, 2 * vector, c, 2 * vector, steps, factor)
        else:
            narrow(a, a_row, a_step, b, vector, vector, c, vector, steps, factor)

    return multiply


@cache
def queries_packer(dtype, sizes):
    """Return ``place_queries``."""
    if sizes.products:
        return pairs.queries_packer(sizes.lanes)
    acc, lanes = sizes.acc, sizes.lanes
    size = itemsize(sizes.acc)
    vector, store, load_source = lanes * size, storer(acc), loader(dtype, acc)
    turn_in, _ = transposing(dtype, acc, acc, lanes, ahead=True)

    @part
    def place_queries(p, a, b, tile):
        """Pack the queries of a tile: ``[E][lanes]``; a missing row repeats the last one."""
        query, row, column = batch(a.query, 3, a.query, b), stride(a.query, 2), stride(a.query, 1)
        head = stride(a.query, 3)
        across = tile.vectors * vector
        for r in range(0, tile.vectors * lanes, lanes):
            if p.regular:
                first = query + at(tile.rows.h, r) * head + at(tile.rows.i, r) * row
                step = row if p.fold == 1 else head
                turn_in(first, step, column, max(1, min(lanes, tile.filled - r)), p.E, tile.queries + r * size, across)
            else:
                for x in range(r, r + lanes):
                    first = query + at(tile.rows.h, x) * head + at(tile.rows.i, x) * row
                    for e in range(p.E):
                        store(tile.queries + e * across + x * size, load_source(first + e * column))

    return place_queries


@cache
def sums_reader(sizes):
    """Return ``read_sums``."""
    size, load, store = itemsize(sizes.acc), loader(sizes.acc, sizes.acc), storer(sizes.acc)

    @part
    def read_sums(p, a, b, tile):
        """Begin a tile with what keys before these have made of its rows; a missing row repeats the last one."""
        across = tile.vectors * sizes.lanes * size
        for r in range(tile.vectors * sizes.lanes):
            row = (b * p.Hq + at(tile.rows.h, r)) * p.L + at(tile.rows.i, r)
            store(tile.whole_m + r * size, load(data(a.m) + row * size))
            store(tile.whole_z + r * size, load(data(a.z) + row * size))
            for d in range(p.Ev):
                store(tile.whole_sums + d * across + r * size, load(data(a.sums) + (row * p.Ev + d) * size))

    return read_sums


class Blocks(NamedTuple):
    """What a tile makes of a block of keys: an update of its state, or its weights."""

    update_tile: Any
    weigh_block: Any


def blocks(dtype, sizes, general, score_mod):
    """Return `Blocks`, without what only `general` problems need."""
    acc, lanes = sizes.acc, sizes.lanes
    number, size, panel, tile_rows = np.dtype(sizes.acc).type, itemsize(sizes.acc), sizes.panel, sizes.tile_rows
    vector, store, load_one, store_narrow = lanes * size, storer(acc), loader(acc, acc), storer(dtype)
    load, splat, store_int64 = loader(acc, acc, lanes), splatter(acc, lanes), storer("int64")
    make_scores, add_values = multiplier(sizes, False), multiplier(sizes, True)
    softmax_step, rescale, _, weigh = softmax(sizes)
    half = sizes.half
    join, add_pairs_carefully = pairs.weights(sizes) if half else pairs.Weights(None, None)
    adjust, mask, apply_dropout = scores.adjuster(sizes, score_mod), scores.masker(sizes), row_dropout(sizes)

    @part
    def score(p, a, b, tile, keys, t, j0, low, high, complete, work):
        """Fill `t` with the scores of the keys of ``[low, high)``, which are multiples of the tile's rows.

        Return whether bias and boolean mask drop none of them.
        """
        across, steps = tile.vectors * vector, (p.E + half) >> half
        for x in range(low - j0, high - j0, tile_rows):
            first, row, step = keys.keys + (x - x % panel) * keys.key, keys.key_row, keys.key_step
            first += x % panel * row
            if x >= keys.whole:
                first, row, step = keys.tail, size, panel * size
            make_scores(tile.vectors, first, row, step, tile.queries, t + x * across, steps, number(p.scale))
        start, kept = t + (low - j0) * across, True
        if general:
            kept = adjust(p, a, b, tile.rows, tile.vectors, start, j0, low, min(high, p.S), work)
        if not complete:
            mask(p.visible, tile.rows, tile.vectors, start, low, high, work)
        return kept

    @part
    def finite(keys, width):
        """Return whether the values of a block are finite."""
        if load_int64(keys.finite) != UNKNOWN:
            return load_int64(keys.finite) != 0
        odd, alone, done = splat(number(0)), True, width - width % lanes if keys.value_column == size else 0
        for x in range(keys.length):
            row = keys.values + x * keys.value_row
            for d in range(0, done, lanes):
                values = load(row + d * size)
                odd = select(values - values == splat(number(0)), odd, splat(number(1)))
            for d in range(done, width):
                value = load_one(row + d * keys.value)
                alone &= value - value == number(0)
        alone = alone and not any_lane(splat(number(0)) < odd)
        store_int64(keys.finite, np.int64(alone))
        return alone

    @part
    def add_carefully(p, a, tile, keys, t, j0, low, high):
        """Add ``V.T @ P`` key by key, without the values that a row drops: they are not all finite."""
        across = tile.vectors * vector
        for r in range(tile.vectors * lanes):
            for d in range(p.Ev if load_int64(tile.fresh) else 0):
                store(tile.sums + d * across + r * size, number(0))
            for j in range(low, high):
                if keeps(p, a, tile.rows, r, j):
                    weight, value = load_one(t + (j - j0) * across + r * size), keys.values + (j - j0) * keys.value_row
                    for d in range(p.Ev):
                        part, to = d % tile_rows * keys.value_column, tile.sums + d * across + r * size
                        number_d = load_one(value + (d - d % tile_rows) * keys.value + part)
                        store(to, fma(weight, number_d, load_one(to)))

    @part
    def update_tile(p, a, b, tile, keys, t, j0, low, high, complete, work):
        """Update a tile by the keys of ``[low, high)`` of the block at j0."""
        across, bottom, top = tile.vectors * vector, low - low % tile_rows, high + -high % tile_rows
        complete &= bottom == low
        kept = score(p, a, b, tile, keys, t, j0, bottom, top, complete and top == high, work)
        here, fresh = t + (bottom - j0) * across, load_int64(tile.fresh) != 0
        if softmax_step(tile.vectors, here, top - bottom, tile.m, tile.z, tile.factor) and not fresh:
            rescale(tile.vectors, tile.sums, p.Ev, tile.factor)
        if general and p.dropout_threshold:
            apply_dropout(p, b, tile.rows, tile.vectors, here, bottom, top)
        if half:
            join(tile.vectors, here, top - bottom)
            complete &= high % 2 == 0  # else the last pair has a key that is dropped
        if not (kept and complete) and not finite(keys, p.Ev):
            if half:
                add_pairs_carefully(p, a, tile, keys, here, j0, bottom, low, high)
            else:
                add_carefully(p, a, tile, keys, t, j0, low, high)
        else:
            steps = (high - bottom + half) >> half
            for d in range(0, p.Ev, tile_rows):
                part = keys.values + d * keys.value + ((bottom - j0) >> half) * keys.value_row
                add_values(tile.vectors, part, keys.value_column, keys.value_row, here, tile.sums + d * across,
                           steps, number(not fresh))  # fmt: skip
        store_int64(tile.fresh, np.int64(0))

    @part
    def weigh_block(p, a, b, tile, keys, t, j0, low, high, complete, work):
        """Write the weights of the keys of ``[low, high)`` of the block at j0."""
        across, bottom, top = tile.vectors * vector, low - low % tile_rows, high + -high % tile_rows
        score(p, a, b, tile, keys, t, j0, bottom, top, complete and bottom == low and top == high, work)
        here = t + (bottom - j0) * across
        weigh(tile.vectors, here, top - bottom, tile.whole_m, tile.factor)
        if general and p.dropout_threshold:
            apply_dropout(p, b, tile.rows, tile.vectors, here, bottom, top)
        weights = batch(a.weights, 3, a.query, b)
        for r in range(tile.filled):
            to = weights + at(tile.rows.h, r) * stride(a.weights, 3) + at(tile.rows.i, r) * stride(a.weights, 2)
            for j in range(low, high):
                if keeps(p, a, tile.rows, r, j):
                    store_narrow(to + j * stride(a.weights, 1), load_one(t + (j - j0) * across + r * size))

    return Blocks(update_tile, weigh_block)
