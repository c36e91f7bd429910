"""The definition of attention, a formula a line, in float64 and rounded once. No line here is there for speed."""

from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.floating_point import ieee
from sdpa_ref.gradients import Gradients
from sdpa_ref.problem import Problem, Result

ARRAYS = "numpy"
F64 = np.float64
Array = np.ndarray[Any, np.dtype[Any]]


class Stages(NamedTuple):
    """Every stage of attention in float64, scores ``(..., Hq, L, S)``.

    Attributes
    ----------
    raw : query times key
    scaled : times the scale
    capped : after the soft cap (as scaled where there is none)
    biased : after bias, ALiBi and score_mod, -inf where a key is dropped
    keep : bool, True where the query attends to the key
    lse : ``(..., Hq, L)``, logarithm of the sum of the exponentials, the sink's included
    weights : after softmax and dropout
    output : ``(..., Hq, L, Ev)``
    """

    raw: Array
    scaled: Array
    capped: Array
    biased: Array
    keep: Array
    lse: Array
    weights: Array
    output: Array


def unavailable() -> str | None:
    """Return why the backend cannot run here: it always can."""
    return None


def unsupported(problem: Problem) -> str | None:
    """Return why the backend cannot solve the problem: it always can."""
    return None


@ieee
def forward(problem: Problem, want: frozenset[str]) -> Result:
    """Return what is wanted of output, lse and weights, rounded once."""
    exact = stages(problem)
    output = None
    if "output" in want:
        output = problem.new_output()
        output[...] = _round(exact.output, problem.dtype)
    lse = _round(exact.lse, problem.acc_dtype) if "lse" in want else None
    return Result(output, lse, _round(exact.weights, problem.dtype) if "weights" in want else None)


@ieee
def stages(problem: Problem) -> Stages:
    """Return every stage, in canonical order."""
    p = problem.rows(0, problem.L)
    q, k = _wide(p.query), _wide(p.key)
    with np.errstate(all="ignore"):  # NaN and inf follow IEEE, silently
        raw = _heads(_groups(q, p) @ k[..., None, :, :].swapaxes(-1, -2), p)
        scaled = p.scale * raw
        capped = scaled if p.softcap is None else p.softcap * np.tanh(scaled / p.softcap)
        score, keep = _biased(capped, p), _visible(p)
        if p.score_mod is not None:
            score = np.broadcast_to(p.score_mod(score, *_indices(p)), score.shape)
        score = np.where(keep, score, -np.inf)

        sink = np.full(p.Hq, -np.inf) if p.sink is None else p.sink
        m = np.maximum(score.max(-1, initial=-np.inf), sink[:, None])
        m = np.where(m == -np.inf, 0, m)  # a row that sees nothing, where -inf - -inf would be NaN
        e = np.exp(score - m[..., None])
        z = e.sum(-1) + np.exp(sink[:, None] - m)
        weights = np.where(keep, e / np.where(z == 0, 1, z)[..., None], 0)
        lse = m + np.log(z)
        if p.dropout is not None:
            kept = p.dropout.keep(score.shape, first_row=p.first_row)
            weights = weights * np.where(kept, p.dropout.factor, 0)
        value = _wide(p.value) if p.value is not None else np.empty((*k.shape[:-1], 0))
        seen = keep & ~_empty(score)
        output = _heads(_mixed(_groups(weights, p), _groups(seen, p), value[..., None, :, :]), p)
    return Stages(raw, scaled, capped, score, keep, lse, weights, output)


