"""The last step of the kernel for few rows: the weighted sum of the values of a block."""

from functools import cache

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.rows import row_adder
from sdpa_numba.vector.simd import any_lane, fma, loader, select, splatter, storer

from . import few_rows_pairs
from .codes import code_product
from .few_rows_products import PANELS, WIDE, at_once, multiplier, soon, soon_in_pages
from .heads import page_at
from .pack import value_packer
from .rows import keeps
from .stored import reader, rows_packer
from .views import stride

STEP = 32  # keys whose values stay in the first cache while all columns are done
KEYS = 8  # whose values are read side by side, whole rows in one pass
HALF = KEYS // 2  # for two query rows, as their weights stay in registers
DECODED = 8  # keys whose values are decoded at once: there they take four times the room


@cache
def adder(source, acc, lanes, block, products=""):
    """Return ``add(n, t, values, row, steps, sums, width, ahead)`` for values stored as `source`."""
    size, source_size = itemsize(acc), itemsize(source)
    one = np.dtype(acc).type(1)
    multiply = multiplier(acc, lanes, True, source, products)
    vector, add_long = lanes * source_size, None if products else long_adder(source, acc, lanes, block)

    @part
    def add(n, t, values, row, steps, sums, width, ahead):
        """Add ``P @ V`` for `steps` keys, whose values lie `row` bytes apart."""
        across, weights_row = width * size, block * size
        if add_long is not None:
            if width > WIDE * lanes:
                done = add_long(n, t, values, row, steps, sums, width, ahead)
                t += done * size
                values += done * row
                steps -= done
        r = 0 if steps else n
        while r < n:
            rows, weights, d = at_once(n - r), t + r * weights_row, 0
            while d < width:
                vectors = PANELS if width - d >= PANELS * lanes else 1
                vectors = WIDE if rows == 1 and width - d >= WIDE * lanes else vectors
                b, c = values + d * source_size, sums + (r * width + d) * size
                multiply(rows, vectors, weights, weights_row, size, b, vector, row, c, across, steps, one)
                d += vectors * lanes
            r += rows

    return add


@cache
def long_adder(source, acc, lanes, block):
    """Return ``add``, as `adder` does, for values of more than `WIDE` vectors; it says how many keys it has done."""
    size, source_size = itemsize(acc), itemsize(source)
    one_row, two_rows = row_adder(source, acc, 1, KEYS, lanes), row_adder(source, acc, 2, HALF, lanes)
    vector = lanes * source_size

    @part
    def add(n, t, values, row, steps, sums, width, ahead):
        across, weights_row, vectors, done = width * size, block * size, width // lanes, steps - steps % KEYS
        for x in range(0, done, KEYS):
            b, r = values + x * row, 0
            soon_here, along = (ahead + x * row, 1) if ahead else (b, 0)
            while r < n:
                weights, c = t + (r * block + x) * size, sums + r * across
                if n - r == 1:
                    one_row(weights, 0, b, row, c, 0, vectors, soon_here, along * KEYS * vector)
                else:
                    for y in range(0, KEYS, HALF):
                        two_rows(
                            weights + y * size, weights_row, b + y * row, row, c, across, vectors,
                            soon_here + along * y * row, along * HALF * vector,
                        )  # fmt: skip
                r += 2
                soon_here, along = b, 0  # it is on its way
        return done

    return add


