"""Products with rows that lie in memory as they are: few rows with many, each line prefetched once in its order."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import emit
from .emit import I64, LINE, LLVM, call, itemsize, read, splat_value, write
from .unrolled import columns_of, keep_rolled


def row_dotter(source, target, rows, lanes, panels):
    """Return ``dots(q, q_row, a, a_row, steps, t, t_row, factor, more, ahead, along)``: products of rows with others.

    There are `rows` in `q`, and in `a` ``panels * lanes``, stored as `source`. A step is as many columns as `row_step`
    says; each prefetches as many bytes as it reads of `a`, from `ahead` on, which moves by `along`. Each number of `t`
    is set to a chain of fused multiply-adds, times `factor`; where there were `more` columns before, the chain is added
    to it first.
    """
    columns, size, source_size = row_step(source, lanes), itemsize(target), itemsize(source)
    vector, lines = ir.VectorType(LLVM[target], lanes), max(1, lanes * columns * source_size // LINE)

    @intrinsic
    def dots(_, q, q_row, a, a_row, steps, t, t_row, factor, more, ahead, along):
        def generate(context, builder, signature, arguments):
            q, q_row, a, a_row, steps, t, t_row, factor, more, ahead, along = arguments
            zero = splat_value(builder, LLVM[target](0.0), lanes)
            entry, loop, done = builder.block, *map(builder.append_basic_block, ("rows", "rows.end"))
            builder.branch(loop)
            builder.position_at_end(loop)
            step, q_now, a_now, soon = (builder.phi(I64) for _ in range(4))
            sums = [builder.phi(vector) for _ in range(panels * rows)]
            results = list(sums)
            for panel in range(panels):
                emit.fence(builder)  # or LLVM reads the numbers of q for all panels first, and has no registers left
                base = emit.hidden(builder, builder.add(a_now, builder.mul(a_row, I64(panel * lanes))))
                numbers = [builder.add(q_now, builder.mul(q_row, I64(row))) for row in range(rows)]
                begin = [builder.add(base, builder.mul(a_row, I64(i))) for i in range(lanes)]
                _fetch_lines(builder, builder.add(soon, I64(panel * lines * LINE)), lines)
                for e, column in enumerate(columns_of(builder, begin, columns, source, target)):
                    for place, first in enumerate(numbers, panel * rows):
                        number = read(builder, builder.add(first, I64(e * size)), target, target)
                        results[place] = call(
                            builder, "fma", splat_value(builder, number, lanes), column, results[place]
                        )
            following = builder.add(step, I64(1))
            q_next, a_next = builder.add(q_now, I64(columns * size)), builder.add(a_now, I64(columns * source_size))
            for phi, start, value in zip(
                (step, q_now, a_now, soon, *sums), (I64(0), q, a, ahead, *[zero] * len(sums)),
                (following, q_next, a_next, builder.add(soon, along), *results), strict=True,
            ):  # fmt: skip
                phi.add_incoming(start, entry)
                phi.add_incoming(value, loop)
            keep_rolled(builder, builder.cbranch(builder.icmp_signed("<", following, steps), loop, done))
            builder.position_at_end(done)
            scale = splat_value(builder, factor, lanes)
            for place, total in enumerate(results):
                panel, row = divmod(place, rows)
                to = builder.add(builder.add(t, builder.mul(t_row, I64(row))), I64(panel * lanes * size))
                before = read(builder, to, target, target, lanes)
                total = builder.select(more, builder.fadd(before, total), total)
                write(builder, to, builder.fmul(total, scale), target)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, getattr(types, target), types.boolean, *[types.int64] * 2), generate

    return dots


def row_adder(source, target, rows, keys, lanes):
    """Return ``add(a, a_row, b, b_row, c, c_row, vectors, ahead, along)``: to C is added ``A @ B``.

    A has `rows` x `keys` numbers, and B `keys` rows of so many vectors, stored as `source`, which are read side by
    side: whole rows in one pass, while C stays in the first cache. Each number of C is one chain of fused multiply-adds
    that begins with C. Each vector prefetches as many bytes as it reads, from `ahead` on, which moves by `along`.
    """
    size, source_size = itemsize(target), itemsize(source)
    lines = keys * lanes * source_size // LINE

    @intrinsic
    def add(_, a, a_row, b, b_row, c, c_row, vectors, ahead, along):
        def generate(context, builder, signature, arguments):
            a, a_row, b, b_row, c, c_row, vectors, ahead, along = arguments
            weights = []
            for row in range(rows):
                first = builder.add(a, builder.mul(a_row, I64(row)))
                weights += [
                    splat_value(builder, read(builder, builder.add(first, I64(key * size)), target, target), lanes)
                    for key in range(keys)
                ]
            entry, loop, done = builder.block, *map(builder.append_basic_block, ("columns", "columns.end"))
            builder.branch(loop)
            builder.position_at_end(loop)
            step, b_now, c_now, soon = (builder.phi(I64) for _ in range(4))
            _fetch_lines(builder, soon, lines)
            places = [builder.add(c_now, builder.mul(c_row, I64(row))) for row in range(rows)]
            totals = [read(builder, place, target, target, lanes) for place in places]
            for key in range(keys):
                here = builder.add(b_now, builder.mul(b_row, I64(key)))
                value = read(builder, here, source, target, lanes)
                for row in range(rows):
                    totals[row] = call(builder, "fma", weights[row * keys + key], value, totals[row])
            for place, total in zip(places, totals, strict=True):
                write(builder, place, total, target)
            following = builder.add(step, I64(1))
            b_next, c_next = builder.add(b_now, I64(lanes * source_size)), builder.add(c_now, I64(lanes * size))
            for phi, start, value in zip(
                (step, b_now, c_now, soon), (I64(0), b, c, ahead),
                (following, b_next, c_next, builder.add(soon, along)), strict=True,
            ):  # fmt: skip
                phi.add_incoming(start, entry)
                phi.add_incoming(value, loop)
            keep_rolled(builder, builder.cbranch(builder.icmp_signed("<", following, vectors), loop, done))
            builder.position_at_end(done)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), generate

    return add


def _fetch_lines(builder, address, lines):
    """Prefetch so many cache lines from `address` on."""
    for line in range(lines):
        emit.prefetch(builder, builder.add(address, I64(line * LINE)))


def row_step(source, lanes):
    """Return how many columns `row_dotter` takes at a time: half-precise numbers move in pairs."""
    return max(lanes, 8) if itemsize(source) == 2 else lanes
