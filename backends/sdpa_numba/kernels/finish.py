"""The online softmax of one row: what a chunk of keys adds up to, and what is left at the end."""

from functools import cache
from math import exp, inf, log

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.simd import loader

from .views import data, stride

load_float64 = loader("float64", "float64")


@cache
def finisher(acc):
    """Return ``finish`` for scores of this type, to which a sink is rounded as they are."""
    number = np.dtype(acc).type

    @part
    def finish(m, z, sinks, h):
        """Return what makes the sum of weighted values the output, and x and y, where x + log(y) is the lse."""
        if sinks == 0:
            return (1 / z if z != 0 else 0.0), m, z
        sink = float(number(load_float64(data(sinks) + h * stride(sinks, 1))))
        top = max(m, sink)
        if top == -inf:
            return 0.0, top, 0.0
        total = z * exp(m - top) + exp(sink - top)
        return (exp(m - top) / total if z != 0 else 0.0), top, total

    return finish


@part
def lse_of(x, y):
    """Return x + log(y)."""
    return x + log(y) if y != 0 else -inf
