"""What a tile has made of its rows, written to the caller's arrays."""

from functools import cache

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import loader, select, splatter, storer

from .finish import finisher, lse_of
from .pack import transposing
from .rows import at
from .views import batch, data, stride


@cache
def rows_writer(dtype, sizes):
    """Return ``write_rows``."""
    acc, lanes = sizes.acc, sizes.lanes
    number, size = np.dtype(sizes.acc).type, itemsize(sizes.acc)
    vector, one, load, store = lanes * size, number(1), loader(acc, acc, lanes), storer(acc)
    splat, load_one, store_narrow = splatter(acc, lanes), loader(acc, acc), storer(dtype)
    finish = finisher(acc)
    _, turn_out = transposing(acc, dtype, acc, lanes)

    @part
    def write_sums(p, a, b, tile):
        """Write the state of a tile as it is, for more keys to be added."""
        across = tile.vectors * vector
        for r in range(tile.filled):
            row = (b * p.Hq + at(tile.rows.h, r)) * p.L + at(tile.rows.i, r)
            store(data(a.m) + row * size, load_one(tile.whole_m + r * size))
            store(data(a.z) + row * size, load_one(tile.whole_z + r * size))
            for d in range(p.Ev):
                store(data(a.sums) + (row * p.Ev + d) * size, load_one(tile.whole_sums + d * across + r * size))

    @part
    def write_rows(p, a, b, tile):
        """Write the output and lse of a tile; its `factor` becomes what the weights are multiplied by."""
        across, zero = tile.vectors * vector, splat(number(0))
        if p.sums and a.out == 0:
            write_sums(p, a, b, tile)
            return
        for v in range(0, across, vector):
            z = load(tile.whole_z + v)
            store(tile.factor + v, select(z == zero, zero, splat(one) / z))
        for r in range(tile.vectors * lanes if a.sink or a.lse else 0):
            m, z = float(load_one(tile.whole_m + r * size)), float(load_one(tile.whole_z + r * size))
            ratio, top, total = finish(m, z, a.sink, at(tile.rows.h, r))
            store(tile.factor + r * size, number(ratio))
            if a.lse and r < tile.filled:
                row = ((b * p.Hq + at(tile.rows.h, r)) * p.L + at(tile.rows.i, r)) * size
                store(data(a.lse) + row, number(lse_of(top, total)))
                if a.m:
                    store(data(a.m) + row, number(top))
                    store(data(a.z) + row, number(total))
        if a.out == 0:
            return
        for v in range(0, across, vector):
            ratio, empty = load(tile.factor + v), load(tile.whole_z + v) == zero
            for to in range(tile.whole_sums + v, tile.whole_sums + v + p.Ev * across, across):
                store(to, select(empty, zero, load(to) * ratio + zero))  # + 0: never -0
        out, head, row, column = batch(a.out, 3, a.query, b), stride(a.out, 3), stride(a.out, 2), stride(a.out, 1)
        for r in range(0, tile.filled, lanes):
            if p.regular:
                to, step = out + at(tile.rows.h, r) * head + at(tile.rows.i, r) * row, row if p.fold == 1 else head
                turn_out(tile.whole_sums + r * size, across, min(lanes, tile.filled - r), p.Ev, to, step, column)
            else:
                for x in range(r, min(r + lanes, tile.filled)):
                    to = out + at(tile.rows.h, x) * head + at(tile.rows.i, x) * row
                    for d in range(p.Ev):
                        store_narrow(to + d * column, load_one(tile.whole_sums + d * across + x * size))

    return write_rows
