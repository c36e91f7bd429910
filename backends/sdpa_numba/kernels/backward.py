"""The kernel of the gradients: query tiles pass over packed blocks of keys, which collect dK and dV on the way."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.runtime.kernel import kernel as compiled
from sdpa_numba.runtime.tasks import MOVE, OVERHEAD, next_task, proceed
from sdpa_numba.vector.atomic import add
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import allocate, load_int64, loader, record_reader, release, splatter, storer, tuple_reader

from . import pullback
from .backward_tiles import Tile, tile_placer
from .pack import transposing, value_packer
from .pullback import Block
from .record import BAND_NUMBERS, OPTIONS, SHAPE
from .rows import FIELDS, drops_all, place, rows_at, span, visible
from .views import batch, data, stride


class Arrays(NamedTuple):
    """The arrays of a call, each by the address of its object; 0 for what is absent."""

    query: int
    key: int
    value: int
    output: int
    grad: int
    m: int
    factor: int
    grad_lse: int
    d_query: int
    d_key: int
    d_value: int
    d_bias: int
    slope: int
    prefix: int
    start: int
    stop: int
    keep: int
    bias: int
    slopes: int
    positions: int
    key_positions: int


BACKWARD = np.dtype(
    [(name, np.int64) for name in (
        *Arrays._fields,
        *OPTIONS,
        *BAND_NUMBERS,
        *SHAPE,
        "fold", "units", "regular", "tiles", "strip",  # as in the record of the forward kernels
        "width",  # rows of a tile
        "E_row", "Ev_row", "E_parts",  # numbers from one packed row to the next, and rows of dQ.T
        "chunk", "chunks", "split",  # keys whose dQ is summed up first, their number, tasks of a key head
        "resume", "final",  # whether dK and dV are added to, whether the bias holds the scores
        "block_bytes", "counters", "memory",
    )]
    + [("scale", np.float64), ("softcap", np.float64), ("dropout_factor", np.float64)]
)  # fmt: skip
read_record, read_arrays = record_reader(BACKWARD), tuple_reader(Arrays, BACKWARD)


class Blocks(NamedTuple):
    """How blocks of keys and their gradients are packed and unpacked."""

    clear: Any
    block_at: Any
    pack_block: Any
    unpack: Any


@cache
def blocks(sizes):
    """Return `Blocks` for this type."""
    acc, lanes = sizes.acc, sizes.lanes
    number, size, block, tile_rows = np.dtype(sizes.acc).type, itemsize(sizes.acc), sizes.block, sizes.tile_rows
    vector, zero, load, store = lanes * size, number(0), loader(acc, acc, lanes), storer(acc)
    splat, load_one, store_flag = splatter(acc, lanes), loader(acc, acc), storer("int64")
    pack_rows = value_packer(acc, acc, lanes)

    @part
    def clear(first, end):
        """Set what lies there to 0."""
        for to in range(first, end, vector):
            store(to, splat(zero))

    @part
    def block_at(p, address):
        """Return the block that lies there."""
        values = address + block * p.E_row * size
        d_keys = values + block * p.Ev_row * size
        d_values = d_keys + block * p.E_row * size
        return Block(address, values, d_keys, d_values, load_int64(address + p.block_bytes - 64))

    @part
    def pack_block(p, a, b, head, j0, address):
        """Pack the block of keys that begins at j0, and set its gradients to 0, or to those that it has."""
        rows, keys = min(block, p.S - j0), block_at(p, address)
        key_row, value_row = p.E_row * size, p.Ev_row * size
        key = batch(a.key, 3, a.query, b) + head * stride(a.key, 3) + j0 * stride(a.key, 2)
        value = batch(a.value, 3, a.query, b) + head * stride(a.value, 3) + j0 * stride(a.value, 2)
        finite = pack_rows(key, stride(a.key, 2), stride(a.key, 1), rows, p.E, keys.keys, key_row, vector)
        finite &= pack_rows(value, stride(a.value, 2), stride(a.value, 1), rows, p.Ev, keys.values, value_row, vector)
        store_flag(address + p.block_bytes - 64, np.int64(finite))
        missing = rows + -rows % tile_rows
        clear(keys.keys + rows * key_row, keys.keys + missing * key_row)
        clear(keys.values + rows * value_row, keys.values + missing * value_row)
        clear(keys.d_keys, keys.d_values + missing * value_row)
        if p.resume:
            first = (b * p.Hkv + head) * p.S + j0
            d_key, d_value = data(a.d_key) + first * p.E * size, data(a.d_value) + first * p.Ev * size
            pack_rows(d_key, p.E * size, size, rows, p.E, keys.d_keys, key_row, vector)
            pack_rows(d_value, p.Ev * size, size, rows, p.Ev, keys.d_values, value_row, vector)

    @part
    def unpack(rows, width, source, source_row, target):
        """Write rows without what fills them up."""
        whole = width - width % lanes
        for x in range(rows):
            row, to = source + x * source_row, target + x * width * size
            for d in range(0, whole * size, vector):
                store(to + d, load(row + d) + splat(zero))  # + 0: never -0
            for d in range(whole, width):
                store(to + d * size, load_one(row + d * size) + zero)

    return Blocks(clear, block_at, pack_block, unpack)


class Tiles(NamedTuple):
    """Where tiles and their states lie, how they begin, and where dQ goes."""

    tile_bytes: Any
    tile_at: Any
    begin: Any
    absorb: Any
    write_rows: Any


@cache
def tiles(sizes):
    """Return `Tiles` for this type."""
    acc, lanes = sizes.acc, sizes.lanes
    number, size = np.dtype(sizes.acc).type, itemsize(sizes.acc)
    vector, zero, load, store = lanes * size, number(0), loader(acc, acc, lanes), storer(acc)
    splat = splatter(acc, lanes)
    _, turn_out = transposing(acc, acc, acc, lanes)
    place_tile = tile_placer(sizes)

    @part
    def tile_bytes(p):
        """Return the size of a tile's state and tables."""
        return (p.E + p.Ev + p.E_row + p.Ev_row + 2 * p.E_parts + 3) * p.width * size + 8 * FIELDS * p.width + 64

    @part
    def tile_at(p, state, b, kv, index):
        """Return the tile with this index among those of a key head: its heads take turns."""
        heads = p.group // p.fold
        head, first = kv * p.group + index % heads * p.fold, index // heads * p.width
        filled, step = min(p.width, p.fold * p.L - first), p.width * size
        rows = rows_at(state + 64, p.width)
        m = state + 64 + 8 * FIELDS * p.width
        query = m + 3 * step
        grad = query + p.E * step
        query_rows = grad + p.Ev * step
        grad_rows = query_rows + p.E_row * step
        sums = grad_rows + p.Ev_row * step
        whole = sums + p.E_parts * step
        return Tile(
            rows, (b * p.Hq + head) * p.L + first, filled, (filled + lanes - 1) // lanes, state,
            m, m + step, m + 2 * step, query, grad, query_rows, grad_rows, sums, whole,
        )  # fmt: skip

    @part
    def begin(p, a, b, kv, tile, index, spare):
        """Place the rows of a tile."""
        heads = p.group // p.fold
        first = index // heads * p.width
        head = kv * p.group + index % heads * p.fold
        place(tile.rows, tile.vectors * lanes, b, head, first, first + tile.filled - 1, p, a)
        place_tile(p, a, b, tile, spare)

    @part
    def absorb(p, tile, source, fresh):
        """Add a chunk's dQ to the whole, which is `fresh` before the first."""
        for d in range(0, p.E_parts * tile.vectors * vector, vector):
            chunk = load(source + d)
            store(tile.whole + d, chunk if fresh else load(tile.whole + d) + chunk)

    @part
    def write_rows(p, a, tile, sums):
        """Write dQ."""
        across = tile.vectors * vector
        for to in range(sums, sums + p.E * across, vector):
            store(to, load(to) + splat(zero))
        for r in range(0, tile.filled, lanes):
            to = data(a.d_query) + (tile.first + r) * p.E * size
            turn_out(sums + r * size, across, min(lanes, tile.filled - r), p.E, to, p.E * size, size)

    return Tiles(tile_bytes, tile_at, begin, absorb, write_rows)


