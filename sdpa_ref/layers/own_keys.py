"""Keys and values that a layer has of its own: PyTorch's `bias_k` and `bias_v`, and those of `add_zero_attn`.

Every query sees them, whatever the mask. They are attended to apart from those of the tokens, so that masks, biases and
offsets mean what they mean without them, and the two results are merged.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.api import sdpa_state, sdpa_vjp, sdpa_weights
from sdpa_ref.arrays import Array, as_array, summed_to
from sdpa_ref.backend import Gradients
from sdpa_ref.floating_point import ieee
from sdpa_ref.layers.gradients import like
from sdpa_ref.state import AttentionState

_APART = ("scale", "softcap", "backend")  # the options that count for these keys


class OwnKeys(NamedTuple):
    """Keys and values ``(n, heads, E)``."""

    key: Array
    value: Array

    def in_layout(self, layout: str) -> "OwnKeys":
        """Return the same for calls in this layout."""
        return self if layout == "LHE" else OwnKeys(*(array.swapaxes(0, 1) for array in self))


def own_keys(layer: Any) -> OwnKeys | None:
    """Return what a layer adds to keys and values, None where that is nothing."""
    shape = 1, layer.num_kv_heads, layer.head_size
    rows = [] if layer.bias_k is None else [(layer.bias_k.reshape(shape), layer.bias_v.reshape(shape))]
    if layer.add_zero_attn:
        rows.append((np.zeros(shape, layer.key.weight.dtype if not rows else rows[0][0].dtype),) * 2)
    return OwnKeys(*map(np.concatenate, zip(*rows, strict=True))) if rows else None


def drawn_keys(rng: np.random.Generator, width: int, dtype: Any) -> dict[str, Array]:
    """Return random `bias_k` and `bias_v`, as PyTorch draws them: by Xavier's rule."""
    return {name: rng.normal(0, width**-0.5, (1, 1, width)).astype(dtype) for name in ("bias_k", "bias_v")}


class _Merged(NamedTuple):
    """Attention over the keys of the tokens, over the layer's own, and over both, with the sink."""

    tokens: AttentionState
    own: AttentionState
    all: AttentionState


def attend_with(own: OwnKeys, query: Array, key: Array, value: Array, *, layout: str, **options: Any) -> Array:
    """Return attention over keys and own keys."""
    output: Array = _merged(own, query, key, value, layout, options)[1].all.output
    return output


def attend_and_weights_with(
    own: OwnKeys, query: Array, key: Array, value: Array, *, layout: str, **options: Any
) -> tuple[Array, Array]:
    """Return attention over keys and own keys, and the weights ``(..., H, L, S + n)``, those of the own keys last."""
    query, merged = _merged(own, query, key, value, layout, options)
    rest, few = _parted(options)
    weights = [
        sdpa_weights(query, key, layout=layout, **rest),
        sdpa_weights(query, own.in_layout(layout).key, layout=layout, **few),
    ]
    for part, state in zip(weights, merged, strict=False):
        share = _share(state.lse, merged.all.lse)
        part *= (share.swapaxes(-1, -2) if layout == "LHE" else share)[..., None].astype(part.dtype)
    return merged.all.output, np.concatenate(weights, -1)


def attend_and_vjp_with(
    own: OwnKeys, query: Array, key: Array, value: Array, **options: Any
) -> tuple[Array, Callable[[Array], tuple[Gradients, OwnKeys]]]:
    """Return attention in layout "LHE", and the function that gives the gradients, those by own keys apart."""
    whole, merged = _merged(own, query, key, value, "LHE", options)
    rest, few = _parted(options)
    output, lse = merged.all.output, merged.all.lse

    @ieee
    def vjp(grad_output: Array) -> tuple[Gradients, OwnKeys]:
        grad = grad_output.astype(lse.dtype, copy=False)
        found = []
        for state, keys, given in ((merged.tokens, (key, value), rest), (merged.own, own, few)):
            share = _share(state.lse, lse)  # of the weights; by it the output is a mean of the outputs of the parts
            by_lse = share * (grad * (state.output.astype(lse.dtype) - output.astype(lse.dtype))).sum(-1)
            by_output = share[..., None] * grad
            found.append(sdpa_vjp(whole, *keys, by_output, grad_lse=by_lse, layout="LHE", **given))
        tokens, of_own = found
        by_query = like(summed_to(tokens.query.astype(lse.dtype) + of_own.query, query.shape), query)
        by_sink = None
        if options.get("sink") is not None:
            sink = as_array("sink", options["sink"])
            share = _share(np.broadcast_to(sink, lse.shape[-1:]).astype(lse.dtype), lse)
            of_heads = -(share * (grad * output.astype(lse.dtype)).sum(-1)).reshape(-1, lse.shape[-1]).sum(0)
            by_sink = like(of_heads if sink.ndim else of_heads.sum(), sink)
        return tokens._replace(query=by_query, sink=by_sink), OwnKeys(of_own.key, of_own.value)

    return output, vjp


def _merged(
    own: OwnKeys, query: Array, key: Array, value: Array, layout: str, options: Mapping[str, Any]
) -> tuple[Array, _Merged]:
    """Return the queries, of each batch entry, and their attention."""
    if options.get("dropout") is not None:
        raise NotImplementedError("dropout is not for a layer with bias_k or add_zero_attn: its own keys have none")
    batch = np.broadcast_shapes(query.shape[:-3], key.shape[:-3])
    query = np.broadcast_to(query, (*batch, *query.shape[-3:]))
    rest, few = _parted(options)
    tokens = sdpa_state(query, key, value, layout=layout, **rest)
    apart = sdpa_state(query, *own.in_layout(layout), layout=layout, **few)
    whole, sink = tokens + apart, options.get("sink")
    return query, _Merged(tokens, apart, whole if sink is None else whole.with_sink(sink))


def _parted(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options for the keys of the tokens, and those for own keys."""
    rest = {name: option for name, option in options.items() if name not in ("sink", "dropout")}
    return rest, {name: option for name, option in rest.items() if name in _APART}


def _share(lse: Array, whole: Array) -> Array:
    """Return the share of the weights that a part with this lse has in the whole."""
    with np.errstate(all="ignore"):
        return np.where(lse == -np.inf, 0, np.exp(lse - whole)).astype(whole.dtype)
