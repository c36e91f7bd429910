"""The weighted sum of the values of a block in the kernel for few rows, where products take pairs of keys."""

from functools import cache
from typing import Any

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.pairs import joined, one_dot, rounder
from sdpa_numba.vector.simd import load_int32, loader

from .pairs import BYTES, FIRST, SECOND, WORD, ZERO, load_float, load_number, rows_finder, store_float, values_packer
from .rows import keeps
from .views import stride


@cache
def value_adder(sizes, stored, add_packed, add_in_place, most):
    """Return ``add_values``, up to `most` keys at a time. Of `stored` values, `value` is a `Head`."""
    lanes, block, dot = sizes.panel, sizes.block, one_dot(sizes.products, sizes.panel)
    vector, load, store_narrow = lanes * WORD, loader("float32", "float32", lanes), rounder(sizes.products)
    pack_values = values_packer(lanes)
    find: Any = rows_finder(sizes) if stored else None
    at_once = lanes if stored else most

    @part
    def add_carefully(p, a, rows, n, t, value, row, column, j0, x, low, high, sums, width):
        """Add ``P @ V`` for the pairs from x on, without the values that a row drops; that of `low` lies at `value`."""
        for r in range(n):
            for y in range(x, high, 2):
                first = low <= y and keeps(p, a, rows, r, j0 + y)
                second = y + 1 < high and keeps(p, a, rows, r, j0 + y + 1)
                kept = (FIRST if first else 0) | (SECOND if second else 0)
                weight = load_int32(t + r * block * WORD + y * BYTES) & kept
                here = value + (y - low) * row
                for d in range(p.Ev):
                    u = load_number(here + d * column) if first else ZERO
                    v = load_number(here + row + d * column) if second else ZERO
                    to = sums + (r * width + d) * WORD
                    store_float(to, dot(load_float(to), weight, joined(u, v)))

    @part
    def add_values(p, a, rows, n, t, value, values, j0, low, high, complete, sums, width):
        """Add ``P @ V`` for the keys of ``[low, high)``: from where V lies, or from a packed copy."""
        for r in range(n):  # weights become pairs, in place
            weights = t + r * block * WORD
            for x in range(low - low % lanes, high, lanes):
                store_narrow(weights + x * BYTES, load(weights + x * WORD))
        x = low - low % 2
        while x < high:
            first, last = max(x, low), min(x + at_once, high)
            if stored:
                source, row, column = find(value, j0 + first, last - first)
            else:
                row, column = stride(a.value, 2), stride(a.value, 1)
                source = value + (j0 + first) * row
            weights, whole = t + x * BYTES, first == x and (last - x) % 2 == 0
            if complete and whole and column == BYTES and p.Ev == width:
                add_in_place(n, weights, source, 2 * row, (last - x) // 2, sums, width, 0)
            elif (
                pack_values(source, row, column, first - x, last - first, p.Ev, values, width * WORD, vector)
                or complete
            ):
                add_packed(n, weights, values, width * WORD, (last - x + 1) // 2, sums, width, 0)
            else:
                add_carefully(p, a, rows, n, t, source, row, column, j0, x, first, last, sums, width)
            x += at_once

    return add_values