@cache
def kernel(sizes, general):
    """Return the kernel for this type, without what only `general` problems need.

    A task is a key head, or one chunk of its keys; whoever does the last chunk adds up the dQ of all.
    """
    acc, lanes = sizes.acc, sizes.lanes
    size, block = itemsize(sizes.acc), sizes.block
    vector, load, store = lanes * size, loader(acc, acc, lanes), storer(acc)
    clear, block_at, pack_block, unpack = blocks(sizes)
    tile_bytes, tile_at, begin, absorb, write_rows = tiles(sizes)
    pull_block = pullback.block_puller(sizes, general)

    @compiled
    def pull(worker, record):
        """Compute dQ, dK and dV, and dS where it is wanted."""
        p, a = read_record(record), read_arrays(record)
        own = p.chunks if p.split == 1 else 1  # chunks of a task
        tiles = p.group // p.fold * p.tiles
        sum_bytes = p.E_parts * p.width * size
        work_bytes = max(4 * block + lanes + 2, p.Ev_row) * p.width * size
        scratch = allocate(64 + work_bytes + p.strip * tile_bytes(p) + own * p.chunk // block * p.block_bytes)
        work = (scratch + 63) & -64
        states = work + work_bytes
        blocks = states + p.strip * tile_bytes(p)
        pack_work, place_work = 2 * block * (p.E + p.Ev) * MOVE, p.width * (p.E + p.Ev) * MOVE
        task = next_task(worker)
        while task < p.units * p.split:
            unit, index = task // p.split, task % p.split
            b, kv = unit // p.Hkv, unit % p.Hkv
            key0, key1 = index * own * p.chunk, min((index + 1) * own * p.chunk, p.S)
            shares = p.memory + p.counters + unit * p.split * tiles * sum_bytes
            for j0 in range(key0, key1, block):
                if not proceed(worker, pack_work):
                    break
                pack_block(p, a, b, kv, j0, blocks + (j0 - key0) // block * p.block_bytes)
            for first in range(0, tiles, p.strip):
                if not proceed(worker, p.strip * place_work):
                    break
                last = min(first + p.strip, tiles)
                pass_work = 3 * (last - first) * p.width * block * (p.E + p.Ev + OVERHEAD)
                low, high, gap_start, gap_stop = p.S, np.int64(0), np.int64(0), p.S
                for x in range(first, last):
                    tile = tile_at(p, states + (x - first) * tile_bytes(p), b, kv, x)
                    begin(p, a, b, kv, tile, x, work)
                    seen = span(p, tile.rows, tile.vectors * lanes)
                    low, high = min(low, seen[0]), max(high, seen[1])
                    gap_start, gap_stop = max(gap_start, seen[2]), min(gap_stop, seen[3])
                for chunk0 in range(key0, key1, p.chunk):
                    start, stop = max(chunk0, low - low % block), min(chunk0 + p.chunk, high)
                    for j0 in range(start, stop, block):
                        if gap_start <= j0 and j0 + block <= gap_stop:
                            continue
                        if not proceed(worker, pass_work):
                            break
                        keys = block_at(p, blocks + (j0 - key0) // block * p.block_bytes)
                        for x in range(first, last):
                            tile = tile_at(p, states + (x - first) * tile_bytes(p), b, kv, x)
                            j, end, complete = j0, min(j0 + block, p.S), True
                            if p.visible:
                                j, end, complete = visible(tile.rows, tile.vectors * lanes, j, end)
                            if j < end and not (general and a.keep and drops_all(a, tile.rows, tile.filled, j, end)):
                                pull_block(p, a, b, tile, keys, j0, j, end, complete, work)
                    for x in range(first, last):
                        tile = tile_at(p, states + (x - first) * tile_bytes(p), b, kv, x)
                        absorb(p, tile, tile.sums, chunk0 == key0)
                        clear(tile.sums, tile.sums + p.E_parts * tile.vectors * vector)
                for x in range(first, last):
                    tile = tile_at(p, states + (x - first) * tile_bytes(p), b, kv, x)
                    if p.split == 1:
                        write_rows(p, a, tile, tile.whole)
                    else:
                        to = shares + (index * tiles + x) * sum_bytes
                        for d in range(0, sum_bytes, vector):
                            store(to + d, load(tile.whole + d))
            for j0 in range(key0, key1, block):
                if not proceed(worker, pack_work):
                    break
                keys = block_at(p, blocks + (j0 - key0) // block * p.block_bytes)
                rows, row = min(block, p.S - j0), (b * p.Hkv + kv) * p.S + j0
                unpack(rows, p.E, keys.d_keys, p.E_row * size, data(a.d_key) + row * p.E * size)
                unpack(rows, p.Ev, keys.d_values, p.Ev_row * size, data(a.d_value) + row * p.Ev * size)
            if p.split > 1 and add(p.memory + 8 * unit, 1) == p.split - 1:
                for x in range(tiles):
                    if not proceed(worker, p.split * place_work):
                        break
                    tile = tile_at(p, states, b, kv, x)
                    for other in range(p.split):
                        absorb(p, tile, shares + (other * tiles + x) * sum_bytes, other == 0)
                    write_rows(p, a, tile, tile.whole)
            task = next_task(worker)
        release(scratch)

    return pull
