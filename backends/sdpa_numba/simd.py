"""Vectors for Numba: a type for LLVM's vectors, the operations that the kernels need, and two kernels' worth of unrolling.

Everything here is ordinary LLVM IR, so it is legal for every processor: a vector longer than a register is split, and
a shorter one is widened. Addresses are plain integers in bytes.
"""

import operator

import numpy as np
from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
NUMBA = {4: types.float32, 8: types.float64}
LLVM = {"float16": ir.HalfType(), "bfloat16": I16, "float32": ir.FloatType(), "float64": ir.DoubleType(), "int32": I32, "int64": I64,
        "bool": ir.IntType(8)}


def itemsize(name):
    """Return the bytes of one number of the type with this name."""
    return 2 if name == "bfloat16" else np.dtype(name).itemsize



class Vector(types.Type):
    """`lanes` numbers of one Numba type, held in registers."""

    def __init__(self, element, lanes):
        self.element, self.lanes = element, lanes
        super().__init__(name=f"Vector({element}, {lanes})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """An LLVM vector as it is."""

    def __init__(self, manager, vector):
        element = ir.IntType(1) if vector.element == types.boolean else manager.lookup(vector.element).get_value_type()
        super().__init__(manager, vector, ir.VectorType(element, vector.lanes))


def define_operator(operation, emit, result=lambda vector: vector):
    """Make `operation` work on two vectors of one type."""

    @type_callable(operation)
    def type_operation(_):
        return lambda x, y: result(x) if isinstance(x, Vector) and x == y else None

    @lower_builtin(operation, Vector, Vector)
    def lower_operation(_, builder, signature, arguments):
        return emit(builder, *arguments)


def mask_of(vector):
    """Return the type of a comparison of two such vectors."""
    return Vector(types.boolean, vector.lanes)


def either(integer, real):
    """Return the function that emits `integer` or `real`, by the type of the first operand."""
    return lambda b, x, y: (integer if isinstance(x.type.element, ir.IntType) else real)(b, x, y)


define_operator(operator.add, either(ir.IRBuilder.add, ir.IRBuilder.fadd))
define_operator(operator.sub, either(ir.IRBuilder.sub, ir.IRBuilder.fsub))
define_operator(operator.mul, either(ir.IRBuilder.mul, ir.IRBuilder.fmul))
define_operator(operator.truediv, ir.IRBuilder.fdiv)
define_operator(operator.and_, ir.IRBuilder.and_)
define_operator(operator.or_, ir.IRBuilder.or_)
define_operator(operator.xor, ir.IRBuilder.xor)
define_operator(operator.rshift, ir.IRBuilder.lshr)
define_operator(operator.eq, lambda b, x, y: b.fcmp_ordered("==", x, y), mask_of)
define_operator(
    operator.lt,
    either(lambda b, x, y: b.icmp_signed("<", x, y), lambda b, x, y: b.fcmp_ordered("<", x, y)),
    mask_of,
)


def splat_value(builder, value, lanes):
    """Return the LLVM vector that holds `value` in all its lanes."""
    vector = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    zeros = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
    return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)


def call(builder, name, *arguments):
    """Return the result of LLVM's intrinsic function `name` for the type of its first argument."""
    kind = arguments[0].type
    element, count = (kind.element, f"v{kind.count}") if isinstance(kind, ir.VectorType) else (kind, "")
    suffix = {"float": "f32", "double": "f64"}[str(element)]
    signature = ir.FunctionType(kind, [kind] * len(arguments))
    function = cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{count}{suffix}")
    return builder.call(function, arguments)


def fetch(builder, address, source, lanes=None):
    """Return what lies at `address`, as it is stored: a scalar or a vector."""
    kind = ir.VectorType(LLVM[source], lanes) if lanes else LLVM[source]
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = itemsize(source)
    return value


def widen(builder, value, source, target):
    """Return a fetched value as a number of type `target`.

    A boolean becomes 0 or 1. A finite float64 beyond float32 becomes the largest float32.
    """
    lanes = value.type.count if isinstance(value.type, ir.VectorType) else None
    shape = (lambda kind: ir.VectorType(kind, lanes)) if lanes else (lambda kind: kind)

    def constant(kind, x):
        return splat_value(builder, ir.Constant(kind, x), lanes) if lanes else ir.Constant(kind, x)

    if source == target:
        return value
    if source == "bool":
        return builder.uitofp(value, shape(LLVM[target]))
    if source == "bfloat16":
        value = builder.shl(builder.zext(value, shape(I32)), constant(I32, 16))
        return widen(builder, builder.bitcast(value, shape(LLVM["float32"])), "float32", target)
    if itemsize(source) < itemsize(target):
        return builder.fpext(value, shape(LLVM[target]))
    for largest, outside in ((3.4028234663852886e38, ">"), (-3.4028234663852886e38, "<")):
        limit, infinite = constant(LLVM[source], largest), constant(LLVM[source], largest * np.inf)
        beyond = builder.and_(builder.fcmp_ordered(outside, value, limit), builder.fcmp_ordered("!=", value, infinite))
        value = builder.select(beyond, limit, value)
    return builder.fptrunc(value, shape(LLVM[target]))


def read(builder, address, source, target, lanes=None):
    """Return what lies at `address`, stored as `source`, as a scalar or a vector of `target`."""
    return widen(builder, fetch(builder, address, source, lanes), source, target)


def join(builder, parts):
    """Return the vector that holds the equally long `parts` one behind the other."""
    while len(parts) > 1:
        order = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [builder.shuffle_vector(x, y, order) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def exchange(builder, rows):
    """Return `rows` with every square of as many columns transposed."""
    lanes, distance = rows[0].type.count, len(rows) // 2
    while distance:
        first = [i if not i & distance else lanes + i - distance for i in range(lanes)]
        second = [i + distance if not i & distance else lanes + i for i in range(lanes)]
        orders = [ir.Constant(ir.VectorType(I32, lanes), order) for order in (first, second)]
        for i in range(len(rows)):
            if not i & distance:
                pair = rows[i], rows[i + distance]
                rows[i], rows[i + distance] = (builder.shuffle_vector(*pair, order) for order in orders)
        distance //= 2
    return rows


def write(builder, address, value, target):
    """Store `value` at `address`, rounded to `target`: to nearest, ties to even, NaN stays NaN."""
    lanes = value.type.count if isinstance(value.type, ir.VectorType) else None
    shape = (lambda kind: ir.VectorType(kind, lanes)) if lanes else (lambda kind: kind)
    if target == "bfloat16":
        bits = builder.bitcast(value, shape(I32))

        def constant(x):
            return splat_value(builder, ir.Constant(I32, x), lanes) if lanes else ir.Constant(I32, x)

        odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
        rounded = builder.add(bits, builder.add(odd, constant(0x7FFF)))
        quiet = builder.or_(bits, constant(0x400000))
        bits = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
        value = builder.trunc(builder.lshr(bits, constant(16)), shape(I16))
    elif value.type != shape(LLVM[target]):
        value = builder.fptrunc(value, shape(LLVM[target]))
    instruction = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    instruction.align = itemsize(target)


def loader(source, target, lanes=None):
    """Return ``load(address)``: a vector (a scalar without `lanes`) stored as `source`, widened to `target`."""
    element = getattr(types, target)
    result = Vector(element, lanes) if lanes else element

    @intrinsic
    def load(_, address):
        return result(types.int64), lambda context, b, signature, args: read(b, args[0], source, target, lanes)

    return load


def storer(target):
    """Return ``store(address, value)`` for vectors and scalars, rounded to `target`."""

    @intrinsic
    def store(_, address, value):
        def generate(context, builder, signature, arguments):
            write(builder, arguments[0], arguments[1], target)
            return context.get_dummy_value()

        return types.void(types.int64, value), generate

    return store


def splatter(target, lanes):
    """Return ``splat(x)``: a vector that holds the number `x` in all lanes; int32 lanes for ``target="int32"``."""
    element = getattr(types, target)

    @intrinsic
    def splat(_, x):
        def generate(context, builder, signature, arguments):
            return splat_value(builder, arguments[0], lanes)

        return Vector(element, lanes)(element), generate

    return splat


def record_reader(dtype):
    """Return ``read(address)``: the record of this structured type that lies there."""
    record = from_dtype(dtype)

    @intrinsic
    def read_record(_, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(record))

        return record(types.int64), generate

    return read_record


@intrinsic
def load_int64(_, address):
    """Return the int64 at `address`."""
    generate = lambda context, b, signature, args: b.load(b.inttoptr(args[0], I64.as_pointer()))  # noqa: E731
    return types.int64(types.int64), generate


@intrinsic
def load_int32(_, address):
    """Return the int32 at `address`."""
    generate = lambda context, b, signature, args: b.load(b.inttoptr(args[0], I32.as_pointer()))  # noqa: E731
    return types.int32(types.int64), generate


@intrinsic
def load_byte(_, address):
    """Return the byte at `address`."""
    generate = lambda context, b, signature, args: b.load(b.inttoptr(args[0], ir.IntType(8).as_pointer()))  # noqa: E731
    return types.uint8(types.int64), generate


@intrinsic
def fma(_, x, y, z):
    """Return x * y + z, rounded once."""
    return x(x, x, x), lambda context, b, signature, args: call(b, "fma", *args)


@intrinsic
def select(_, mask, x, y):
    """Return x where `mask`, else y."""
    return x(mask, x, x), lambda context, b, signature, args: b.select(*args)


@intrinsic
def absolute(_, x):
    """Return |x|."""
    return x(x), lambda context, b, signature, args: call(b, "fabs", *args)


@intrinsic
def copysign(_, x, y):
    """Return x with the sign of y."""
    return x(x, x), lambda context, b, signature, args: call(b, "copysign", *args)


@intrinsic
def any_lane(_, mask):
    """Return whether any lane of `mask` is true."""

    def generate(context, builder, signature, arguments):
        bits = builder.bitcast(arguments[0], ir.IntType(signature.args[0].lanes))
        return builder.icmp_unsigned("!=", bits, ir.Constant(bits.type, 0))

    return types.boolean(mask), generate


@intrinsic
def power_of_two(_, x):
    """Return 2**n for the integer n that the low bits of `x` hold, plus the exponent's bias."""

    def generate(context, builder, signature, arguments):
        vector = arguments[0].type
        bits, mantissa = (I32, 23) if vector.element == ir.FloatType() else (I64, 52)
        integers = builder.bitcast(arguments[0], ir.VectorType(bits, vector.count))
        return builder.bitcast(builder.shl(integers, splat_value(builder, bits(mantissa), vector.count)), vector)

    return x(x), generate


@intrinsic
def lane(_, vector, index):
    """Return the number in one lane."""
    return vector.element(vector, types.int64), lambda context, b, signature, args: b.extract_element(*args)


@intrinsic
def sum_fours(_, vector):
    """Return, in each lane, the sum of its group of four lanes: ``(a + b) + (c + d)``."""

    def generate(context, builder, signature, arguments):
        value, lanes = arguments[0], signature.args[0].lanes
        for distance in (1, 2):
            order = ir.Constant(ir.VectorType(I32, lanes), [i ^ distance for i in range(lanes)])
            value = builder.fadd(value, builder.shuffle_vector(value, value, order))
        return value

    return vector(vector), generate


def transposer(source, target, working, lanes, table=False):
    """Return ``transpose(a, a_row, a_last, b, b_row, b_last)``: a square of `lanes` rows from `a` to `b`.

    Row i lies at ``a + min(i, a_last) * a_row``, stored as `source`, and becomes column i of the rows of `b`, stored as
    `target`; `working` is the type between. With `table`, `a` holds the addresses of the rows and `a_row` is added to them.
    """

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
            raw = "bfloat16" if source == "float16" else source  # LLVM joins integers well, and halves one by one
            begin = [listed(i) if table else row(a, a_row, a_last, i) for i in range(lanes)]
            rows = []
            for column in range(0, lanes, piece):
                offset = I64(column * itemsize(source))
                square = []
                for k in range(piece):
                    parts = [fetch(builder, builder.add(begin[i], offset), raw, piece) for i in range(k, lanes, piece)]
                    stored = builder.bitcast(join(builder, parts), ir.VectorType(LLVM[source], lanes))
                    square.append(widen(builder, stored, source, working))
                rows += exchange(builder, square)
            for i in range(lanes):
                write(builder, row(b, b_row, b_last, i), rows[i], target)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), generate

    return transpose


def tiler(target, rows, vectors, lanes, accumulate):
    """Return ``tile(a, a_row, a_step, b, b_vector, b_step, c, c_row, steps, factor)``, a matrix product in registers.

    It sets ``C = factor * (A @ B)``, or adds ``A @ B`` to C, for A of `rows` x steps numbers and B of steps x
    ``vectors * lanes``. All strides are in bytes. Each number of C is one chain of fused multiply-adds in the order of
    the steps, whatever the tile's size is.
    """
    element = LLVM[target]
    vector = ir.VectorType(element, lanes)
    size = np.dtype(target).itemsize

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
                read(builder, builder.add(b_now, builder.mul(b_vector, I64(column))), target, target, lanes)
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
