"""Numbers made into codes and scales, with the bits of the recipes: all in float64, rounded where they are stored."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.runtime.kernel import kernel as compiled
from sdpa_numba.runtime.tasks import next_task, proceed
from sdpa_numba.vector.codes import FLOATS, binade, code_storer
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import lane, load_int64, loader, select, splatter, storer

from .views import data, stride
from .views import size as size_of

BLOCK = 64  # tokens of a task
COST = 8  # multiplications in whose time a number is done
SPANS = {"int8": 127.0, "nibble": 8.0} | {code: most for code, (most, *_) in FLOATS.items()}  # the largest code
SCALES = {"float16": (-14, 10), "float32": (-126, 23)}  # least exponent, bits of mantissa


class Pieces(NamedTuple):
    """What is done to as many numbers as a vector has."""

    extremes: Any
    divide: Any


@cache
def pieces(source, code, lanes):
    """Return `Pieces` for vectors of so many lanes."""
    load, splat, store_codes = loader(source, "float64", lanes), splatter("float64", lanes), code_storer(code)
    size, down = itemsize(source), 2 if code == "nibble" else 1

    @part
    def extremes(x, n):
        """Return the largest, 0 at least, and the smallest, 0 at most; NaN where a number is not finite."""
        top, low, odd = splat(0.0), splat(0.0), splat(0.0)
        for i in range(0, n, lanes):
            value = load(x + i * size)
            top, low, odd = select(top < value, value, top), select(value < low, value, low), odd + (value - value)
        most, least, lost = lane(top, 0), lane(low, 0), lane(odd, 0)
        for i in range(1, lanes):
            most, least, lost = max(most, lane(top, i)), min(least, lane(low, i)), lost + lane(odd, i)
        return most + lost, least + lost

    @part
    def divide(x, n, step, codes):
        """Write the codes of numbers in units of `step`."""
        by = splat(step)
        for i in range(0, n, lanes):
            store_codes(codes + i // down, load(x + i * size) / by)

    return Pieces(extremes, divide)


@cache
def kernel(source, code, lanes):
    """Return the kernel that codes contiguous arrays of a type.

    Its record: an array, those of its codes and of its scales, whose last axes are close, the same of another one
    (which may be absent), then tokens of an array, numbers of a token and of a group, and a word that becomes 1
    where numbers cannot be coded.
    """
    few = 2 if code == "nibble" else 1
    many, rest, first_sign = pieces(source, code, lanes), pieces(source, code, few), _first_sign(source)
    size, down, signed = itemsize(source), 2 if code == "nibble" else 1, code == "nibble"
    scale_type = "float32" if code.startswith("float8") else "float16"
    scale_size, store_scale, store_word, span = itemsize(scale_type), storer(scale_type), storer("int64"), SPANS[code]
    most = float(np.finfo(scale_type).max)
    lowest, digit = 2.0 ** SCALES[scale_type][0], 2.0 ** -SCALES[scale_type][1]

    @part
    def scale_of(peak):
        """Return the smallest number of the type of scales whose product with the span reaches the peak."""
        exact = peak / span
        unit = max(binade(exact), lowest) * digit
        steps = exact / unit
        whole = (steps + 2.0**52) - 2.0**52
        if whole < steps:
            whole += 1.0
        scale = whole * unit
        return scale + unit if scale * span < peak else scale

    @part
    def encode_group(x, n, codes, scale):
        """Write the codes and the scale of a group, and return whether it can be coded."""
        whole = n - n % lanes
        top, low = many.extremes(x, whole)
        last_top, last_low = rest.extremes(x + whole * size, n - whole)
        lost = (top - top) + (last_top - last_top)  # NaN where a number is not finite
        top, low = max(top, last_top), min(low, last_low)
        peak = max(top, -low) + lost
        if not peak / span <= most:
            return False
        step = scale_of(peak)
        if step > most:
            return False
        if signed and (top > -low or (top == -low and first_sign(x, n, peak) > 0)):
            step = 0.0 - step
        store_scale(scale, np.float32(step))
        if step == 0.0:
            step = 1.0
        many.divide(x, whole, step, codes)
        rest.divide(x + whole * size, n - whole, step, codes + whole // down)
        return True

    @compiled
    def encode(worker, record):
        tokens, width, group = load_int64(record + 48), load_int64(record + 56), load_int64(record + 64)
        total, task = tokens * (2 if load_int64(record + 24) else 1), next_task(worker)
        while task * BLOCK < total and proceed(worker, COST * BLOCK * width):
            for token in range(task * BLOCK, min(task * BLOCK + BLOCK, total)):
                arrays, i = (record, token) if token < tokens else (record + 24, token - tokens)
                x, scale = data(load_int64(arrays)) + i * width * size, place(load_int64(arrays + 16), i)
                codes = place(load_int64(arrays + 8), i)
                for g in range(0, width, group):
                    if not encode_group(x + g * size, group, codes + g // down, scale):
                        store_word(record + 72, np.int64(1))
                    scale += scale_size
            task = next_task(worker)

    return encode


@part
def place(array, i):
    """Return the address of the i-th row of an array along its last axis."""
    address, axis = data(array), np.int64(2)
    while i > 0:
        n = size_of(array, axis)
        if n > 1:
            address += i % n * stride(array, axis)
            i //= n
        axis += 1
    return address


@cache
def _first_sign(source):
    load, size = loader(source, "float64"), itemsize(source)

    @part
    def first_sign(x, n, peak):
        """Return the first of `n` numbers whose magnitude is the peak."""
        for i in range(n):
            number = load(x + i * size)
            if abs(number) == peak:
                return number
        return 0.0

    return first_sign
