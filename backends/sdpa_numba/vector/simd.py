"""Vectors for Numba: a type for LLVM's vectors and the operations that the kernels need.

Everything here is ordinary LLVM IR, so it is legal for every processor: a vector longer than a register is split, and
a shorter one is widened. No operation may assume that there is no NaN and no infinity.
"""

import operator

from llvmlite import ir
from numba import from_dtype, types
from numba.core import cgutils
from numba.extending import intrinsic, lower_builtin, models, register_model, type_callable

from .emit import I32, I64, LLVM, call, hidden, read, splat_value, write


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


@intrinsic
def concealed(_, address):
    """Return an address of which LLVM does not know that it is the same.

    What is chosen between a number and what lies at the address would else be stored there under a mask, for which some
    processors take twenty operations.
    """
    return types.int64(types.int64), lambda context, builder, signature, arguments: hidden(builder, *arguments)


def splatter(target, lanes):
    """Return ``splat(x)``: a vector that holds the number `x` in all lanes."""
    element = getattr(types, target)

    @intrinsic
    def splat(_, x):
        def generate(context, builder, signature, arguments):
            return splat_value(builder, arguments[0], lanes)

        return Vector(element, lanes)(element), generate

    return splat


def polynomial(target, lanes, coefficients):
    """Return ``evaluate(x)``: the polynomial with these coefficients, from that of the power 0 on, by Horner's rule."""
    vector = Vector(getattr(types, target), lanes)

    @intrinsic
    def evaluate(_, x):
        def generate(context, builder, signature, arguments):
            (x,) = arguments
            *others, value = (splat_value(builder, LLVM[target](float(c)), lanes) for c in coefficients)
            for coefficient in reversed(others):
                value = call(builder, "fma", value, x, coefficient)
            return value

        return vector(vector), generate

    return evaluate


def ramp(target, lanes):
    """Return ``numbers()``: a vector of 0, 1, 2 and so on."""
    vector = Vector(getattr(types, target), lanes)
    counted = list(range(lanes)) if target.startswith("int") else [float(n) for n in range(lanes)]

    @intrinsic
    def numbers(_):
        constant = ir.Constant(ir.VectorType(LLVM[target], lanes), counted)
        return vector(), lambda context, builder, signature, arguments: constant

    return numbers


def record_reader(dtype):
    """Return ``read(address)``: the record of this structured type that lies there."""
    record = from_dtype(dtype)

    @intrinsic
    def read_record(_, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(record))

        return record(types.int64), generate

    return read_record


def tuple_reader(named, dtype):
    """Return ``read(address)``: a named tuple of those int64 fields of a record of this structured type."""
    result = types.NamedUniTuple(types.int64, len(named._fields), named)
    offsets = [dtype.fields[name][1] for name in named._fields]

    @intrinsic
    def read_tuple(_, address):
        def generate(context, builder, signature, arguments):
            numbers = [read(builder, builder.add(arguments[0], I64(at)), "int64", "int64") for at in offsets]
            return context.make_tuple(builder, signature.return_type, numbers)

        return result(types.int64), generate

    return read_tuple


load_int32, load_int64 = loader("int32", "int32"), loader("int64", "int64")


@intrinsic
def allocate(_, size):
    """Return the address of `size` new bytes, which `release` takes back, or raise a MemoryError."""

    def generate(context, builder, signature, arguments):
        return builder.ptrtoint(context.nrt.allocate(builder, arguments[0]), I64)

    return types.int64(types.int64), generate


@intrinsic
def release(_, address):
    """Give memory back that `allocate` has returned."""

    def generate(context, builder, signature, arguments):
        context.nrt.free(builder, builder.inttoptr(arguments[0], cgutils.voidptr_t))
        return context.get_dummy_value()

    return types.void(types.int64), generate


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
