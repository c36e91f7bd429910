"""The kernel for few query rows: lanes are keys for the scores and columns of V for the output.

All query rows of a key head share one pass over its keys and values, which are read where they lie. A task is one
chunk of keys; the thread that does the last of them merges the states in their order, whichever thread it is.
Each sum runs in the same order as in the kernel for many rows: a row's bits do not depend on how many rows there are.
"""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.runtime.kernel import kernel as compiled
from sdpa_numba.runtime.tasks import MOVE, OVERHEAD, next_at_ends, proceed
from sdpa_numba.vector.atomic import add
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import allocate, lane, loader, release, splatter, storer

from . import pairs
from .dropout import TABLE, key_dropout
from .elementary import elementary
from .few_rows_products import PANELS, scorer
from .few_rows_steps import adjuster, softmax_step
from .few_rows_values import STEP, value_adder
from .few_rows_weights import weights
from .finish import finisher, lse_of
from .heads import HEAD_BYTES, place_head
from .record import APART, SOURCE_BYTES, read_arrays, read_record
from .rows import FIELDS, at, place, rows_at, visible
from .views import batch, data, stride


class Output(NamedTuple):
    """What writes the rows of a key head from the state of all its keys, or from those of its chunks."""

    write_row: Any
    merge: Any


@cache
def output(dtype, sizes):
    """Return `Output` for this type."""
    acc, lanes, number, size = sizes.acc, sizes.panel, np.dtype(sizes.acc).type, itemsize(sizes.acc)
    vector, zero, nothing = lanes * size, number(0), number(-np.inf)
    load, store, splat = loader(acc, acc, lanes), storer(acc), splatter(acc, lanes)
    load_one, store_narrow, out_size = loader(acc, acc), storer(dtype), itemsize(dtype)
    exp, finish = elementary(acc, lanes).exp, finisher(acc)

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
            to, column = batch(a.out, 3, a.query, b) + h * stride(a.out, 3) + i * stride(a.out, 2), stride(a.out, 1)
            scale, empty, done = number(ratio), load_one(z) == zero, 0
            if column == out_size:
                done = p.Ev - p.Ev % lanes
                for d in range(0, done, lanes):
                    value = load(sums + d * size) * splat(scale) + splat(zero)  # + 0: never -0
                    store_narrow(to + d * out_size, splat(zero) if empty else value)
            for d in range(done, p.Ev):
                value = load_one(sums + d * size) * scale + zero
                store_narrow(to + d * column, zero if empty else value)

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

    return Output(write_row, merge)


@cache
def query_placer(dtype, sizes):
    """Return ``place_query``."""
    if sizes.products:
        return pairs.place_query
    acc, lanes, size, source_size = sizes.acc, sizes.panel, itemsize(sizes.acc), itemsize(dtype)
    load, load_one, store = loader(dtype, acc, lanes), loader(dtype, acc), storer(acc)

    @part
    def place_query(query, column, width, target):
        """Copy a query, one number behind the other."""
        done = width - width % lanes if column == source_size else 0
        for e in range(0, done, lanes):
            store(target + e * size, load(query + e * source_size))
        for e in range(done, width):
            store(target + e * size, load_one(query + e * column))

    return place_query


@lru_cache(maxsize=64)  # a bound on kernels for functions of the user
def kernel(dtype, sizes, stored=False, score_mod=None):
    """Return the kernel for this type, and for keys and values that may be `stored`."""
    lanes, block, chunk, size = sizes.panel, sizes.block, sizes.chunk, itemsize(sizes.acc)
    number, store, place_query = np.dtype(sizes.acc).type, storer(sizes.acc), query_placer(dtype, sizes)
    zero, nothing = number(0), number(-np.inf)
    score, adjust = scorer(dtype, sizes, stored), adjuster(sizes, score_mod)
    step, add_values = softmax_step(sizes), value_adder(dtype, sizes, stored)
    apply_dropout, (keep_scores, weigh) = key_dropout(sizes), weights(sizes)
    write_row, merge = output(dtype, sizes)

    @compiled
    def attend(worker, record):
        """Compute all chunks and merge their states: maxima, sums, and sums of weighted values."""
        p, a = read_record(record), read_arrays(record)
        n, width, chunks = p.group * p.L, p.Ev + -p.Ev % lanes, (p.S + chunk - 1) // chunk
        floats = n * (p.E + block) + PANELS * lanes * p.E + STEP * width + TABLE * lanes
        room_bytes = HEAD_BYTES + lanes * max(p.E, p.Ev) * size if stored else 0
        state_bytes = (n * (width + 2) * size + APART - 1) & -APART
        scratch = allocate(floats * size + 8 * FIELDS * n + state_bytes + 2 * room_bytes + 64)
        t = (scratch + 63) & -64
        keys = t + n * block * size
        values = keys + PANELS * lanes * p.E * size
        queries = values + STEP * width * size
        table = queries + n * p.E * size
        own = table + TABLE * lanes * size
        rows = rows_at(own + state_bytes, n)
        room = own + state_bytes + 8 * FIELDS * n
        tasks = p.B * p.Hkv * max(chunks, 1)
        task = next_at_ends(worker, tasks)
        while task < tasks:
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
                place_query(q, stride(a.query, 1), p.E, queries + r * p.E * size)
            if stored:
                key_head = value_head = place_head(room, p.stored, a.query, b, kv)
                if a.value:
                    value_head = place_head(room + room_bytes, p.stored + SOURCE_BYTES, a.query, b, kv)
            else:
                key_head = value_head = batch(a.key, 3, a.query, b) + kv * stride(a.key, 3)
                if a.value:
                    value_head = batch(a.value, 3, a.query, b) + kv * stride(a.value, 3)
            for j0 in range(index * chunk, min((index + 1) * chunk, p.S), block):
                low, high, complete = visible(rows, n, j0, min(j0 + block, p.S))
                if low >= high:
                    continue
                low -= j0
                high -= j0
                bottom, top = low - low % lanes, high + -high % lanes
                score(p, a, n, queries, key_head, keys, t, j0, bottom, high)
                complete &= adjust(p, a, b, rows, n, t, j0, bottom, top, complete and bottom == low and top == high)
                if a.weights:
                    keep_scores(p, a, b, rows, n, t, j0, low, high)
                step(p, n, t, bottom, top, m, z, sums, width)
                if p.dropout_threshold:
                    apply_dropout(p, b, rows, n, t, j0, bottom, top, table)
                if a.value:
                    add_values(p, a, rows, n, t, value_head, values, j0, low, high, complete, sums, width)
            if chunks < 2:
                for r in range(n):
                    write_row(p, a, b, rows, r, m + r * size, z + r * size, sums + r * width * size)
                if a.weights:
                    weigh(p, a, b, rows, n, m, z, t, table)
            elif add(p.memory + 8 * unit, 1) == chunks - 1:
                merge(p, a, b, rows, n, states, state_bytes, chunks, width)
                if a.weights:
                    m = states + n * width * size
                    weigh(p, a, b, rows, n, m, m + n * size, t, table)
            task = next_at_ends(worker, tasks)
        release(scratch)

    return attend
