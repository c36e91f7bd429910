"""The steps of the kernel for few rows up to the weights of a block of keys: scores, options and softmax."""

from functools import cache

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import any_lane, lane, loader, ramp, select, splatter, storer, sum_fours
from sdpa_numba.vector.tiler import CHAIN, tiler
from sdpa_numba.vector.unrolled import row_dotter, row_step

from . import pairs
from .elementary import elementary
from .pack import transposing
from .rows import at, keeps, look
from .stored import reader
from .views import batch, stride

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
    """Return what to prefetch while rows of `width` bytes are read from `address` on, and 1; 0 where there is none.

    Memory is read at its full rate in its own order, each line once, and few rows at a time: as many as leave the first
    cache room for the next ones. Rows that do not follow one another are left to the processor.
    """
    return (address + AHEAD, 1) if row == width else (address, 0)


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
    def score_rows(n, queries, key, row, keys, width, t, scale):
        """Set the scores to chains, and add up those of a width beyond one chain, as `tiler` does."""
        ahead, along = soon(key, row, width * source_size)
        q_row, along = width * size, along * keys * columns * source_size
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
    direct = not stored and not half

    @part
    def score(p, a, n, queries, key, keys, t, j0, low, high):
        """Fill the rows of `t` with the scores of the keys of ``[low, high)``, counted from the block's first.

        `low` is a multiple of the lanes. What lies in a panel that is not packed is never touched: numbers without a
        leading one would cost a hundred cycles each.
        """
        row, column, panel, x, steps = stride(a.key, 2), stride(a.key, 1), p.E * vector, low, (p.E + half) >> half
        if direct:
            taken = at_a_time(n, column, p.E)
            while taken and x + taken <= high:
                score_rows(n, queries, key + (j0 + x) * row, row, taken, p.E, t + x * size, number(p.scale))
                x += taken
        while x < high:
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


@cache
def bias_adder(source, sizes):
    """Return ``add_bias`` for a bias that is stored as `source`."""
    acc, lanes, size, source_size = sizes.acc, sizes.panel, itemsize(sizes.acc), itemsize(source)
    nothing = np.dtype(acc).type(-np.inf)
    load, store, splat = loader(acc, acc, lanes), storer(acc), splatter(acc, lanes)
    load_one, load_bias, load_biases = loader(acc, acc), loader(source, acc), loader(source, acc, lanes)

    @part
    def add_bias(bias, step, t, count, drops):
        """Add the bias of `count` keys to a row, and return whether none is dropped, as -inf does if it `drops`."""
        kept, x = True, 0
        while step == source_size and x + lanes <= count:
            y = load_biases(bias + x * step)
            gone = y == splat(nothing)
            score = load(t + x * size) + y
            if drops and any_lane(gone):
                score, kept = select(gone, splat(nothing), score), False
            store(t + x * size, score)
            x += lanes
        while x < count:
            y = load_bias(bias + x * step)
            if drops and y == nothing:
                store(t + x * size, nothing)
                kept = False
            else:
                store(t + x * size, load_one(t + x * size) + y)
            x += 1
        return kept

    return add_bias


