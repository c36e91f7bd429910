"""An a-priori, componentwise bound of the rounding errors of attention, in whatever order a kernel adds.

Let u be the unit roundoff of the accumulation type, v that of the type of inputs and weights, and gamma(n) = n u /
(1 - n u). Each of n additions errs by u times a partial sum (Higham, "Accuracy and Stability of Numerical
Algorithms", 2002, chapters 3 and 4), which in any order is at most ``peak = (sum |terms| + |sum|) / 2``, the sum of
the terms of one sign: a sum errs by at most ``gamma(n) peak``. Hats are what a kernel computes.

1. **Score.** The product and the scale, which may go into query or key first and is rounded itself, add three
   roundings a term to those of the sum: ``|s^ - s| <= |scale| (gamma(E) peak + gamma(3) |q|.|k|)``. The soft cap
   multiplies that by its slope ``1 - tanh(x)**2``, taken at the end of the error interval nearest to 0, and adds 8
   u of its value for division, tanh and product. Bias and ALiBi add 4 u of the sum of the absolute values of all
   terms. A `score_mod` adds its change over the error interval, and 4 u of its value.
2. **Exponent.** The maximum m is subtracted, perhaps in logarithms to base 2, perhaps a running maximum, whose
   steps add up to the distance from the last one: the argument of exp errs by ``|s^ - s| + 2 u |s| + 3 u |s - m|``,
   and exp itself by 4 u. Let d be the sum: an unnormalised weight is ``p e**t`` with ``|t| <= d``.
3. **Normalisation.** With exact sums, and a sink as a key whose value is 0, the weights sum to 1, and so ``o^ - o =
   sum w_j (e**t_j - 1) (v_j - o) / sum w_j e**t_j``. Hence the bound ``sum w_j (e**d_j - 1) |v_j - o| / sum w_j
   e**-d_j``: an error does little where a value is close to the output. As o^ is a mean of values, ``max |v_j -
   o|`` bounds it too.
4. **Sums.** Adding up the n keys that a row sees, one by one, or in blocks of 16 or more whose rescaling costs 7
   roundings each, takes at most n + 16 roundings: ``gamma(n + 16) (peak + |o|)`` for numerator and denominator.
5. **Weights** rounded to a 16-bit type before the product with V: ``v sum w_j |v_j|``. Weights below the smallest
   normal number may become 0, and 16-bit ones be off by half the smallest subnormal number.
6. **A merge of states** rounds output and lse once more, and errs in the shares by twice the error of the lse.
7. **The result** is rounded to its type.
8. **Codes** become numbers in the accumulation type, ``scale * (code - zero) + offset``, whose product and sum are
   rounded: a number errs by ``u (|scale (code - zero)| + |number|)``, which enters the scores by ``|scale| |q|`` and
   the output by the weights.
9. **Claims of less** (`Arithmetic`) enter where they act. Operands of products with a relative error r add
   ``(2 r + r**2) |scale| |q|.|k|`` to the score, and so err in the exponent, and r times the sums of absolute values
   to the product with V; weights of a narrower type add theirs to step 5; an exponential with a relative error of x
   adds ``(2 + log2(1 + n / 16)) x`` to d, as often as a maximum among blocks of 16 keys in random order may grow.
   Instructions for products of bfloat16 may round to odd, which errs by 2 u, and take numbers below the smallest
   normal one, t, for 0: operands of the scores, which adds ``|scale| |q|.|k|`` of those terms where one is that small,
   and up to three results a term or key, t each.

The lse errs by the logarithm of ``sum w_j e**d_j`` (or of its counterpart with -d), by gamma(n + 16) for the sum,
and by 4 u of maximum and result. The weights are the output for V = identity. Where a number may leave the range of
the accumulation type, and where it depends on underflow whether infinity meets a weight of 0, the bound is
infinite: no error is too large there.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref import reference
from sdpa_ref.backend import Problem
from sdpa_ref.reference import Stages
from sdpa_ref.storage import Stored

Array = np.ndarray[Any, np.dtype[Any]]
_LOST = 100.0  # an error of scores beyond which shares say nothing any more
_ANYTHING = 600.0  # an error of a score with which a weight may be anything, and whose exponential is still finite
_NO_BOUND = 1e30  # a relative error that allows anything, but nothing where the terms are 0: infinity times 0 is NaN
ANYTHING = -np.inf
"""The mark of numbers that may even be NaN or not: where it depends on underflow whether infinity meets 0."""
_BLOCK = 1 << 21  # numbers held at a time for the products of weights and values


class Arithmetic(NamedTuple):
    """What a kernel computes with, beside the accumulation type.

    Attributes
    ----------
    acc : str
        The accumulation type, "" for what this library requires of a backend.
    operand : float
        Largest relative error of a number that goes into a product of matrices.
    weight : float
        Largest relative error of a weight that goes into the product with V, beside what 16-bit inputs allow.
    exponential : float
        Largest relative error of an exponential.
    rounding : float
        Largest error of a sum in a product of matrices, by the unit roundoff.
    lost : float
        Below it, an operand or a result of a product of matrices may count as 0.
    only : str
        The type of the inputs that all this is for, "" for any.
    """

    acc: str = ""
    operand: float = 0.0
    weight: float = 0.0
    exponential: float = 0.0
    rounding: float = 1.0
    lost: float = 0.0
    only: str = ""


ARITHMETIC = {
    "float32": Arithmetic(),
    "tf32": Arithmetic(operand=2.0**-10, weight=2.0**-10),
    "bfloat16": Arithmetic(operand=2.0**-8, weight=2.0**-8),
    "bfloat16 weights": Arithmetic(weight=2.0**-8),
    "bfloat16 products": Arithmetic(rounding=2.0, lost=2.0**-126, only="bfloat16"),
    "float16 weights": Arithmetic(weight=2.0**-11),
    "float16 accumulation": Arithmetic(acc="float16", weight=2.0**-11),
}
"""By what `Capabilities.precision` calls them. The 11 bits of TF32 may be rounded or cut off."""
PLAIN = Arithmetic()


class Softmax(NamedTuple):
    """What all bounds start from, over ``(..., Hq, L, S)``, or with 1 for S."""

    seen: Array  # keys that count: kept, in a row that is not empty
    share: Array  # exact weights before dropout
    factor: Array  # what dropout multiplies a weight by
    error: Array  # d of step 2
    change: Array  # share * (e**d - 1)
    floor: Array  # sum of share * e**-d, the sink's included
    sink_share: Array
    sink_change: Array
    total: Array  # sum of the exponentials beside the largest score of a key, the sink's included
    most: Array  # the largest error of a score of the row
    overflows: Array  # whether a score may leave the range of the accumulation type


def finfo(dtype: np.dtype[Any]) -> Any:
    """Return the limits of a float type, bfloat16 included."""
    if dtype.kind == "f":
        return np.finfo(dtype)
    import ml_dtypes

    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]


def unit(dtype: np.dtype[Any]) -> float:
    """Return the unit roundoff."""
    return float(finfo(dtype).eps) / 2


def gamma(n: Any, u: float) -> Any:
    """Return the relative error of n roundings, `_NO_BOUND` where there are too many for any."""
    return np.where(n * u < 1, n * u / np.maximum(1 - n * u, u), _NO_BOUND)


def softmax(p: Problem, exact: Stages, by: Arithmetic = PLAIN) -> Softmax:
    """Return the exact softmax and how far rounding may move it (steps 1 and 2)."""
    u = unit(p.acc_dtype)
    score, lse = exact.biased, exact.lse[..., None]
    soft = reference.softmax(score, exact.keep, p.sink)
    seen = exact.keep & (lse > -np.inf) if p.sink is None else exact.keep & (score > -np.inf).any(-1, keepdims=True)
    counts = seen & (score > -np.inf)
    error, largest = _score_error(p, exact, u, by)
    overflows = (counts & np.isfinite(largest) & (largest >= _half_of_range(p))).any(-1, keepdims=True)
    if by.lost:  # whether infinity is multiplied by 0
        overflows = overflows | (seen & np.isposinf(_lost_products(p, by.lost))).any(-1, keepdims=True)
    sink = np.full((p.Hq, 1, 1), -np.inf) if p.sink is None else p.sink[:, None, None]
    m = np.maximum(score.max(-1, keepdims=True, initial=-np.inf), sink)
    inexact = (2 + np.log2(1 + p.S / 16)) * by.exponential
    error = np.where(counts, error + u * (2 * abs(score) + 3 * abs(score - m) + 4) + inexact, 0)
    share, sink_share = np.where(counts, soft.weights, 0), soft.sink[..., None]
    most = error.max(-1, keepdims=True, initial=0)
    rival = counts & (most > _LOST) & (score - lse + error + most > -_LOST)  # it may win, whatever its share is
    error = np.minimum(error, _ANYTHING)
    sink_error = np.where(sink > -np.inf, u * (3 * abs(sink) + 3 * abs(sink - m) + 4) + inexact, 0)
    floor = (share * np.exp(-error)).sum(-1, keepdims=True) + sink_share * np.exp(-sink_error)
    factor = 1.0 if p.dropout is None else p.dropout.factor * p.kept_by_dropout()
    return Softmax(
        seen=seen,
        share=share,
        factor=np.broadcast_to(factor, seen.shape),
        error=error,
        change=np.where(rival, np.maximum(share * np.expm1(error), 1), np.where(share > 0, share * np.expm1(error), 0)),
        floor=np.where(floor == 0, 1, floor),
        sink_share=sink_share,
        sink_change=sink_share * np.expm1(sink_error),
        total=soft.z[..., None] * np.exp(soft.m[..., None] - score.max(-1, keepdims=True, initial=-np.inf)),
        most=most,
        overflows=np.asarray(overflows),
    )


def _score_error(p: Problem, exact: Stages, u: float, by: Arithmetic) -> tuple[Array, Array]:
    """Return the error of the scores (step 1), and the largest number on the way to them."""
    products = abs(wide(p.query)) @ abs(per_head(p.key, p)).swapaxes(-1, -2)
    largest = max(1, abs(p.scale)) * products
    error = abs(p.scale) * (gamma(p.E, u * by.rounding) * (products + abs(exact.raw)) / 2 + gamma(3, u) * products)
    error += abs(p.scale) * by.operand * (2 + by.operand) * products
    if by.lost:
        error += abs(p.scale) * (_lost_products(p, by.lost) + 3 * p.E * by.lost)
    if isinstance(p.key, Stored):
        error += abs(p.scale) * (abs(wide(p.query)) @ of_heads(decoding_error(p.key, u), p).swapaxes(-1, -2))
    if p.softcap is not None:
        nearest = np.maximum(abs(exact.scaled) - error, 0) / p.softcap
        error = error * (1 - np.tanh(nearest) ** 2) + 8 * u * abs(exact.capped)
    if p.bias is not None or p.slopes is not None:
        terms, most = abs(exact.capped), float(finfo(p.acc_dtype).max)
        if p.slopes is not None:
            terms = terms + abs(p.slopes[..., None, None] * p.distances())
        if p.bias is not None:
            harmless = terms < u * most / 2  # a bias at the end of the range stays there
            terms = terms + abs(np.clip(wide(p.bias), -most, most))
            largest = np.where(harmless, largest, np.maximum(largest, terms))
        largest, error = np.maximum(largest, terms if p.bias is None else 0), error + 4 * u * terms
    if p.score_mod is not None:
        score, indices = exact.capped + p.added(), p.indices()
        end = np.finfo(np.float64).max
        moved = (np.clip(x, -end, end) for x in (score, score + error, score - error))
        here, above, below = (p.score_mod(x, *indices) for x in moved)
        error = np.maximum(abs(above - here), abs(below - here)) + 4 * u * abs(here)
    return error, largest


def _lost_products(p: Problem, lost: float) -> Array:
    """Return the sums of the products of which an operand is smaller than `lost`."""
    query, key = abs(wide(p.query)), abs(per_head(p.key, p)).swapaxes(-1, -2)
    few, little = np.where(query < lost, query, 0), np.where(key < lost, key, 0)
    products: Array = few @ key + np.where(query < lost, 0, query) @ little
    return products


def output_bound(p: Problem, exact: Stages, s: Softmax, merges: int, by: Arithmetic = PLAIN) -> Array:
    """Return the bound of the output before its last rounding (steps 3 to 6)."""
    u, tiny, narrow = unit(p.acc_dtype), float(finfo(p.acc_dtype).tiny), p.dtype.itemsize == 2
    weight_unit, lost = (unit(p.dtype), tiny + float(finfo(p.dtype).smallest_subnormal) / 2) if narrow else (0.0, tiny)
    value = per_head(p.value, p)[..., None, :, :]
    harmful, infinite = ~np.isfinite(value), np.isinf(value)
    value = np.where(harmful, 0, value)
    if by.weight:  # of any type of 16 bits
        lost = max(lost, float(np.finfo(np.float16).smallest_subnormal))
    decoded = of_heads(decoding_error(p.value, u), p) if isinstance(p.value, Stored) else None
    lse_error, n = lse_bound(p, exact, s, 0), sum_roundings(s, u * by.rounding)
    by_zero = by.lost * (3 * p.S + 1) * (1.0 if p.dropout is None else p.dropout.factor)
    counts = exact.biased > -np.inf
    bound = np.empty(exact.output.shape)
    for rows in _blocks(p):
        seen, share, error = (x[..., rows, :, None] for x in (s.seen, s.share, s.error))
        floor, sink_share, sink_change, beyond = (
            x[..., rows, :] for x in (s.floor, s.sink_share, s.sink_change, s.overflows)
        )
        output = exact.output[..., rows, :]
        values = np.where(seen, s.factor[..., rows, :, None] * value, 0)
        apart = np.where(seen, abs(values - output[..., None, :]), 0)
        size, values = abs(output), abs(values)
        reach = np.maximum(apart.max(-2, initial=0), np.where(sink_share > 0, size, 0))
        moved = ((s.change[..., rows, :, None] * apart).sum(-2) + sink_change * size) / floor
        total = (np.where(share > 0, share * np.exp(error), 0) * values).sum(-2) / floor
        total = np.minimum(total, values.max(-2, initial=0))
        moved += merges * np.expm1(np.minimum(2 * lse_error[..., rows, None], _ANYTHING)) * (total + size)
        rounded = (
            (by.weight + by.operand) * total
            + n[..., rows, None] * (total / 2 + 1.5 * size)
            + (weight_unit + u) * total
            + lost * values.sum(-2)
            + p.S * tiny
            + by_zero
        )
        if decoded is not None:
            errs = np.where(seen & ~harmful, decoded[..., None, :, :], 0)
            rounded += (s.factor[..., rows, :, None] * (share + s.change[..., rows, :, None]) * errs).sum(-2)
        rounded += merges * ((unit(p.dtype) + 8 * u) * total + float(finfo(p.dtype).smallest_subnormal) / 2)
        may_be = (share * np.exp(error) > 0) | (infinite & counts[..., rows, :, None])  # before the maximum came
        unsure = (seen & harmful & (share < 2 * lost) & may_be).any(-2)
        sums = (share * values).sum(-2) * s.total[..., rows, :]
        hopeless = beyond | (sums >= _half_of_range(p))
        bounded = np.where(hopeless, np.inf, np.minimum(moved, reach) + rounded)
        bound[..., rows, :] = np.where(unsure, ANYTHING, bounded)
    return bound


def weights_bound(p: Problem, exact: Stages, s: Softmax) -> Array:
    """Return the bound of the weights before their last rounding: that of the output for V = identity."""
    moved = share_error(s)
    rounded = sum_roundings(s, unit(p.acc_dtype))[..., None] * (s.share + moved) + float(finfo(p.acc_dtype).tiny)
    return np.where(s.overflows, np.inf, np.where(s.seen, s.factor * (moved + rounded), 0))


def share_error(s: Softmax) -> Array:
    """Return how far errors of the scores move the weights before dropout."""
    others = s.change.sum(-1, keepdims=True) + s.sink_change - s.change
    moved: Array = np.minimum((s.change * (1 - s.share) + s.share * others) / s.floor, 1)
    return moved


def lse_bound(p: Problem, exact: Stages, s: Softmax, merges: int) -> Array:
    """Return the bound of the lse before its last rounding."""
    u, m = unit(p.acc_dtype), exact.biased.max(-1, initial=-np.inf)
    if p.sink is not None:
        m = np.maximum(m, p.sink[:, None])
    moved = np.maximum(np.log1p(s.change.sum(-1) + s.sink_change[..., 0]), -np.log(s.floor[..., 0]))
    moved = np.maximum(moved, np.where(s.most[..., 0] > _LOST, s.most[..., 0], 0))
    rounded = sum_roundings(s, u) + 4 * u * (abs(m) + abs(exact.lse)) + merges * 4 * u * (1 + abs(exact.lse))
    return np.where(s.overflows[..., 0], np.inf, np.where(np.isfinite(exact.lse), moved + rounded, 0))


def remade_error(s: Softmax) -> tuple[Array, Array]:
    """Return how far the weights and that of the sink may be off where they are made again from rounded scores.

    Numerators and denominators then err apart, but a weight stays between 0 and 1.
    """
    sums = s.change.sum(-1, keepdims=True) + s.sink_change
    apart = ((change + share * sums, share) for change, share in ((s.change, s.share), (s.sink_change, s.sink_share)))
    keys, sink = (np.minimum(moved / s.floor, np.maximum(share, 1 - share)) for moved, share in apart)
    return np.where(s.seen, keys, 0), sink


def sum_roundings(s: Softmax, u: float) -> Array:
    """Return gamma(n + 16) for each row (step 4)."""
    roundings: Array = gamma(s.seen.sum(-1) + 16, u)
    return roundings


def decoding_error(stored: Stored, u: float) -> Array:
    """Return how far the numbers that codes mean may be off (step 8)."""
    numbers: Array = wide(stored)
    if stored.bits == 0:
        return np.zeros_like(numbers)
    return u * (abs(wide(stored._replace(offset=None))) + abs(numbers))


def wide(array: Array | Stored) -> Array:
    """Return the array, or that which stored keys mean, in float64."""
    dense: Array = array.dense() if isinstance(array, Stored) else array
    return dense.astype(np.float64)


def of_heads(array: Array, p: Problem) -> Array:
    """Return an array of key heads with one head for each query head."""
    return array[..., np.arange(p.Hq) // p.group, :, :]


def per_head(array: Array | Stored, p: Problem) -> Array:
    """Return keys or values in float64 with one head for each query head."""
    return of_heads(wide(array), p)


def _half_of_range(p: Problem) -> float:
    return float(finfo(p.acc_dtype).max) / 2


def _blocks(p: Problem) -> Iterator[slice]:
    """Return slices of rows that keep the products of weights and values small."""
    step = max(1, _BLOCK // max(1, p.B * p.Hq * p.S * p.Ev))
    return (slice(i, min(i + step, p.L)) for i in range(0, p.L, step))
