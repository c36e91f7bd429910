"""bfloat16 numbers by twos, for kernels whose products take pairs: two numbers of a query or key, or two keys of V.

A pair fills the word of a float32, so that panels of pairs lie as panels of float32 numbers do, with half the steps. A
number that is missing at an odd end is 0. Pairs of keys begin at even indices, whichever keys a row sees.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.pairs import joined, joiner, one_dot
from sdpa_numba.vector.simd import any_lane, load_int32, loader, select, splatter, storer

from .heads import page_at, place_head
from .pack import transposing
from .record import SOURCE_BYTES
from .rows import at, keeps
from .stored import reader
from .views import batch, stride

BYTES, WORD = 2, 4  # of a number, and of a pair
FIRST, SECOND = 0xFFFF, -0x10000  # the halves of a word
ZERO = np.float32(0)
load_number, store_number, store_word = loader("bfloat16", "float32"), storer("bfloat16"), storer("int32")
load_float, store_float = loader("float32", "float32"), storer("float32")


@cache
def turner(lanes, ahead=False):
    """Return ``turn(a, a_row, a_column, rows, width, b, b_row)``: pair e of up to `lanes` rows becomes row e of `b`."""
    turn_words, _ = transposing("int32", "int32", "int32", lanes, ahead)

    @part
    def turn(a, a_row, a_column, rows, width, b, b_row):
        done = 0
        if a_column == BYTES:
            done = width // 2
            turn_words(a, a_row, WORD, rows, done, b, b_row)
        for x in range(lanes if 2 * done < width else 0):
            turn_one(a + min(x, rows - 1) * a_row, a_column, done, width, b + x * WORD, b_row)

    return turn


@part
def turn_one(a, a_column, done, width, b, b_row):
    """Write the pairs of a row from pair `done` on, `b_row` bytes apart."""
    for e in range(done, (width + 1) // 2):
        first = a + 2 * e * a_column
        second = load_number(first + a_column) if 2 * e + 1 < width else ZERO
        store_word(b + e * b_row, joined(load_number(first), second))


@cache
def queries_packer(lanes):
    """Return ``place_queries`` of tiles: pairs of a query's numbers, ``[E / 2][lanes]``."""
    turn = turner(lanes)

    @part
    def place_queries(p, a, b, tile):
        """Pack the queries of a tile; a missing row repeats the last one."""
        query, row, column = batch(a.query, 3, a.query, b), stride(a.query, 2), stride(a.query, 1)
        head = stride(a.query, 3)
        across = tile.vectors * lanes * WORD
        for r in range(0, tile.vectors * lanes, lanes):
            if p.regular:
                first = query + at(tile.rows.h, r) * head + at(tile.rows.i, r) * row
                step = row if p.fold == 1 else head
                turn(first, step, column, max(1, min(lanes, tile.filled - r)), p.E, tile.queries + r * WORD, across)
            else:
                for x in range(r, r + lanes):
                    first = query + at(tile.rows.h, x) * head + at(tile.rows.i, x) * row
                    turn_one(first, column, 0, p.E, tile.queries + x * WORD, across)

    return place_queries


@part
def place_query(query, column, width, target):
    """Copy a query, one number behind the other, and a 0 behind an odd number of them."""
    for e in range(width):
        store_number(target + e * BYTES, load_number(query + e * column))
    if width % 2:
        store_number(target + width * BYTES, ZERO)


