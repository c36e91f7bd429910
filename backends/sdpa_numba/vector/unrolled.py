"""The two pieces of unrolled code: a square that is transposed, and a matrix product, each in registers."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import emit
from .emit import I16, I64, LLVM, call, exchange, fetch, itemsize, join, read, splat_value, widen, write


def transposer(source, target, working, lanes, columns, table=False, ahead=False):
    """Return ``transpose(a, a_row, a_last, b, b_row, b_last)``: `lanes` rows and some `columns` from `a` to `b`.

    Row i lies at ``a + min(i, a_last) * a_row``, stored as `source`, and becomes column i of the rows of `b`, stored as
    `target`; `working` is the type between. With `table`, `a` lists the addresses of the rows and `a_row` is added.
    With `ahead`, the next `lanes` rows are asked for. Half-precise numbers move in pairs where the columns allow it.
    """
    paired = itemsize(source) == 2 and working == "float32" and columns % 8 == 0
    raw = "int32" if paired else "bfloat16" if source == "float16" else source  # LLVM joins halves one by one

    def number(builder, stored):
        return widen(builder, builder.bitcast(stored, ir.VectorType(LLVM[source], lanes)), source, working)

    @intrinsic
    def transpose(_, a, a_row, a_last, b, b_row, b_last):
        def generate(context, builder, signature, arguments):
            a, a_row, a_last, b, b_row, b_last = arguments

            def row(base, stride, last, i):
                inside = builder.icmp_signed("<", I64(i), last)
                return builder.add(base, builder.mul(builder.select(inside, I64(i), last), stride))

            def listed(i):
                return builder.add(read(builder, builder.add(a, I64(8 * i)), "int64", "int64"), a_row)

            # pieces of 16 bytes are loaded to where they belong; only within them are numbers exchanged
            piece = min(lanes, 16 // itemsize(working))
            begin = [listed(i) if table else row(a, a_row, a_last, i) for i in range(lanes)]
            rows = []
            if ahead:  # a processor does not foresee that column blocks of a row are followed by another row
                for address in begin:
                    emit.prefetch(builder, builder.add(address, builder.mul(a_row, I64(lanes))))
            for offset in range(0, columns * itemsize(source), piece * itemsize(raw)):
                square = []
                for k in range(piece):
                    parts = [
                        fetch(builder, builder.add(begin[i], I64(offset)), raw, piece) for i in range(k, lanes, piece)
                    ]
                    square.append(join(builder, parts) if paired else number(builder, join(builder, parts)))
                for moved in exchange(builder, square):
                    shifted = [builder.lshr(moved, emit.constant(moved, bits)) for bits in (0, 16)] if paired else []
                    rows += [number(builder, builder.trunc(x, ir.VectorType(I16, lanes))) for x in shifted] or [moved]
            for i in range(columns):
                write(builder, row(b, b_row, b_last, i), rows[i], target)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return transpose


def tiler(target, rows, vectors, lanes, accumulate, source=None):
    """Return ``tile(a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor)``, a matrix product in registers.

    It sets ``C = factor * (A @ B)``, or adds ``A @ B`` to C, for A of `rows` x steps numbers and B of steps x
    ``vectors * lanes``, stored as `source` (by default as `target`). All strides are in bytes. Each number of C is one
    chain of fused multiply-adds in the order of the steps, whatever the tile's size is.
    """
    element = LLVM[target]
    vector = ir.VectorType(element, lanes)
    size = itemsize(target)

    @intrinsic
    def tile(_, a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor):
        def generate(context, builder, signature, arguments):
            a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor = arguments

            def cell(row, column):
                return builder.add(builder.add(c, builder.mul(c_row, I64(row))), I64(column * lanes * size))

            entry = builder.block
            zero = splat_value(builder, element(0.0), lanes)
            cells = [(row, column) for row in range(rows) for column in range(vectors)]
            starts = [read(builder, cell(*rc), target, target, lanes) if accumulate else zero for rc in cells]
            loop, done = builder.append_basic_block("steps"), builder.append_basic_block("steps.end")
            builder.cbranch(builder.icmp_signed("<", I64(0), steps), loop, done)
            builder.position_at_end(loop)
            step, a_now, b_now = builder.phi(I64), builder.phi(I64), builder.phi(I64)
            sums = [builder.phi(vector) for _ in cells]
            columns = [
                read(builder, builder.add(b_now, builder.mul(b_vector, I64(column))), source or target, target, lanes)
                for column in range(vectors)
            ]
            results = []
            for row in range(rows):
                scalar = read(builder, builder.add(a_now, builder.mul(a_row, I64(row))), target, target)
                left = splat_value(builder, scalar, lanes)
                for column in range(vectors):
                    results.append(call(builder, "fma", left, columns[column], sums[row * vectors + column]))
            following = builder.add(step, I64(1))
            for phi, start, value in zip(
                (step, a_now, b_now, *sums),
                (I64(0), a, b, *starts),
                (following, builder.add(a_now, a_step), builder.add(b_now, b_step), *results),
                strict=True,
            ):
                phi.add_incoming(start, entry)
                phi.add_incoming(value, loop)
            builder.cbranch(builder.icmp_signed("<", following, steps), loop, done)
            builder.position_at_end(done)
            finals = [builder.phi(vector) for _ in cells]
            for final, start, value in zip(finals, starts, results, strict=True):
                final.add_incoming(start, entry)
                final.add_incoming(value, loop)
            scale = splat_value(builder, factor, lanes)
            for (row, column), final in zip(cells, finals, strict=True):
                write(builder, cell(row, column), final if accumulate else builder.fmul(final, scale), target)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9, getattr(types, target)), generate

    return tile
