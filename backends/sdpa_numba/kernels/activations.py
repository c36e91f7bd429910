"""The Gaussian error linear unit of an array: a kernel for arrays of which layers have more than scores."""

from functools import cache

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.runtime.kernel import kernel as compiled
from sdpa_numba.runtime.tasks import next_task, proceed
from sdpa_numba.vector.emit import itemsize
from sdpa_numba.vector.simd import absolute, fma, load_int64, loader, polynomial, select, splatter, storer

from .elementary import elementary
from .views import data

BLOCK = 2**13  # numbers of a task
COST = 32  # multiplications in whose time a number is done
# erfc(y) * exp(y**2) / 2 is t times this polynomial in t = 1 / (1 + 0.4 * y), within 7e-9 of itself up to y = 9.6
HALF_ERFCX = (0.11285492777824402, 0.11244760453701019, 0.10769346356391907, 0.06375695019960403, 0.13914312422275543,
              -0.14794057607650757, 0.2806008458137512, -0.25454118847846985, 0.10118072479963303,
              -0.015195884741842747)  # fmt: skip
FAR = 13.19  # beyond it the smaller side is below all normal numbers, and taken as 0


@cache
def gelu_of(lanes):
    """Return ``gelu(x)`` for float32 vectors: x times the normal distribution up to x."""
    splat, evaluate, exp = splatter("float32", lanes), polynomial("float32", lanes, HALF_ERFCX), _exp(lanes)
    zero, one, half, far, slope = map(np.float32, (0, 1, 0.5, FAR, 0.4 * 0.5**0.5))

    @part
    def gelu(x):
        y = absolute(x)
        y = select(splat(far) < y, splat(far), y)
        square = y * y
        lost = fma(y, y, splat(zero) - square)  # what rounding took from the square, which the exponential would show
        t = splat(one) / fma(splat(slope), y, splat(one))
        gauss = exp(splat(zero) - splat(half) * square)
        smaller = t * evaluate(t) * fma(gauss, splat(zero) - splat(half) * lost, gauss)
        smaller = select(y < splat(far), smaller, splat(zero) * y)
        share = select(x < splat(zero), smaller, splat(one) - smaller)
        return select(x < splat(zero) - splat(far), splat(zero) - splat(far), x) * share

    return gelu


@cache
def _exp(lanes):
    return elementary("float32", lanes).exp


@cache
def kernel(source, lanes):
    """Return the kernel for contiguous arrays of this type; its record: the arrays' objects, and how many numbers."""
    load, store = loader(source, "float32", lanes), storer(source)
    load_one, bytes_of = loader(source, "float32", 1), itemsize(source)
    of_vector, of_one = gelu_of(lanes), gelu_of(1)

    @compiled
    def gelu(worker, record):
        x, y, n = data(load_int64(record)), data(load_int64(record + 8)), load_int64(record + 16)
        task = next_task(worker)
        while task * BLOCK < n:
            first = task * BLOCK
            stop = min(first + BLOCK, n)
            whole = stop - (stop - first) % lanes
            if not proceed(worker, COST * (stop - first)):
                break
            for i in range(first, whole, lanes):
                store(y + i * bytes_of, of_vector(load(x + i * bytes_of)))
            for i in range(whole, stop):
                store(y + i * bytes_of, of_one(load_one(x + i * bytes_of)))
            task = next_task(worker)

    return gelu