@cache
def values_packer(lanes):
    """Return the function that packs pairs of values in parts of `lanes` columns."""
    load, store, splat = loader("bfloat16", "float32", lanes), storer("int32"), splatter("float32", lanes)

    @part
    def pack_values(source, row, column, absent, rows, width, target, target_row, target_part):
        """Pack the pairs of `rows` rows, the first without a first one if `absent` is 1; return if all are finite."""
        odd, finite = splat(ZERO), True  # 1 where a number is not finite
        done = width - width % lanes if column == BYTES else 0
        for y in range((rows + absent + 1) // 2):
            x = 2 * y - absent  # the row of the first number
            begins, ends = x >= 0, x + 1 < rows
            first, second, to = source + max(x, 0) * row, source + min(x + 1, rows - 1) * row, target + y * target_row
            for d in range(0, done, lanes):
                u, v = load(first + d * BYTES), load(second + d * BYTES)
                odd = select((u - u == splat(ZERO)) & (v - v == splat(ZERO)), odd, splat(np.float32(1)))
                store(to, joined(u if begins else splat(ZERO), v if ends else splat(ZERO)))
                to += target_part
            for part_of in range(done, width, lanes):
                for d in range(lanes):
                    u, v = ZERO, ZERO
                    if part_of + d < width:
                        u = load_number(first + (part_of + d) * column) if begins else ZERO
                        v = load_number(second + (part_of + d) * column) if ends else ZERO
                    finite &= u - u == ZERO and v - v == ZERO
                    store_word(to + d * WORD, joined(u, v))
                to += target_part
        return finite and not any_lane(splat(ZERO) < odd)

    return pack_values


@cache
def block_packer(lanes):
    """Return the function that packs pairs of values from the first key of a block on, as `value_packer` does."""
    pack_from = values_packer(lanes)

    @part
    def pack_values(source, row, column, rows, width, target, target_row, target_part):
        return pack_from(source, row, column, 0, rows, width, target, target_row, target_part)

    return pack_values


class Weights(NamedTuple):
    """What a tile does with its weights: they become pairs of keys, and are multiplied one by one where V is odd."""

    join: Any
    add_carefully: Any


@cache
def weights(sizes):
    """Return `Weights` for tiles of rows."""
    lanes, tile_rows = sizes.lanes, sizes.tile_rows
    vector, load, load_flag = lanes * WORD, loader("float32", "float32", lanes), loader("int64", "int64")
    dot, joined_rounded = one_dot(sizes.products, lanes), joiner(sizes.products)

    @part
    def join(vectors, t, keys):
        """Round the weights of an even number of keys; the pairs lie where those of half as many keys lay."""
        across = vectors * vector
        for x in range(0, keys, 2):
            for v in range(0, across, vector):
                first = t + x * across + v
                store_word(t + x // 2 * across + v, joined_rounded(load(first), load(first + across)))

    @part
    def add_carefully(p, a, tile, keys, t, j0, bottom, low, high):
        """Add ``V.T @ P``, whose weights from `bottom` on lie at `t`, without the values that a row drops."""
        across = tile.vectors * vector
        for r in range(tile.vectors * lanes):
            for d in range(p.Ev if load_flag(tile.fresh) else 0):
                store_float(tile.sums + d * across + r * WORD, ZERO)
            for x in range(bottom, high, 2):
                first = low <= x and keeps(p, a, tile.rows, r, x)
                second = x + 1 < high and keeps(p, a, tile.rows, r, x + 1)
                kept = (FIRST if first else 0) | (SECOND if second else 0)
                weight = load_int32(t + (x - bottom) // 2 * across + r * WORD) & kept
                pair = keys.values + (x - j0) // 2 * keys.value_row
                for d in range(p.Ev):
                    number, to = d % tile_rows * keys.value_column, tile.sums + d * across + r * WORD
                    value = load_int32(pair + (d - d % tile_rows) * keys.value + number) & kept
                    store_float(to, dot(load_float(to), weight, value))

    return Weights(join, add_carefully)


class Reader(NamedTuple):
    """What packs keys that are stored: a panel of keys, or a block of keys and values."""

    pack_panel: Any
    pack_block: Any


@cache
def rows_finder(sizes):
    """Return ``find(h, j, count)``, for up to a panel of stored keys that are bfloat16 themselves."""
    lanes, read_rows = sizes.panel, reader("bfloat16", sizes).read_rows
    load, store = loader("float32", "float32", lanes), storer("bfloat16")

    @part
    def find(h, j, count):
        """Return where the rows of keys from j on lie, and the bytes between rows and numbers; over pages, a copy's."""
        page, slot = page_at(h, j)
        if h.direct and slot + count <= h.page:
            return h.first + page * h.leap + slot * h.down, h.down, h.across
        read_rows(h, j, count, h.room, h.width * WORD)
        done = count * h.width - count * h.width % lanes
        for x in range(0, done, lanes):  # in place, as the copy is never ahead
            store(h.room + x * BYTES, load(h.room + x * WORD))
        for x in range(done, count * h.width):
            store_number(h.room + x * BYTES, load_float(h.room + x * WORD))
        return h.room, h.width * BYTES, np.int64(BYTES)

    return find


@cache
def stored_reader(sizes):
    """Return `Reader` for keys and values in pages."""
    panel, block, tile_rows, store = sizes.panel, sizes.block, sizes.tile_rows, storer("int64")
    find, turn, pack_values = rows_finder(sizes), turner(sizes.panel, True), values_packer(sizes.tile_rows)

    @part
    def pack_panel(h, j, count, target):
        """Pack up to a panel of keys from j on: ``[E / 2][panel]``."""
        first, row, column = find(h, j, count)
        turn(first, row, column, count, h.width, target, panel * WORD)

    @part
    def pack_block(p, a, b, head, j0, target, room):
        """Pack the block of keys that begins at j0."""
        count, finite, words = min(block, p.S - j0), True, (p.E + 1) // 2
        key = place_head(room, p.stored, a.query, b, head)
        for x in range(0, count, panel):
            pack_panel(key, j0 + x, min(panel, count - x), target + x * words * WORD)
        if a.value:
            to, part_row = target + block * words * WORD, tile_rows * WORD
            value = place_head(room, p.stored + SOURCE_BYTES, a.query, b, head)
            for x in range(0, count, panel):
                n = min(panel, count - x)
                first, row, column = find(value, j0 + x, n)
                here = to + x // 2 * part_row
                finite &= pack_values(first, row, column, 0, n, p.Ev, here, part_row, block // 2 * part_row)
        store(target + p.block_bytes - 64, np.int64(finite))

    return Reader(pack_panel, pack_block)
