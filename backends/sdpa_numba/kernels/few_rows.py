"""The kernel for few query rows: lanes are keys for the scores and columns of V for the output.

All query rows of a key head share one pass over its keys and values, which are read where they lie. A task is one
chunk of keys; whoever does the last of them merges the states in their order: nothing depends on who that is.
Each sum runs in the same order as in the kernel for many rows: a row's bits do not depend on how many rows there are.
"""

from functools import cache

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.runtime.kernel import kernel as compiled
from sdpa_numba.runtime.tasks import MOVE, OVERHEAD, next_task, proceed
from sdpa_numba.vector.atomic import add
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import allocate, fma, lane, loader, release, select, splatter, storer, sum_fours
from sdpa_numba.vector.unrolled import tiler

from . import elementary
from .finish import finish, lse_of
from .pack import transposing, value_packer
from .record import read_arrays, read_record
from .rows import FIELDS, at, keeps, place, rows_at, visible
from .views import batch, data, stride

PANELS = 4  # of keys at a time
STEP = 32  # keys whose values stay in the first cache while all columns are done


@cache
def adder(source, acc, lanes, block):
    """Return ``add(n, t, values, row, steps, sums, width)`` for values stored as `source`."""
    size, source_size = itemsize(acc), itemsize(source)
    one = np.dtype(acc).type(1)
    four_wide, one_wide = (tiler(acc, rows, 4, lanes, True, source) for rows in (4, 1))
    four_narrow, one_narrow = (tiler(acc, rows, 1, lanes, True, source) for rows in (4, 1))
    vector = lanes * source_size

    @part
    def add(n, t, values, row, steps, sums, width):
        """Add ``P @ V`` for `steps` keys, whose values lie `row` bytes apart."""
        across, weights_row = width * size, block * size
        r = 0
        while r < n:
            weights, d = t + r * weights_row, 0
            rows = 4 if n - r >= 4 else 1
            while d < width:
                vectors = 4 if width - d >= 4 * lanes else 1
                b, c = values + d * source_size, sums + (r * width + d) * size
                if rows == 4 and vectors == 4:
                    four_wide(weights, weights_row, size, b, vector, row, c, across, steps, one)
                elif rows == 4:
                    four_narrow(weights, weights_row, size, b, vector, row, c, across, steps, one)
                elif vectors == 4:
                    one_wide(weights, weights_row, size, b, vector, row, c, across, steps, one)
                else:
                    one_narrow(weights, weights_row, size, b, vector, row, c, across, steps, one)
                d += vectors * lanes
            r += rows

    return add