@cache
def value_adder(dtype, sizes, stored):
    """Return ``add_values``, which adds the weighted values of a block. Of `stored` values, `value` is a `Head`."""
    if sizes.products:
        packed, in_place = (
            adder(source, sizes.acc, sizes.panel, sizes.block, sizes.products) for source in (sizes.acc, dtype)
        )
        return few_rows_pairs.value_adder(sizes, stored, packed, in_place, STEP)
    if stored:
        return stored_value_adder(dtype, sizes)
    acc, lanes, block, size, source_size = sizes.acc, sizes.panel, sizes.block, itemsize(sizes.acc), itemsize(dtype)
    vector, store, load_one, load_source = lanes * size, storer(acc), loader(acc, acc), loader(dtype, acc)
    load, splat, zero, one = loader(acc, acc, lanes), splatter(acc, lanes), np.dtype(acc).type(0), np.dtype(acc).type(1)
    pack_values = value_packer(dtype, acc, lanes)
    add_packed, add_in_place = adder(acc, acc, lanes, block), adder(dtype, acc, lanes, block)

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
    def move(source, target, end):
        """Copy the sums from `source` to `end`, and return whether they are finite."""
        odd = splat(zero)  # 1 where a number is not
        for x in range(0, end - source, vector):
            y = load(source + x)
            odd = select(y - y == splat(zero), odd, splat(one))
            store(target + x, y)
        return not any_lane(splat(zero) < odd)

    @part
    def add_rows(n, t, source, row, low, high, sums, width):
        """Add ``P @ V`` from where V lies."""
        for x in range(low, high, STEP):
            first = source + x * row
            ahead = soon(first, row, width * source_size)
            add_in_place(n, t + x * size, first, row, min(STEP, high - x), sums, width, ahead)

    @part
    def add_values(p, a, rows, n, t, value, values, j0, low, high, complete, sums, width):
        """Add ``P @ V`` for the keys of ``[low, high)``: from where V lies, or from a packed copy."""
        row, column = stride(a.value, 2), stride(a.value, 1)
        source, direct, end = value + j0 * row, column == source_size and p.Ev == width, sums + n * width * size
        if direct and complete:
            add_rows(n, t, source, row, low, high, sums, width)
            return
        if direct:  # a value that is dropped has the weight 0: it changes no sum, but where it is not finite
            move(sums, values, end)
            add_rows(n, t, source, row, low, high, sums, width)
            if move(sums, sums, end):
                return
            move(values, sums, values + n * width * size)
        for x in range(low, high, STEP):
            steps, first = min(STEP, high - x), source + x * row
            if pack_values(first, row, column, steps, p.Ev, values, width * size, vector) or complete:
                add_packed(n, t + x * size, values, width * size, steps, sums, width, 0)
            else:
                add_carefully(p, a, rows, n, t, value, j0, x, x + steps, sums, width)

    return add_values


@cache
def stored_value_adder(dtype, sizes):
    """Return ``add_values`` for values that are stored, which `value`, a `Head`, says where to find."""
    acc, lanes, block, size, own = sizes.acc, sizes.panel, sizes.block, itemsize(sizes.acc), itemsize(dtype)
    vector, zero, store, load_one = lanes * size, np.dtype(sizes.acc).type(0), storer(acc), loader(acc, acc)
    add_packed, add_in_place = adder(acc, acc, lanes, block), adder(dtype, acc, lanes, block)
    pack_rows, read_rows = rows_packer(dtype, sizes, lanes), reader(dtype, sizes).read_rows
    fits, add_codes = code_product(acc, lanes, PANELS, block)

    @part
    def add_carefully(p, a, rows, n, t, values, j, x, steps, sums, width):
        """Add ``P @ V`` key by key, without the values that a row drops: they are not all finite."""
        for r in range(n):
            for y in range(steps):
                if keeps(p, a, rows, r, j + y):
                    weight = load_one(t + (r * block + x + y) * size)
                    for d in range(p.Ev):
                        to = sums + (r * width + d) * size
                        store(to, fma(weight, load_one(values + (y * width + d) * size), load_one(to)))

    @part
    def add_values(p, a, rows, n, t, value, values, j0, low, high, complete, sums, width):
        """Add ``P @ V`` for the keys of ``[low, high)``: from where V lies, or from a packed copy."""
        across, x = width * size, low
        as_codes = complete and fits(value, n)
        in_place = complete and value.direct != 0 and value.width == width and value.across == own
        while x < high:
            j, steps = j0 + x, min(STEP, high - x)
            if in_place:
                page, slot = page_at(value, j)
                steps = min(steps, value.page - slot)
                first = value.first + page * value.leap + slot * value.down
                ahead = soon_in_pages(value, j, p.S, width * own)
                add_in_place(n, t + x * size, first, value.down, steps, sums, width, ahead)
            elif as_codes:
                page, slot = page_at(value, j)
                steps = min(steps, value.page - slot)
                add_codes(value, page, slot, steps, n, t + x * size, sums, values)
            elif complete and value.direct == 0:
                steps = min(steps, DECODED)
                read_rows(value, j, steps, values, across)
                for y in range(steps):
                    for d in range(value.width, width):
                        store(values + y * across + d * size, zero)
                add_packed(n, t + x * size, values, across, steps, sums, width, 0)
            elif pack_rows(value, j, steps, values, across, vector) or complete:
                add_packed(n, t + x * size, values, across, steps, sums, width, 0)
            else:
                add_carefully(p, a, rows, n, t, values, j, x, steps, sums, width)
            x += steps

    return add_values
