"""Error budgets for gradients, and derivatives by differences to hold them against.

The bounds follow `sdpa_ref.testing.bounds`, to first order. A weight that is computed again from the lse errs by
its own error, by that of the lse and by that of exp; let r be their relative sum. ``dP = dO . v`` errs by gamma(Ev
+ 2), the row sum ``D = sum w dP`` by what its terms do, or is taken as dO times the rounded output; so ``dS = w (dP
- D + dlse)`` errs by ``r |dS|`` and w times the errors of dP and D, with sums of absolute values for dS. 16-bit
kernels round w and dS before the products with Q, K and dO. The sums over keys, rows, the heads of a group and
broadcast axes add gamma of their lengths.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_ref import reference
from sdpa_ref.arrays import as_array, is_float
from sdpa_ref._problem import differentiable, pose
from sdpa_ref.backend import Gradients, Problem
from sdpa_ref.testing import bounds
from sdpa_ref.testing.bounds import gamma, per_head, unit, wide
from sdpa_ref.testing.budget import Budget, rounded

Array = np.ndarray[Any, np.dtype[Any]]


def gradient_budget(
    query: Any, key: Any, value: Any, grad_output: Any, *, grad_lse: Any = None, **options: Any
) -> Gradients:
    """Return the error budgets of the gradients of attention.

    Parameters
    ----------
    query, key, value, grad_output, grad_lse, **options
        As in `sdpa_vjp`.

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
    with np.errstate(all="ignore"):
        bound = caller.gradients(_bounds(problem.rows(0, problem.L), *incoming), *as_wide)
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


def _bounds(p: Problem, grad_output: Array, grad_lse: Array | None) -> Gradients:
    """Return the bounds of the canonical gradients, before any rounding to the types of the inputs."""
    exact = reference.stages(p)
    s = bounds.softmax(p, exact)
    u, narrow = unit(p.acc_dtype), unit(p.dtype) if p.dtype.itemsize == 2 else 0.0
    seen, w = s.seen, s.share
    q, k, v = abs(wide(p.query)), abs(per_head(p.key, p)), abs(per_head(p.value, p))
    d_output = np.where(seen.any(-1, keepdims=True), abs(wide(grad_output)), 0)
    d_lse = 0.0 if grad_lse is None else np.where(exact.lse > -np.inf, abs(wide(grad_lse)), 0)[..., None]

    relative = np.minimum(np.where(w > 0, bounds.share_error(s) / np.where(w > 0, w, 1), 0), 1 / np.maximum(w, u))
    relative += np.expm1(np.minimum(bounds.lse_bound(p, exact, s, 0)[..., None] + u * abs(exact.lse)[..., None], 1))
    relative += np.where(np.isfinite(exact.biased), u * (2 * abs(exact.biased) + 8), 0)
    dP = s.factor * np.where(seen, d_output @ np.where(np.isfinite(v), v, 0).swapaxes(-1, -2), 0)
    dP_error = gamma(p.Ev + 2, u) * dP
    D = (w * dP).sum(-1, keepdims=True)
    lost = float(bounds.finfo(p.acc_dtype).tiny)  # weights below the smallest normal number are inexact or 0
    D_error = (w * (relative * dP + dP_error) + lost * dP).sum(-1, keepdims=True)
    D_error += (gamma(p.S + p.Ev + 16, u) + 2 * narrow) * D
    dS = w * (dP + D + d_lse)
    dS_error = relative * dS + w * (dP_error + D_error) + 4 * u * dS + np.where(seen, lost * (1 + dP + D + d_lse), 0)
    if p.score_mod is not None:
        inner = abs(p.score_mod.derivative(exact.capped + p.added(), *p.indices()))  # type: ignore[attr-defined]
        dS, dS_error = inner * dS, inner * dS_error + 16 * u * dS
    d_bias = np.where(seen, dS_error + u * dS, 0)
    if p.softcap is not None:
        t = abs(exact.capped / p.softcap)
        moved = np.minimum(2 * t * (np.where(seen, s.error, 0) / p.softcap + 8 * u) + 4 * u, 1)
        dS, dS_error = dS * (1 - t**2), dS_error * (1 - t**2) + dS * moved
    dS, dS_error = (abs(p.scale) * np.where(seen, x, 0) for x in (dS, dS_error))
    dS_error = dS_error + narrow * dS + float(bounds.finfo(p.dtype).tiny)

    def mixed(error: Array, size: Array, other: Array, n: int) -> Array:
        product: Array = (error + gamma(n + 16, u) * size) @ np.where(np.isfinite(other), other, 0)
        return product

    def grouped(array: Array) -> Array:
        total: Array = array.reshape(*p.batch, p.Hkv if p.Hq else 0, p.group, *array.shape[-2:]).sum(-3)
        return total

    rows = p.L * p.group
    mixing = w * s.factor
    mixing_error = mixing * (relative + narrow) + np.where(seen, float(bounds.finfo(p.dtype).tiny), 0)
    d_sink = None
    if p.sink is not None:
        share = s.sink_share * (D + d_lse)
        moved_share = np.minimum(s.change.sum(-1, keepdims=True) + s.sink_change, 1) / s.floor
        d_sink = share * (moved_share + gamma(rows * p.B + 32, u)) + s.sink_share * D_error + lost * (1 + D + d_lse)
        d_sink = d_sink.sum((-1, -2))
    return Gradients(
        mixed(dS_error, dS, k, p.S),
        grouped(mixed(dS_error.swapaxes(-1, -2), dS.swapaxes(-1, -2), q, rows)),
        grouped(mixed(mixing_error.swapaxes(-1, -2), mixing.swapaxes(-1, -2), d_output, rows)),
        d_bias,
        d_sink,
    )
