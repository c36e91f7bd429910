"""The gradients of the definition, in float64: docs/gradients.md derives them."""

from typing import Any

import numpy as np

from sdpa_ref import reference  # a module that imports this one
from sdpa_ref.backend import Gradients, Problem, Result

Array = np.ndarray[Any, np.dtype[Any]]


def vjp(problem: Problem, grad_output: Array, grad_lse: Array | None, result: Result | None = None) -> Gradients:
    """Return the gradients in canonical order and float64, those of broadcast inputs and bias not yet summed."""
    p, s = problem.rows(0, problem.L), reference.stages(problem)
    q, k, v = reference.wide(p.query), reference.per_head(p, p.key), reference.per_head(p, p.value)
    d_output, d_lse = reference.wide(grad_output), 0.0 if grad_lse is None else reference.wide(grad_lse)[..., None]
    with np.errstate(all="ignore"):
        seen = s.keep & (s.biased.max(-1, initial=-np.inf) > -np.inf)[..., None]
        # through the weighted sum and dropout
        weights = np.where(seen, (s if p.dropout is None else reference.stages(p._replace(dropout=None))).weights, 0)
        d_weights = d_output @ v.swapaxes(-1, -2)
        if p.dropout is not None:
            kept = p.dropout.keep(weights.shape, first_row=p.first_row)
            d_weights = np.where(kept, d_weights * p.dropout.factor, 0)
        # through the softmax
        inner = np.where(seen, weights * d_weights, 0).sum(-1, keepdims=True)
        d_score = np.where(seen, weights * (d_weights - inner + d_lse), 0)
        d_sink = None
        if p.sink is not None:
            share = np.where(s.lse == -np.inf, 0, np.exp(p.sink[:, None] - s.lse))[..., None]
            d_sink = np.where(share == 0, 0, share * (d_lse - inner)).sum((-1, -2))
        # through score_mod, bias and soft cap
        if p.score_mod is not None:
            slope = p.score_mod.derivative(s.capped + p.added(), *p.indices())  # type: ignore[attr-defined]
            d_score = np.where(seen, d_score * slope, 0)
        d_bias = d_score
        if p.softcap is not None:
            d_score = np.where(seen, d_score * (1 - (s.capped / p.softcap) ** 2), 0)
        # through the product of query and key
        d_score = p.scale * d_score
        d_query = reference.mixed(d_score, seen, k)
        d_key = reference.mixed(d_score.swapaxes(-1, -2), seen.swapaxes(-1, -2), q)
        d_value = reference.mixed(s.weights.swapaxes(-1, -2), seen.swapaxes(-1, -2), d_output)
    return Gradients(d_query, _per_key_head(p, d_key), _per_key_head(p, d_value), d_bias, d_sink)


def _per_key_head(p: Problem, gradient: Array) -> Array:
    """Return the sum over the query heads that read one key head."""
    total: Array = gradient.reshape(*gradient.shape[:-3], p.Hkv, p.group, *gradient.shape[-2:]).sum(-3)
    return total
