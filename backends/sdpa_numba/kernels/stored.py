"""Keys and values that are stored: pages and codes become rows of numbers, a few at a time, or are read in place.

From there on all is as for dense keys, so that stored keys have the bits of the dense array that they mean.
"""

from functools import cache
from typing import Any, NamedTuple

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize

from .codes import CODES, code_packer, decoder, row_decoder, unrounded_in
from .heads import page_at
from .pack import transposing, value_packer


class Reader(NamedTuple):
    """What reads stored keys: as rows of numbers, or packed as a panel."""

    read_rows: Any
    pack_panel: Any


@cache
def reader(dtype, sizes):
    """Return `Reader` for kernels of this type."""
    acc, panel, size = sizes.acc, sizes.panel, itemsize(sizes.acc)
    signed, unsigned, e4m3, e5m2, nibbles = (decoder(code, acc, panel) for code in CODES[4:])
    own, own_bytes = decoder(dtype, acc, panel), itemsize(dtype)
    decode_rows, unrounded = row_decoder(acc), unrounded_in(acc)
    pack_direct, _ = transposing(dtype, acc, acc, panel, ahead=True)
    pack_decoded, _ = transposing(acc, acc, acc, panel)
    packers = (code_packer(code, acc, panel) for code in CODES[4:])
    pack_signed, pack_unsigned, pack_e4m3, pack_e5m2, pack_nibbles = packers

    @part
    def suits(f, numbers, width):
        """Return whether so many numbers at a time share one factor, if any."""
        return f.first == 0 or (f.code != unrounded and (f.run % numbers == 0 or f.run >= width))

    @part
    def by(h, numbers):
        """Return whether rows are codes side by side that can be taken so many numbers at a time."""
        close = h.code >= 4 and h.across == 1 and h.width % numbers == 0
        return close and suits(h.scale, numbers, h.width) and suits(h.offset, numbers, h.width)

    @part
    def pack_codes(h, page, slot, count, target):
        """Pack up to a panel of keys of a page, whatever the type of the codes."""
        code = h.code
        if code == 4:
            pack_signed(h, page, slot, count, target)
        elif code == 5:
            pack_unsigned(h, page, slot, count, target)
        elif code == 8:
            pack_nibbles(h, page, slot, count, target)
        elif code == 6:
            pack_e4m3(h, page, slot, count, target)
        else:
            pack_e5m2(h, page, slot, count, target)

    @part
    def decode(h, page, slot, count, target, row):
        """Write what keys of a page mean, whatever their type."""
        code = h.code
        if h.direct and h.across == own_bytes and h.width % panel == 0:
            own(h, page, slot, count, target, row)
        elif not by(h, panel):
            decode_rows(h, page, slot, count, target, row)
        elif code == 4:
            signed(h, page, slot, count, target, row)
        elif code == 5:
            unsigned(h, page, slot, count, target, row)
        elif code == 8:
            nibbles(h, page, slot, count, target, row)
        elif code == 6:
            e4m3(h, page, slot, count, target, row)
        else:
            e5m2(h, page, slot, count, target, row)

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
        page, slot = page_at(h, j)
        if slot + count <= h.page:
            if h.direct:
                first = h.first + page * h.leap + slot * h.down
                pack_direct(first, h.down, h.across, count, width, target, panel * size)
                return
            if by(h, 16 if h.code == 8 else 8):
                pack_codes(h, page, slot, count, target)
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
