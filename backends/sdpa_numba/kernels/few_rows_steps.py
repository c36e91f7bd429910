"""The steps of the kernel for few rows from the scores of a block of keys to their weights: options and softmax."""

from functools import cache

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import any_lane, lane, loader, ramp, select, splatter, storer, sum_fours

from .elementary import elementary
from .rows import at, keeps, look
from .views import batch, stride


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