@ieee
def vjp(problem: Problem, grad_output: Array, grad_lse: Array | None, result: Result | None = None) -> Gradients:
    """Return the gradients in canonical order and float64, those of broadcast inputs and bias not yet summed."""
    p, s = problem.rows(0, problem.L), stages(problem)
    q, k, v = _groups(_wide(p.query), p), _wide(p.key)[..., None, :, :], _wide(p.value)[..., None, :, :]
    d_output, d_lse = _groups(_wide(grad_output), p), 0.0 if grad_lse is None else _wide(grad_lse)[..., None]
    with np.errstate(all="ignore"):
        seen = s.keep & ~_empty(s.biased)
        weights = np.where(seen, (s if p.dropout is None else stages(p._replace(dropout=None))).weights, 0)
        d_weights = _heads(d_output @ v.swapaxes(-1, -2), p)
        if p.dropout is not None:
            kept = p.dropout.keep(weights.shape, first_row=p.first_row)
            d_weights = np.where(kept, d_weights * p.dropout.factor, 0)
        inner = np.where(seen, weights * d_weights, 0).sum(-1, keepdims=True)
        d_score = np.where(seen, weights * (d_weights - inner + d_lse), 0)

        d_sink = None
        if p.sink is not None:
            share = np.where(s.lse == -np.inf, 0, np.exp(p.sink[:, None] - s.lse))[..., None]
            d_sink = np.where(share == 0, 0, share * (d_lse - inner)).sum((-1, -2))
        if p.score_mod is not None:
            slope = p.score_mod.derivative(_biased(s.capped, p), *_indices(p))  # type: ignore[attr-defined]
            d_score = np.where(seen, d_score * slope, 0)
        d_bias = d_score
        if p.softcap is not None:
            d_score = np.where(seen, d_score * (1 - (s.capped / p.softcap) ** 2), 0)

        d_score, seen, mixed = (_groups(x, p) for x in (p.scale * d_score, seen, s.weights))
        d_query = _heads(_mixed(d_score, seen, k), p)
        d_key, d_value = (
            _mixed(x.swapaxes(-1, -2), seen.swapaxes(-1, -2), y).sum(-3) for x, y in ((d_score, q), (mixed, d_output))
        )
    return Gradients(d_query, d_key, d_value, d_bias, d_sink)


def _biased(capped: Array, p: Problem) -> Array:
    """Return the scores plus bias and ALiBi."""
    score = capped
    if p.bias is not None:
        score = score + _clamped(_wide(p.bias), p.acc_dtype)
    if p.slopes is not None:
        score = score - p.slopes[:, None, None] * abs(p.positions[..., None, :, None] - np.arange(p.S))
    return score


def _empty(score: Array) -> Array:
    """Return, (..., 1), whether a row has no kept score above -inf."""
    empty: Array = np.all(score == -np.inf, axis=-1, keepdims=True)
    return empty


def _visible(p: Problem) -> Array:
    """Return which keys a row keeps: the mask, less those whose bias is -inf."""
    j = np.arange(p.S)
    keep = np.ones((*p.batch, p.Hq, p.L, p.S), bool)
    if p.intervals is not None:
        prefix, start, stop = (bound[..., None, :, None] for bound in p.intervals)
        keep &= (j < prefix) | ((start <= j) & (j < stop))
    if p.dense is not None:
        keep &= p.dense
    if p.bias is not None:
        keep &= p.bias != -np.inf
    return keep


def _mixed(weights: Array, keep: Array, value: Array) -> Array:
    """Return weights times value, where a key that a row drops adds nothing to it, not even 0 * NaN."""
    harmful = ~np.isfinite(value)
    mixed: Array = weights @ np.where(harmful, 0, value)
    for j in np.flatnonzero(harmful.any((*range(value.ndim - 2), -1))):
        rows = np.where(harmful, value, 0)[..., None, j, :]
        mixed += np.where(keep[..., j, None], weights[..., j, None] * rows, 0)
    return mixed


def _wide(array: Array) -> Array:
    """Return a float64 copy in C order: sums must not depend on the caller's strides."""
    return np.array(array, F64, order="C")


def _groups(array: Array, p: Problem) -> Array:
    """Return (..., Hq, x, y) as (..., Hkv, group, x, y)."""
    return array.reshape(*array.shape[:-3], p.Hkv, p.group, *array.shape[-2:])


def _heads(array: Array, p: Problem) -> Array:
    """Return (..., Hkv, group, x, y) as (..., Hq, x, y)."""
    return array.reshape(*array.shape[:-4], p.Hq, *array.shape[-2:])


def _indices(p: Problem) -> tuple[Array, Array, Array, Array]:
    """Return b, h, i, j as arrays that broadcast to the scores."""
    b = np.arange(p.B).reshape(*p.batch, 1, 1, 1)
    return (
        b,
        np.arange(p.Hq)[:, None, None],
        np.arange(p.first_row, p.first_row + p.L)[:, None],
        np.arange(p.S),
    )


def _clamped(bias: Array, acc_dtype: np.dtype[Any]) -> Array:
    """Return the bias with what is finite kept within the range of the accumulation type."""
    most = float(np.finfo(acc_dtype).max)
    return np.where(np.isfinite(bias), np.clip(bias, -most, most), bias)


def _round(array: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return array.astype(dtype)
