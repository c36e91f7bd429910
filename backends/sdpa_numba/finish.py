"""The online softmax of one row: what a chunk of keys adds up to, and what is left at the end."""

from math import exp, inf, log

from .compilation import part
from .simd import loader
from .views import data, stride

load_float64 = loader("float64", "float64")


@part
def finish(m, z, sinks, h):
    """Return the factor that turns the sum of weighted values into the output, and the lse."""
    if sinks == 0:
        return (1 / z, m + log(z)) if z != 0 else (0.0, -inf)
    sink = load_float64(data(sinks) + h * stride(sinks, 1))
    top = max(m, sink)
    if top == -inf:
        return 0.0, -inf
    total = z * exp(m - top) + exp(sink - top)
    return (exp(m - top) / total if z != 0 else 0.0), top + log(total)
