"""What a `MultiHeadAttention` does between its projections of the tokens and that of its output."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from sdpa_ref.api import sdpa, sdpa_with_vjp
from sdpa_ref.arrays import Array
from sdpa_ref.layers.attend import append_and_attend, attend_over, sdpa_and_weights
from sdpa_ref.layers.gradients import LayerGradients, Vjp, like, of_parts
from sdpa_ref.layers.own_keys import attend_and_vjp_with, attend_and_weights_with, attend_with, own_keys
from sdpa_ref.layers.projected import PROJECTIONS, as_heads, context_tokens, places_of, projected, projected_and_vjp
from sdpa_ref.layers.rotary import Rotary
from sdpa_ref.layers.weights import checked_input
from sdpa_ref.stored.cache import Cache
from sdpa_ref.stored.kv_cache import KVCache


def attended(layer: Any, x: Any, context: Any, cache: Any, positions: Any, options: Any) -> Array:
    """Return the attention of tokens, their heads side by side."""
    own = own_keys(layer)
    if cache is not None and context is not None:
        raise TypeError("context and cache exclude each other: a cache holds the keys of the tokens x")
    if cache is not None and own is not None:
        raise TypeError("cache is not for a layer with bias_k or add_zero_attn, whose own keys it would not have")
    attend = sdpa if own is None else partial(attend_with, own)
    if isinstance(context, Cache):
        return _joined(layer, attend_over(context, _queries(layer, x, context, positions), options, attend))
    query, key, value = _heads(layer, x, context, cache, positions)
    if cache is not None:
        return _joined(layer, append_and_attend(cache, query, key, value, options))
    return _joined(layer, attend(query, key, value, layout="LHE", **options))


def attended_and_weights(layer: Any, x: Any, context: Any, positions: Any, options: Any) -> tuple[Array, Array]:
    """Return the attention of tokens, their heads side by side, and the weights."""
    own = own_keys(layer)
    attend = sdpa_and_weights if own is None else partial(attend_and_weights_with, own)
    if isinstance(context, Cache):
        output, weights = attend_over(context, _queries(layer, x, context, positions), options, attend)
    else:
        output, weights = attend(*_heads(layer, x, context, None, positions), layout="LHE", **options)
    return _joined(layer, output), weights


def value_and_vjp(layer: Any, x: Any, context: Any, positions: Any, options: Any) -> tuple[Array, Vjp]:
    """Return the value of the layer, and the function that gives its gradients."""
    if isinstance(context, Cache):
        raise TypeError("context must be the tokens themselves where gradients are wanted, got a cache")
    projections, to_tokens = projected_and_vjp(layer, x, context)
    places = places_of(layer, projections[0].shape[-2], context, None, positions)
    parts = [as_heads(layer, name, y, places) for name, y in zip(PROJECTIONS, projections, strict=True)]
    heads, own = [each for each, _ in parts], own_keys(layer)
    to_heads: Any
    if own is None:
        output, to_heads = sdpa_with_vjp(*heads, layout="LHE", **options)
    else:
        output, to_heads = attend_and_vjp_with(own, *heads, **options)
    value, to_attended = layer.output.value_and_vjp(_joined(layer, output))

    def vjp(grad_value: Any) -> LayerGradients:
        of_output = to_attended(grad_value)
        by_heads: Any = to_heads(of_output.x.reshape(output.shape))
        weights: dict[str, Array] = {}
        if own is not None:
            by_heads, by_own = by_heads
            if layer.bias_k is not None:
                weights = {"bias_k": like(by_own.key[0], layer.bias_k), "bias_v": like(by_own.value[0], layer.bias_v)}
        ways = [back(gradient) for (_, back), gradient in zip(parts, by_heads[:3], strict=True)]
        query, key, of_value = (gradient for gradient, _ in ways)
        tokens = to_tokens(by_heads._replace(query=query, key=key, value=of_value))
        weights |= {name: gradient for _, norms in ways for name, gradient in norms.items()}
        return tokens._replace(weights=tokens.weights | of_parts(output=of_output) | weights)

    return value, vjp


def cached(layer: Any, context: Any, lengths: Any, store: Any) -> KVCache:
    """Return the keys and values of tokens in a cache."""
    keys, values = context_tokens(layer, "context", context)
    places_of(layer, 0, context, None, None)
    key, value = as_heads(layer, "key", layer.key(keys))[0], as_heads(layer, "value", layer.value(values))[0]
    *batch, S, heads, E = key.shape
    cache = KVCache(tuple(batch), heads, E, dtype=key.dtype, capacity=S, store=store, layout="LHE", like=key)
    cache.append(key, value, lengths)
    return cache


def check_parts(weights: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Raise the error of weights and sizes that do not fit together."""
    num_heads, num_kv_heads = sizes["num_heads"], sizes["num_kv_heads"]
    rotary, zero = sizes.get("rotary"), sizes.get("add_zero_attn")
    if num_heads % num_kv_heads:
        raise ValueError(f"num_heads = {num_heads} must be a multiple of num_kv_heads = {num_kv_heads}")
    if rotary is not None and not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a Rotary, got {type(rotary).__name__}")
    if zero is not None and not isinstance(zero, (bool, np.bool_)):
        raise TypeError(f"add_zero_attn must be True or False, got {type(zero).__name__}")
    if ("bias_k" in weights) != ("bias_v" in weights):
        raise ValueError("bias_k and bias_v go together, and one of them is missing")


def _queries(layer: Any, x: Any, context: Cache, positions: Any) -> Array:
    """Return the queries of tokens, ``(..., L, H, E)``."""
    y = layer.query(checked_input("x", x, "L hidden_size", hidden_size=layer.hidden_size))
    return as_heads(layer, "query", y, places_of(layer, y.shape[-2], context, None, positions))[0]


def _heads(layer: Any, x: Any, context: Any, cache: Any, positions: Any) -> tuple[Array, Array, Array]:
    """Return query, key and value of tokens, ``(..., length, H, E)``."""
    query, key, value = projected(layer, x, context)
    places = places_of(layer, query.shape[-2], context, cache, positions)
    query, key = as_heads(layer, "query", query, places)[0], as_heads(layer, "key", key, places)[0]
    return query, key, as_heads(layer, "value", value)[0]


def _joined(layer: Any, output: Array) -> Array:
    """Return the output of the heads side by side."""
    return output.reshape(*output.shape[:-2], layer.num_heads * layer.head_size)