@cache
def kernel(dtype, sizes):
    """Return the kernel for this type."""
    acc, lanes, block, chunk = sizes.acc, sizes.panel, sizes.block, sizes.chunk
    number, size, source_size = np.dtype(acc).type, itemsize(acc), itemsize(dtype)
    vector, one, zero, nothing = lanes * size, number(1), number(0), number(-np.inf)
    load, store, splat = loader(acc, acc, lanes), storer(acc), splatter(acc, lanes)
    load_one, load_source, store_narrow = loader(acc, acc), loader(dtype, acc), storer(dtype)
    exp, tanh = elementary.functions(acc, lanes)
    pack_keys, _ = transposing(dtype, acc, acc, lanes, ahead=True)
    pack_values = value_packer(dtype, acc, lanes)
    four_wide, one_wide = (tiler(acc, rows, PANELS, lanes, False) for rows in (4, 1))
    four_narrow, one_narrow = (tiler(acc, rows, 1, lanes, False) for rows in (4, 1))
    add_packed, add_in_place = adder(acc, acc, lanes, block), adder(dtype, acc, lanes, block)

    @part
    def score(p, a, n, queries, key, keys, t, j0, low, high):
        """Fill the rows of `t` with the scores of the keys of ``[low, high)``, counted from the block's first.

        `low` is a multiple of the lanes. What lies in a panel that is not packed is never touched: numbers without a
        leading one would cost a hundred cycles each.
        """
        row, column, panel, x = stride(a.key, 2), stride(a.key, 1), p.E * vector, low
        while x < high:
            panels = PANELS if x + PANELS * lanes <= high else 1
            for y in range(0, panels):
                first, count = j0 + x + y * lanes, min(lanes, p.S - j0 - x - y * lanes)
                pack_keys(key + first * row, row, column, count, p.E, keys + y * panel, vector)
            r, scale = 0, number(p.scale)
            while r < n:
                rows = 4 if n - r >= 4 else 1
                q, c = queries + r * p.E * size, t + (r * block + x) * size
                if rows == 4 and panels == PANELS:
                    four_wide(q, p.E * size, size, keys, panel, vector, c, block * size, p.E, scale)
                elif rows == 4:
                    four_narrow(q, p.E * size, size, keys, panel, vector, c, block * size, p.E, scale)
                elif panels == PANELS:
                    one_wide(q, p.E * size, size, keys, panel, vector, c, block * size, p.E, scale)
                else:
                    one_narrow(q, p.E * size, size, keys, panel, vector, c, block * size, p.E, scale)
                r += rows
            x += panels * lanes

    @part
    def adjust(p, rows, n, t, j0, low, high, complete):
        """Apply the softcap, and give keys that a row does not see the score -inf."""
        for r in range(n):
            if p.softcap:
                limit = splat(number(p.softcap))
                for to in range(t + (r * block + low) * size, t + (r * block + high) * size, vector):
                    store(to, limit * tanh(load(to) / limit))
            if not complete:
                for x in range(low, high):
                    j = j0 + x
                    if not (j < at(rows.prefix, r) or at(rows.start, r) <= j < at(rows.stop, r)):
                        store(t + (r * block + x) * size, nothing)

    @part
    def update(p, n, t, low, high, m, z, sums, width):
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

    @part
    def add_carefully(p, a, rows, n, t, value, j0, low, high, sums, width):
        """Add ``P @ V`` key by key, without the values that a row drops: they are not all finite."""
        row, column = stride(a.value, 2), stride(a.value, 1)
        for r in range(n):
            for x in range(low, high):
                if keeps(p, a, rows, r, j0 + x):
                    weight = load_one(t + (r * block + x) * size)
                    for d in range(p.Ev):
                        to = sums + (r * width + d) * size
                        store(to, fma(weight, load_source(value + (j0 + x) * row + d * column), load_one(to)))

    @part
    def add_values(p, a, rows, n, t, value, values, j0, low, high, complete, sums, width):
        """Add ``P @ V`` for the keys of ``[low, high)``: from where V lies, or from a packed copy."""
        row, column = stride(a.value, 2), stride(a.value, 1)
        in_place = complete and column == source_size and p.Ev == width
        for x in range(low, high, STEP):
            steps, source = min(STEP, high - x), value + (j0 + x) * row
            if in_place:
                add_in_place(n, t + x * size, source, row, steps, sums, width)
            elif pack_values(source, row, column, steps, p.Ev, values, width * size, vector) or complete:
                add_packed(n, t + x * size, values, width * size, steps, sums, width)
            else:
                add_carefully(p, a, rows, n, t, value, j0, x, x + steps, sums, width)

    @part
    def write_row(p, a, b, rows, r, m, z, sums):
        """Write the output and lse of one row."""
        ratio, top, total = finish(float(load_one(m)), float(load_one(z)), a.sink, at(rows.h, r))
        h, i = at(rows.h, r), at(rows.i, r)
        if a.lse:
            row = ((b * p.Hq + h) * p.L + i) * size
            store(data(a.lse) + row, number(lse_of(top, total)))
            if a.m:
                store(data(a.m) + row, number(top))
                store(data(a.z) + row, number(total))
        if a.out:
            to = batch(a.out, 3, a.query, b) + h * stride(a.out, 3) + i * stride(a.out, 2)
            for d in range(p.Ev):
                value = load_one(sums + d * size) * number(ratio) + zero  # + 0: never -0
                store_narrow(to + d * stride(a.out, 1), zero if load_one(z) == zero else value)

    @part
    def merge(p, a, b, rows, n, states, state_bytes, chunks, width):
        """Merge the states of all chunks of a key head and write its rows."""
        for r in range(n):
            sums, m = states + r * width * size, states + (n * width + r) * size
            z = m + n * size
            for other in range(state_bytes, chunks * state_bytes, state_bytes):
                mine, theirs = load_one(m), load_one(m + other)
                new = max(mine, theirs)
                base = zero if new == nothing else new
                keep, gain = exp(splat(mine - base)), exp(splat(theirs - base))
                store(m, new)
                store(z, load_one(z) * lane(keep, 0) + load_one(z + other) * lane(gain, 0))
                for d in range(0, width * size, vector):
                    store(sums + d, load(sums + d) * keep + load(sums + other + d) * gain)
            write_row(p, a, b, rows, r, m, z, sums)

    @compiled
    def attend(worker, record):
        """Compute all chunks and merge their states: maxima, sums, and sums of weighted values."""
        p, a = read_record(record), read_arrays(record)
        n, width, chunks = p.group * p.L, p.Ev + -p.Ev % lanes, (p.S + chunk - 1) // chunk
        floats = n * (p.E + block) + PANELS * lanes * p.E + STEP * width
        state_bytes = n * (width + 2) * size
        scratch = allocate(floats * size + 8 * FIELDS * n + state_bytes + 64)
        t = (scratch + 63) & -64
        keys = t + n * block * size
        values = keys + PANELS * lanes * p.E * size
        queries = values + STEP * width * size
        own = queries + n * p.E * size
        rows = rows_at(own + state_bytes, n)
        task = next_task(worker)
        while task < p.B * p.Hkv * max(chunks, 1):
            unit, index = task // max(chunks, 1), task % max(chunks, 1)
            proceed(worker, chunk * ((n + MOVE) * (p.E + p.Ev) + n * OVERHEAD))
            b, kv = unit // p.Hkv, unit % p.Hkv
            place(rows, n, b, kv * p.group, 0, n - 1, p, a)
            states = p.memory + p.counters + unit * chunks * state_bytes
            sums = own if chunks < 2 else states + index * state_bytes
            m = sums + n * width * size
            z = m + n * size
            for x in range(n * width):
                store(sums + x * size, zero)
            source = batch(a.query, 3, a.query, b)
            for r in range(n):
                store(m + r * size, nothing)
                store(z + r * size, zero)
                q = source + at(rows.h, r) * stride(a.query, 3) + at(rows.i, r) * stride(a.query, 2)
                for e in range(p.E):
                    store(queries + (r * p.E + e) * size, load_source(q + e * stride(a.query, 1)))
            key_head = batch(a.key, 3, a.query, b) + kv * stride(a.key, 3)
            value_head = batch(a.value, 3, a.query, b) + kv * stride(a.value, 3)
            for j0 in range(index * chunk, min((index + 1) * chunk, p.S), block):
                low, high, complete = visible(rows, n, j0, min(j0 + block, p.S))
                if low >= high:
                    continue
                low -= j0
                high -= j0
                bottom, top = low - low % lanes, high + -high % lanes
                score(p, a, n, queries, key_head, keys, t, j0, bottom, high)
                adjust(p, rows, n, t, j0, bottom, top, complete and top == high)
                update(p, n, t, bottom, top, m, z, sums, width)
                add_values(p, a, rows, n, t, value_head, values, j0, low, high, complete, sums, width)
            if chunks < 2:
                for r in range(n):
                    write_row(p, a, b, rows, r, m + r * size, z + r * size, sums + r * width * size)
            elif add(p.memory + 8 * unit, 1) == chunks - 1:
                merge(p, a, b, rows, n, states, state_bytes, chunks, width)
            task = next_task(worker)
        release(scratch)

    return attend
