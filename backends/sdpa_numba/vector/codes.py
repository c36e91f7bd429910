"""Vectors of float64 rounded to codes of eight and of four bits. Ties go to the even code."""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .emit import I8, I64, constant, like

EXPONENT, REST = 0x7FF << 52, (1 << 63) - 1
WHOLE = 1.5 * 2.0**52  # added to a number of less than 51 bits, it leaves the nearest integer in the low bits
FLOATS = {"float8_e4m3fn": (448.0, 3, -6), "float8_e5m2": (57344.0, 2, -14)}  # largest, mantissa, least exponent


def code_storer(code):
    """Return ``store(address, y)`` of a vector of numbers in units of their scale, within the range of the codes."""

    @intrinsic
    def store_codes(_, address, y):
        def generate(context, builder, signature, arguments):
            to, value = arguments
            codes = _nibbles(builder, value) if code == "nibble" else (
                _integers(builder, value) if code == "int8" else _floats(builder, value, *FLOATS[code])
            )  # fmt: skip
            instruction = builder.store(codes, builder.inttoptr(to, codes.type.as_pointer()))
            instruction.align = 1
            return context.get_dummy_value()

        return types.void(types.int64, y), generate

    return store_codes


@intrinsic
def binade(_, x):
    """Return the largest power of 2 up to |x|, 0 where |x| is subnormal."""

    def generate(context, builder, signature, arguments):
        return _binade(builder, builder.bitcast(arguments[0], I64))

    return x(x), generate


def _binade(builder, bits):
    return builder.bitcast(builder.and_(bits, constant(bits, EXPONENT)), like(bits, ir.DoubleType()))


def _integers(builder, value):
    rounded = builder.fadd(value, constant(value, WHOLE))
    return builder.trunc(builder.bitcast(rounded, like(value, I64)), like(value, I8))


def _nibbles(builder, value):
    """Return bytes of two numbers from -8 to 7, plus 8: the first in the low half."""
    largest = constant(value, 7.0)
    value = builder.select(builder.fcmp_ordered("<", value, largest), value, largest)
    codes = _integers(builder, builder.fadd(value, constant(value, 8.0)))
    low, high = (_every_second(builder, codes, first) for first in (0, 1))
    return builder.or_(low, builder.shl(high, constant(high, 4)))


def _every_second(builder, vector, first):
    order = ir.Constant(ir.VectorType(ir.IntType(32), vector.type.count // 2), list(range(first, vector.type.count, 2)))
    return builder.shuffle_vector(vector, vector, order)


def _floats(builder, value, most, mantissa, lowest):
    bits = builder.bitcast(value, like(value, I64))
    size = builder.bitcast(builder.and_(bits, constant(bits, REST)), value.type)
    power, least = _binade(builder, bits), constant(value, 2.0**lowest)
    power = builder.select(builder.fcmp_ordered("<", power, least), least, power)
    step = builder.fmul(power, constant(value, WHOLE / 2.0**mantissa))  # whose last digit is that of the code
    size = builder.fsub(builder.fadd(size, step), step)
    largest = constant(value, most)
    size = builder.select(builder.fcmp_ordered("<", size, largest), size, largest)
    normal = builder.lshr(builder.bitcast(size, bits.type), constant(bits, 52 - mantissa))
    normal = builder.sub(normal, constant(bits, 1022 + lowest << mantissa))
    steps = builder.fmul(size, constant(value, 2.0 ** (mantissa - lowest)))
    subnormal = builder.bitcast(builder.fadd(steps, constant(value, 2.0**52)), bits.type)
    code = builder.select(builder.fcmp_ordered("<", size, least), subnormal, normal)
    sign = builder.and_(builder.lshr(bits, constant(bits, 56)), constant(bits, 0x80))
    return builder.trunc(builder.or_(builder.and_(code, constant(bits, 0x7F)), sign), like(value, I8))
