"""The definition of attention: the eight steps of docs/semantics.md in float64, rounded once. No line is for speed."""

import sys
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.backend import Problem, Result, Sums
from sdpa_ref.floating_point import ieee
from sdpa_ref.reference_vjp import vjp
from sdpa_ref.storage import Stored

__all__ = ["ARRAYS", "TASKS", "Stages", "add", "finish", "forward", "stages", "unavailable", "unsupported", "vjp"]

ARRAYS, TASKS = "numpy", frozenset({"vjp", "stages", "add"})
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


class Softmax(NamedTuple):
    """The softmax of each row: its largest score, sum of exponentials beside it, weights, and the sink's weight."""

    m: Array
    z: Array
    weights: Array
    sink: Array


def unavailable() -> str | None:
    """Return why the backend cannot run here: it always can."""
    return None


def unsupported(problem: Problem) -> str | None:
    """Return why the backend cannot solve the problem: it always can."""
    return None


@ieee
def forward(problem: Problem, want: frozenset[str]) -> Result:
    """Return what is wanted, rounded once; maximum and sum stay in float64."""
    exact = stages(problem)
    with np.errstate(all="ignore"):
        soft = softmax(exact.biased, exact.keep, problem.sink)
        output = lse = weights = None
        if "output" in want:
            output = problem.new_output()
            output[...] = exact.output.astype(problem.dtype)
        if "lse" in want:
            lse = exact.lse.astype(problem.acc_dtype)
        if "weights" in want:
            weights = exact.weights.astype(problem.dtype)
    return Result(output, lse, weights, soft.m, soft.z)


@ieee
def stages(problem: Problem) -> Stages:
    """Return every stage, in canonical order."""
    p = problem.rows(0, problem.L)  # mask and bias as arrays
    q, k = groups(p, wide(p.query)), wide(p.key)[..., None, :, :]  # a group of query heads reads one key head
    v = (np.empty((*p.key.shape[:-1], 0)) if p.value is None else wide(p.value))[..., None, :, :]
    with np.errstate(all="ignore"):  # NaN and inf follow IEEE, silently
        # 1. the scores
        raw = heads(p, q @ k.swapaxes(-1, -2))
        scaled = p.scale * raw
        # 2. the soft cap
        capped = scaled if p.softcap is None else p.softcap * np.tanh(scaled / p.softcap)
        # 3. bias and ALiBi
        s = capped + p.added()
        # 4. the user's function
        s = s if p.score_mod is None else p.score_mod(s, *p.indices())
        # 5. dropped keys
        keep = p.kept()
        s = np.where(keep, s, -np.inf)
        # 6. and 7. the softmax
        m, z, weights, _ = softmax(s, keep, p.sink)
        lse = m + np.log(z)
        # 8. the output
        if p.dropout is not None:
            weights = weights * np.where(p.kept_by_dropout(), p.dropout.factor, 0)
        seen = keep & (s.max(-1, initial=-np.inf) > -np.inf)[..., None]
        output = heads(p, mixed(groups(p, weights), groups(p, seen), v))
    return Stages(raw, scaled, capped, s, keep, lse, weights, output)


def softmax(s: Array, keep: Array, sink: Array | None) -> Softmax:
    """Return the softmax of each row, with a logit a head that only adds to the sum: steps 6 and 7."""
    logit = -np.inf if sink is None else sink[:, None]
    m = np.maximum(s.max(-1, initial=-np.inf), logit)
    base = np.where(m == -np.inf, 0, m)  # a row that sees nothing, where -inf - -inf would be NaN
    e, e_sink = np.exp(s - base[..., None]), np.exp(logit - base)
    z = e.sum(-1) + e_sink
    divisor = np.where(z == 0, 1, z)
    return Softmax(m, z, np.where(keep, e / divisor[..., None], 0), e_sink / divisor)


def wide(array: Array | Stored) -> Array:
    """Return a float64 copy in C order: sums must not depend on the caller's strides. Pages are gathered."""
    array = array.dense() if isinstance(array, Stored) else array
    with np.errstate(invalid="ignore"):  # a NaN of the signalling kind becomes a quiet one
        return np.array(array, np.float64, order="C")


def groups(p: Problem, array: Array) -> Array:
    """Return (..., Hq, x, y) as (..., Hkv, group, x, y): query head h reads key head h // group."""
    return array.reshape(*array.shape[:-3], p.Hkv, p.group, *array.shape[-2:])


def heads(p: Problem, array: Array) -> Array:
    """Return (..., Hkv, group, x, y) as (..., Hq, x, y)."""
    return array.reshape(*array.shape[:-4], p.Hq, *array.shape[-2:])


def mixed(weights: Array, seen: Array, value: Array) -> Array:
    """Return weights times value, where a key that a row does not see adds nothing to it, not even 0 * NaN."""
    harmful = ~np.isfinite(value)
    total: Array = weights @ np.where(harmful, 0, value)
    for j in np.flatnonzero(harmful.any((*range(value.ndim - 2), -1))):
        rows = np.where(harmful, value, 0)[..., None, j, :]
        total += np.where(seen[..., j, None], weights[..., j, None] * rows, 0)
    return total


def add(problem: Problem, sums: Sums | None) -> Sums:
    """Return the sums with the keys of a problem added, in float64."""
    from sdpa_ref.blocks import alone, merged  # who has no blocks needs none of it

    own = alone(sys.modules[__name__], problem, np.dtype(np.float64))
    return own if sums is None else merged(sums, own)


def finish(problem: Problem, sums: Sums, want: frozenset[str]) -> Result:
    """Return what sums come to, rounded once."""
    from sdpa_ref.blocks import divided

    return divided(problem, sums)
