"""LLVM instructions for scalars and vectors alike, of which the vector layer is made. Addresses count bytes."""

import numpy as np
from llvmlite import ir
from numba.core import cgutils

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
LINE = 64  # bytes that are prefetched at once
LLVM = {
    "bool": I8,
    "int8": I8,
    "uint8": I8,
    "float8_e4m3fn": I8,
    "float8_e5m2": I8,
    "int32": I32,
    "int64": I64,
    "float16": ir.HalfType(),
    "bfloat16": I16,
    "float32": ir.FloatType(),
    "float64": ir.DoubleType(),
}


def itemsize(name):
    """Return the bytes of one number of the type with this name."""
    return LLVM[name].width // 8 if isinstance(LLVM[name], ir.IntType) else np.dtype(name).itemsize


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


def like(value, kind):
    """Return the type of numbers of this `kind` in the shape of `value`."""
    return ir.VectorType(kind, value.type.count) if isinstance(value.type, ir.VectorType) else kind


def constant(value, x):
    """Return the number x in the type and shape of `value`."""
    return ir.Constant(value.type, [x] * value.type.count if isinstance(value.type, ir.VectorType) else x)


def fetch(builder, address, source, lanes=None):
    """Return what lies at `address`, as it is stored: a scalar or a vector."""
    kind = ir.VectorType(LLVM[source], lanes) if lanes else LLVM[source]
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 1  # the caller's arrays may lie anywhere
    return value


def hidden(builder, number):
    """Return an integer that is opaque to LLVM, so that it does not compute many addresses from it in advance."""
    return builder.asm(ir.FunctionType(I64, [I64]), "", "=r,0", [number], side_effect=False)


def fence(builder):
    """Keep LLVM from reading on the other side what is read on this one; the processor may."""
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def prefetch(builder, address):
    """Prefetch the cache line at `address`, which need not exist."""
    pointer = builder.inttoptr(address, ir.IntType(8).as_pointer())
    numbers = [I32(n) for n in (0, 3, 1)]  # to read, into all caches, data
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, *[I32] * 3])
    builder.call(cgutils.get_or_insert_function(builder.module, signature, "llvm.prefetch.p0"), [pointer, *numbers])


def widen(builder, value, source, target):
    """Return a fetched value as a number of type `target`.

    A boolean becomes 0 or 1. A finite float64 beyond float32 becomes the largest float32.
    """
    if source == target:
        return value
    kind = like(value, LLVM[target])
    if source in ("bool", "uint8"):
        return builder.uitofp(value, kind)
    if source == "int8":
        return builder.sitofp(value, kind)
    if source.startswith("float8"):
        wide = widen(builder, _half_of(builder, value, source), "float16", target)
        return builder.fmul(wide, constant(wide, 256.0)) if source == "float8_e4m3fn" else wide
    if source == "bfloat16":
        bits = builder.zext(value, like(value, I32))
        single = builder.bitcast(builder.shl(bits, constant(bits, 16)), like(value, LLVM["float32"]))
        return widen(builder, single, "float32", target)
    if itemsize(source) < itemsize(target):
        return builder.fpext(value, kind)
    for largest, outside in ((float(np.finfo(target).max), ">"), (float(np.finfo(target).min), "<")):
        limit, infinite = constant(value, largest), constant(value, largest * np.inf)
        beyond = builder.and_(builder.fcmp_ordered(outside, value, limit), builder.fcmp_ordered("!=", value, infinite))
        value = builder.select(beyond, limit, value)
    return builder.fptrunc(value, kind)


def _half_of(builder, value, source):
    """Return the float16 that is a float8 of e5m2, which is its upper byte, or 2**-8 times one of e4m3fn."""
    bits = builder.zext(value, like(value, I16))
    half = like(value, LLVM["float16"])
    if source == "float8_e5m2":
        return builder.bitcast(builder.shl(bits, constant(bits, 8)), half)
    size = builder.and_(bits, constant(bits, 0x7F))
    nan = builder.icmp_unsigned("==", size, constant(bits, 0x7F))
    size = builder.select(nan, constant(bits, 0x7E00), builder.shl(size, constant(bits, 7)))
    sign = builder.shl(builder.and_(bits, constant(bits, 0x80)), constant(bits, 8))
    return builder.bitcast(builder.or_(size, sign), half)


def read(builder, address, source, target, lanes=None):
    """Return what lies at `address`, stored as `source`, as a scalar or a vector of `target`.

    Numbers of four bits, "nibble", are read as vectors only, two a byte, the low half first.
    """
    if source == "nibble":
        pairs = fetch(builder, address, "uint8", lanes // 2)
        order = ir.Constant(ir.VectorType(I32, lanes), [i // 2 for i in range(lanes)])
        bits = builder.zext(builder.shuffle_vector(pairs, pairs, order), ir.VectorType(I32, lanes))
        shifts = ir.Constant(ir.VectorType(I32, lanes), [4 * (i % 2) for i in range(lanes)])
        bits = builder.and_(builder.lshr(bits, shifts), constant(bits, 15))
        return builder.sitofp(bits, ir.VectorType(LLVM[target], lanes))
    return widen(builder, fetch(builder, address, source, lanes), source, target)


def join(builder, parts):
    """Return the vector that holds the equally long `parts` one behind the other."""
    while len(parts) > 1:
        order = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [builder.shuffle_vector(x, y, order) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def exchange(builder, rows):
    """Return `rows` with every square of as many columns transposed."""
    lanes, n = rows[0].type.count, len(rows)
    halves = [
        [place for x in range(0, lanes, n) for c in range(half, half + n // 2) for place in (x + c, lanes + x + c)]
        for half in (0, n // 2)
    ]
    orders = [ir.Constant(ir.VectorType(I32, lanes), order) for order in halves]
    for _ in range(n.bit_length() - 1):  # rows that are half of all apart are merged, number by number
        pairs = zip(rows[: n // 2], rows[n // 2 :], strict=True)
        rows = [builder.shuffle_vector(*pair, order) for pair in pairs for order in orders]
    return rows


def bfloat16_bits(builder, value):
    """Return integers whose upper halves are float32 numbers rounded to bfloat16: to nearest, ties to even."""
    bits = builder.bitcast(value, like(value, I32))
    odd = builder.and_(builder.lshr(bits, constant(bits, 16)), constant(bits, 1))
    rounded = builder.add(bits, builder.add(odd, constant(bits, 0x7FFF)))
    quiet = builder.or_(bits, constant(bits, 0x400000))
    return builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)


def write(builder, address, value, target):
    """Store `value` at `address`, rounded to `target`: to nearest, ties to even, NaN stays NaN."""
    if target == "bfloat16":
        bits = bfloat16_bits(builder, value)
        value = builder.trunc(builder.lshr(bits, constant(bits, 16)), like(value, I16))
    elif value.type != like(value, LLVM[target]):
        value = builder.fptrunc(value, like(value, LLVM[target]))
    instruction = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    instruction.align = 1
