"""What instructions compute of numbers, as NumPy functions: `OPERATIONS` has an entry for each name of PTX.

Approximate instructions are exact here. What a device rounds in another way is named where it is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .faults import Array

WIDE = {np.dtype(f"{kind}{size}"): np.dtype(f"{kind}{2 * size}") for kind in "iu" for size in (1, 2, 4)}
Function = Callable[..., Any]


class Operation(NamedTuple):
    """A function, and the types of what it takes and gives.

    One letter each: t is the instruction's type, w that of twice the size, u is u32, p is pred.
    """

    function: Function
    takes: str
    gives: str = "t"


def flush(x: Array) -> Array:
    """Return the numbers with a zero of the same sign for those too small to be normal."""
    return np.where(np.abs(x) < np.finfo(x.dtype).tiny, np.copysign(x.dtype.type(0), x), x)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c rounded once; for float32 twice, at a distance of 29 bits."""
    if a.dtype.itemsize < 8:
        return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype)
    product = a * b
    (a1, a0), (b1, b0) = _halves(a), _halves(b)
    rest = ((a1 * b1 - product) + a1 * b0 + a0 * b1) + a0 * b0
    total = product + c
    virtual = total - product
    exact = total + (((product - (total - virtual)) + (c - virtual)) + rest)
    return np.where(np.isfinite(exact), exact, total)


def _fma_down(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of float32 rounded down, once."""
    product, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)  # which is exact
    total = product + c
    virtual = total - product
    rest = (product - (total - virtual)) + (c - virtual)
    near = total.astype(np.float32)
    above = (near > total) | ((near == total) & (rest < 0))
    return np.where(above, np.nextafter(near, np.float32(-np.inf)), near)


def _halves(x: Array) -> tuple[Array, Array]:
    """Return float64 numbers as sums of two with half of the bits each."""
    scaled = x * 134217729.0  # 2**27 + 1
    high = scaled - (scaled - x)
    return high, x - high


def _wide(a: Array, b: Array) -> Array:
    return np.multiply(a, b, dtype=WIDE[a.dtype])


def _high(a: Array, b: Array) -> Array:
    """Return the upper half of the product."""
    if a.dtype in WIDE:
        return (_wide(a, b) >> (8 * a.dtype.itemsize)).astype(a.dtype)
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = a.view(np.uint64), b.view(np.uint64)
    x1, x0, y1, y0 = x >> half, x & low, y >> half, y & low
    middle = (x0 * y0 >> half) + (x1 * y0 & low) + x0 * y1
    high = x1 * y1 + (x1 * y0 >> half) + (middle >> half)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, 0) - np.where(b < 0, x, 0)
    return high.view(a.dtype)


def _divide(a: Array, b: Array) -> Array:
    """Return the quotient, of integers without its fraction; all bits are set in an integer divided by zero."""
    if a.dtype.kind not in "iu":
        return a / b
    quotient, remainder = np.divmod(a, np.where(b == 0, 1, b))
    towards_zero = quotient + ((remainder != 0) & ((a < 0) != (b < 0))).astype(a.dtype)
    return np.where(b == 0, ~np.zeros_like(a), towards_zero)


def _remainder(a: Array, b: Array) -> Array:
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, 1, b)))


def _shift_left(a: Array, count: Array) -> Array:
    return np.left_shift(a, np.minimum(count, 64).astype(a.dtype))


def _shift_right(a: Array, count: Array) -> Array:
    return np.right_shift(a, np.minimum(count, 64).astype(a.dtype))


def _funnel(low: Array, high: Array, count: Array, *, left: bool, wrap: bool) -> Array:
    """Return the upper word of (high, low) shifted left, or the lower one shifted right."""
    both = high.astype(np.uint64) << np.uint64(32) | low
    by = (count & 31 if wrap else np.minimum(count, 32)).astype(np.uint64)
    return ((both << by >> np.uint64(32)) if left else both >> by).astype(np.uint32)


def _ones(width: Array) -> Array:
    return (np.uint64(1) << np.minimum(width & 255, 64).astype(np.uint64)) - np.uint64(1)


def _extract(a: Array, start: Array, width: Array) -> Array:
    if a.dtype.kind == "i":
        shift = 8 * a.dtype.itemsize - width.astype(a.dtype)
        return np.where(width == 0, 0, _shift_left(a, shift - start.astype(a.dtype)) >> np.minimum(shift, 63))
    return (a.astype(np.uint64) >> (start & 255).astype(np.uint64) & _ones(width)).astype(a.dtype)


def _insert(a: Array, b: Array, start: Array, width: Array) -> Array:
    field = _ones(width) << (start & 255).astype(np.uint64)
    shifted = a.astype(np.uint64) << (start & 255).astype(np.uint64)
    return ((b & ~field) | (shifted & field)).astype(a.dtype)


def _logic(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Return, for each bit of three numbers, the bit of the table at the place that they spell."""
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), a.dtype)
    for n in range(8):
        if int(table[0]) >> n & 1:
            result |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
    return result


