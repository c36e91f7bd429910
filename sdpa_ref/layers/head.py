"""Attention with learned projections: a single head."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import numpy as np

from sdpa_ref.api import sdpa_with_vjp
from sdpa_ref.arrays import Array
from sdpa_ref.layers.attend import sdpa_and_weights
from sdpa_ref.layers.gradients import LayerGradients, Vjp, checked_gradient
from sdpa_ref.layers.layer import Layer
from sdpa_ref.layers.linear import Linear
from sdpa_ref.layers.projected import PROJECTIONS, projected, projected_and_vjp
from sdpa_ref.layers.weights import Axes
from sdpa_ref.options import LayerOptions, spelled_out
from sdpa_ref.spelling import known_to_layers


@dataclass(init=False, eq=False, repr=False)
class AttentionHead(Layer):
    """One attention head: learned `query`, `key` and `value` projections, and attention between them.

    Parameters
    ----------
    hidden_size : int
        Width of the tokens.
    attention_head_size : int
        Width E of the projections; scores are divided by its square root.
    bias : bool or collection of str
        Whether the projections have biases, or the names of those that do: ``("query", "value")``.
    rng, dtype
        As in `Linear`.

    Attributes
    ----------
    query, key, value : Linear
        From `hidden_size` to `attention_head_size`.

    Examples
    --------
    >>> head = AttentionHead(48, 12, rng=0)
    >>> attention_output, attention_probs = head(np.ones((2, 5, 48), np.float32))
    >>> attention_output.shape, attention_probs.shape
    ((2, 5, 12), (2, 5, 5))
    """

    hidden_size: int
    attention_head_size: int
    query: Linear
    key: Linear
    value: Linear

    _weights: ClassVar[Axes] = {f"{name}.weight": "attention_head_size hidden_size" for name in PROJECTIONS}
    _biases: ClassVar[Axes] = {f"{name}.bias": "attention_head_size" for name in PROJECTIONS}

    def __init__(
        self,
        hidden_size: int,
        attention_head_size: int,
        bias: bool | Collection[str] = True,
        *,
        rng: Any = None,
        dtype: Any = np.float32,
    ) -> None:
        self._draw(rng, dtype, bias, hidden_size=hidden_size, attention_head_size=attention_head_size)

    @spelled_out(LayerOptions)
    def __call__(self, x: Any, context: Any = None, **options: Unpack[LayerOptions]) -> tuple[Array, Array]:
        """Return the attention output and the attention probabilities.

        Parameters
        ----------
        x : array, shape (..., L, hidden_size)
            Tokens that make the queries.
        context : array, shape (..., S, hidden_size), optional
            Tokens that answer; those of `x` by default.
        mask, bias, query_offset, scale, softcap, sink, dropout, backend
            As in `sdpa_ref.sdpa`, with one head: mask and bias broadcast to ``(..., 1, L, S)``, True = may attend.
            Without `dropout` nothing is dropped.

        Returns
        -------
        attention_output : array, shape (..., L, attention_head_size)
        attention_probs : array, shape (..., L, S)
            After dropout where it is given.
        """
        given = known_to_layers(options, LayerOptions)
        output, weights = sdpa_and_weights(*map(_one_head, projected(self, x, context)), **given)
        return output[..., 0, :, :], weights[..., 0, :, :]

    @spelled_out(LayerOptions)
    def value_and_vjp(self, x: Any, context: Any = None, **options: Unpack[LayerOptions]) -> tuple[Array, Vjp]:
        """Return the attention output, and the function that gives its gradients: see `MultiHeadAttention`."""
        given = known_to_layers(options, LayerOptions)
        heads, to_tokens = projected_and_vjp(self, x, context)
        output, to_heads = sdpa_with_vjp(*map(_one_head, heads), **given)
        output = output[..., 0, :, :]

        def vjp(grad_value: Any) -> LayerGradients:
            return to_tokens(to_heads(checked_gradient(grad_value, output.shape)[..., None, :, :]))

        return output, vjp


def _one_head(y: Array) -> Array:
    """Return projected tokens with the head axis, ``(..., 1, length, E)``."""
    return y[..., None, :, :]
