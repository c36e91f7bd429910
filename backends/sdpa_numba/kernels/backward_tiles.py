"""Tiles of query rows in the backward pass: where their numbers lie, and how they are filled."""

from functools import cache
from typing import NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import fma, lane, loader, splatter, storer

from .pack import transposing, value_packer
from .rows import Rows, at
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


@cache
def tile_placer(sizes):
    """Return ``place_tile``, which fills a tile of the backward pass."""
    acc, lanes = sizes.acc, sizes.lanes
    number, size, vector = np.dtype(sizes.acc).type, itemsize(sizes.acc), lanes * itemsize(acc)
    zero, load, store, splat = number(0), loader(acc, acc, lanes), storer(acc), splatter(acc, lanes)
    load_one, store_flag = loader(acc, acc), storer("int64")
    pack_rows, (turn_in, _) = value_packer(acc, acc, lanes), transposing(acc, acc, acc, lanes)

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

    return place_tile
