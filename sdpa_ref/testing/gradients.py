"""Error budgets for gradients, and derivatives by differences to hold them against.

The bounds follow `sdpa_ref.testing.bounds`, to first order. A weight ``w = p / z`` that is made again errs by r: what
errors of the scores do to p and to z, each on its own, and gamma(n + 16). However large the scores are, the weights of
a row are not below 0 and sum to 1 or less. So r is at most ``max(w, 1 - w)``, and the r of a row sum to 2 at most: a
sum over keys errs by no more than twice its largest term for w = 1, and ``|dV_j|`` by no more than ``sum_i |dO_i|``.

``dP = dO . v`` errs by gamma(Ev + 2), the row sum ``D = sum w dP`` by what its terms do, or is taken as dO times the
rounded output; so ``dS = w (dP - D + dlse)`` errs by ``r (|dP| + |D| + |dlse|)`` and w times the errors of dP and D,
with sums of absolute values for dP and D. 16-bit kernels round w and dS before the products with Q, K and dO. The sums
over keys, rows, the heads of a group and broadcast axes add gamma of their lengths.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_ref import reference
from sdpa_ref._problem import differentiable, pose
from sdpa_ref.arrays import as_array, is_float
from sdpa_ref.backend import Gradients, Problem
from sdpa_ref.testing import bounds
from sdpa_ref.testing.bounds import gamma, per_head, unit, wide
from sdpa_ref.testing.budget import Budget, rounded, with_precision

Array = np.ndarray[Any, np.dtype[Any]]


def gradient_budget(
    query: Any,
    key: Any,
    value: Any,
    grad_output: Any,
    *,
    grad_lse: Any = None,
    precision: Any = None,
    exp_error: float = 0.0,
    **options: Any,
) -> Gradients:
    """Return the error budgets of the gradients of attention.

    Parameters
    ----------
    query, key, value, grad_output, grad_lse, **options
        As in `sdpa_vjp`.
    precision, exp_error
        As in `error_budget`.

    Returns
    -------
    Gradients
        With a `Budget` for each array that `sdpa_vjp` returns.

    Examples
    --------
    >>> x = np.eye(2)
    >>> gradient_budget(x, x, x, x).value.expected.round(2)
    array([[0.67, 0.33],
           [0.33, 0.67]])
    """
    bias, sink = options.get("bias"), options.get("sink")
    problem, caller = pose(query, key, value, **options)
    incoming = caller.incoming(differentiable(problem), grad_output, grad_lse)
    given = query, key, value, bias, sink
    as_wide = tuple(map(_widened, given))
    exact = caller.gradients(reference.vjp(problem, *incoming), *as_wide)
    problem, by = with_precision(problem, precision, exp_error)
    with np.errstate(all="ignore"):
        bound = caller.gradients(_bounds(problem.rows(0, problem.L), *incoming, by), *as_wide)
    terms = problem.B * max(problem.group, problem.Hq)  # the longest sum over broadcast axes

    def budget(expected: Any, allowed: Any, like: Any) -> Any:
        if isinstance(expected, tuple):
            return tuple(map(budget, expected, allowed, like))
        if expected is None:
            return None
        dtype = as_array("input", like).dtype
        dtype = dtype.newbyteorder("=") if is_float(dtype) else np.dtype(np.float64)
        allowed = allowed * (1 + gamma(terms, unit(problem.acc_dtype)))
        return Budget(expected, dtype, rounded(allowed, expected, dtype, problem.acc_dtype), np.inf, False)

    return Gradients(*map(budget, exact, bound, given))


def slope(f: Callable[[float], float]) -> tuple[float, float]:
    """Return the derivative of f at 0 by central differences, and an estimate of its error.

    The error is that of the rounding of f, and of the next term of the series, as a second, halved step shows it.

    Examples
    --------
    >>> import math
    >>> value, error = slope(math.exp)
    >>> abs(value - 1) < error < 1e-6
    True
    """
    step = 2.0**-14
    (coarse, top), (fine, _) = (((f(h) - f(-h)) / (2 * h), max(abs(f(h)), abs(f(-h)))) for h in (step, step / 2))
    return fine, 2 * abs(fine - coarse) + 64 * float(np.finfo(np.float64).eps) * (top + 1) / step


def _widened(given: Any) -> Any:
    """Return the argument in float64, so that its gradient is not rounded."""
    if isinstance(given, tuple):
        return tuple(map(_widened, given))
    if given is None or hasattr(given, "slopes"):
        return given
    return as_array("input", given).astype(np.float64)


def _bounds(p: Problem, grad_output: Array, grad_lse: Array | None, by: bounds.Arithmetic) -> Gradients:
    """Return the bounds of the canonical gradients, before any rounding to the types of the inputs."""
    exact = reference.stages(p)
    s = bounds.softmax(p, exact, by)
    u, narrow = unit(p.acc_dtype), unit(p.dtype) if p.dtype.itemsize == 2 else 0.0
    narrow = max(narrow, by.weight) + by.operand
    seen, w = s.seen, s.share
    q, k, v = abs(wide(p.query)), abs(per_head(p.key, p)), abs(per_head(p.value, p))
    d_output = np.where(seen.any(-1, keepdims=True), abs(wide(grad_output)), 0)
    d_lse = 0.0 if grad_lse is None else np.where(exact.lse > -np.inf, abs(wide(grad_lse)), 0)[..., None]

    moved, moved_sink = bounds.remade_error(s)
    moved = moved + np.where(seen, (bounds.sum_roundings(s, u)[..., None] + 16 * u) * (w + moved), 0)
    dP = s.factor * np.where(seen, d_output @ np.where(np.isfinite(v), v, 0).swapaxes(-1, -2), 0)
    dP_error = (gamma(p.Ev + 2, u) + by.operand * (2 + by.operand)) * dP
    D = (w * dP).sum(-1, keepdims=True)
    lost = float(bounds.finfo(p.acc_dtype).tiny)  # weights below the smallest normal number are inexact or 0
    D_error = np.minimum((moved * dP).sum(-1, keepdims=True), 2 * dP.max(-1, keepdims=True, initial=0))
    D_error += (w * dP_error + lost * dP).sum(-1, keepdims=True) + (gamma(p.S + p.Ev + 16, u) + 2 * narrow) * D
    reach = np.where(seen, dP + D + D_error + d_lse, 0)  # what a weight is multiplied by, at most
    dS = w * (dP + D + d_lse)
    dS_error = w * (dP_error + D_error) + 4 * u * dS + np.where(seen, lost * (1 + dP + D + d_lse), 0)
    if p.score_mod is not None:
        inner = abs(p.score_mod.derivative(exact.capped + p.added(), *p.indices()))  # type: ignore[attr-defined]
        dS, dS_error, reach = inner * dS, inner * dS_error + 16 * u * dS, inner * reach
    d_bias = np.where(seen, moved * reach + dS_error + u * dS, 0)
    if p.softcap is not None:
        t = abs(exact.capped / p.softcap)
        bent = np.minimum(2 * t * (np.where(seen, s.error, 0) / p.softcap + 8 * u) + 4 * u, 1)
        dS_error = dS_error * (1 - t**2) + (dS + dS_error + moved * reach) * bent
        dS, reach = dS * (1 - t**2), reach * (1 - t**2)
    dS, dS_error, reach = (abs(p.scale) * np.where(seen, x, 0) for x in (dS, dS_error, reach))
    dS_error = dS_error + narrow * (dS + moved * reach) + float(bounds.finfo(p.dtype).tiny)

    def mixed(error: Array, size: Array, other: Array, n: int) -> Array:
        product: Array = (error + gamma(n + 16, u) * size) @ np.where(np.isfinite(other), other, 0)
        return product

    def grouped(array: Array) -> Array:
        total: Array = array.reshape(*p.batch, p.Hkv if p.Hq else 0, p.group, *array.shape[-2:]).sum(-3)
        return total

    rows = p.L * p.group
    mixing = w * s.factor
    mixing_error = s.factor * (moved + narrow * (w + moved)) + np.where(seen, float(bounds.finfo(p.dtype).tiny), 0)
    d_sink = None
    if p.sink is not None:
        size = D + D_error + d_lse
        d_sink = moved_sink * size + s.sink_share * (D_error + gamma(rows * p.B + 32, u) * size)
        d_sink = (d_sink + lost * (1 + size)).sum((-1, -2))
    finite_k = np.where(np.isfinite(k), k, 0)
    most = reach.max(-1, keepdims=True, initial=0) * finite_k.max(-2, keepdims=True, initial=0)
    d_query = np.minimum((moved * reach) @ finite_k, 2 * most) + mixed(dS_error, dS, k, p.S)
    dS_error = dS_error + moved * reach
    return Gradients(
        d_query,
        grouped(mixed(dS_error.swapaxes(-1, -2), dS.swapaxes(-1, -2), q, rows)),
        grouped(mixed(mixing_error.swapaxes(-1, -2), mixing.swapaxes(-1, -2), d_output, rows)),
        d_bias,
        d_sink,
    )
