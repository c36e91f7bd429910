"""The exponential and the hyperbolic tangent of whole vectors: without branches, the same bits on every machine."""

from functools import cache
from math import factorial, log
from typing import Any, NamedTuple

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.simd import absolute, copysign, fma, polynomial, power_of_two, select, splatter

LOG2_E = 1 / log(2)
# 2**f = 1 + f * P(f) for |f| <= 1/2: least maximum error (2e-9) for float32, Taylor's series (1e-17) for float64
POLYNOMIALS = {
    "float32": (0.6931472028818952, 0.24022647910157283, 0.05550332408144205,
                0.009618437614770754, 0.0013398900659716006, 0.00015353339847923927),
    "float64": tuple(log(2) ** k / factorial(k) for k in range(1, 14)),
}  # fmt: skip
# adding this number leaves round(x) plus the bias of the exponent in the low bits of the sum
MAGIC = {"float32": 1.5 * 2.0**23 + 127, "float64": 1.5 * 2.0**52 + 1023}
# exp of anything lower is 0: its exponent field would be 0, and half-precise numbers differ between machines
LOWEST = {"float32": -88.0, "float64": -709.1}


class Elementary(NamedTuple):
    """Functions on vectors: ``exp(x)``, for x up to 0, and ``tanh(x)``."""

    exp: Any
    tanh: Any


@cache
def elementary(name, lanes):
    """Return `Elementary` for vectors of this type."""
    number, splat = np.dtype(name).type, splatter(name, lanes)
    magic, lowest, log2_e = number(MAGIC[name]), number(LOWEST[name]), number(LOG2_E)
    evaluate = polynomial(name, lanes, POLYNOMIALS[name])
    one, two, saturated = number(1), number(2), number(2 * 20)

    @part
    def split(x):
        """Return f * P(f) and 2**n, where exp(x) = (1 + f * P(f)) * 2**n."""
        shifted = fma(x, splat(log2_e), splat(magic))
        f = fma(x, splat(log2_e), splat(magic) - shifted)
        return f * evaluate(f), power_of_two(shifted)

    @part
    def exp(x):
        part, power = split(select(x < splat(lowest), splat(lowest), x))
        return fma(part, power, power)

    @part
    def tanh(x):
        twice = splat(two) * absolute(x)
        part, power = split(select(splat(saturated) < twice, splat(saturated), twice))
        grown = fma(part, power, power - splat(one))  # exp(2 |x|) - 1, exact to the last bits also near 0
        return copysign(grown / (grown + splat(two)), x)

    return Elementary(exp, tanh)