def _permute(a: Array, b: Array, choice: Array) -> Array:
    """Return four bytes of (b, a): each of a digit of `choice`, or its sign where the digit's bit 3 is set."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros(both.shape, np.uint32)
    for n in range(4):
        digit = choice >> np.uint32(4 * n)
        byte = (both >> (np.uint64(8) * (digit & 7)) & np.uint64(0xFF)).astype(np.uint32)
        byte = np.where(digit & 8, np.where(byte & 0x80, 0xFF, 0), byte).astype(np.uint32)
        result = result | byte << np.uint32(8 * n)
    return result


def _bits(a: Array) -> Array:
    """Return the bits of each number, the lowest first."""
    return np.unpackbits(a.view(np.uint8).reshape(-1, a.dtype.itemsize), axis=1, bitorder="little")


def _leading_zeros(a: Array) -> Array:
    return np.logical_not(np.logical_or.accumulate(_bits(a)[:, ::-1], axis=1)).sum(1, dtype=np.uint32)


def _reversed(a: Array) -> Array:
    return np.packbits(_bits(a)[:, ::-1], axis=1, bitorder="little").view(a.dtype)[:, 0]


def _select(a: Array, b: Array, choose: Array) -> Array:
    return np.where(choose, a, b)


def _absolute_difference(a: Array, b: Array, c: Array) -> Array:
    return np.where(a < b, b - a, a - b) + c


def _saturated(function: Function) -> Function:
    return lambda *numbers: np.fmin(np.fmax(function(*numbers), 0), 1).astype(numbers[0].dtype)


def _reciprocal(a: Array) -> Array:
    return a.dtype.type(1) / a


def _inverse_root(a: Array) -> Array:
    return (1 / np.sqrt(a.astype(np.float64))).astype(a.dtype)


OPERATIONS: dict[str, Operation] = {
    "add": Operation(np.add, "tt"),
    "add.sat": Operation(_saturated(np.add), "tt"),
    "sub": Operation(np.subtract, "tt"),
    "mul": Operation(np.multiply, "tt"),
    "mul.sat": Operation(_saturated(np.multiply), "tt"),
    "mul.lo": Operation(np.multiply, "tt"),
    "mul.hi": Operation(_high, "tt"),
    "mul.wide": Operation(_wide, "tt", "w"),
    "mad.lo": Operation(lambda a, b, c: a * b + c, "ttt"),
    "mad.hi": Operation(lambda a, b, c: _high(a, b) + c, "ttt"),
    "mad.wide": Operation(lambda a, b, c: _wide(a, b) + c, "ttw", "w"),
    "mad": Operation(_fma, "ttt"),
    "fma": Operation(_fma, "ttt"),
    "fma.sat": Operation(_saturated(_fma), "ttt"),
    "fma.rm": Operation(_fma_down, "ttt"),
    "div": Operation(_divide, "tt"),
    "div.full": Operation(np.true_divide, "tt"),
    "rem": Operation(_remainder, "tt"),
    "min": Operation(np.fmin, "tt"),
    "max": Operation(np.fmax, "tt"),
    "min.NaN": Operation(np.minimum, "tt"),
    "max.NaN": Operation(np.maximum, "tt"),
    "neg": Operation(np.negative, "t"),
    "abs": Operation(np.absolute, "t"),
    "sad": Operation(_absolute_difference, "ttt"),
    "and": Operation(np.bitwise_and, "tt"),
    "or": Operation(np.bitwise_or, "tt"),
    "xor": Operation(np.bitwise_xor, "tt"),
    "not": Operation(np.invert, "t"),
    "cnot": Operation(lambda a: (a == 0).astype(a.dtype), "t"),
    "lop3": Operation(_logic, "ttuu"),
    "shl": Operation(_shift_left, "tu"),
    "shr": Operation(_shift_right, "tu"),
    "shf.l.wrap": Operation(lambda a, b, c: _funnel(a, b, c, left=True, wrap=True), "uuu"),
    "shf.r.wrap": Operation(lambda a, b, c: _funnel(a, b, c, left=False, wrap=True), "uuu"),
    "shf.l.clamp": Operation(lambda a, b, c: _funnel(a, b, c, left=True, wrap=False), "uuu"),
    "shf.r.clamp": Operation(lambda a, b, c: _funnel(a, b, c, left=False, wrap=False), "uuu"),
    "bfe": Operation(_extract, "tuu"),
    "bfi": Operation(_insert, "ttuu"),
    "prmt": Operation(_permute, "uuu"),
    "popc": Operation(lambda a: _bits(a).sum(1, dtype=np.uint32), "t", "u"),
    "clz": Operation(_leading_zeros, "t", "u"),
    "brev": Operation(_reversed, "t"),
    "selp": Operation(_select, "ttp"),
    "copysign": Operation(lambda a, b: np.copysign(b, a), "tt"),
    "rcp": Operation(_reciprocal, "t"),
    "sqrt": Operation(np.sqrt, "t"),
    "rsqrt": Operation(_inverse_root, "t"),
    "ex2": Operation(np.exp2, "t"),
    "lg2": Operation(np.log2, "t"),
    "sin": Operation(np.sin, "t"),
    "cos": Operation(np.cos, "t"),
    "tanh": Operation(np.tanh, "t"),
}

_ORDERS = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_UNSIGNED = {"lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal}


def _unordered(a: Array, b: Array) -> Array:
    return np.isnan(a) | np.isnan(b)


COMPARISONS: dict[str, Function] = {
    **_ORDERS,
    **_UNSIGNED,
    "ne": lambda a, b: (a != b) & ~((a != a) | (b != b)),  # of floating numbers, false for NaN as the others are
    **{f"{name}u": lambda a, b, order=order: order(a, b) | _unordered(a, b) for name, order in _ORDERS.items()},
    "num": lambda a, b: ~_unordered(a, b),
    "nan": _unordered,
}
COMBINATIONS: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
