"""A matrix product in registers, unrolled."""

from typing import Any, NamedTuple

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import emit
from .emit import I64, LLVM, call, itemsize, read, splat_value, write
from .pairs import dot2, read_pairs
from .unrolled import keep_rolled

CHAIN = 128  # steps of a product whose sum is one chain; the sums of longer products are added up


class Tile(NamedTuple):
    """What a product is unrolled for: the types of C and of B, rows of A, and vectors of so many lanes of B."""

    target: str
    source: str
    rows: int
    vectors: int
    lanes: int
    products: str = ""  # of pairs of bfloat16 numbers, by this instruction

    @property
    def cells(self) -> list[tuple[int, int]]:
        """Row and vector of each register of C."""
        return [(row, column) for row in range(self.rows) for column in range(self.vectors)]


class Strides(NamedTuple):
    """Bytes between rows and steps of A, and between vectors and steps of B; and four rows of A."""

    a_row: Any
    a_step: Any
    b_vector: Any
    b_step: Any
    further: Any


def tiler(target, rows, vectors, lanes, accumulate, source=None, products=""):
    """Return ``tile(a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor)``, a matrix product in registers.

    It sets ``C = factor * (A @ B)``, or adds ``A @ B`` to C (to nothing where `factor` is 0), for A of `rows` x steps
    numbers and B of steps x ``vectors * lanes``, stored as `source` (by default as `target`). All strides are in bytes.
    Each number of C is chains of fused multiply-adds, each over `CHAIN` steps and added to those before it, or one
    chain that begins with C where that is added to; in the order of the steps, whatever the tile's size is. With
    `products`, A and B hold words, pairs of bfloat16 numbers (see `pairs`), and a step adds both products; where
    `source` is bfloat16, a step of B is two rows of numbers, which are paired as they are read.
    """
    shape, size = Tile(target, source or target, rows, vectors, lanes, products), itemsize(target)
    make = _add if accumulate else _set

    @intrinsic
    def tile(_, a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor):
        def generate(context, builder, signature, arguments):
            a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor = arguments
            further = None
            if rows > 4:  # hidden from LLVM, which would make each address by adding to the one before
                further = emit.hidden(builder, builder.mul(a_row, I64(4)))

            def cell(row, column):
                return builder.add(builder.add(c, builder.mul(c_row, I64(row))), I64(column * lanes * size))

            make(builder, shape, Strides(a_row, a_step, b_vector, b_step, further), a, b, cell, steps, factor)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9, getattr(types, target)), generate

    return tile


def _add(builder, tile, strides, a, b, cell, steps, factor):
    """Add a product to C, in one chain."""
    target, lanes, element = tile.target, tile.lanes, LLVM[tile.target]
    zero = splat_value(builder, element(0.0), lanes)
    fresh = builder.fcmp_ordered("==", factor, element(0.0))
    starts = [read(builder, cell(*place), target, target, lanes) for place in tile.cells]
    starts = [builder.select(fresh, zero, start) for start in starts]
    for place, final in zip(tile.cells, _chain(builder, tile, strides, a, b, steps, starts)[2], strict=True):
        write(builder, cell(*place), final, target)


