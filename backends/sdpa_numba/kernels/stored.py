"""Keys and values that are stored: pages and codes become rows of numbers, a few at a time, or are read in place.

A row is ``scale * (code - zero) + offset`` in the accumulation type, each operation rounded once. From there on all is
as for dense keys, so that stored keys have the bits of the dense array that they mean.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import load_int32, load_int64, loader, nibble_loader, splatter, storer

from .pack import transposing, value_packer
from .record import Source
from .views import HEADER, data, size, stride

CODES = (
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "nibble",
)  # fmt: skip
NIBBLE = CODES.index("nibble")


class Place(NamedTuple):
    """Where the keys of one head begin, in a page or at key 0: numbers, scale and offset."""

    numbers: int
    scale: int
    offset: int


@part
def serving(array, numbers, axis, i):
    """Return the bytes to what serves index i of an axis of `numbers`, in an array that serves it in runs."""
    if size(array, 0) < axis or size(array, axis) == 1:
        return 0
    n = size(numbers, axis) if size(numbers, 0) >= axis else 1
    return i // max(1, n // size(array, axis)) * stride(array, axis)


@part
def run_of(array, n, axis):
    """Return how many of n consecutive indices of an axis one number serves."""
    if size(array, 0) < axis:
        return n
    return max(np.int64(1), n // max(np.int64(1), size(array, axis)))


@part
def entry_in(array, numbers, query, b):
    """Return the bytes to batch entry b in `numbers`, or in an array that serves it in runs."""
    address, shape = 0, load_int64(query + HEADER + 16)
    inner = 3
    for axis in range(load_int32(query + HEADER + 8) - 4, -1, -1):
        n = load_int64(shape + 8 * axis)
        inner += 1
        if size(numbers, 0) >= inner and size(numbers, inner) > 1:
            address += serving(array, numbers, inner, b % n)
        b //= n
    return address


@part
def page_of(s, query, b, m):
    """Return the page that entry m of the table names; one that does not exist is not needed, and any will do."""
    at, step, rest, inner = data(s.table), stride(s.table, 1), b, 1
    shape = load_int64(query + HEADER + 16)
    for axis in range(load_int32(query + HEADER + 8) - 4, -1, -1):
        n = load_int64(shape + 8 * axis)
        inner += 1
        at += rest % n * stride(s.table, inner)
        rest //= n
    page = load_int64(at + m * step) if s.table_item == 8 else np.int64(load_int32(at + m * step))
    return page if 0 <= page < s.pages else np.int64(0)


@part
def place_of(s, query, b, head, m):
    """Return the `Place` of the keys of page m of a head, or of all keys where there are no pages."""
    page, axis = (page_of(s, query, b, m), 4) if s.table else (np.int64(0), 3)
    numbers = data(s.numbers) + serving(s.numbers, s.numbers, 3, head)
    scale, offset = np.int64(0), np.int64(0)
    if s.scale:
        scale = data(s.scale) + serving(s.scale, s.numbers, 3, head)
    if s.offset:
        offset = data(s.offset) + serving(s.offset, s.numbers, 3, head)
    if axis == 4:
        numbers += page * stride(s.numbers, 4)
        if s.scale:
            scale += serving(s.scale, s.numbers, 4, page)
        if s.offset:
            offset += serving(s.offset, s.numbers, 4, page)
        return Place(numbers, scale, offset)
    numbers += entry_in(s.numbers, s.numbers, query, b)
    if s.scale:
        scale += entry_in(s.scale, s.numbers, query, b)
    if s.offset:
        offset += entry_in(s.offset, s.numbers, query, b)
    return Place(numbers, scale, offset)


class Head(NamedTuple):
    """Stored keys or values of a head of a batch entry, and room for a panel of them as rows."""

    source: Source
    b: int
    head: int
    rows: int


class Numbers(NamedTuple):
    """A row of codes: the first and the bytes between two; how many, and the code that means 0."""

    first: int
    step: int
    count: int
    zero: int


class Factor(NamedTuple):
    """The numbers of a scale or an offset along a row: the first, the bytes between two, and what each serves."""

    first: int
    step: int
    run: int
    code: int


@cache
def decoder(code, acc, lanes):
    """Return ``decode(numbers, scale, offset, target)`` for a row of numbers stored as `code`."""
    size, number, nibble = itemsize(acc), np.dtype(acc).type, code == "nibble"
    bytes_of = 1 if nibble else itemsize(code)
    load_byte = loader("uint8", "float64")
    load = nibble_loader(acc, lanes) if nibble else loader(code, acc, lanes)
    load_exact = loader("uint8" if nibble else code, "float64")
    store, splat = storer(acc), splatter(acc, lanes)
    halves, brains, singles, doubles = (loader(name, acc) for name in CODES[:4])
    load_double = loader("float64", "float64")
    unrounded = 3 if acc == "float32" else -1  # factors of more digits, which are rounded with what they make

    @part
    def factor_at(f, e):
        """Return what serves number e of a row."""
        at = f.first + e // f.run * f.step
        if f.code == 0:
            return halves(at)
        if f.code == 1:
            return brains(at)
        if f.code == 2:
            return singles(at)
        return doubles(at)

    @part
    def exact_at(f, e):
        """Return the same as a float64."""
        return load_double(f.first + e // f.run * f.step) if f.code == 3 else np.float64(factor_at(f, e))

    @part
    def one(numbers, e):
        """Return the code of number e of a row as a float64."""
        if nibble:
            byte = np.int64(load_byte(numbers.first + e // 2 * numbers.step))
            return np.float64(byte >> 4 if e % 2 else byte & 15)
        return load_exact(numbers.first + e * numbers.step)

    @part
    def smooth(f, width):
        """Return whether whole vectors of a row share one factor, if any."""
        return f.first == 0 or (f.code != unrounded and (f.run % lanes == 0 or f.run >= width))

    @part
    def decode(numbers, scale, offset, target):
        """Write the numbers that a row of codes means, in the accumulation type."""
        width, e, whole = numbers.count, np.int64(0), np.int64(0)
        if numbers.step == bytes_of and smooth(scale, width) and smooth(offset, width):
            whole = width - width % lanes
        while e < whole:
            end, factor, shift = whole, splat(number(1)), splat(number(0))
            if scale.first:
                factor, end = splat(factor_at(scale, e)), min(end, (e // scale.run + 1) * scale.run)
            if offset.first:
                shift, end = splat(factor_at(offset, e)), min(end, (e // offset.run + 1) * offset.run)
            zero = splat(number(numbers.zero))
            while e < end:
                x = load(numbers.first + (e // 2 if nibble else e * bytes_of))
                if numbers.zero:
                    x -= zero
                if scale.first:
                    x *= factor
                if offset.first:
                    x += shift
                store(target + e * size, x)
                e += lanes
        while e < width:
            code = one(numbers, e) - numbers.zero
            if scale.code == unrounded or offset.code == unrounded:
                x = code * exact_at(scale, e) if scale.first else code
                store(target + e * size, number(x + exact_at(offset, e) if offset.first else x))
            else:
                y = number(code)
                if scale.first:
                    y *= factor_at(scale, e)
                if offset.first:
                    y += factor_at(offset, e)
                store(target + e * size, y)
            e += 1

    return decode


class Reader(NamedTuple):
    """What reads stored keys: as rows of numbers, or packed as a panel."""

    read_rows: Any
    pack_panel: Any


@cache
def reader(dtype, sizes):
    """Return `Reader` for kernels of this type."""
    acc, panel, size = sizes.acc, sizes.panel, itemsize(sizes.acc)
    decoders = tuple(decoder(code, acc, panel) for code in CODES)
    half, brain, single, double, signed, unsigned, e4m3, e5m2, nibbles = decoders
    pack_direct, _ = transposing(dtype, acc, acc, panel, ahead=True)
    pack_decoded, _ = transposing(acc, acc, acc, panel)

    @part
    def decode(s, numbers, scale, offset, target):
        """Decode a row, whatever its type."""
        if s.code == 4:
            signed(numbers, scale, offset, target)
        elif s.code == 5:
            unsigned(numbers, scale, offset, target)
        elif s.code == 8:
            nibbles(numbers, scale, offset, target)
        elif s.code == 6:
            e4m3(numbers, scale, offset, target)
        elif s.code == 7:
            e5m2(numbers, scale, offset, target)
        elif s.code == 0:
            half(numbers, scale, offset, target)
        elif s.code == 1:
            brain(numbers, scale, offset, target)
        elif s.code == 2:
            single(numbers, scale, offset, target)
        else:
            double(numbers, scale, offset, target)

    @part
    def read_rows(s, query, b, head, j, count, target, row):
        """Write the numbers of `count` keys from j on, `row` bytes apart."""
        done = np.int64(0)
        while done < count:
            m, slot = (j + done) // s.page, (j + done) % s.page
            place = place_of(s, query, b, head, m)
            n = min(count - done, s.page - slot)
            down, across = stride(s.numbers, 2), stride(s.numbers, 1)
            keys_of_scale = run_of(s.scale, s.page, 2) if s.scale else 1
            keys_of_offset = run_of(s.offset, s.page, 2) if s.offset else 1
            run = run_of(s.scale, s.width, 1) if s.scale else 1
            run_offset = run_of(s.offset, s.width, 1) if s.offset else 1
            for x in range(slot, slot + n):
                scale, offset = np.int64(0), np.int64(0)
                step, offset_step = np.int64(0), np.int64(0)
                if s.scale:
                    scale = place.scale + x // keys_of_scale * stride(s.scale, 2)
                    step = stride(s.scale, 1)
                if s.offset:
                    offset = place.offset + x // keys_of_offset * stride(s.offset, 2)
                    offset_step = stride(s.offset, 1)
                decode(
                    s, Numbers(place.numbers + x * down, across, s.width, s.zero),
                    Factor(scale, step, run, s.scale_code), Factor(offset, offset_step, run_offset, s.offset_code),
                    target + (done + x - slot) * row,
                )  # fmt: skip
            done += n

    @part
    def pack_panel(s, query, b, head, j, count, rows, target):
        """Pack up to a panel of keys from j on: ``[E][panel]``; `rows` is room for them as rows."""
        if s.direct:
            m, slot = j // s.page, j % s.page
            place = place_of(s, query, b, head, m)
            if slot + count <= s.page:
                down, across = stride(s.numbers, 2), stride(s.numbers, 1)
                pack_direct(place.numbers + slot * down, down, across, count, s.width, target, panel * size)
                return
        read_rows(s, query, b, head, j, count, rows, s.width * size)
        pack_decoded(rows, s.width * size, size, count, s.width, target, panel * size)

    return Reader(read_rows, pack_panel)


@cache
def rows_packer(dtype, sizes, lanes):
    """Return what packs stored values in parts of `lanes` columns, as `value_packer` does; `rows` is room for some."""
    acc, panel, size = sizes.acc, sizes.panel, itemsize(sizes.acc)
    pack_in_place, pack_decoded = value_packer(dtype, acc, lanes), value_packer(acc, acc, lanes)
    read_rows = reader(dtype, sizes).read_rows

    @part
    def pack_rows(s, query, b, head, j, count, rows, target, target_row, target_part):
        finite, done = True, np.int64(0)
        while done < count:
            m, slot = (j + done) // s.page, (j + done) % s.page
            to, n = target + done * target_row, min(count - done, s.page - slot)
            if s.direct:
                down, across = stride(s.numbers, 2), stride(s.numbers, 1)
                first = place_of(s, query, b, head, m).numbers + slot * down
                finite &= pack_in_place(first, down, across, n, s.width, to, target_row, target_part)
            else:
                n = min(n, panel)
                read_rows(s, query, b, head, j + done, n, rows, s.width * size)
                finite &= pack_decoded(rows, s.width * size, size, n, s.width, to, target_row, target_part)
            done += n
        return finite

    return pack_rows
