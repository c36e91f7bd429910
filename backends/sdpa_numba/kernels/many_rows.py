"""The kernel for many query rows: strips of tiles pass over packed blocks of keys and values."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.runtime.kernel import kernel as compiled
from sdpa_numba.runtime.tasks import MOVE, OVERHEAD, next_task, proceed
from sdpa_numba.vector.atomic import add, look
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import allocate, load_int64, release, splatter, storer

from . import tiles
from .blocks import packing
from .heads import HEAD_BYTES
from .record import read_arrays, read_record
from .rows import FIELDS, drops_all, place, rows_at, span, visible
from .softmax import softmax
from .tiles import Tile
from .write_rows import rows_writer

IN_PLACE = 4  # tiles, at most, that read a block where it lies in less time than it takes to pack it


class States(NamedTuple):
    """Where the tiles of a strip and their states lie, and how they begin."""

    tile_bytes: Any
    tile_at: Any
    clear: Any
    begin: Any


@cache
def states(dtype, sizes):
    """Return `States` for this type."""
    acc, lanes = sizes.acc, sizes.lanes
    number, size, chunk, tile_rows = np.dtype(sizes.acc).type, itemsize(sizes.acc), sizes.chunk, sizes.tile_rows
    widest = sizes.tile_vectors * sizes.lanes
    nothing, vector, store, splat = number(-np.inf), lanes * size, storer(acc), splatter(acc, lanes)
    store_int64 = storer("int64")
    place_queries, read_sums = tiles.queries_packer(dtype, sizes), tiles.sums_reader(sizes)

    @part
    def tile_bytes(p):
        """Return the size of a tile's state and tables."""
        return ((p.E + 2 * (p.Ev + -p.Ev % tile_rows) + 5) * size + 8 * FIELDS) * widest + 64

    @part
    def first_row(p, index):
        """Return a tile's first row; rows that would leave one vector to the last tile give it two."""
        rows = index * widest
        return rows - lanes if index == p.tiles - 1 and index and 0 < p.fold * p.L - rows <= lanes else rows

    @part
    def tile_at(p, states, index, first):
        """Return the tile with this index of a strip that begins with the tile `first`."""
        width = p.Ev + -p.Ev % tile_rows
        step = widest * size
        state = states + (index - first) * tile_bytes(p)
        fresh = state + tile_bytes(p) - 64
        rows = rows_at(fresh - 8 * FIELDS * widest, widest)
        count = min(first_row(p, index + 1), p.fold * p.L) - first_row(p, index)
        whole = 3 if p.S > chunk or p.sums else 1
        sums = state + (5 + p.E) * step
        return Tile(
            rows, count, (count + lanes - 1) // lanes, state + 5 * step, state, state + step, state + 2 * step, sums,
            state + whole * step, state + (whole + 1) * step, sums + (whole // 2) * width * step,
            fresh,
        )  # fmt: skip

    @part
    def clear(tile, m, z):
        """Set a state to that of no keys."""
        for v in range(0, tile.vectors * vector, vector):
            store(m + v, splat(nothing))
            store(z + v, splat(number(0)))
        store_int64(tile.fresh, np.int64(1))

    @part
    def begin(p, a, b, head, tile, index):
        """Place the rows of a tile and clear its state."""
        first = first_row(p, index)
        place(tile.rows, tile.vectors * lanes, b, head, first, first + tile.filled - 1, p, a)
        place_queries(p, a, b, tile)
        clear(tile, tile.m, tile.z)
        if p.sums:
            read_sums(p, a, b, tile)
        elif p.S > chunk:
            clear(tile, tile.whole_m, tile.whole_z)
            for to in range(tile.whole_sums, tile.whole_sums + p.Ev * tile.vectors * vector, vector):
                store(to, splat(number(0)))

    return States(tile_bytes, tile_at, clear, begin)


def passing(dtype, sizes, general, score_mod, tile_at):
    """Return ``pass_block``, which lets a strip see one block of keys."""
    lanes, block = sizes.lanes, sizes.block
    update_tile, weigh_block = tiles.blocks(dtype, sizes, general, score_mod)

    @part
    def pass_block(p, a, b, kv, j0, states, first, last, keys, t, work, weigh):
        """Update the tiles [first, last) by the keys of a block, or compute their weights."""
        j1 = min(j0 + block, p.S)
        for index in range(first, last):
            tile = tile_at(p, states, index, first)
            low, high, complete = j0, j1, True
            if p.visible:
                low, high, complete = visible(tile.rows, tile.vectors * lanes, j0, j1)
            if low < high and not (general and a.keep and drops_all(a, tile.rows, tile.filled, low, high)):
                if general and weigh:
                    weigh_block(p, a, b, tile, keys, t, j0, low, high, complete, work)
                else:
                    update_tile(p, a, b, tile, keys, t, j0, low, high, complete, work)

    return pass_block


@lru_cache(maxsize=64)  # a bound on kernels for functions of the user
def kernel(dtype, sizes, general, score_mod, stored=False):
    """Return the kernel for this type, without what only `general` problems or `stored` keys need.

    A task is one block to pack, and then, where the blocks of its head are packed, one strip.
    """
    lanes, size, block, chunk = sizes.lanes, itemsize(sizes.acc), sizes.block, sizes.chunk
    tile_rows = sizes.tile_rows
    widest = sizes.tile_vectors * lanes
    pack_block, packed_block, block_in_place = packing(dtype, sizes, stored)
    tile_bytes, tile_at, clear, begin = states(dtype, sizes)
    pass_block = passing(dtype, sizes, general, score_mod, tile_at)
    write_rows = rows_writer(dtype, sizes)
    absorb = softmax(sizes).absorb

    @compiled
    def attend(worker, record):
        """Compute all strips: output, lse and weights, as far as they have somewhere to go."""
        p, a = read_record(record), read_arrays(record)
        blocks, heads = (p.S + block - 1) // block, p.Hq // p.fold
        packing, packed = p.B * p.Hkv * blocks if p.packed else 0, p.memory + p.counters
        pack_work = block * (p.E + p.Ev) * MOVE
        in_place = not stored and a.value != 0 and dtype == sizes.acc
        in_place &= p.strip <= IN_PLACE and p.Ev % tile_rows == 0
        work_bytes = (lanes + 2) * widest * size
        room_bytes = HEAD_BYTES + sizes.panel * max(p.E, p.Ev) * size if stored else 0
        whole = block * widest * size + work_bytes + p.block_bytes + p.strip * tile_bytes(p)
        scratch = allocate(64 + whole + room_bytes)
        t = (scratch + 63) & -64
        room = t + whole
        work = t + block * widest * size
        own = work + work_bytes
        states = own + p.block_bytes
        task = next_task(worker)
        while task < packing:
            unit = task // blocks
            pack_block(p, a, unit // p.Hkv, unit % p.Hkv, task % blocks * block, packed + task * p.block_bytes, room)
            add(p.memory + 8 * unit, 1)
            proceed(worker, pack_work)
            task = next_task(worker)
        while task < packing + p.units * p.strips:
            unit, strip = (task - packing) // p.strips, p.strips - 1 - (task - packing) % p.strips
            b, head = unit // heads, unit % heads * p.fold
            kv, first = head // p.group, strip * p.strip
            while p.packed and look(p.memory + 8 * (b * p.Hkv + kv)) < blocks and proceed(worker, OVERHEAD):
                pass  # somebody else is at it
            last = min(first + p.strip, p.tiles)
            proceed(worker, (last - first) * widest * (p.E + p.Ev) * MOVE)
            pass_work = (last - first) * widest * block * (p.E + p.Ev + OVERHEAD)
            low, high, gap_start, gap_stop = p.S, np.int64(0), np.int64(0), p.S
            for index in range(first, last):
                tile = tile_at(p, states, index, first)
                begin(p, a, b, head, tile, index)
                seen = span(p, tile.rows, tile.vectors * lanes)
                low, high = min(low, seen[0]), max(high, seen[1])
                gap_start, gap_stop = max(gap_start, seen[2]), min(gap_stop, seen[3])
            for weigh in range(2 if general and a.weights else 1):
                for chunk0 in range(low - low % chunk, high, chunk):
                    if not proceed(worker, 0):
                        break
                    for j0 in range(max(chunk0, low - low % block), min(chunk0 + chunk, high), block):
                        if gap_start <= j0 and j0 + block <= gap_stop:
                            continue
                        if not proceed(worker, pass_work):
                            break
                        if p.packed:
                            at = packed + ((b * p.Hkv + kv) * blocks + j0 // block) * p.block_bytes
                            keys = packed_block(p, at)
                        elif in_place:
                            keys = block_in_place(p, a, b, kv, j0, own)
                        else:
                            pack_block(p, a, b, kv, j0, own, room)
                            keys = packed_block(p, own)
                        pass_block(p, a, b, kv, j0, states, first, last, keys, t, work, weigh)
                    if (p.S > chunk or p.sums) and not weigh:
                        for index in range(first, last):
                            tile = tile_at(p, states, index, first)
                            if load_int64(tile.fresh):
                                continue
                            absorb(tile.vectors, tile.whole_m, tile.whole_z, tile.whole_sums, p.Ev,
                                   tile.m, tile.z, tile.sums)  # fmt: skip
                            clear(tile, tile.m, tile.z)
                if not weigh:
                    for index in range(first, last):
                        write_rows(p, a, b, tile_at(p, states, index, first))
            task = next_task(worker)
        release(scratch)

    return attend
