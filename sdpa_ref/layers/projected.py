"""Query, key and value of a layer that has a projection of each."""

from collections.abc import Callable
from typing import Any

from sdpa_ref.arrays import Array
from sdpa_ref.backend import Gradients
from sdpa_ref.floating_point import ieee
from sdpa_ref.layers.gradients import LayerGradients, of_parts
from sdpa_ref.layers.weights import checked_input

PROJECTIONS = ("query", "key", "value")


def _tokens(layer: Any, x: Any, context: Any) -> tuple[Array, Array]:
    """Return the tokens of the queries, and those of the keys and values."""
    x = checked_input("x", x, "L hidden_size", hidden_size=layer.hidden_size)
    if context is None:
        return x, x
    return x, checked_input("context", context, "S hidden_size", hidden_size=layer.hidden_size)


def projected(layer: Any, x: Any, context: Any) -> tuple[Array, Array, Array]:
    """Return query, key and value, their heads side by side."""
    x, context = _tokens(layer, x, context)
    return layer.query(x), layer.key(context), layer.value(context)


def projected_and_vjp(layer: Any, x: Any, context: Any) -> tuple[list[Array], Callable[[Gradients], LayerGradients]]:
    """Return query, key and value, and the function that takes the gradients of their heads to the tokens."""
    alone = context is None
    x, context = _tokens(layer, x, context)
    projected = layer.query.value_and_vjp(x), layer.key.value_and_vjp(context), layer.value.value_and_vjp(context)

    @ieee
    def vjp(heads: Gradients) -> LayerGradients:
        query, key, value = (
            to_tokens(gradient.reshape(y.shape)) for (y, to_tokens), gradient in zip(projected, heads[:3], strict=True)
        )
        weights, total = of_parts(query=query, key=key, value=value), key.x + value.x
        by_x, by_context = (query.x + total, None) if alone else (query.x, total)
        return LayerGradients(by_x, by_context, weights, heads.bias, heads.sink)

    return [y for y, _ in projected], vjp
