"""Query rows as the kernels read them: tables of int64, one number a row, and which keys a row keeps."""

from typing import NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.simd import any_lane, load_int64, loader, splatter, storer

from .record import ALL, BAND, INTERVALS, Bounds, bounds_of, seen_by
from .views import batch, stride

store = storer("int64")
load_boolean, load_double = loader("bool", "float32"), loader("float64", "float64")
load_booleans, splat = loader("bool", "float32", 16), splatter("float32", 16)
load_half, load_brain, load_single = (loader(name, "float32") for name in ("float16", "bfloat16", "float32"))
FAR = 2**62
NO_BOUNDS = Bounds(*[0] * len(Bounds._fields))


class Rows(NamedTuple):
    """Addresses of tables: head and index of each row, visible keys, position, and where bias and mask begin."""

    h: int
    i: int
    prefix: int
    start: int
    stop: int
    position: int
    bias: int
    keep: int


FIELDS = len(Rows._fields)


@part
def rows_at(address, n):
    """Return the tables of `n` rows that lie at `address` one behind the other."""
    n *= 8
    return Rows(
        address, address + n, address + 2 * n, address + 3 * n,
        address + 4 * n, address + 5 * n, address + 6 * n, address + 7 * n,
    )  # fmt: skip


@part
def at(table, r):
    """Return a table's number for row r."""
    return load_int64(table + 8 * r)


@part
def at_row(array, first, i):
    """Return the number of row i, where those of the batch entry begin at `first`."""
    return load_int64(first + i * stride(array, 1))


@part
def look(array, b, i, query):
    """Return the number of row i in an int64 array that broadcasts to ``(*batch, L)``."""
    return at_row(array, batch(array, 1, query, b), i)


@part
def place(rows, n, b, head, first, last, p, a):
    """Fill the tables: `n` rows from `first` on, counted through the heads from `head` on; none comes after `last`."""
    h, i = head + first // p.L, first % p.L
    band = bounds_of(p, a.query, b) if p.visible == BAND or a.slopes else NO_BOUNDS
    bias, keep = batch(a.bias, 3, a.query, b), batch(a.keep, 3, a.query, b)
    prefixes, starts = batch(a.prefix, 1, a.query, b), batch(a.start, 1, a.query, b)
    stops, positions = batch(a.stop, 1, a.query, b), batch(a.positions, 1, a.query, b)
    for r in range(n):
        prefix, start, stop = np.int64(0), np.int64(0), p.S
        if p.visible == BAND:
            prefix, start, stop = seen_by(band, i, p.S)
        elif p.visible == INTERVALS:
            prefix, start = at_row(a.prefix, prefixes, i), at_row(a.start, starts, i)
            stop = at_row(a.stop, stops, i)
        store(rows.h + 8 * r, h)
        store(rows.i + 8 * r, i)
        store(rows.prefix + 8 * r, prefix)
        store(rows.start + 8 * r, start)
        store(rows.stop + 8 * r, stop)
        if a.slopes:
            store(rows.position + 8 * r, at_row(a.positions, positions, i) if a.positions else band.offset + i)
        if a.bias:
            store(rows.bias + 8 * r, bias + h * stride(a.bias, 3) + i * stride(a.bias, 2))
        if a.keep:
            store(rows.keep + 8 * r, keep + h * stride(a.keep, 3) + i * stride(a.keep, 2))
        if first + r < last:
            i += 1
            if i == p.L:
                h, i = h + 1, 0


@part
def span(p, rows, n):
    """Return the first key that some row sees, the end of the last, and the gap between prefixes and starts."""
    if p.visible == ALL:
        return 0, p.S, 0, 0
    high, gap_start, gap_stop = 0, 0, FAR
    for r in range(n):
        gap_start = max(gap_start, at(rows.prefix, r))
        high = max(high, at(rows.prefix, r), at(rows.stop, r))
        if at(rows.start, r) < at(rows.stop, r):
            gap_stop = min(gap_stop, at(rows.start, r))
    return (0 if gap_start > 0 else gap_stop), high, gap_start, gap_stop


@part
def visible(rows, n, j0, j1):
    """Return an interval around the keys of ``[j0, j1)`` that some row sees, and whether every row sees all of it."""
    low, high, complete = j1, j0, True
    for r in range(n):
        prefix, start, stop = at(rows.prefix, r), at(rows.start, r), at(rows.stop, r)
        if prefix > j0:
            low, high = j0, max(high, min(prefix, j1))
        if max(start, j0) < min(stop, j1):
            low, high = min(low, max(start, j0)), max(high, min(stop, j1))
    for r in range(n):
        complete &= at(rows.prefix, r) >= high or (at(rows.start, r) <= low and at(rows.stop, r) >= high)
    return low, high, complete


@part
def drops_all(a, rows, n, low, high):
    """Return whether the boolean mask drops all keys of ``[low, high)`` for all rows."""
    step, before = stride(a.keep, 1), 0
    for r in range(n):
        first, j = at(rows.keep, r), low
        if first == before:
            continue
        before = first
        while step == 1 and j + 16 <= high:
            if any_lane(splat(np.float32(0)) < load_booleans(first + j)):
                return False
            j += 16
        while j < high:
            if load_boolean(first + j * step) != 0:
                return False
            j += 1
    return True


@part
def keeps(p, a, rows, r, j):
    """Return whether row r keeps key j."""
    if not (j < at(rows.prefix, r) or at(rows.start, r) <= j < at(rows.stop, r)):
        return False
    if a.keep and load_boolean(at(rows.keep, r) + j * stride(a.keep, 1)) == 0:
        return False
    if a.bias and p.bias_drops:
        address = at(rows.bias, r) + j * stride(a.bias, 1)
        if p.bias_code == 0:
            return load_half(address) != -np.inf
        if p.bias_code == 1:
            return load_brain(address) != -np.inf
        if p.bias_code == 2:
            return load_single(address) != -np.inf
        return load_double(address) != -np.inf
    return True
