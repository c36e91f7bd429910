"""The products of the kernel for few rows, in whose order memory is read, and the scores that they make."""

from functools import cache

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.rows import row_dotter, row_step
from sdpa_numba.vector.tiler import CHAIN, tiler

from . import pairs
from .heads import page_at
from .pack import transposing
from .stored import reader
from .views import stride

PANELS = 4  # of keys at a time
WIDE = 8  # vectors that one row takes at a time in the product with V: four would wait for one another
COLUMN = 32  # bytes of a column of long keys, at least, that are turned at a time for one row
SHORT = 256  # bytes of keys that are not long: of them two panels stay in the first cache, with the next ones
AHEAD = 8192  # bytes from what is read to what is prefetched
ROWS = 3  # of queries at a time: with four vectors each they fill the multipliers, and fit in 16 registers


@cache
def multiplier(acc, lanes, accumulate, source, products=""):
    """Return ``multiply(rows, vectors, ...)``: a product of at most `ROWS` rows, with one vector or `PANELS`.

    One row may also take `WIDE` where it adds up.
    """
    (one_wide, two_wide, three_wide), (one_narrow, two_narrow, three_narrow) = (
        [tiler(acc, rows, vectors, lanes, accumulate, source, products) for rows in (1, 2, 3)]
        for vectors in (PANELS, 1)
    )
    widest = tiler(acc, 1, WIDE, lanes, accumulate, source, products) if accumulate else None

    @part
    def multiply(rows, vectors, a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor):
        if widest is not None and vectors == WIDE:
            widest(a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor)
        elif vectors == PANELS:
            if rows == 3:
                three_wide(a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor)
            elif rows == 2:
                two_wide(a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor)
            else:
                one_wide(a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor)
        elif rows == 3:
            three_narrow(a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor)
        elif rows == 2:
            two_narrow(a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor)
        else:
            one_narrow(a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor)

    return multiply


@part
def at_once(rows):
    """Return how many of so many rows a product has best: four are two and two."""
    return 2 if rows == 4 else min(ROWS, rows)


@part
def soon(address, row, width):
    """Return what to prefetch while rows of `width` bytes are read from `address` on, 0 for nothing.

    Memory is read at its full rate in its own order, each line once, and few rows at a time: as many as leave the first
    cache room for the next ones. Rows that do not follow one another are left to the processor.
    """
    return address + AHEAD if row == width else 0


@part
def soon_in_pages(h, j, end, width):
    """Return what to prefetch while stored rows of `width` bytes are read from row j on: those of a later page, too."""
    later = j + AHEAD // width
    if later >= end or h.down != width:
        return 0
    page, slot = page_at(h, later)
    return h.first + page * h.leap + slot * h.down


@cache
def row_scorer(dtype, sizes):
    """Return ``(at_a_time, score_rows)``: how many keys are taken, and what makes their scores from where they lie."""
    acc, size, source_size, columns = sizes.acc, itemsize(sizes.acc), itemsize(dtype), row_step(dtype, sizes.panel)
    lanes, one, across = sizes.panel, np.dtype(sizes.acc).type(1), sizes.block * itemsize(sizes.acc)
    wide = PANELS if source_size == 2 else 2
    narrow = wide if source_size == 2 else max(1, COLUMN // (lanes * source_size))
    one_row, one_narrow = row_dotter(dtype, acc, 1, lanes, wide), row_dotter(dtype, acc, 1, lanes, narrow)
    four_rows = row_dotter(dtype, acc, 4, lanes, 2)

    @part
    def at_a_time(n, column, width):
        """Return how many keys ``score_rows`` takes at a time, 0 where it takes none."""
        if (n != 1 and n != 4) or column != source_size or width % columns != 0 or width == 0:
            return 0
        return lanes * (2 if n > 1 else wide if width * source_size <= SHORT else narrow)

    @part
    def score_rows(n, queries, key, row, keys, width, t, scale, ahead):
        """Set the scores to chains, and add up those of a width beyond one chain, as `tiler` does."""
        q_row, along, ahead = width * size, keys * columns * source_size if ahead else 0, ahead or key
        for e in range(0, width, CHAIN):
            now = min(CHAIN, width - e)
            q, first, last, steps = queries + e * size, key + e * source_size, e + now == width, now // columns
            factor = scale if last else one
            if n == 4:
                four_rows(q, q_row, first, row, steps, t, across, factor, e > 0, ahead, along)
            elif keys == wide * lanes:
                one_row(q, q_row, first, row, steps, t, across, factor, e > 0, ahead, along)
            else:
                one_narrow(q, q_row, first, row, steps, t, across, factor, e > 0, ahead, along)
            ahead += steps * along

    return at_a_time, score_rows


@cache
def scorer(dtype, sizes, stored):
    """Return ``score``, which makes the scores of a block. Of `stored` keys, `key` is where a `Head` is read."""
    acc, lanes, block, number, size = sizes.acc, sizes.panel, sizes.block, np.dtype(sizes.acc).type, itemsize(sizes.acc)
    vector, half = lanes * size, sizes.half
    pack_keys = pairs.turner(lanes, True) if half else transposing(dtype, acc, acc, lanes, ahead=True)[0]
    pack_panel = pack_keys  # of which a kernel for dense keys uses none
    if stored:
        pack_panel = pairs.stored_reader(sizes).pack_panel if half else reader(dtype, sizes).pack_panel
    multiply, (at_a_time, score_rows) = multiplier(acc, lanes, False, acc, sizes.products), row_scorer(dtype, sizes)
    source_size, in_place = itemsize(dtype), not half

    @part
    def score(p, a, n, queries, key, keys, t, j0, low, high):
        """Fill the rows of `t` with the scores of the keys of ``[low, high)``, counted from the block's first.

        `low` is a multiple of the lanes. What lies in a panel that is not packed is never touched: numbers without a
        leading one would cost a hundred cycles each.
        """
        row, column, panel, x, steps = stride(a.key, 2), stride(a.key, 1), p.E * vector, low, (p.E + half) >> half
        taken = 0
        if in_place and stored:
            taken = at_a_time(n, key.across, p.E) if key.direct else 0
        elif in_place:
            taken = at_a_time(n, column, p.E)
        while x < high:
            if in_place and taken and x + taken <= high:
                j = j0 + x
                if stored:
                    page, slot = page_at(key, j)
                    first, down = key.first + page * key.leap + slot * key.down, key.down
                    whole = slot + taken <= key.page
                    ahead = soon_in_pages(key, j, p.S, p.E * source_size)
                else:
                    first, down, whole = key + j * row, row, True
                    ahead = soon(first, row, p.E * source_size)
                if whole:
                    score_rows(n, queries, first, down, taken, p.E, t + x * size, number(p.scale), ahead)
                    x += taken
                    continue
            panels = PANELS if x + PANELS * lanes <= high else 1
            for y in range(0, panels):
                first, count = j0 + x + y * lanes, min(lanes, p.S - j0 - x - y * lanes)
                if stored:
                    pack_panel(key, first, count, keys + y * panel)
                else:
                    pack_keys(key + first * row, row, column, count, p.E, keys + y * panel, vector)
            r, scale = 0, number(p.scale)
            while r < n:
                rows, q, c = at_once(n - r), queries + r * p.E * size, t + (r * block + x) * size
                multiply(rows, panels, q, p.E * size, size, keys, panel, vector, c, block * size, steps, scale)
                r += rows
            x += panels * lanes

    return score
