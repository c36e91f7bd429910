"""Query, key and value of a layer that has a projection of each, and what models do to them before attention."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.backend import Gradients
from sdpa_ref.floating_point import ieee
from sdpa_ref.layers.gradients import LayerGradients, of_parts
from sdpa_ref.layers.weights import checked_input
from sdpa_ref.stored.cache import Cache

PROJECTIONS = ("query", "key", "value")


def _tokens(layer: Any, x: Any, context: Any) -> tuple[Array, Array, Array]:
    """Return the tokens of the queries, of the keys and of the values."""
    x = checked_input("x", x, "L hidden_size", hidden_size=layer.hidden_size)
    return x, *context_tokens(layer, "x" if context is None else "context", x if context is None else context)


def context_tokens(layer: Any, name: str, context: Any) -> tuple[Array, Array]:
    """Return the tokens of the keys and those of the values, of one array or a pair."""
    kdim, vdim = getattr(layer, "kdim", layer.hidden_size), getattr(layer, "vdim", layer.hidden_size)
    if isinstance(context, tuple) and len(context) == 2:
        key, value = context
        of_keys = checked_input("context[0]", key, "S kdim", kdim=kdim)
        return of_keys, checked_input("context[1]", value, "S vdim", vdim=vdim)
    if kdim == vdim == layer.hidden_size:
        tokens = checked_input(name, context, "S hidden_size", hidden_size=kdim)
    else:
        tokens = checked_input(name, context, "S kdim", kdim=kdim)
        checked_input(name, tokens, "S vdim", vdim=vdim)
    return tokens, tokens


def projected(layer: Any, x: Any, context: Any) -> tuple[Array, Array, Array]:
    """Return query, key and value, their heads side by side."""
    x, keys, values = _tokens(layer, x, context)
    return layer.query(x), layer.key(keys), layer.value(values)


def projected_and_vjp(layer: Any, x: Any, context: Any) -> tuple[list[Array], Callable[[Gradients], LayerGradients]]:
    """Return query, key and value, and the function that takes the gradients of their heads to the tokens."""
    alone, pair = context is None, isinstance(context, tuple)
    x, keys, values = _tokens(layer, x, context)
    projected = layer.query.value_and_vjp(x), layer.key.value_and_vjp(keys), layer.value.value_and_vjp(values)

    @ieee
    def vjp(heads: Gradients) -> LayerGradients:
        query, key, value = (
            to_tokens(gradient.reshape(y.shape)) for (y, to_tokens), gradient in zip(projected, heads[:3], strict=True)
        )
        weights = of_parts(query=query, key=key, value=value)
        of_context = (key.x, value.x) if pair else key.x + value.x
        by_x, by_context = (query.x + of_context, None) if alone else (query.x, of_context)
        return LayerGradients(by_x, by_context, weights, heads.bias, heads.sink)

    return [y for y, _ in projected], vjp


Back = Callable[[Array], tuple[Array, dict[str, Array]]]


def as_heads(layer: Any, name: str, y: Array, places: Any = None) -> tuple[Array, Back]:
    """Return a projection as ``(..., length, H, E)``, normalised and turned by its places, and the way back.

    The way back leads from the gradient of the heads to that of the projection, and those of the norm's weights.
    """
    heads = y.reshape(*y.shape[:-1], y.shape[-1] // layer.head_size, layer.head_size)
    norm, to_heads = getattr(layer, f"{name}_norm", None), None
    if norm is not None:
        heads, to_heads = norm.value_and_vjp(heads)
    turned = places is not None and name != "value"
    if turned:
        heads = layer.rotary(heads, places)

    def back(gradient: Array) -> tuple[Array, dict[str, Array]]:
        gradient = layer.rotary(gradient, places, back=True) if turned else gradient
        if to_heads is None:
            return gradient, {}
        of_norm = to_heads(gradient)
        return of_norm.x, of_parts(**{f"{name}_norm": of_norm})

    return heads, back


def places_of(layer: Any, L: int, context: Any, cache: Any, positions: Any) -> Any:
    """Return where the tokens of a call stand, None for a layer without rotary positions."""
    if layer.rotary is None:
        if positions is not None:
            raise TypeError("positions= is for a layer with rotary= positions, and this one has none")
        return None
    if context is not None:
        raise TypeError("context= excludes rotary positions: its tokens and those of x do not stand in one row")
    if positions is not None:
        return positions
    return np.arange(L) + (cache.lengths[..., None] if isinstance(cache, Cache) else 0)
