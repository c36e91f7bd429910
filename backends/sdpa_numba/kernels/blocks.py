"""Blocks of keys and values: packed, or where they lie in the caller's arrays."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import storer

from . import pairs
from .heads import place_head
from .pack import transposing, value_packer
from .record import SOURCE_BYTES
from .stored import reader, rows_packer
from .views import batch, stride

UNKNOWN = 2  # whether values are finite


class Block(NamedTuple):
    """Where a block of keys and values lies, by bytes from one number to the next.

    Key x is at ``keys + (x - x % panel) * key + x % panel * key_row``; the keys from `whole` on, fewer than a tile has,
    lie packed at `tail`. Column d of its value, d a multiple of the tile's rows, is at
    ``values + d * value + x * value_row``. Whether the values of all `length` keys are finite is written at `finite`:
    1, 0, or `UNKNOWN`.
    """

    keys: int
    key: int
    key_row: int
    key_step: int
    whole: int
    tail: int
    values: int
    value: int
    value_column: int
    value_row: int
    finite: int
    length: int


class Packing(NamedTuple):
    """What packs a block, and where the numbers of one lie that is packed, or is read in the caller's arrays."""

    pack_block: Any
    packed_block: Any
    block_in_place: Any


@cache
def packing(dtype, sizes, stored):
    """Return `Packing`, for dense or for `stored` keys and values.

    A block holds panels of keys, ``[E][panel]``, then values, ``[Ev / tile_rows][block][tile_rows]``, and in its last
    64 bytes whether all values are finite. Missing keys repeat the last one; missing columns of V are zero. Of pairs
    there are half as many in ``[E]`` and ``[block]``.
    """
    half = sizes.half
    if half:
        pack_keys, pack_values = pairs.turner(sizes.panel, True), pairs.block_packer(sizes.tile_rows)
    else:
        pack_keys, _ = transposing(dtype, sizes.acc, sizes.acc, sizes.panel, ahead=True)
        pack_values = value_packer(dtype, sizes.acc, sizes.tile_rows)
    size, panel, block, tile_rows = itemsize(sizes.acc), sizes.panel, sizes.block, sizes.tile_rows
    store = storer("int64")
    pack_stored = stored_packing(dtype, sizes) if stored else None

    @part
    def pack_block(p, a, b, head, j0, target, room):
        """Pack the block of keys that begins at j0."""
        count, finite, width = min(block, p.S - j0), True, (p.E + half) >> half
        row, column = stride(a.key, 2), stride(a.key, 1)
        key = batch(a.key, 3, a.query, b) + head * stride(a.key, 3) + j0 * row
        for x in range(0, count, panel):
            rows = min(panel, count - x)
            pack_keys(key + x * row, row, column, rows, p.E, target + x * width * size, panel * size)
        if a.value:
            row, column = stride(a.value, 2), stride(a.value, 1)
            value = batch(a.value, 3, a.query, b) + head * stride(a.value, 3) + j0 * row
            to, part = target + block * width * size, tile_rows * size
            finite = pack_values(value, row, column, count, p.Ev, to, part, (block >> half) * part)
        store(target + p.block_bytes - 64, np.int64(finite))

    @part
    def packed_block(p, at):
        """Return the block that is packed at this address."""
        width, depth, part = (p.E + half) >> half, block >> half, tile_rows * size
        values, finite = at + block * width * size, at + p.block_bytes - 64
        return Block(at, width * size, size, panel * size, block, 0, values, depth * size, size, part, finite, block)

    @part
    def block_in_place(p, a, b, head, j0, spare):
        """Return the block that begins at j0, of which only keys that fill no tile are packed, where there is room."""
        count = min(block, p.S - j0)
        whole = count - count % tile_rows
        row, column = stride(a.key, 2), stride(a.key, 1)
        key = batch(a.key, 3, a.query, b) + head * stride(a.key, 3) + j0 * row
        if whole < count:
            pack_keys(key + whole * row, row, column, count - whole, p.E, spare, panel * size)
        value_row, value_column = stride(a.value, 2), stride(a.value, 1)
        value = batch(a.value, 3, a.query, b) + head * stride(a.value, 3) + j0 * value_row
        finite = spare + p.block_bytes - 64
        store(finite, np.int64(UNKNOWN))
        return Block(key, row, row, column, whole, spare, value, value_column, value_column, value_row, finite, count)

    return Packing(pack_stored or pack_block, packed_block, block_in_place)


@cache
def stored_packing(dtype, sizes):
    """Return ``pack_block`` for keys and values that are stored; `room` is for a panel of them as rows."""
    if sizes.products:
        return pairs.stored_reader(sizes).pack_block
    size, panel, block, tile_rows = itemsize(sizes.acc), sizes.panel, sizes.block, sizes.tile_rows
    pack_panel, pack_rows = reader(dtype, sizes).pack_panel, rows_packer(dtype, sizes, tile_rows)
    store = storer("int64")

    @part
    def pack_block(p, a, b, head, j0, target, room):
        """Pack the block of keys that begins at j0."""
        count, finite = min(block, p.S - j0), True
        key = place_head(room, p.stored, a.query, b, head)
        for x in range(0, count, panel):
            rows = min(panel, count - x)
            pack_panel(key, j0 + x, rows, target + x * p.E * size)
        if a.value:
            to, part = target + block * p.E * size, tile_rows * size
            value = place_head(room, p.stored + SOURCE_BYTES, a.query, b, head)
            finite = pack_rows(value, j0, count, to, part, block * part)
        store(target + p.block_bytes - 64, np.int64(finite))

    return pack_block
