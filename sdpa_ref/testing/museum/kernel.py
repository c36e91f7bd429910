"""Attention as kernels compute it: keys in tiles, an online softmax, each step a function that a fault can replace.

It is right, and slow on purpose: every sum runs over the last axis of an array in C order, so that a row's bits depend
on nothing but the row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.biases import ALiBi
from sdpa_ref.testing.museum import arguments, backward, storage, visibility
from sdpa_ref.testing.museum.arguments import Call, arranged, arrays_of
from sdpa_ref.testing.museum.sums import mixed, product

TILE = 32
Step = Callable[..., Any]


class State(NamedTuple):
    """What is known of each row after some of its keys.

    Attributes
    ----------
    m : array (B, Hq, L)
        Largest score.
    z : array (B, Hq, L)
        Sum of ``exp(score - m)``.
    o : array (B, Hq, L, Ev)
        Sum of ``exp(score - m) * value``.
    """

    m: Array
    z: Array
    o: Array


class Stages(NamedTuple):
    """Scores of some keys: after scale and soft cap, after the biases, and after `score_mod`."""

    capped: Array
    biased: Array
    final: Array


def start(call: Call) -> State:
    """Return the state of rows that have seen no key."""
    rows = call.query.shape[:3]
    return State(
        np.full(rows, -np.inf, call.acc), np.zeros(rows, call.acc), np.zeros((*rows, call.value.shape[-1]), call.acc)
    )


def tiles(call: Call) -> Iterator[slice]:
    """Yield the keys, a tile at a time."""
    S = call.shape[3]
    return (slice(j, min(j + TILE, S)) for j in range(0, S, TILE))


def of_heads(call: Call, array: Array, name: str) -> Array:
    """Return the keys or values (`name`) with a head for each query head: query head h reads ``h // group``."""
    return np.repeat(array, call.shape[1] // max(1, array.shape[1]), axis=1)


def scale(call: Call) -> float:
    """Return the factor of the scores."""
    E = call.query.shape[-1]
    return (E**-0.5 if E else 1.0) if call.scale is None else float(call.scale)


def capped(call: Call, s: Array) -> Array:
    """Return the scores after the soft cap."""
    if call.softcap is None:
        return s
    cap = call.acc.type(call.softcap)
    return cap * np.tanh(s / cap)


def bias(call: Call, keys: slice) -> Array:
    """Return what is added to the scores, less ALiBi: a sum in float64 whose finite numbers stay finite."""
    given = [visibility.over_scores(each, call)[..., keys].astype(np.float64) for each in arrays_of(call.biases)]
    total = sum(given, np.zeros((1, 1, 1, 1)))
    most = np.where(
        np.logical_and.reduce([np.isfinite(each) for each in given] or [True]), np.finfo(call.acc).max, np.inf
    )
    return np.clip(total, -most, most).astype(call.acc)


def alibi(call: Call, keys: slice) -> Array:
    """Return the linear biases: minus slope times distance."""
    at = visibility.indices(call)
    return call.kernel.slope(slopes_of(call), at.p - at.k[..., keys]).astype(call.acc)


def slopes_of(call: Call) -> Array:
    """Return the sum of the slopes, ``(B, Hq, 1, 1)``."""
    given = [call.per_entry(each.slopes, call.shape[1]) for each in call.biases if isinstance(each, ALiBi)]
    return sum(given, np.zeros(call.shape[:2]))[..., None, None]


def slope(slopes: Array, ahead: Array) -> Array:
    """Return the linear bias of keys that lie so far behind the query's position."""
    return -slopes * abs(ahead)


def scores(call: Call, query: Array, key: Array, keys: slice) -> Stages:
    """Return the scores of some keys: scale, soft cap, biases, `score_mod`, in this order."""
    k = call.kernel
    capped = k.capped(call, call.acc.type(k.scale(call)) * product(query, key[:, :, keys]))
    biased = capped
    if arrays_of(call.biases):
        biased = biased + k.bias(call, keys)
    if len(arrays_of(call.biases)) < len(call.biases):
        biased = biased + k.alibi(call, keys)
    if call.score_mod is None:
        return Stages(capped, biased, biased)
    b, h, i, j = np.ogrid[tuple(map(slice, call.shape))]
    final = call.score_mod(biased, b, h, i, j[..., keys])
    return Stages(capped, biased, np.broadcast_to(final, biased.shape).astype(call.acc))


def fold(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """Return the state after some more keys, with their scores, visibility, values and dropout factors."""
    m = np.maximum(state.m, np.where(keep, s, -np.inf).max(-1, initial=-np.inf))
    base = np.where(m == -np.inf, 0, m).astype(m.dtype)
    e = np.where(keep, np.exp(s - base[..., None]), 0).astype(m.dtype)
    shrink = np.exp(state.m - base)
    return State(m, state.z * shrink + e.sum(-1), state.o * shrink[..., None] + mixed(e * kept, keep, values))


def with_sink(call: Call, state: State) -> State:
    """Return the state with a logit a head that only adds to the denominator."""
    if call.sink is None:
        return state
    sink = np.broadcast_to(np.asarray(call.sink, call.acc), call.shape[1:2])[:, None]
    m = np.maximum(state.m, sink)
    base = np.where(m == -np.inf, 0, m)
    shrink = np.exp(state.m - base)
    return State(m, state.z * shrink + np.exp(sink - base), state.o * shrink[..., None])


def finish(call: Call, state: State, seen: Array) -> tuple[Array, Array]:
    """Return output and lse; `seen` is False for rows that have no kept score above -inf."""
    output = state.o / np.where(state.z == 0, 1, state.z)[..., None].astype(state.o.dtype)
    m = np.where(state.m == -np.inf, 0, state.m)
    return np.where(seen[..., None], output, 0).astype(state.o.dtype), (m + np.log(state.z)).astype(state.z.dtype)


def kept(call: Call) -> Array:
    """Return the factor of each weight after dropout, ``(B, Hq, L, S)``: 0 or ``1 / (1 - p)``."""
    if call.dropout is None:
        return np.ones((1, 1, 1, 1), call.acc)
    return call.dropout.keep(call.shape) * call.acc.type(1 / (1 - call.dropout.p))


def rounded(call: Call, array: Array) -> Array:
    """Return the output or the weights in the type of the result."""
    return array.astype(call.dtype)


def rounded_lse(call: Call, lse: Array) -> Array:
    """Return the lse in the type of the sums."""
    return lse.astype(call.acc)


def merge(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return output and lse over the keys of both."""
    m = np.maximum(a[1], b[1])
    base = np.where(m == -np.inf, 0, m).astype(m.dtype)
    shares = np.exp(a[1] - base), np.exp(b[1] - base)
    z = shares[0] + shares[1]
    total = sum(share[..., None] * x.astype(m.dtype) for share, (x, _) in zip(shares, (a, b), strict=True))
    output = total / np.where(z == 0, 1, z)[..., None]
    return output.astype(np.result_type(a[0], b[0])), (base + np.log(z)).astype(m.dtype)


@dataclass(frozen=True)
class Kernel:
    """The steps of attention. A fault is ``Kernel(step=another)``."""

    read: Step = arguments.read
    result_type: Step = np.result_type
    heads_first: Step = arguments.heads_first
    positions: Step = arguments.positions
    valid_lengths: Step = arguments.valid_lengths
    places: Step = arguments.places
    gathered: Step = storage.gathered
    slots: Step = storage.slots
    stored_lengths: Step = storage.stored_lengths
    entries: Step = storage.entries
    decoded: Step = storage.decoded
    unpacked: Step = storage.unpacked
    zero: Step = storage.zero
    scaled: Step = storage.scaled
    blocks: Step = storage.blocks
    weights_over: Step = storage.weights_over
    rule: Step = visibility.rule
    visible: Step = visibility.visible
    of_heads: Step = of_heads
    scale: Step = scale
    capped: Step = capped
    bias: Step = bias
    alibi: Step = alibi
    slope: Step = slope
    scores: Step = scores
    start: Step = start
    tiles: Step = tiles
    fold: Step = fold
    with_sink: Step = with_sink
    finish: Step = finish
    kept: Step = kept
    rounded: Step = rounded
    rounded_lse: Step = rounded_lse
    merge: Step = merge
    seen_again: Step = backward.seen_again
    weights_again: Step = backward.weights_again
    d_scores: Step = backward.d_scores
    through_cap: Step = backward.through_cap
    d_inputs: Step = backward.d_inputs
    d_sink: Step = backward.d_sink
    of_group: Step = backward.of_group
    as_given: Step = backward.as_given

    def forward(self, query: Array, key: Array, value: Array, **options: Any) -> Array:
        """Return the output, as `sdpa` does."""
        call = arranged(self, query, key, value, options)
        return call.to_caller(self.rounded(call, self.finish(call, *self.attended(call))[0]))

    def state(self, query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Array]:
        """Return output and lse, as `sdpa_state` does."""
        call = arranged(self, query, key, value, options)
        output, lse = self.finish(call, *self.attended(call))
        return call.to_caller(self.rounded(call, output)), call.to_caller(
            self.rounded_lse(call, lse), lengths_last=True
        )

    def weights(self, query: Array, key: Array, **options: Any) -> Array:
        """Return the weights after dropout, as `sdpa_weights` does."""
        call = arranged(self, query, key, key, options)
        state, _ = self.attended(call)
        weights = self.rounded(call, self.weights_of(call, state) * self.kept(call))
        weights = self.weights_over(key, weights)
        return weights[0, 0] if call.headless else weights.reshape(*call.batch, *weights.shape[1:])

    def vjp(self, query: Array, key: Array, value: Array, grad_output: Array, **options: Any) -> tuple[Any, ...]:
        """Return the gradients, as `sdpa_vjp` does."""
        given = (query, key, value, options.get("bias"), options.get("sink"))
        grad_lse = options.pop("grad_lse", None)
        call = arranged(self, query, key, value, options)
        incoming = (
            call.from_caller(grad_output),
            None if grad_lse is None else call.from_caller(grad_lse, lengths_last=True),
        )
        gradients: tuple[Any, ...] = self.as_given(call, backward.gradients(call, *incoming), given)
        return gradients

    def attended(self, call: Call) -> tuple[State, Array]:
        """Return the state after all keys and the sink, and which rows have a kept score above -inf."""
        query, key, value = self.operands(call)
        keep = np.ascontiguousarray(np.broadcast_to(self.visible(call), call.shape))
        kept = np.broadcast_to(self.kept(call), call.shape)
        state = self.start(call)
        for keys in self.tiles(call):
            s = self.scores(call, query, key, keys).final
            state = self.fold(call, state, s, keep[..., keys], value[:, :, keys], kept[..., keys])
        return self.with_sink(call, state), state.m != -np.inf

    def operands(self, call: Call) -> tuple[Array, Array, Array]:
        """Return query, key and value in the type of the sums, each with Hq heads."""
        wide = [array.astype(call.acc) for array in (call.query, call.key, call.value)]
        return wide[0], *(self.of_heads(call, x, name) for x, name in zip(wide[1:], ("key", "value"), strict=True))

    def weights_of(self, call: Call, state: State) -> Array:
        """Return the weights before dropout."""
        query, key, _ = self.operands(call)
        s = self.scores(call, query, key, slice(None)).final
        seen = np.broadcast_to(self.visible(call), call.shape) & (state.m != -np.inf)[..., None]
        m, z = (np.where(seen.any(-1), x, 1)[..., None] for x in (state.m, state.z))
        return np.where(seen, np.exp(s - m) / z, 0).astype(call.acc)
