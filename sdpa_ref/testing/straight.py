"""The straight formula in a given accumulation type: as it is written plainly in NumPy, without blocks."""

from typing import Any

import numpy as np

from sdpa_ref.backend import Problem, Result
from sdpa_ref.storage import Stored

Array = np.ndarray[Any, np.dtype[Any]]


def straight(p: Problem, keep: Array, acc: Any) -> Result:
    """Return output, lse and weights computed in `acc`, the product with V from 16-bit weights for 16-bit inputs.

    Parameters
    ----------
    p : Problem
        With `blockwise` False.
    keep : bool array, shape (..., Hq, L, S)
        The keys that a row sees.
    acc : data type
        At least as wide as float32.
    """
    narrow = p.dtype if p.dtype.itemsize == 2 else acc
    with np.errstate(all="ignore"):
        s = scores(p, keep, acc)
        m = s.max(-1, keepdims=True, initial=-np.inf)
        if p.sink is not None:
            m = np.maximum(m, p.sink.astype(acc)[:, None, None])
        m = np.where(m == -np.inf, acc.type(0), m)
        e = np.exp(s - m)
        z = e.sum(-1, keepdims=True)
        if p.sink is not None:
            z = z + np.exp(p.sink.astype(acc)[:, None, None] - m)
        weights = np.where(keep, e / np.where(z == 0, acc.type(1), z), acc.type(0))
        if p.dropout is not None:
            kept = p.kept_by_dropout()
            weights = np.where(kept, weights * acc.type(p.dropout.factor), acc.type(0))
        output = None
        if p.value is not None:
            value = _per_head(p.value, p).astype(acc)
            output = weights.astype(narrow).astype(acc) @ np.where(np.isfinite(value), value, acc.type(0))
        return Result(output, (m + np.log(z))[..., 0], weights)


def scores(p: Problem, keep: Array, acc: Any) -> Array:
    """Return the scores after bias and `score_mod`, -inf where a key is dropped."""
    s = acc.type(p.scale) * (p.query.astype(acc) @ _per_head(p.key, p).astype(acc).swapaxes(-1, -2))
    if p.softcap is not None:
        s = acc.type(p.softcap) * np.tanh(s / acc.type(p.softcap))
    s = s + np.asarray(p.added()).astype(acc)
    if p.score_mod is not None:
        s = p.score_mod(s, *p.indices())
    masked: Array = np.where(keep, s, acc.type(-np.inf))
    return masked


def _per_head(array: Array | Stored, p: Problem) -> Array:
    array = array.dense() if isinstance(array, Stored) else array
    return array[..., np.arange(p.Hq) // p.group, :, :]
