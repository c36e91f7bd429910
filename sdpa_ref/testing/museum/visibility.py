"""Which key a query sees: the rules of the mask objects once more, a line or two each."""

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

import sdpa_ref as sr
from sdpa_ref.arrays import Array
from sdpa_ref.masks.algebra import All, AnyOf, BooleanArray, Not
from sdpa_ref.testing.museum.arguments import Call, documents

_FAR = 1 << 40  # a bound that no key is beyond


class At(NamedTuple):
    """Indices that broadcast to the scores ``(B, Hq, L, S)``.

    Attributes
    ----------
    b, h, i, j : array
        Batch entry, query head, query, key.
    p : array
        Position of the query, as a key index.
    origin : array
        Key index of the first key of the query's document.
    k : array
        Position of the key.
    """

    b: Array
    h: Array
    i: Array
    j: Array
    p: Array
    origin: Array
    k: Array


def indices(call: Call) -> At:
    """Return all indices."""
    b, h, i, j = np.ogrid[tuple(map(slice, call.shape))]
    p, origin = (
        np.broadcast_to(x, (call.shape[0], call.shape[2]))[:, None, :, None] for x in call.kernel.positions(call)
    )
    return At(b, h, i, j, p, origin, call.kernel.places(call)[:, None, None])


def visible(call: Call) -> Array:
    """Return which keys each query sees, ``(B, Hq, L, S)``: by the mask, and because no bias is -inf."""
    keep = np.ones(call.shape, bool)
    if call.mask is not None:
        keep = keep & call.kernel.rule(call.mask, indices(call), call)
    for bias in call.biases:
        if not isinstance(bias, sr.ALiBi):
            keep = keep & over_scores(np.asarray(bias) != -np.inf, call)
    return keep


def rule(mask: Any, at: At, call: Call) -> Array:
    """Return what a mask lets through, in an array that broadcasts to ``(B, Hq, L, S)``."""
    return _RULES[type(mask)](mask, at, call)


def over_scores(array: Array, call: Call) -> Array:
    """Return an array that broadcasts to the caller's scores as one that broadcasts to ``(B, Hq, L, S)``."""
    return np.broadcast_to(array, (*call.batch, *call.shape[1:])).reshape(call.shape)


def _joined(together: Callable[..., Any]) -> Callable[..., Any]:
    return lambda m, at, call: reduce(together, (call.kernel.rule(part, at, call) for part in m.parts))


def lengths(m: Any, call: Call) -> Array:
    """Return the numbers of a mask a batch entry, ``(B, 1, 1, 1)``."""
    return call.per_entry(m.n)[:, None, None, None]


def _ids(ids: Array, call: Call) -> Array:
    return call.per_entry(ids, ids.shape[-1])[:, None]


def window(at: At, left: int | None, right: int | None) -> Array:
    """Return which keys lie within these bounds around the query's position; None leaves a side open."""
    before, after = (_FAR if bound is None else bound for bound in (left, right))
    return (at.p - before <= at.k) & (at.k <= at.p + after)


def _packed(m: Any, at: At, call: Call) -> Array:
    _, first, _, keys = (x[:, None, :, None] for x in documents(call, m))
    return (at.j >= first) & (at.j < first + keys)


def _tree(m: Any, at: At, call: Call) -> Array:
    L = call.shape[2]
    ancestor = np.zeros((call.shape[0], L, L), bool)
    for (b, i), parent in np.ndenumerate(call.per_entry(m.parents, L)):
        if parent >= 0:
            ancestor[b, i] = ancestor[b, parent]
        ancestor[b, i, i] = True
    past = np.ones((call.shape[0], L, call.shape[3] - L), bool)
    return np.concatenate([past, ancestor], -1)[:, None]


_RULES: dict[type, Callable[..., Any]] = {
    sr.Causal: lambda m, at, call: at.k <= at.p,
    sr.Window: lambda m, at, call: window(at, m.left, m.right),
    sr.KeyLengths: lambda m, at, call: at.j < lengths(m, call),
    sr.KeyStarts: lambda m, at, call: at.j >= lengths(m, call),
    sr.QueryLengths: lambda m, at, call: at.i < lengths(m, call),
    sr.Prefix: lambda m, at, call: (at.k < at.origin + lengths(m, call)) | (at.k <= at.p),
    sr.Chunked: lambda m, at, call: (at.k <= at.p) & ((at.k - at.origin) // m.size == (at.p - at.origin) // m.size),
    sr.FirstTokens: lambda m, at, call: at.k < at.origin + m.n,
    sr.Segments: lambda m, at, call: _ids(m.q_ids, call)[..., None] == _ids(m.k_ids, call)[:, :, None],
    sr.Packed: _packed,
    sr.Tree: _tree,
    sr.MaskFunction: lambda m, at, call: m.f(at.b, at.h, at.i, at.j),
    np.ndarray: lambda m, at, call: over_scores(m, call),
    BooleanArray: lambda m, at, call: over_scores(m.array, call),
    All: _joined(np.logical_and),
    AnyOf: _joined(np.logical_or),
    Not: lambda m, at, call: ~call.kernel.rule(m.parts[0], at, call),
}
