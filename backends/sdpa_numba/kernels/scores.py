"""What happens to a tile's scores between the two matrix products, apart from the softmax.

The tile's rows are its lanes: the scores of key x lie in `vectors` vectors at ``t + x * across``.
"""

from functools import cache

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import any_lane, concealed, load_int64, loader, select, splatter, storer
from sdpa_numba.vector.unrolled import transposer

from .elementary import elementary
from .record import ALL
from .rows import at, look
from .views import batch, stride


@cache
def filler(source, acc, lanes):
    """Return ``fill(rows, offset, step, count, target, across)``: up to `lanes` keys of `lanes` rows, keys first."""
    size, source_size = itemsize(acc), itemsize(source)
    load, store, splat = loader(source, acc), storer(acc), splatter(acc, lanes)
    square = transposer(source, acc, acc, lanes, lanes, table=True, ahead=True)

    @part
    def fill(rows, offset, step, count, target, across):
        first, alike = load_int64(rows), 1
        while alike < lanes and load_int64(rows + 8 * alike) == first:
            alike += 1
        if alike == lanes:
            for x in range(count):
                store(target + x * across, splat(load(first + offset + x * step)))
        elif step == source_size and count == lanes:
            square(rows, offset, 0, target, across, lanes)
        else:
            for r in range(lanes):
                address = load_int64(rows + 8 * r) + offset
                for x in range(count):
                    store(target + x * across + r * size, load(address + x * step))

    return fill


def adjuster(sizes, score_mod):
    """Return ``adjust``, which makes scores of products of query and key."""
    acc, lanes = sizes.acc, sizes.lanes
    size, number = itemsize(sizes.acc), np.dtype(acc).type
    vector, load, store, splat = lanes * size, loader(acc, acc, lanes), storer(acc), splatter(acc, lanes)
    load_one, load_double = loader(acc, acc), loader("float64", "float64")
    half, brain, single, double, boolean = (
        filler(source, acc, lanes) for source in ("float16", "bfloat16", "float32", "float64", "bool")
    )
    tanh = elementary(acc, lanes).tanh
    zero, one, nothing = number(0), number(1), number(-np.inf)

    @part
    def fill_bias(code, rows, offset, step, count, target, across):
        """Fill a slab with the bias, whatever its type."""
        if code == 0:
            half(rows, offset, step, count, target, across)
        elif code == 1:
            brain(rows, offset, step, count, target, across)
        elif code == 2:
            single(rows, offset, step, count, target, across)
        else:
            double(rows, offset, step, count, target, across)

    @part
    def cap(p, t, end):
        """Apply the softcap to the scores from `t` to `end`."""
        limit = splat(number(p.softcap))
        for to in range(t, end, vector):
            store(to, limit * tanh(load(to) / limit))

    @part
    def drop(t, slab, end, dropped):
        """Give the score -inf to whatever has the number `dropped` in the slab; return whether nothing has it."""
        gone_there = splat(zero)  # 1 where something is dropped
        for offset in range(0, end, vector):
            gone = load(slab + offset) == splat(dropped)
            gone_there = select(gone, splat(one), gone_there)
            store(concealed(t + offset), select(gone, splat(nothing), load(t + offset)))
        return not any_lane(splat(zero) < gone_there)

    @part
    def alibi(a, b, rows, vectors, t, j0, j, count, slab):
        """Subtract the slope times the distance to the keys from j on; positions count from the block's first key."""
        slopes = batch(a.slopes, 1, a.query, b)
        for r in range(vectors * lanes):
            slope = load_double(slopes + at(rows.h, r) * stride(a.slopes, 1))
            store(slab + r * size, number(slope))
            store(slab + (vectors * lanes + r) * size, number(at(rows.position, r) - j0))
        for v in range(0, vectors * vector, vector):
            slope, position = load(slab + v), load(slab + vectors * vector + v)
            for x in range(count):
                to = t + x * vectors * vector + v
                key = j + x if a.key_positions == 0 else look(a.key_positions, b, j + x, a.query)
                distance = position - splat(number(key - j0))
                store(to, load(to) - slope * select(distance < splat(zero), splat(zero) - distance, distance))

    @part
    def adjust(p, a, b, rows, vectors, t, j0, low, high, slab):
        """Cap the scores of the keys of ``[low, high)``, add bias and ALiBi, apply the function and drop keys.

        Return whether bias and mask drop none.
        """
        across, n, kept = vectors * vector, vectors * lanes, True
        if p.softcap:
            cap(p, t, t + (high - low) * across)
        if score_mod is None and not (a.bias or a.slopes or a.keep):
            return kept
        for j in range(low, high, lanes):
            count = min(lanes, high - j)
            here, end = t + (j - low) * across, count * across
            if a.bias:
                step = stride(a.bias, 1)
                for v in range(vectors):
                    fill_bias(p.bias_code, rows.bias + 8 * v * lanes, j * step, step, count, slab + v * vector, across)
                if p.bias_drops:
                    gone_there = splat(zero)
                    for offset in range(0, end, vector):
                        added = load(slab + offset)
                        gone = added == splat(nothing)
                        gone_there = select(gone, splat(one), gone_there)
                        store(here + offset, select(gone, splat(nothing), load(here + offset) + added))
                    kept &= not any_lane(splat(zero) < gone_there)
                else:
                    for offset in range(0, end, vector):
                        store(here + offset, load(here + offset) + load(slab + offset))
            if a.slopes:
                alibi(a, b, rows, vectors, here, j0, j, count, slab + lanes * across)
            if score_mod is not None:
                for x in range(count):
                    for r in range(n):
                        to = here + x * across + r * size
                        h, i = at(rows.h, r) + p.first_head, at(rows.i, r) + p.first_row
                        score = score_mod(load_one(to), b + p.first_entry, h, i, j + x + p.first_key)
                        store(to, number(score))
                if a.bias:
                    drop(here, slab, end, nothing)
            if a.keep:
                step = stride(a.keep, 1)
                for v in range(vectors):
                    boolean(rows.keep + 8 * v * lanes, j * step, step, count, slab + v * vector, across)
                kept &= drop(here, slab, end, zero)
        return kept

    return adjust


