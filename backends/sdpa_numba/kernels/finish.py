"""The online softmax of one row: what a chunk of keys adds up to, and what is left at the end."""

from math import exp, inf, log

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.simd import loader

from .views import data, stride

load_float64 = loader("float64", "float64")


@part
def finish(m, z, sinks, h):
    """Return the factor that turns the sum of weighted values into the output, and x and y, where x + log(y) is lse."""
    if sinks == 0:
        return (1 / z if z != 0 else 0.0), m, z
    sink = load_float64(data(sinks) + h * stride(sinks, 1))
    top = max(m, sink)
    if top == -inf:
        return 0.0, top, 0.0
    total = z * exp(m - top) + exp(sink - top)
    return (exp(m - top) / total if z != 0 else 0.0), top, total


@part
def lse_of(x, y):
    """Return x + log(y)."""
    return x + log(y) if y != 0 else -inf
