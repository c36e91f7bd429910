"""Products of rows with rows of weights that are read as they are stored: numbers of 16 bits, or codes with scales."""

from typing import NamedTuple

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from .emit import I32, I64, LINE, LLVM, call, constant, fetch, itemsize, prefetch, read, splat_value, widen, write
from .unrolled import keep_rolled

CHUNK = 32  # numbers of a row at a time, which share a scale
AHEAD = 4096  # bytes from what is read to what is prefetched: a processor does not foresee what lies in the next page


class Code(NamedTuple):
    """How weights are stored: the type of the numbers or "nibble", those of scale and offset or "", and the zero."""

    source: str
    scale: str = ""
    offset: str = ""
    zero: int = 0

    @property
    def chunk_bytes(self):
        """Bytes of as many numbers as are read at a time."""
        return CHUNK // 2 if self.source == "nibble" else CHUNK * itemsize(self.source)


def dotter(code, rows, columns, lanes):
    """Return ``dots(x, x_row, w, w_row, s, s_row, o, o_row, run, width, y, y_row, more)``.

    It sets y to the products of `rows` rows of x, float32, and `columns` rows of weights, of `width` numbers each, or
    where there were `more` numbers before adds them; s and o are the scales and offsets, each of which serves `run`
    numbers. `width` and `run` are multiples of `CHUNK`; strides are in bytes. For nibbles x is as `halver` makes it.
    Weights are rounded to float32 once. Each lane of a product is a chain of fused multiply-adds, or of codes the sum
    of a chain for each `CHUNK`, whatever is computed beside it.
    """
    vector = ir.VectorType(LLVM["float32"], lanes)
    cells = [(row, column) for row in range(rows) for column in range(columns)]

    def vectors(builder, at, step):
        """Return the numbers of one or two vectors of weights, from number `step` of a chunk on."""
        if code.source == "nibble":
            pairs = fetch(builder, builder.add(at, I64(step // 2)), "uint8", lanes)
            pairs = builder.zext(pairs, ir.VectorType(I32, lanes))
            halves = builder.and_(pairs, constant(pairs, 15)), builder.lshr(pairs, constant(pairs, 4))
            codes = [builder.sub(half, constant(half, code.zero)) if code.zero else half for half in halves]
            return [builder.sitofp(each, vector) for each in codes]
        y = read(builder, builder.add(at, I64(step * itemsize(code.source))), code.source, "float32", lanes)
        return [builder.fsub(y, constant(y, float(code.zero))) if code.zero else y]

    @intrinsic
    def dots(_, x, x_row, w, w_row, s, s_row, o, o_row, run, width, y, y_row, more):
        def generate(context, builder, signature, arguments):
            x, x_row, w, w_row, s, s_row, o, o_row, run, width, y, y_row, further = arguments

            def apart(base, stride, count):
                return [builder.add(base, builder.mul(stride, I64(i))) for i in range(count)]

            xs, ws, ys = apart(x, x_row, rows), apart(w, w_row, columns), apart(y, y_row, rows)
            ss, os = apart(s, s_row, columns), apart(o, o_row, columns)

            def factors(kind, bases, at):
                if not kind:
                    return None
                along = builder.mul(at, I64(itemsize(kind)))
                numbers = [fetch(builder, builder.add(base, along), kind) for base in bases]
                return [widen(builder, splat_value(builder, number, lanes), kind, "float32") for number in numbers]

            entry, loop, done = builder.block, *map(builder.append_basic_block, ("dots", "dots.end"))
            builder.branch(loop)
            builder.position_at_end(loop)
            step, left, group = (builder.phi(I64) for _ in range(3))
            sums = {cell: builder.phi(vector) for cell in cells}
            zero = ir.Constant(vector, [0.0] * lanes)
            results = dict.fromkeys(cells, zero) if code.scale else dict(sums)
            by, plus = factors(code.scale, ss, group), factors(code.offset, os, group)
            x_now, w_now = builder.mul(step, I64(4 * CHUNK)), builder.mul(step, I64(code.chunk_bytes))
            places, x_places = ([builder.add(base, now) for base in bases] for bases, now in ((ws, w_now), (xs, x_now)))
            for place in places if rows == 1 else ():
                for line in range(0, code.chunk_bytes, LINE):
                    prefetch(builder, builder.add(place, I64(AHEAD + line)))
            along = 2 * lanes if code.source == "nibble" else lanes
            for n in range(0, CHUNK, along):
                right = []
                for column in range(columns):
                    numbers = vectors(builder, places[column], n)
                    if by and plus:
                        numbers = [call(builder, "fma", each, by[column], plus[column]) for each in numbers]
                    elif by:
                        numbers = [builder.fmul(each, by[column]) for each in numbers]
                    right.append(numbers)
                for half in range(along // lanes):
                    for row in range(rows):
                        at = builder.add(x_places[row], I64(4 * (n + half * lanes)))
                        left_one = read(builder, at, "float32", "float32", lanes)
                        for column in range(columns):
                            results[row, column] = call(
                                builder, "fma", left_one, right[column][half], results[row, column]
                            )
            if code.scale:  # else the chain of a sum would take longer than all that is done to the codes
                results = {cell: builder.fadd(sums[cell], part) for cell, part in results.items()}
            next_step, next_left = builder.add(step, I64(1)), builder.sub(left, I64(CHUNK))
            over = builder.icmp_signed("<=", next_left, I64(0))
            next_group = builder.select(over, builder.add(group, I64(1)), group)
            next_left = builder.select(over, run, next_left)
            for phi, start, value in (
                (step, I64(0), next_step), (left, run, next_left), (group, I64(0), next_group),
                *((sums[cell], zero, results[cell]) for cell in cells),
            ):  # fmt: skip
                phi.add_incoming(start, entry)
                phi.add_incoming(value, loop)
            more = builder.icmp_signed("<", builder.mul(next_step, I64(CHUNK)), width)
            keep_rolled(builder, builder.cbranch(more, loop, done))
            builder.position_at_end(done)
            for row in range(rows):
                totals = _sums(builder, [results[row, column] for column in range(columns)])
                for column in range(columns):
                    total, to = builder.extract_element(totals, I32(column)), builder.add(ys[row], I64(4 * column))
                    before = read(builder, to, "float32", "float32")
                    anew = builder.icmp_signed("==", further, I64(0))
                    write(builder, to, builder.select(anew, total, builder.fadd(before, total)), "float32")
            return context.get_dummy_value()

        return types.void(*[types.int64] * 13), generate

    return dots


@intrinsic
def prefetch_lines(_, address, count):
    """Prefetch so many lines from an address on."""

    def generate(context, builder, signature, arguments):
        address, count = arguments
        with cgutils.for_range(builder, count, intp=I64) as loop:
            prefetch(builder, builder.add(address, builder.mul(loop.index, I64(LINE))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


def halver(lanes):
    """Return ``halve(source, target)``: of twice as many float32 numbers the even ones, and then the odd ones."""

    @intrinsic
    def halve(_, source, target):
        def generate(context, builder, signature, arguments):
            source, target = arguments
            both = read(builder, source, "float32", "float32", 2 * lanes)
            for odd in (0, 1):
                order = ir.Constant(ir.VectorType(I32, lanes), [2 * i + odd for i in range(lanes)])
                half = builder.shuffle_vector(both, both, order)
                write(builder, builder.add(target, I64(4 * odd * lanes)), half, "float32")
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return halve


def _sums(builder, vectors):
    """Return the sums of the lanes of up to four vectors, each in the order ``((0 + 1) + (2 + 3)) + ...``."""
    lanes = vectors[0].type.count

    def shuffled(x, y, order):
        return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(order)), order))

    def neighbours(x, y):
        even = [four + i for four in range(0, lanes, 4) for i in (0, 2, lanes, lanes + 2)]
        return builder.fadd(shuffled(x, y, even), shuffled(x, y, [i + 1 for i in even]))

    a, b, c, d = (vectors[min(i, len(vectors) - 1)] for i in range(4))
    total = neighbours(neighbours(a, b), neighbours(c, d))
    while total.type.count > 4:
        many = total.type.count // 2
        low, high = (shuffled(total, total, [first + i for i in range(many)]) for first in (0, many))
        total = builder.fadd(low, high)
    return total