def adjuster(sizes, score_mod):
    """Return ``adjust``, which makes scores of products of query and key."""
    acc, lanes, block, number, size = sizes.acc, sizes.panel, sizes.block, np.dtype(sizes.acc).type, itemsize(sizes.acc)
    vector, zero, nothing = lanes * size, number(0), number(-np.inf)
    load, store, splat, numbers = loader(acc, acc, lanes), storer(acc), splatter(acc, lanes), ramp(acc, lanes)
    load_double, load_one = loader("float64", "float64"), loader(acc, acc)
    load_boolean, load_booleans = loader("bool", acc), loader("bool", acc, lanes)
    half, brain, single, double = (
        bias_adder(source, sizes) for source in ("float16", "bfloat16", "float32", "float64")
    )
    tanh = elementary(acc, lanes).tanh

    @part
    def cap(p, t, end):
        """Apply the softcap."""
        limit = splat(number(p.softcap))
        for to in range(t, end, vector):
            store(to, limit * tanh(load(to) / limit))

    @part
    def add_any_bias(p, bias, step, t, count):
        """Add the bias of `count` keys to a row, whatever its type, and return whether none is dropped."""
        if p.bias_code == 0:
            return half(bias, step, t, count, p.bias_drops != 0)
        if p.bias_code == 1:
            return brain(bias, step, t, count, p.bias_drops != 0)
        if p.bias_code == 2:
            return single(bias, step, t, count, p.bias_drops != 0)
        return double(bias, step, t, count, p.bias_drops != 0)

    @part
    def subtract_alibi_there(a, b, slope, position, t, j0, low, high):
        """Subtract the slope times the distance to the keys of ``[low, high)``, whose positions are in an array."""
        for x in range(low, high):
            distance = number(position) - number(look(a.key_positions, b, j0 + x, a.query) - j0)
            distance = zero - distance if distance < zero else distance
            store(t + x * size, load_one(t + x * size) - number(slope) * distance)

    @part
    def subtract_alibi(slope, position, t, low, high):
        """Subtract the slope times the distance to the keys of ``[low, high)``, counted as the position is."""
        for x in range(low, high, lanes):
            distance = splat(number(position)) - (splat(number(x)) + numbers())
            distance = select(distance < splat(zero), splat(zero) - distance, distance)
            store(t + x * size, load(t + x * size) - splat(number(slope)) * distance)

    @part
    def apply(p, a, b, rows, r, t, j0, low, high):
        """Apply the function to the scores of a row, but of those keys that its bias drops: it revives none."""
        h, i = at(rows.h, r) + p.first_head, at(rows.i, r) + p.first_row
        for x in range(low, high):
            score = load_one(t + x * size)
            if score != nothing or a.bias == 0 or keeps(p, a, rows, r, j0 + x):
                score = score_mod(score, b + p.first_entry, h, i, j0 + x + p.first_key)
                store(t + x * size, number(score))

    @part
    def drop(keep, step, t, count):
        """Give the keys of a row that the boolean mask drops the score -inf, and return whether there are none."""
        kept, x = True, 0
        while step == 1 and x + lanes <= count:
            gone = load_booleans(keep + x) == splat(zero)
            if any_lane(gone):
                store(t + x * size, select(gone, splat(nothing), load(t + x * size)))
                kept = False
            x += lanes
        while x < count:
            if load_boolean(keep + x * step) == zero:
                store(t + x * size, nothing)
                kept = False
            x += 1
        return kept

    @part
    def adjust(p, a, b, rows, n, t, j0, low, high, complete):
        """Make scores, give dropped keys the score -inf, and return whether bias and mask drop none."""
        count, kept = min(high, p.S - j0) - low, True
        for r in range(n):
            row = t + r * block * size
            if p.softcap:
                cap(p, row + low * size, row + high * size)
            if a.bias:
                step = stride(a.bias, 1)
                kept &= add_any_bias(p, at(rows.bias, r) + (j0 + low) * step, step, row + low * size, count)
            if a.slopes:
                slope = load_double(batch(a.slopes, 1, a.query, b) + at(rows.h, r) * stride(a.slopes, 1))
                if a.key_positions:
                    subtract_alibi_there(a, b, slope, at(rows.position, r) - j0, row, j0, low, min(high, p.S - j0))
                else:
                    subtract_alibi(slope, at(rows.position, r) - j0, row, low, high)
            if score_mod is not None:
                apply(p, a, b, rows, r, row, j0, low, low + count)
            if a.keep:
                step = stride(a.keep, 1)
                kept &= drop(at(rows.keep, r) + (j0 + low) * step, step, row + low * size, count)
            if not complete:
                prefix, start, stop = at(rows.prefix, r) - j0, at(rows.start, r) - j0, at(rows.stop, r) - j0
                for x in range(max(prefix, low), min(start, high)):
                    store(row + x * size, nothing)
                for x in range(max(prefix, stop, low), high):
                    store(row + x * size, nothing)
        return kept

    return adjust


@cache
def softmax_step(sizes):
    """Return ``softmax_step``, which turns the scores of a block into weights."""
    acc, lanes, block, number, size = sizes.acc, sizes.panel, sizes.block, np.dtype(sizes.acc).type, itemsize(sizes.acc)
    vector, one, zero, nothing = lanes * size, number(1), number(0), number(-np.inf)
    load, store, splat, load_one = loader(acc, acc, lanes), storer(acc), splatter(acc, lanes), loader(acc, acc)
    exp = elementary(acc, lanes).exp

    @part
    def softmax_step(p, n, t, low, high, m, z, sums, width):
        """Turn scores into weights; `low` and `high` are multiples of the lanes."""
        for r in range(n):
            first, last = t + (r * block + low) * size, t + (r * block + high) * size
            old = load_one(m + r * size)
            tops = splat(old)
            for to in range(first, last, vector):
                s = load(to)
                tops = select(tops < s, s, tops)
            new = old
            for x in range(lanes):
                new = max(new, lane(tops, x))
            base = zero if new == nothing else new
            shrink = exp(splat(old - base))
            total = load_one(z + r * size) * lane(shrink, 0)
            for to in range(first, last, vector):
                weight = exp(load(to) - splat(base))
                store(to, weight)
                fours = sum_fours(weight)
                for x in range(0, lanes, 4):
                    total += lane(fours, x)
            store(m + r * size, new)
            store(z + r * size, total)
            if lane(shrink, 0) < one:
                for to in range(sums + r * width * size, sums + (r + 1) * width * size, vector):
                    store(to, load(to) * shrink)

    return softmax_step