def _set(builder, tile, strides, a, b, cell, steps, factor):
    """Set C to a product times a factor, in chains that are added up."""
    target, lanes, element, cells = tile.target, tile.lanes, LLVM[tile.target], tile.cells
    vector = ir.VectorType(element, lanes)
    zero, scale = splat_value(builder, element(0.0), lanes), splat_value(builder, factor, lanes)
    first, loop, end = builder.block, *map(builder.append_basic_block, ("chains", "chains.end"))
    alone, joined, scaled = map(builder.append_basic_block, ("first", "further", "scale"))
    builder.branch(loop)
    builder.position_at_end(loop)
    done, a_now, b_now = builder.phi(I64), builder.phi(I64), builder.phi(I64)
    left = builder.sub(steps, done)
    count = builder.select(builder.icmp_signed("<", left, I64(CHAIN)), left, I64(CHAIN))
    a_next, b_next, sums = _chain(builder, tile, strides, a_now, b_now, count, [zero] * len(cells))
    builder.cbranch(builder.icmp_signed("==", done, I64(0)), alone, joined)
    builder.position_at_end(alone)
    builder.branch(scaled)
    builder.position_at_end(joined)
    before = [read(builder, cell(*place), target, target, lanes) for place in cells]
    totals = [builder.fadd(x, y) for x, y in zip(before, sums, strict=True)]
    builder.branch(scaled)
    builder.position_at_end(scaled)
    values = [builder.phi(vector) for _ in cells]
    for value, own, total in zip(values, sums, totals, strict=True):
        value.add_incoming(own, alone)
        value.add_incoming(total, joined)
    following = builder.add(done, count)
    more = builder.icmp_signed("<", following, steps)
    now = builder.select(more, splat_value(builder, element(1.0), lanes), scale)
    for place, value in zip(cells, values, strict=True):
        write(builder, cell(*place), builder.fmul(value, now), target)
    for phi, start, value in zip((done, a_now, b_now), (I64(0), a, b), (following, a_next, b_next), strict=True):
        phi.add_incoming(start, first)
        phi.add_incoming(value, scaled)
    builder.cbranch(more, loop, end)
    builder.position_at_end(end)


def _chain(builder, tile, strides, a, b, steps, starts):
    """Return where A and B go on after so many steps, and the sums over them, one a register."""
    entry, vector = builder.block, ir.VectorType(LLVM[tile.target], tile.lanes)
    loop, done = builder.append_basic_block("steps"), builder.append_basic_block("steps.end")
    builder.cbranch(builder.icmp_signed("<", I64(0), steps), loop, done)
    builder.position_at_end(loop)
    step, a_now, b_now = builder.phi(I64), builder.phi(I64), builder.phi(I64)
    sums = [builder.phi(vector) for _ in tile.cells]
    results = _step(builder, tile, strides, a_now, b_now, sums)
    following = builder.add(step, I64(1))
    a_next, b_next = builder.add(a_now, strides.a_step), builder.add(b_now, strides.b_step)
    for phi, start, value in zip(
        (step, a_now, b_now, *sums), (I64(0), a, b, *starts), (following, a_next, b_next, *results), strict=True
    ):
        phi.add_incoming(start, entry)
        phi.add_incoming(value, loop)
    keep_rolled(builder, builder.cbranch(builder.icmp_signed("<", following, steps), loop, done))
    builder.position_at_end(done)
    finals = [builder.phi(start.type) for start in (a, b, *starts)]
    for final, start, value in zip(finals, (a, b, *starts), (a_next, b_next, *results), strict=True):
        final.add_incoming(start, entry)
        final.add_incoming(value, loop)
    return finals[0], finals[1], finals[2:]


def _step(builder, tile, strides, a, b, sums):
    """Return the sums with the products of one column of A and one row of B added."""
    target, source, rows, vectors, lanes, products = tile
    results = list(sums)

    def left(row):
        place = builder.add(a, builder.mul(strides.a_row, I64(row % 4)))
        place = builder.add(place, strides.further) if row >= 4 else place
        return splat_value(builder, read(builder, place, target, target), lanes)

    def right(column):
        place = builder.add(b, builder.mul(strides.b_vector, I64(column)))
        if products and source == "bfloat16":
            return read_pairs(builder, place, builder.ashr(strides.b_step, I64(1)), lanes)
        return read(builder, place, source, target, lanes)

    def add_product(row, column, x, y):
        place = row * vectors + column
        if products:
            results[place] = dot2(builder, products, sums[place], x, y)
        else:
            results[place] = call(builder, "fma", x, y, sums[place])

    if rows < vectors:  # what there is less of stays in registers while the other passes by
        lefts = [left(row) for row in range(rows)]
        for column in range(vectors):
            now = right(column)
            for row in range(rows):
                add_product(row, column, lefts[row], now)
    else:
        rights = [right(column) for column in range(vectors)]
        for row in range(rows):
            now = left(row)
            for column in range(vectors):
                add_product(row, column, now, rights[column])
    return results
