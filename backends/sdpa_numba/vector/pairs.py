"""Products of bfloat16 numbers by twos: a word of 32 bits holds a pair, the first of it in the low half.

One operation, `dot2`, is an instruction of the processor, or a model of one that every processor can run. Both
instructions take subnormal numbers for 0, and leave none.
"""

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .emit import I16, I32, I64, LLVM, bfloat16_bits, call, constant, fetch, join, like, splat_value

MODEL = " model"  # behind the name of an instruction: its model
FUNCTIONS = {  # of LLVM, with the lengths of total that they are there for
    "vdpbf16ps": {n: f"llvm.x86.avx512bf16.dpbf16ps.{32 * n}" for n in (16, 8, 4)},
    "bfdot": {4: "llvm.aarch64.neon.bfdot.v4f32.v8bf16"},
}
PRODUCTS = (*FUNCTIONS, *(name + MODEL for name in FUNCTIONS))
EXPONENT, SIGN, HIGH = 0x7F800000, 0x80000000, 0xFFFF0000
TINY = 2.0**-126  # the smallest normal number
CUT = 29  # digits of a float64 behind those of a float32


class BFloat(ir.Type):
    """LLVM's own bfloat16, which llvmlite does not know."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, BFloat)

    def __hash__(self):
        return hash(BFloat)


def dot2(builder, products, total, x, y):
    """Return `total`, a vector of float32, plus the products of both halves of x and y, vectors of as many words."""
    lanes = total.type.count
    if products.endswith(MODEL):
        return builder.call(
            _model(builder.module, products, lanes), [total, *(builder.bitcast(z, like(z, I32)) for z in (x, y))]
        )
    n, name = next((n, name) for n, name in FUNCTIONS[products].items() if lanes % n == 0)
    whole, pair = ir.VectorType(LLVM["float32"], n), ir.VectorType(BFloat(), 2 * n)
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(whole, [whole, pair, pair]), name
    )
    parts = []
    for first in range(0, lanes, n):
        order = ir.Constant(ir.VectorType(I32, n), list(range(first, first + n)))
        t, a, b = (z if lanes == n else builder.shuffle_vector(z, z, order) for z in (total, x, y))
        parts.append(builder.call(function, [t, builder.bitcast(a, pair), builder.bitcast(b, pair)]))
    return join(builder, parts)


def read_pairs(builder, address, row, lanes):
    """Return a vector of words from two rows of bfloat16 numbers, `row` bytes apart."""
    first, second = (fetch(builder, at, "bfloat16", lanes) for at in (address, builder.add(address, row)))
    order = ir.Constant(ir.VectorType(I32, 2 * lanes), [i // 2 + i % 2 * lanes for i in range(2 * lanes)])
    return builder.bitcast(builder.shuffle_vector(first, second, order), ir.VectorType(LLVM["float32"], lanes))


def _model(module, products, lanes):
    """Return the model of an instruction as a function, which LLVM has to compile only once."""
    name = f"sdpa_numba.{products}.{lanes}".replace(" ", ".")
    function = module.globals.get(name)
    if function is None:
        whole, words = (ir.VectorType(kind, lanes) for kind in (LLVM["float32"], I32))
        function = ir.Function(module, ir.FunctionType(whole, [whole, words, words]), name)
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        builder = ir.IRBuilder(function.append_basic_block())
        builder.ret((_fused if products.startswith("vdpbf16ps") else _rounded_to_odd)(builder, *function.args))
    return function


def _halves(builder, words):
    """Return the first and the second number of each pair, as float32, those that are subnormal as 0."""
    shifted = builder.shl(words, constant(words, 16)), builder.and_(words, constant(words, HIGH))
    return [_flushed(builder, builder.bitcast(bits, like(bits, LLVM["float32"]))) for bits in shifted]


def _flushed(builder, x):
    """Return float32 numbers, those that are subnormal as 0 of their sign."""
    bits = builder.bitcast(x, like(x, I32))
    small = builder.icmp_unsigned("==", builder.and_(bits, constant(bits, EXPONENT)), constant(bits, 0))
    return builder.bitcast(builder.select(small, builder.and_(bits, constant(bits, SIGN)), bits), x.type)


def _fused(builder, total, x, y):
    """Model vdpbf16ps: two fused multiply-adds, rounded to nearest, of the second numbers and then of the first.

    A result just below the smallest normal number, which by its digits could still be rounded up, is one unit of the
    subnormal numbers less exact here.
    """
    total = _flushed(builder, total)
    for a, b in reversed(list(zip(_halves(builder, x), _halves(builder, y), strict=True))):
        total = _flushed(builder, call(builder, "fma", a, b, total))
    return total


def _rounded_to_odd(builder, total, x, y):
    """Model bfdot as Arm defines it without extended bfloat16: the sum of both products, added to the total.

    Each is rounded to odd: what is not exact becomes that neighbour whose last digit is 1.
    """
    first, second = (
        _flushed(builder, builder.fmul(a, b))  # exact, if it is normal
        for a, b in zip(_halves(builder, x), _halves(builder, y), strict=True)
    )
    return _odd_sum(builder, _flushed(builder, total), _odd_sum(builder, first, second))


def _odd_sum(builder, x, y):
    wide = like(x, ir.DoubleType())
    a, b = builder.fpext(x, wide), builder.fpext(y, wide)
    total = builder.fadd(a, b)
    part = builder.fsub(total, a)
    rest = builder.fadd(builder.fsub(a, builder.fsub(total, part)), builder.fsub(b, part))
    bits, lost = (builder.bitcast(z, like(z, I64)) for z in (total, rest))
    even = builder.icmp_unsigned("==", builder.and_(bits, constant(bits, 1)), constant(bits, 0))
    inexact = builder.fcmp_ordered("!=", rest, constant(rest, 0.0))
    away = builder.icmp_signed(">=", builder.xor(bits, lost), constant(bits, 0))
    step = builder.select(away, constant(bits, 1), constant(bits, -1))
    bits = builder.select(builder.and_(even, inexact), builder.add(bits, step), bits)
    below = builder.and_(bits, constant(bits, (1 << CUT) - 1))
    odd = builder.select(
        builder.icmp_unsigned("!=", below, constant(bits, 0)), constant(bits, 1 << CUT), constant(bits, 0)
    )
    bits = builder.or_(builder.and_(bits, constant(bits, -1 << CUT)), odd)
    return _flushed(builder, builder.fptrunc(builder.bitcast(bits, wide), x.type))


def one_dot(products, lanes):
    """Return ``dot(total, x, y)`` of a number and two words, the low half of integers."""

    @intrinsic
    def dot(_, total, x, y):
        def generate(context, builder, signature, arguments):
            total, *words = arguments
            words = [word if word.type == I32 else builder.trunc(word, I32) for word in words]
            vectors = [splat_value(builder, z, lanes) for z in (total, *words)]
            return builder.extract_element(dot2(builder, products, *vectors), I32(0))

        return total(total, x, y), generate

    return dot


@intrinsic
def joined(_, x, y):
    """Return the words of pairs (x, y): float32 numbers, vectors or scalars, that bfloat16 has."""

    def generate(context, builder, signature, arguments):
        low, high = (builder.bitcast(z, like(z, I32)) for z in arguments)
        return builder.or_(builder.lshr(low, constant(low, 16)), builder.and_(high, constant(high, HIGH)))

    return _words(x)(x, x), generate


def _rounded(builder, products, x):
    """Return float32 numbers rounded to bfloat16, as integers; what is subnormal may become 0."""
    if products in FUNCTIONS:  # which comes with an instruction for it
        return builder.bitcast(builder.fptrunc(x, like(x, BFloat())), like(x, I16))
    bits = bfloat16_bits(builder, x)
    return builder.trunc(builder.lshr(bits, constant(bits, 16)), like(bits, I16))


def joiner(products):
    """Return ``join(x, y)``: the words of pairs (x, y) of vectors of float32, rounded to bfloat16."""

    @intrinsic
    def join_rounded(_, x, y):
        def generate(context, builder, signature, arguments):
            low, high = (builder.zext(_rounded(builder, products, z), like(z, I32)) for z in arguments)
            return builder.or_(low, builder.shl(high, constant(high, 16)))

        return _words(x)(x, x), generate

    return join_rounded


def rounder(products):
    """Return ``store(address, x)``: a vector of float32 as pairs of neighbours, rounded to bfloat16."""

    @intrinsic
    def store_rounded(_, address, x):
        def generate(context, builder, signature, arguments):
            value = _rounded(builder, products, arguments[1])
            builder.store(value, builder.inttoptr(arguments[0], value.type.as_pointer())).align = 1
            return context.get_dummy_value()

        return types.void(types.int64, x), generate

    return store_rounded


def _words(x):
    return types.int32 if x == types.float32 else type(x)(types.int32, x.lanes)
