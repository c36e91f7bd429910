"""Gradients by whole-array operations over `xp`, NumPy or CuPy: for what the kernels do not take."""

from typing import Any

import numpy as np

from sdpa_ref.backend import Gradients, Problem

from .arrays import KEYS, Array, by_function, dropped, mixed, scores, spread, taken
from .flows import Flow


def pull(problem: Problem, flow: Flow, xp: Any, keys: int = KEYS) -> Gradients:
    """Return the gradients of a problem of few rows, without rules, in the accumulation type.

    That of the bias is of the scores' shape, where there is one. Heads are computed one after the other, in the tiles
    that `arrays.attend` has, so that scores have the bits of the forward pass.
    """
    p, acc = spread(problem), problem.acc_dtype
    into = Gradients(
        xp.zeros(p.query.shape, acc),
        xp.zeros((*p.batch, p.Hkv, p.S, p.E), acc),
        xp.zeros((*p.batch, p.Hkv, p.S, p.Ev), acc),
        None if p.bias is None else xp.zeros(p.scores_shape, acc),
    )
    with np.errstate(all="ignore"):  # NaN and inf follow IEEE, silently
        for n, batch in enumerate(np.ndindex(p.batch)):
            for h in range(p.Hq):
                _one_head(p, flow, into, xp, keys, n, (*batch, h))
    return into


def _one_head(p: Problem, flow: Flow, into: Gradients, xp: Any, keys: int, b: int, at: tuple[int, ...]) -> None:
    """Add what one query head of the batch entry `b` has to the gradients."""
    acc, kv = p.acc_dtype, (*at[:-1], at[-1] // p.group)
    query, grad = (array[at].astype(acc, order="C") for array in (p.query, flow.grad))
    m, z = flow.m[at], flow.z[at]
    alive = z != 0
    inner = (grad * flow.output[at].astype(acc)).sum(1)
    inner = inner if flow.grad_lse is None else inner - flow.grad_lse[at].astype(acc)
    base, factor = xp.where(alive, m, 0)[:, None], xp.where(alive, 1 / xp.where(alive, z, 1), 0)[:, None]
    for j in range(0, p.S, keys):
        tile = slice(j, min(j + keys, p.S))
        key, value = (taken(p, array, kv, tile).astype(acc, order="C") for array in (p.key, p.value))
        capped, biased, final, keep = scores(p, xp, query, b, at, tile)
        seen, kept = keep & alive[:, None], dropped(p, xp, b, at, tile)
        weights = xp.where(seen, xp.exp(final - base) * factor, 0)
        d_weights = xp.where(kept != 0, (grad @ value.T) * kept, 0)
        d_score = xp.where(seen, weights * (d_weights - inner[:, None]), 0)
        if p.score_mod is not None:
            derivative: Any = p.score_mod.derivative  # type: ignore[attr-defined]
            d_score = xp.where(seen, d_score * by_function(derivative, p, xp, biased, b, at[-1], tile), 0)
        if into.bias is not None:
            into.bias[at][:, tile] = d_score
        if p.softcap is not None:
            d_score = xp.where(seen, d_score * (1 - (capped / acc.type(p.softcap)) ** 2), 0)
        d_score = d_score * acc.type(p.scale)
        _add(into.query[at], mixed(xp, d_score, seen, key))
        _add(into.key[kv][tile], mixed(xp, d_score.T, seen.T, query))
        _add(into.value[kv][tile], mixed(xp, (weights * kept).T, seen.T, grad))


def _add(total: Array, part: Array) -> None:
    total[...] = total + part
