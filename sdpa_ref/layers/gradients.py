"""Gradients of layers, and what their `value_and_vjp` share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arrays import FLOATS, Array, as_array, is_float
from sdpa_ref.stored.quantized import Quantized


class LayerGradients(NamedTuple):
    """Gradients of a layer, each in the type and shape of what it belongs to; None for what was not passed.

    Attributes
    ----------
    x : array or None
        None for `Embedding`, whose input are integers.
    context : array or None
        Without a context all of it is in `x`.
    weights : dict of str to array
        By the names of `Layer.state_dict`.
    bias : array, None, or a tuple of them
        By the `bias` that a call adds to the scores, as in `Gradients`; that of a projection is in `weights`.
    sink : array or None
        By the `sink` of a call.
    """

    x: Array
    context: Array
    weights: dict[str, Array]
    bias: Any = None
    sink: Array = None


Vjp = Callable[[Any], LayerGradients]


def checked_gradient(grad_value: Any, shape: tuple[int, ...]) -> Array:
    """Return the gradient by a layer's value as an array."""
    array = as_array("grad_value", grad_value)
    if not is_float(array.dtype):
        raise TypeError(f"grad_value must be {FLOATS}, got {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"grad_value must have shape {shape}, got {array.shape}")
    return array


def like(gradient: Array, given: Array) -> Array:
    """Return the gradient in the shape of what was given, and in its type."""
    return gradient.reshape(given.shape).astype(given.dtype.newbyteorder("="), copy=False)


def affine(layer: Any, x: Array, grad: Array) -> dict[str, Array]:
    """Return the gradients by the weights of a layer that maps rows x, ``(n, width)``, to rows with this gradient.

    A row without gradient adds nothing, whatever it holds: a token that no query saw may be NaN.
    """
    weights = {}
    if not isinstance(layer.weight, Quantized):
        product = grad.T @ x
        if not np.isfinite(product).all():
            product = grad.T @ np.where(grad.any(-1, keepdims=True), x, 0)
        weights = {"weight": like(product, layer.weight)}
    return weights if layer.bias is None else weights | {"bias": like(grad.sum(0), layer.bias)}


def of_parts(**parts: LayerGradients) -> dict[str, Array]:
    """Return the gradients by the weights of layers within a layer, under their full names."""
    return {f"{part}.{name}": array for part, gradients in parts.items() for name, array in gradients.weights.items()}
