"""What codes mean: ``scale * (code - zero) + offset`` in the accumulation type, each operation rounded once."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import loader, splatter, storer
from sdpa_numba.vector.unrolled import byte_transposer, code_adder

from .heads import served

CODES = (
    "float16", "bfloat16", "float32", "float64", "int8", "uint8", "float8_e4m3fn", "float8_e5m2", "nibble",
)  # fmt: skip


@cache
def factor_loader(acc):
    """Return ``load_factor(code, at)``, whatever its type."""
    half, brain, single, double = (loader(name, acc) for name in CODES[:4])

    @part
    def load_factor(code, at):
        """Return the number that lies there."""
        if code == 0:
            return half(at)
        if code == 2:
            return single(at)
        return brain(at) if code == 1 else double(at)

    return load_factor


@cache
def factors_loader(acc):
    """Return ``load_factors(f, page, slot, count, e, target)``: what serves number e of consecutive keys."""
    size, load_factor, store = itemsize(acc), factor_loader(acc), storer(acc)
    half, single = loader("float16", acc), loader("float32", acc)

    @part
    def load_factors(f, page, slot, count, e, target):
        at, down = f.first + (page if f.pages == 1 else page // f.pages) * f.leap + e // f.run * f.across, f.down
        if f.keys == 1 and f.code == 0:
            at += slot * down
            for to in range(target, target + count * size, size):
                store(to, half(at))
                at += down
        elif f.keys == 1 and f.code == 2:
            at += slot * down
            for to in range(target, target + count * size, size):
                store(to, single(at))
                at += down
        else:
            for x in range(count):
                store(target + x * size, load_factor(f.code, at + (slot + x) // f.keys * down))

    return load_factors


@cache
def row_decoder(acc):
    """Return ``decode_rows(h, page, slot, count, target, row)``: any numbers, one at a time."""
    size, number, unrounded = itemsize(acc), np.dtype(acc).type, unrounded_in(acc)
    load_factor, load_double = factor_loader(acc), loader("float64", "float64")
    half, brain, single, double, signed, unsigned, e4m3, e5m2, _ = (
        loader(code.replace("nibble", "uint8"), "float64") for code in CODES
    )

    @part
    def number_at(h, first, e):
        """Return number e of a row, as it is stored, as a float64."""
        code, at = h.code, first + e * h.across
        if code == 8:
            byte = np.int64(unsigned(first + e // 2 * h.across))
            return np.float64(byte >> 4 if e % 2 else byte & 15)
        if code == 0:
            return half(at)
        if code == 1:
            return brain(at)
        if code == 2:
            return single(at)
        if code == 3:
            return double(at)
        if code == 4:
            return signed(at)
        if code == 5:
            return unsigned(at)
        return e4m3(at) if code == 6 else e5m2(at)

    @part
    def exact_factor(code, at):
        """Return a factor as a float64."""
        return load_double(at) if code == 3 else np.float64(load_factor(code, at))

    @part
    def decode_rows(h, page, slot, count, target, row):
        """Write what `count` keys of a page mean, from `slot` on, in the accumulation type and `row` bytes apart."""
        for x in range(slot, slot + count):
            first = h.first + page * h.leap + x * h.down
            scales, offsets = served(h.scale, page, x), served(h.offset, page, x)
            for e in range(h.width):
                code, to = number_at(h, first, e) - h.zero, target + e * size
                scale = scales + e // h.scale.run * h.scale.across
                offset = offsets + e // h.offset.run * h.offset.across
                if h.scale.code == unrounded or h.offset.code == unrounded:
                    exact = code * exact_factor(h.scale.code, scale) if scales else code
                    store_one(to, number(exact + exact_factor(h.offset.code, offset) if offsets else exact))
                else:
                    y = number(code)
                    if scales:
                        y *= load_factor(h.scale.code, scale)
                    if offsets:
                        y += load_factor(h.offset.code, offset)
                    store_one(to, y)
            target += row

    store_one = storer(acc)
    return decode_rows


def unrounded_in(acc):
    """Return the type of factors with more digits than `acc`, which are rounded with what they make; -1 for none."""
    return 3 if acc == "float32" else -1


@cache
def decoder(code, acc, lanes):
    """Return ``decode(h, page, slot, count, target, row)`` for close rows, whose vectors share factors."""
    size, number, nibble = itemsize(acc), np.dtype(acc).type, code == "nibble"
    load, step = loader(code, acc, lanes), 1 if nibble else itemsize(code)
    store, splat, load_factor = storer(acc), splatter(acc, lanes), factor_loader(acc)

    @part
    def decode(h, page, slot, count, target, row):
        """Write what `count` keys of a page mean, from `slot` on, in the accumulation type and `row` bytes apart."""
        # what the inner loop reads is held in registers: LLVM must assume that a store changes what lies in memory
        width, zero, zeros = h.width, splat(number(h.zero)), h.zero != 0
        scaled, shifted, scale_run, offset_run = h.scale.first != 0, h.offset.first != 0, h.scale.run, h.offset.run
        for x in range(slot, slot + count):
            first, e = h.first + page * h.leap + x * h.down, np.int64(0)
            scale, offset, next_scale, next_offset = served(h.scale, page, x), served(h.offset, page, x), width, width
            by, plus = splat(number(1)), splat(number(0))
            while e < width:
                if scaled and (e == 0 or e == next_scale):
                    by, next_scale = splat(load_factor(h.scale.code, scale)), min(width, e + scale_run)
                    scale += h.scale.across
                if shifted and (e == 0 or e == next_offset):
                    plus, next_offset = splat(load_factor(h.offset.code, offset)), min(width, e + offset_run)
                    offset += h.offset.across
                end = min(next_scale, next_offset)
                while e < end:
                    y = load(first + (e // 2 if nibble else e * step))
                    if zeros:
                        y = y - zero
                    if scaled:
                        y = y * by
                    if shifted:
                        y = y + plus
                    store(target + e * size, y)
                    e += lanes
            target += row

    return decode


@cache
def code_packer(code, acc, panel):
    """Return ``pack_codes(h, page, slot, count, target)`` for close rows, whose steps share factors."""
    size, number = itemsize(acc), np.dtype(acc).type
    numbers = 16 if code == "nibble" else 8  # that a step takes from each row
    transpose, load_factors, store = byte_transposer(code, acc, panel), factors_loader(acc), storer(acc)
    load_one = loader(acc, acc)

    @part
    def place_factors(f, page, slot, count, e, otherwise, target):
        """Write what serves number e of each key of a panel; keys that are missing repeat the last one."""
        if f.first == 0:
            for x in range(panel):
                store(target + x * size, otherwise)
            return
        load_factors(f, page, slot, count, e, target)
        for x in range(count, panel):
            store(target + x * size, load_one(target + (count - 1) * size))

    @part
    def pack_codes(h, page, slot, count, target):
        """Pack up to a panel of keys of a page."""
        scales, offsets = h.room, h.room + panel * size
        first, zero, down = h.first + page * h.leap + slot * h.down, number(h.zero), h.down
        next_scale, next_offset, scale_run, offset_run = np.int64(0), np.int64(0), h.scale.run, h.offset.run
        for e in range(0, h.width, numbers):
            if e >= next_scale:
                place_factors(h.scale, page, slot, count, e, number(1), scales)
                next_scale = e + scale_run if h.scale.first else h.width
            if e >= next_offset:
                place_factors(h.offset, page, slot, count, e, number(0), offsets)
                next_offset = e + offset_run if h.offset.first else h.width
            transpose(first, down, count - 1, zero, scales, offsets, target + e * panel * size, panel * size)
            first += 8

    return pack_codes


class CodeProduct(NamedTuple):
    """What adds the products of weights and values that are codes: whether it can, and how."""

    fits: Any
    add: Any


@cache
def code_product(acc, lanes, panels, block):
    """Return `CodeProduct`, for the codes of which most caches consist: int8, and four bits."""
    size, number, wide = itemsize(acc), np.dtype(acc).type, panels * lanes
    ones = {code: [code_adder(code, acc, rows, panels, lanes) for rows in (1, 2, 3)] for code in ("int8", "nibble")}
    (one_byte, two_bytes, three_bytes), (one_half, two_halves, three_halves) = ones.values()
    load_factors, unrounded = factors_loader(acc), unrounded_in(acc)

    @part
    def fits(h, n):
        """Return whether values can be added without being written down: rows close, and a scale for whole tiles."""
        good = n <= 3 and h.across == 1 and h.width % wide == 0 and h.offset.first == 0 and h.scale.first != 0
        good &= h.scale.code != unrounded and (h.scale.run % wide == 0 or h.scale.run >= h.width)
        return good and (h.code == 8 or (h.code == 4 and h.zero == 0))

    @part
    def add(h, page, slot, steps, n, t, sums, scales):
        """Add ``P @ V`` for `steps` keys of a page from `slot` on; `scales` is room for one a key."""
        first, zero = h.first + page * h.leap + slot * h.down, number(h.zero)
        for d in range(0, h.width, wide):
            if d % h.scale.run == 0:
                load_factors(h.scale, page, slot, steps, d, scales)
            c, row, across, down = sums + d * size, block * size, h.width * size, h.down
            if h.code == 4:
                b = first + d
                if n == 1:
                    one_byte(t, row, b, down, scales, zero, c, across, steps)
                elif n == 2:
                    two_bytes(t, row, b, down, scales, zero, c, across, steps)
                else:
                    three_bytes(t, row, b, down, scales, zero, c, across, steps)
            else:
                b = first + d // 2
                if n == 1:
                    one_half(t, row, b, down, scales, zero, c, across, steps)
                elif n == 2:
                    two_halves(t, row, b, down, scales, zero, c, across, steps)
                else:
                    three_halves(t, row, b, down, scales, zero, c, across, steps)

    return CodeProduct(fits, add)
