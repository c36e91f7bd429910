"""Unrolled code: squares that are transposed in registers, and codes that are added up as they are read."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from . import emit
from .emit import I8, I16, I32, I64, LLVM, call, exchange, fetch, itemsize, join, read, splat_value, widen, write

AHEAD = 128  # bytes from what is read to what is prefetched of the same row


def transposer(source, target, working, lanes, columns, table=False, whole=False, ahead=False):
    """Return ``transpose(a, a_row, a_last, b, b_row, b_last)``: `lanes` rows and some `columns` from `a` to `b`.

    Row i lies at ``a + min(i, a_last) * a_row``, stored as `source`, and becomes column i of the rows of `b`, stored as
    `target`; `working` is the type between. With `table`, `a` lists the addresses of the rows and `a_row` is added.
    `whole`: no row is missing. With `ahead`, the next `lanes` rows are prefetched, or what follows in rows of a table.
    Half-precise numbers move in pairs where the columns allow it.
    """

    @intrinsic
    def transpose(_, a, a_row, a_last, b, b_row, b_last):
        def generate(context, builder, signature, arguments):
            a, a_row, a_last, b, b_row, b_last = arguments

            if whole:
                a, b = emit.hidden(builder, a), emit.hidden(builder, b)

            def row(base, stride, last, i):
                if whole:
                    return builder.add(base, builder.mul(stride, I64(i)))
                inside = builder.icmp_signed("<", I64(i), last)
                return builder.add(base, builder.mul(builder.select(inside, I64(i), last), stride))

            def listed(i):
                return builder.add(read(builder, builder.add(a, I64(8 * i)), "int64", "int64"), a_row)

            begin = [listed(i) if table else row(a, a_row, a_last, i) for i in range(lanes)]
            if ahead:  # a processor does not foresee that column blocks of a row are followed by another row
                step = I64(AHEAD) if table else builder.mul(a_row, I64(lanes))
                for address in begin:
                    emit.prefetch(builder, builder.add(address, step))
            rows = columns_of(builder, begin, columns, source, working)
            for i in range(columns):
                write(builder, row(b, b_row, b_last, i), rows[i], target)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return transpose


def columns_of(builder, begin, columns, source, working):
    """Return the first `columns` numbers of rows that begin at these addresses: a vector of `working` for each."""
    lanes = len(begin)
    paired = itemsize(source) == 2 and working == "float32" and columns % 8 == 0
    raw = "int32" if paired else "bfloat16" if source == "float16" else source  # LLVM joins halves one by one

    def number(stored):
        return widen(builder, builder.bitcast(stored, ir.VectorType(LLVM[source], lanes)), source, working)

    # pieces of 16 bytes are loaded to where they belong; only within them are numbers exchanged
    piece, found = min(lanes, 16 // itemsize(working)), []
    for offset in range(0, columns * itemsize(source), piece * itemsize(raw)):
        square = []
        for k in range(piece):
            parts = [fetch(builder, builder.add(begin[i], I64(offset)), raw, piece) for i in range(k, lanes, piece)]
            square.append(join(builder, parts) if paired else number(join(builder, parts)))
        for moved in exchange(builder, square):
            shifted = [builder.lshr(moved, emit.constant(moved, bits)) for bits in (0, 16)] if paired else []
            found += [number(builder.trunc(x, ir.VectorType(I16, lanes))) for x in shifted] or [moved]
    return found


def keep_rolled(builder, branch):
    """Keep LLVM from unrolling the loop that goes on by this branch: its body has what the registers hold."""
    module = builder.module
    loop = module.add_metadata([module.add_metadata(["llvm.loop.unroll.disable"]), I64(len(module.metadata))])
    loop.operands = (loop, loop.operands[0])
    branch.set_metadata("llvm.loop", loop)


def byte_transposer(source, target, lanes):
    """Return ``transpose(a, a_row, a_last, zero, scale, offset, b, b_row)`` for codes of a byte, or two in a byte.

    `lanes` rows of eight bytes, of which row i lies at ``a + min(i, a_last) * a_row``, become the columns of rows of
    `b`. Each is ``scale * (code - zero) + offset``, for which `scale` and `offset` have a number for each row.
    """
    nibble = source == "nibble"
    order = {n: ir.Constant(ir.VectorType(I32, 16), [n + i // 2 + 16 * (i % 2) for i in range(16)]) for n in (0, 8)}

    def columns_of(builder, rows):
        """Return eight columns of eight rows, as the two halves of four vectors."""
        rows = [builder.shuffle_vector(rows[i], rows[i + 4], order[0]) for i in range(4)]
        for _ in range(2):
            rows = [builder.shuffle_vector(rows[i], rows[i + 2], order[n]) for i in (0, 1) for n in (0, 8)]
        return rows

    @intrinsic
    def transpose(_, a, a_row, a_last, zero, scale, offset, b, b_row):
        def generate(context, builder, signature, arguments):
            a, a_row, a_last, zero, scale, offset, b, b_row = arguments
            groups, undefined = [], ir.Constant(ir.VectorType(I8, 8), ir.Undefined)
            wide = ir.Constant(ir.VectorType(I32, 16), list(range(16)))
            for first in range(0, lanes, 8):
                rows = []
                for i in range(first, first + 8):
                    inside = builder.icmp_signed("<", I64(i), a_last)
                    at = builder.add(a, builder.mul(builder.select(inside, I64(i), a_last), a_row))
                    rows.append(builder.shuffle_vector(fetch(builder, at, "uint8", 8), undefined, wide))
                groups.append(columns_of(builder, rows))
            base, factor = splat_value(builder, zero, lanes), read(builder, scale, target, target, lanes)
            shift = read(builder, offset, target, target, lanes)
            many, taken = min(8, lanes), 0
            for column in range(8):
                half = ir.Constant(ir.VectorType(I32, many), [column % 2 * 8 + i for i in range(many)])
                parts = [builder.shuffle_vector(group[column // 2], group[column // 2], half) for group in groups]
                stored = join(builder, parts)
                if nibble:
                    halves = (
                        builder.and_(stored, emit.constant(stored, 15)),
                        builder.lshr(stored, emit.constant(stored, 4)),
                    )
                    numbers = [widen(builder, x, "uint8", target) for x in halves]
                else:
                    numbers = [widen(builder, stored, source, target)]
                for x in numbers:
                    x = builder.fadd(builder.fmul(builder.fsub(x, base), factor), shift)
                    write(builder, builder.add(b, builder.mul(b_row, I64(taken))), x, target)
                    taken += 1
            return context.get_dummy_value()

        number = getattr(types, target)
        return types.void(*[types.int64] * 3, number, *[types.int64] * 4), generate

    return transpose


def code_adder(source, target, rows, vectors, lanes):
    """Return ``add(a, a_row, b, b_step, scale, zero, c, c_row, steps)``: to C is added ``A @ (scale * (B - zero))``.

    A has `rows` x steps numbers, B steps x ``vectors * lanes`` codes, and each step a scale. Each number of C is one
    chain of fused multiply-adds that begins with C; numbers of B are rounded as `byte_transposer` rounds them. Only
    codes of four bits have a `zero` here.
    """
    element, size, nibble = LLVM[target], itemsize(target), source == "nibble"
    vector, bytes_of = ir.VectorType(element, lanes), lanes // 2 if nibble else lanes
    cells = [(row, column) for row in range(rows) for column in range(vectors)]

    @intrinsic
    def add(_, a, a_row, b, b_step, scale, zero, c, c_row, steps):
        def generate(context, builder, signature, arguments):
            a, a_row, b, b_step, scale, zero, c, c_row, steps = arguments

            def cell(row, column):
                return builder.add(builder.add(c, builder.mul(c_row, I64(row))), I64(column * lanes * size))

            base = splat_value(builder, zero, lanes)
            starts = [read(builder, cell(*place), target, target, lanes) for place in cells]
            entry, loop, done = builder.block, *map(builder.append_basic_block, ("codes", "codes.end"))
            builder.cbranch(builder.icmp_signed("<", I64(0), steps), loop, done)
            builder.position_at_end(loop)
            step, b_now = builder.phi(I64), builder.phi(I64)
            sums = [builder.phi(vector) for _ in cells]
            along = builder.mul(step, I64(size))
            by = splat_value(builder, read(builder, builder.add(scale, along), target, target), lanes)
            here = builder.add(a, along)
            places = [builder.add(here, builder.mul(a_row, I64(row))) for row in range(rows)]
            lefts = [splat_value(builder, read(builder, place, target, target), lanes) for place in places]
            results = list(sums)
            for column in range(vectors):
                x = read(builder, builder.add(b_now, I64(column * bytes_of)), source, target, lanes)
                x = builder.fmul(builder.fsub(x, base) if nibble else x, by)
                for row in range(rows):
                    place = row * vectors + column
                    results[place] = call(builder, "fma", lefts[row], x, sums[place])
            following, b_next = builder.add(step, I64(1)), builder.add(b_now, b_step)
            for phi, start, value in zip(
                (step, b_now, *sums), (I64(0), b, *starts), (following, b_next, *results), strict=True
            ):
                phi.add_incoming(start, entry)
                phi.add_incoming(value, loop)
            keep_rolled(builder, builder.cbranch(builder.icmp_signed("<", following, steps), loop, done))
            builder.position_at_end(done)
            finals = [builder.phi(vector) for _ in cells]
            for place, final, start, value in zip(cells, finals, starts, results, strict=True):
                final.add_incoming(start, entry)
                final.add_incoming(value, loop)
                write(builder, cell(*place), final, target)
            return context.get_dummy_value()

        number = getattr(types, target)
        return types.void(*[types.int64] * 5, number, *[types.int64] * 3), generate

    return add
