"""The gradients of the definition, in float64: docs/gradients.md derives them."""

from typing import Any

import numpy as np

from sdpa_ref import reference  # a module that imports this one
from sdpa_ref.backend import Gradients, Problem, Result
from sdpa_ref.floating_point import ieee

Array = np.ndarray[Any, np.dtype[Any]]


@ieee
def vjp(problem: Problem, grad_output: Array, grad_lse: Array | None, result: Result | None = None) -> Gradients:
    """Return the gradients in canonical order and float64, those of broadcast inputs and bias not yet summed."""
    whole = result if result is not None and result.output.dtype == np.float64 else None  # what is rounded says less
    groups, heads, mixed, wide = reference.groups, reference.heads, reference.mixed, reference.wide
    p, s = problem.rows(0, problem.L), reference.stages(problem)
    q, k, v = groups(p, wide(p.query)), wide(p.key)[..., None, :, :], wide(p.value)[..., None, :, :]
    d_output, d_lse = groups(p, wide(grad_output)), 0.0 if grad_lse is None else wide(grad_lse)[..., None]
    with np.errstate(all="ignore"):
        seen = s.keep & (s.biased.max(-1, initial=-np.inf) > -np.inf)[..., None]
        # through the weighted sum and dropout
        soft = reference.softmax(s.biased, s.keep, p.sink)
        weights = soft.weights
        if whole is not None and _alike(whole, soft):
            whole = None  # it is that of these keys
        if whole is not None:
            e = np.exp(s.biased - np.where(whole.m == -np.inf, 0, whole.m)[..., None])
            weights = e / np.where(whole.z == 0, 1, whole.z)[..., None]
        weights = np.where(seen, weights, 0)
        d_weights = heads(p, d_output @ v.swapaxes(-1, -2))
        if p.dropout is not None:
            kept = p.kept_by_dropout()
            d_weights = np.where(kept, d_weights * p.dropout.factor, 0)
        # through the softmax
        inner = np.where(seen, weights * d_weights, 0).sum(-1, keepdims=True)
        if whole is not None:
            product = (wide(grad_output) * wide(whole.output)).sum(-1, keepdims=True)
            inner = np.where(seen.any(-1, keepdims=True), product, 0)
        d_score = np.where(seen, weights * (d_weights - inner + d_lse), 0)
        d_sink = None
        if p.sink is not None:
            share = soft.sink[..., None]
            d_sink = np.where(share == 0, 0, share * (d_lse - inner)).sum((-1, -2))
        # through score_mod, bias and soft cap
        if p.score_mod is not None:
            slope = p.score_mod.derivative(s.capped + p.added(), *p.indices())  # type: ignore[attr-defined]
            d_score = np.where(seen, d_score * slope, 0)
        d_bias = d_score
        mixing = weights if p.dropout is None else np.where(kept, weights * p.dropout.factor, 0)
        if p.softcap is not None:
            d_score = np.where(seen, d_score * (1 - (s.capped / p.softcap) ** 2), 0)
        # through the product of query and key
        d_score, seen, mixing = (groups(p, x) for x in (p.scale * d_score, seen, mixing))
        seen_by = seen.swapaxes(-1, -2)
        d_query = heads(p, mixed(d_score, seen, k))
        d_key = mixed(d_score.swapaxes(-1, -2), seen_by, q).sum(-3)
        d_value = mixed(mixing.swapaxes(-1, -2), seen_by, d_output).sum(-3)
    return Gradients(d_query, d_key, d_value, d_bias, d_sink)


def _alike(result: Result, soft: Any) -> bool:
    """Return whether a result is that of the same keys: it has the same numbers of each row."""
    return np.array_equal(result.m, soft.m, equal_nan=True) and np.array_equal(result.z, soft.z, equal_nan=True)
