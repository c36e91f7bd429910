"""Keys and values that are stored: pages and codes become rows of numbers, a few at a time, or are read in place.

A row is ``scale * (code - zero) + offset`` in the accumulation type, each operation rounded once. From there on all is
as for dense keys, so that stored keys have the bits of the dense array that they mean.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import load_int32, load_int64, loader, nibble_loader, record_reader, splatter, storer

from .pack import transposing, value_packer
from .record import read_source
from .views import HEADER, data, size, stride

CODES = (
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "nibble",
)  # fmt: skip


FACTOR = np.dtype([(name, np.int64) for name in ("first", "code", "across", "down", "leap", "run", "keys", "pages")])
"""A scale or an offset of a head: where it begins, 0 for none, its type, and the bytes between its numbers, keys and
pages; one of its numbers serves `run` numbers of `keys` keys of `pages` pages."""

HEAD = np.dtype(
    [(name, np.int64) for name in (
        "first", "across", "down", "leap",  # where the numbers begin, and the bytes between two, two keys and two pages
        "width", "direct", "code", "zero", "pages", "page", "table_item",  # as in `Source`
        "table", "table_step",  # the head's row of the table, and the bytes between two entries
        "room",  # for a panel of keys as rows
    )]
    + [("scale", FACTOR), ("offset", FACTOR)]
)  # fmt: skip
"""Stored keys or values of one head of a batch entry. It lies in memory, as so many arguments cost as much as keys."""

HEAD_BYTES = HEAD.itemsize
SCALE, OFFSET = (HEAD.fields[name][1] for name in ("scale", "offset"))  # type: ignore[index]
read_head, read_factor = record_reader(HEAD), record_reader(FACTOR)


@part
def within(array, numbers, paged, query, b, head):
    """Return the bytes to a head of batch entry b in `numbers`, or in an array that serves it in runs."""
    at, heads = np.int64(0), size(numbers, 3)
    if size(array, 0) > 2 and size(array, 3) > 1:
        at = head // (heads // size(array, 3)) * stride(array, 3)
    if paged:
        return at
    inner, shape = 3, load_int64(query + HEADER + 16)
    for axis in range(load_int32(query + HEADER + 8) - 4, -1, -1):
        n = load_int64(shape + 8 * axis)
        inner += 1
        if size(array, 0) >= inner and size(array, inner) > 1:  # and so has `numbers`
            at += b % n // (size(numbers, inner) // size(array, inner)) * stride(array, inner)
        b //= n
    return at


@part
def place_factor(f, array, code, run, keys, pages, s, query, b, head):
    """Fill in the scale or the offset of a head."""
    f.first, f.code, f.run, f.keys, f.pages = np.int64(0), code, run, keys, pages
    f.across, f.down, f.leap = np.int64(0), np.int64(0), np.int64(0)
    if array:
        f.first = data(array) + within(array, s.numbers, s.table != 0, query, b, head)
        f.across, f.down = stride(array, 1), stride(array, 2)
        f.leap = stride(array, 4) if s.table else np.int64(0)


@part
def place_head(at, source, query, b, head):
    """Fill in, and return, the head that lies at `at`, with room behind it, of the `Source` at `source`."""
    s, h = read_source(source), read_head(at)
    h.first = data(s.numbers) + within(s.numbers, s.numbers, s.table != 0, query, b, head)
    h.across, h.down, h.leap = stride(s.numbers, 1), stride(s.numbers, 2), np.int64(0)
    h.width, h.direct, h.code, h.zero, h.pages, h.page = s.width, s.direct, s.code, s.zero, s.pages, s.page
    h.table, h.table_step, h.table_item, h.room = np.int64(0), np.int64(0), s.table_item, at + HEAD_BYTES
    if s.table:
        h.leap, h.table, h.table_step = stride(s.numbers, 4), row_of(s.table, query, b), stride(s.table, 1)
    place_factor(
        read_factor(at + SCALE), s.scale, s.scale_code, s.scale_run, s.scale_keys, s.scale_pages, s, query, b, head
    )
    place_factor(
        read_factor(at + OFFSET), s.offset, s.offset_code, s.offset_run, s.offset_keys, s.offset_pages, s, query, b,
        head,
    )  # fmt: skip
    return h


@part
def row_of(table, query, b):
    """Return where the row of batch entry b begins in a table."""
    at, inner, shape = data(table), 1, load_int64(query + HEADER + 16)
    for axis in range(load_int32(query + HEADER + 8) - 4, -1, -1):
        n = load_int64(shape + 8 * axis)
        inner += 1
        at += b % n * stride(table, inner)
        b //= n
    return at


@part
def page_at(h, j):
    """Return the page and the slot of key j; of a page that does not exist no key is needed, and any page will do."""
    if h.table == 0:
        return np.int64(0), j
    m = j // h.page
    at = h.table + m * h.table_step
    page = load_int64(at) if h.table_item == 8 else np.int64(load_int32(at))
    return (page if 0 <= page < h.pages else np.int64(0)), j - m * h.page


@part
def served(f, page, slot):
    """Return where what serves a key begins."""
    if f.first == 0:
        return np.int64(0)
    key = slot if f.keys == 1 else slot // f.keys
    return f.first + (page if f.pages == 1 else page // f.pages) * f.leap + key * f.down


@cache
def decoder(code, acc, lanes):
    """Return ``decode(h, page, slot, count, target, row)`` for numbers stored as `code`."""
    size, number, nibble = itemsize(acc), np.dtype(acc).type, code == "nibble"
    bytes_of = 1 if nibble else itemsize(code)
    load = nibble_loader(acc, lanes) if nibble else loader(code, acc, lanes)
    load_byte, load_exact = loader("uint8", "float64"), loader("uint8" if nibble else code, "float64")
    store, splat = storer(acc), splatter(acc, lanes)
    half, brain, single, double = (loader(name, acc) for name in CODES[:4])
    load_double = loader("float64", "float64")
    unrounded = 3 if acc == "float32" else -1  # factors of more digits, which are rounded with what they make

    @part
    def load_factor(code, at):
        """Return the number that lies there."""
        if code == 0:
            return half(at)
        if code == 2:
            return single(at)
        return brain(at) if code == 1 else double(at)

    @part
    def exact_factor(code, at):
        """Return the same as a float64."""
        return load_double(at) if code == 3 else np.float64(load_factor(code, at))

    @part
    def one(first, across, e):
        """Return the code of number e of a row as a float64."""
        if nibble:
            byte = np.int64(load_byte(first + e // 2 * across))
            return np.float64(byte >> 4 if e % 2 else byte & 15)
        return load_exact(first + e * across)

    @part
    def smooth(f, width):
        """Return whether whole vectors of a row share one factor, if any."""
        return f.first == 0 or (f.code != unrounded and (f.run % lanes == 0 or f.run >= width))

    @part
    def decode_one(h, first, scale, offset, e, to):
        """Write number e of a row."""
        code = one(first, h.across, e) - h.zero
        scale += e // h.scale.run * h.scale.across
        offset += e // h.offset.run * h.offset.across
        if h.scale.code == unrounded or h.offset.code == unrounded:
            exact = code * exact_factor(h.scale.code, scale) if h.scale.first else code
            store(to, number(exact + exact_factor(h.offset.code, offset) if h.offset.first else exact))
        else:
            y = number(code)
            if h.scale.first:
                y *= load_factor(h.scale.code, scale)
            if h.offset.first:
                y += load_factor(h.offset.code, offset)
            store(to, y)

    @part
    def decode(h, page, slot, count, target, row):
        """Write what `count` keys of a page mean, from `slot` on, in the accumulation type and `row` bytes apart."""
        # what the inner loop asks is held in registers: for all that is known, a store may change what lies in memory
        width, zero, zeros, whole = h.width, splat(number(h.zero)), h.zero != 0, np.int64(0)
        scaled, shifted, scale_run, offset_run = h.scale.first != 0, h.offset.first != 0, h.scale.run, h.offset.run
        if h.across == bytes_of and smooth(h.scale, width) and smooth(h.offset, width):
            whole = width - width % lanes
        for x in range(slot, slot + count):
            first = h.first + page * h.leap + x * h.down
            scale, offset, e = served(h.scale, page, x), served(h.offset, page, x), np.int64(0)
            next_scale, next_offset, scale_now, offset_now = whole, whole, scale, offset
            by, plus = splat(number(1)), splat(number(0))
            while e < whole:
                if scaled and (e == 0 or e == next_scale):
                    by, next_scale = splat(load_factor(h.scale.code, scale_now)), min(whole, e + scale_run)
                    scale_now += h.scale.across
                if shifted and (e == 0 or e == next_offset):
                    plus, next_offset = splat(load_factor(h.offset.code, offset_now)), min(whole, e + offset_run)
                    offset_now += h.offset.across
                end = min(next_scale, next_offset)
                while e < end:
                    y = load(first + (e // 2 if nibble else e * bytes_of))
                    if zeros:
                        y = y - zero
                    if scaled:
                        y = y * by
                    if shifted:
                        y = y + plus
                    store(target + e * size, y)
                    e += lanes
            while e < width:
                decode_one(h, first, scale, offset, e, target + e * size)
                e += 1
            target += row

    return decode


class Reader(NamedTuple):
    """What reads stored keys: as rows of numbers, or packed as a panel."""

    read_rows: Any
    pack_panel: Any


@cache
def reader(dtype, sizes):
    """Return `Reader` for kernels of this type."""
    acc, panel, size = sizes.acc, sizes.panel, itemsize(sizes.acc)
    half, brain, single, double, signed, unsigned, e4m3, e5m2, nibbles = (decoder(code, acc, panel) for code in CODES)
    pack_direct, _ = transposing(dtype, acc, acc, panel, ahead=True)
    pack_decoded, _ = transposing(acc, acc, acc, panel)

    @part
    def decode(h, page, slot, count, target, row):
        """Write what keys of a page mean, whatever their type."""
        code = h.code
        if code == 4:
            signed(h, page, slot, count, target, row)
        elif code == 5:
            unsigned(h, page, slot, count, target, row)
        elif code == 8:
            nibbles(h, page, slot, count, target, row)
        elif code == 6:
            e4m3(h, page, slot, count, target, row)
        elif code == 7:
            e5m2(h, page, slot, count, target, row)
        elif code == 0:
            half(h, page, slot, count, target, row)
        elif code == 1:
            brain(h, page, slot, count, target, row)
        elif code == 2:
            single(h, page, slot, count, target, row)
        else:
            double(h, page, slot, count, target, row)

    @part
    def read_rows(h, j, count, target, row):
        """Write the numbers of `count` keys from j on, `row` bytes apart."""
        while count > 0:
            page, slot = page_at(h, j)
            n = min(count, h.page - slot)
            decode(h, page, slot, n, target, row)
            j += n
            count -= n
            target += n * row

    @part
    def pack_panel(h, j, count, target):
        """Pack up to a panel of keys from j on: ``[E][panel]``."""
        width = h.width
        if h.direct:
            page, slot = page_at(h, j)
            if slot + count <= h.page:
                first = h.first + page * h.leap + slot * h.down
                pack_direct(first, h.down, h.across, count, width, target, panel * size)
                return
        read_rows(h, j, count, h.room, width * size)
        pack_decoded(h.room, width * size, size, count, width, target, panel * size)

    return Reader(read_rows, pack_panel)


@cache
def rows_packer(dtype, sizes, lanes):
    """Return what packs stored values in parts of `lanes` columns, as `value_packer` does."""
    acc, panel, size = sizes.acc, sizes.panel, itemsize(sizes.acc)
    pack_in_place, pack_decoded = value_packer(dtype, acc, lanes), value_packer(acc, acc, lanes)
    read_rows = reader(dtype, sizes).read_rows

    @part
    def pack_rows(h, j, count, target, target_row, target_part):
        finite, width = True, h.width
        while count > 0:
            page, slot = page_at(h, j)
            n = min(count, h.page - slot)
            if h.direct:
                first = h.first + page * h.leap + slot * h.down
                down, across = h.down, h.across
                finite &= pack_in_place(first, down, across, n, width, target, target_row, target_part)
            else:
                n = min(n, panel)
                read_rows(h, j, n, h.room, width * size)
                finite &= pack_decoded(h.room, width * size, size, n, width, target, target_row, target_part)
            j += n
            count -= n
            target += n * target_row
        return finite

    return pack_rows