@cache
def masker(sizes):
    """Return ``mask``, which drops the keys outside the intervals of rows."""
    acc, lanes = sizes.acc, sizes.lanes
    size, number = itemsize(sizes.acc), np.dtype(acc).type
    vector, load, store, splat = lanes * size, loader(acc, acc, lanes), storer(acc), splatter(acc, lanes)
    store_limit, load_limit, splat_limit = storer("int32"), loader("int32", "int32", lanes), splatter("int32", lanes)
    nothing = number(-np.inf)

    @part
    def drop(vectors, t, first, last, limits):
        """Drop keys of ``[first, last)``, counted as the limits are."""
        n = vectors * lanes
        for v in range(vectors if first < last else 0):
            prefix = load_limit(limits + 4 * v * lanes)
            before, stop = load_limit(limits + 4 * (n + v * lanes)), load_limit(limits + 4 * (2 * n + v * lanes))
            for x in range(first, last):
                key, to = splat_limit(np.int32(x)), t + (x * vectors + v) * vector
                seen = (key < prefix) | ((before < key) & (key < stop))
                store(concealed(to), select(seen, load(to), splat(nothing)))

    @part
    def mask(visible, rows, vectors, t, low, high, limits):
        """Give the keys of ``[low, high)`` outside a row's intervals the score -inf."""
        if visible == ALL:  # rows differ in nothing, and only keys behind the last one are there to be dropped
            across = vectors * vector
            for to in range(t + (at(rows.stop, 0) - low) * across, t + (high - low) * across, vector):
                store(to, splat(nothing))
            return
        n, count, first, last = vectors * lanes, high - low, np.int64(0), high - low
        for r in range(n):
            prefix = min(max(at(rows.prefix, r) - low, 0), count)
            start, stop = min(max(at(rows.start, r) - low, 0), count), min(max(at(rows.stop, r) - low, 0), count)
            store_limit(limits + 4 * r, np.int32(prefix))
            store_limit(limits + 4 * (n + r), np.int32(start - 1))
            store_limit(limits + 4 * (2 * n + r), np.int32(stop))
            first, last = max(first, start), min(last, stop)
        if first < last:  # keys that all rows see need no test: most of them, but for a diagonal and an end
            drop(vectors, t, np.int64(0), first, limits)
            drop(vectors, t, last, count, limits)
        else:
            drop(vectors, t, np.int64(0), count, limits)

    return mask
