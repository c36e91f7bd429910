"""The gradients of attention, from weights that are computed again, as kernels do."""

from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.biases import ALiBi
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.sums import mixed, product


class Pieces(NamedTuple):
    """What the gradients are made of.

    Attributes
    ----------
    seen, w, kept : array (B, Hq, L, S)
        Kept keys of rows that are not empty, weights before dropout, dropout factors.
    d_output, d_lse : array (B, Hq, L, Ev) and (B, Hq, L, 1)
        Incoming.
    query, key, value : array
        In the type of the sums, with Hq heads.
    m, z : array (B, Hq, L, 1)
        Largest score of a row and the sum of exponentials beside it, the sink's included.
    """

    seen: Array
    w: Array
    kept: Array
    d_output: Array
    d_lse: Array
    query: Array
    key: Array
    value: Array
    m: Array
    z: Array


class Inner(NamedTuple):
    """Gradients by query, by the keys and values of each query head, by the biased scores, and by the sink."""

    query: Array
    key: Array
    value: Array
    biased: Array
    sink: Any


def gradients(call: Call, d_output: Array, d_lse: Array | None) -> Inner:
    """Return the gradients before heads of a group and broadcast axes are summed."""
    k = call.kernel
    query, key, value = k.operands(call)
    state, nonempty = k.attended(call)
    m, z = state.m[..., None], state.z[..., None]
    s = k.scores(call, query, key, slice(None))
    seen = np.broadcast_to(k.seen_again(call), call.shape) & nonempty[..., None]
    incoming = np.zeros_like(m) if d_lse is None else d_lse[..., None]
    w = k.weights_again(call, s.final, m, z, seen)
    p = Pieces(seen, w, np.broadcast_to(k.kept(call), call.shape), d_output, incoming, query, key, value, m, z)
    d_final = k.d_scores(call, p)
    d_biased = d_final
    if call.score_mod is not None:
        b, h, i, j = np.ogrid[tuple(map(slice, call.shape))]
        d_biased = np.where(seen, d_final * call.score_mod.derivative(s.biased, b, h, i, j), 0).astype(call.acc)
    d_capped = d_biased if call.softcap is None else np.where(seen, k.through_cap(call, d_biased, s.capped), 0)
    d_sink = None if call.sink is None else k.d_sink(call, p)
    d_query, d_key, d_value = k.d_inputs(call, p, d_capped.astype(call.acc))
    return Inner(d_query, d_key, d_value, d_biased, d_sink)


def seen_again(call: Call) -> Array:
    """Return which keys each query sees."""
    seen: Array = call.kernel.visible(call)
    return seen


def weights_again(call: Call, s: Array, m: Array, z: Array, seen: Array) -> Array:
    """Return the weights before dropout."""
    return np.where(seen, np.exp(s - np.where(seen, m, 0)) / np.where(seen, z, 1), 0).astype(s.dtype)


def row_sum(p: Pieces) -> Array:
    """Return of each row the sum of weight times its gradient, ``(B, Hq, L, 1)``."""
    total: Array = np.where(p.seen, p.w * p.kept * product(p.d_output, p.value), 0).sum(-1, keepdims=True)
    return total


def d_scores(call: Call, p: Pieces) -> Array:
    """Return the gradient by the scores that go into the softmax."""
    d_weights = p.kept * product(p.d_output, p.value)
    return np.where(p.seen, p.w * (d_weights - row_sum(p) + p.d_lse), 0).astype(p.w.dtype)


def through_cap(call: Call, d: Array, capped: Array) -> Array:
    """Return the gradient by the scores before the soft cap."""
    return d * (1 - (capped / call.acc.type(call.softcap)) ** 2)


def d_inputs(call: Call, p: Pieces, d: Array) -> tuple[Array, Array, Array]:
    """Return the gradients by query, and by keys and values of each query head; `d` is that by the scaled scores."""
    d = call.acc.type(call.kernel.scale(call)) * d
    back = [np.ascontiguousarray(x.swapaxes(-1, -2)) for x in (d, p.w * p.kept, p.seen)]
    return mixed(d, p.seen, p.key), mixed(back[0], back[2], p.query), mixed(back[1], back[2], p.d_output)


def d_sink(call: Call, p: Pieces) -> Array:
    """Return the gradient by the sink of each head."""
    sink = np.broadcast_to(np.asarray(call.sink, call.acc), call.shape[1:2])[:, None, None]
    share = np.where(p.z == 0, 0, np.exp(sink - p.m) / p.z)
    total: Array = np.where(share == 0, 0, share * (p.d_lse - row_sum(p))).sum((0, 2, 3), dtype=np.float64)
    return total


def of_group(call: Call, gradient: Array) -> Array:
    """Return the gradient by keys or values: the sum over the query heads that read them."""
    (B, Hq, *rest), Hkv = gradient.shape, call.key.shape[1]
    total: Array = gradient.reshape(B, Hkv if Hq else 0, Hq // max(1, Hkv), *rest).sum(2)
    return total if Hq else np.zeros((B, Hkv, *rest), gradient.dtype)


def as_given(call: Call, inner: Inner, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the gradients in the types and shapes of the arguments."""
    query, key, value, bias, sink = given
    k = call.kernel
    heads = inner.query, k.of_group(call, inner.key), k.of_group(call, inner.value)
    own = tuple(
        summed(call.to_caller(x) if not call.headless else x[0], like)
        for x, like in zip(heads, (query, key, value), strict=True)
    )
    scores = inner.biased.reshape(*call.batch, *call.shape[1:])

    def by_bias(one: Any) -> Any:
        if isinstance(one, tuple):
            return tuple(map(by_bias, one))
        return None if one is None or isinstance(one, ALiBi) else summed(scores, np.asarray(one))

    return (*own, by_bias(bias), None if sink is None else summed(inner.sink, np.asarray(sink)))


def summed(gradient: Array, given: Array) -> Array:
    """Return the gradient in the shape and type of an argument: axes along which it was broadcast are summed."""
    gradient = gradient.sum(tuple(range(gradient.ndim - given.ndim)))
    axes = tuple(axis for axis, n in enumerate(given.shape) if n == 1 and gradient.shape[axis] != 1)
    dtype = given.dtype.newbyteorder("=") if given.dtype.kind not in "iu" else np.dtype(np.float64)
    return np.asarray(gradient.sum(axes, keepdims=True)).astype(dtype)
