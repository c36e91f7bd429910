"""Attention over images: between the positions of a feature map, and images as rows of patches."""

from dataclasses import dataclass
from typing import Any, ClassVar, Unpack

import numpy as np

from sdpa_ref._problem.checks import checked_shape, checked_sizes
from sdpa_ref.api import sdpa, sdpa_with_vjp
from sdpa_ref.arrays import Array
from sdpa_ref.layers.attend import sdpa_and_weights
from sdpa_ref.layers.gradients import LayerGradients, Vjp, of_parts
from sdpa_ref.layers.layer import Layer
from sdpa_ref.layers.linear import Conv1x1
from sdpa_ref.layers.weights import Axes, checked_input
from sdpa_ref.options import MapOptions, spelled_out
from sdpa_ref.spelling import known_to_layers


@dataclass(init=False, eq=False, repr=False)
class SpatialAttention(Layer):
    """Attention between all positions of a feature map, as in the U-Nets of diffusion models.

    Parameters
    ----------
    dim : int
        Channels of the map.
    heads : int
        Number of heads.
    dim_head : int
        Width E of a head; `dim` need not be ``heads * dim_head``.
    rng, dtype
        As in `Linear`.

    Attributes
    ----------
    to_qkv : Conv1x1
        From `dim` to ``3 * heads * dim_head`` channels, without bias: all of q, then k, then v.
    to_out : Conv1x1
        From ``heads * dim_head`` back to `dim`, with bias.

    Examples
    --------
    >>> layer = SpatialAttention(64, rng=0)
    >>> layer, layer.to_qkv.weight.shape
    (SpatialAttention(dim=64, heads=4, dim_head=32), (384, 64, 1, 1))
    >>> layer(np.zeros((2, 64, 6, 8), np.float32)).shape
    (2, 64, 6, 8)
    """

    dim: int
    heads: int
    dim_head: int
    to_qkv: Conv1x1
    to_out: Conv1x1

    _weights: ClassVar[Axes] = {
        "to_qkv.weight": "3*heads*dim_head dim 1 1",
        "to_out.weight": "dim heads*dim_head 1 1",
        "to_out.bias": "dim",
    }
    _given = ("heads",)

    def __init__(
        self, dim: int, heads: int = 4, dim_head: int = 32, *, rng: Any = None, dtype: Any = np.float32
    ) -> None:
        self._draw(rng, dtype, False, dim=dim, heads=heads, dim_head=dim_head)

    @spelled_out(MapOptions)
    def __call__(self, x: Any, **options: Unpack[MapOptions]) -> Array:
        """Return the attention of the map over itself.

        Parameters
        ----------
        x : array, shape (..., dim, h, w)
            The feature map; its positions are tokens in row-major order.
        mask, bias, dropout, backend
            As in `sdpa_ref.sdpa`: mask and bias broadcast to ``(..., heads, h * w, h * w)``, True = may attend.
            Without `dropout` nothing is dropped.

        Returns
        -------
        array, shape (..., dim, h, w)
            In the common type of input and weights.
        """
        given = known_to_layers(options, MapOptions)
        qkv = self._qkv(x)
        return self.to_out(self._map(sdpa(*self._heads(qkv), **given), qkv))

    @spelled_out(MapOptions)
    def value_and_vjp(self, x: Any, **options: Unpack[MapOptions]) -> tuple[Array, Vjp]:
        """Return the output, and the function that gives its gradients: see `MultiHeadAttention.value_and_vjp`."""
        given = known_to_layers(options, MapOptions)
        qkv, to_x = self.to_qkv.value_and_vjp(self._checked(x))
        attended, to_heads = sdpa_with_vjp(*self._heads(qkv), **given)
        value, to_attended = self.to_out.value_and_vjp(self._map(attended, qkv))
        shape = attended.swapaxes(-1, -2).shape

        def vjp(grad_value: Any) -> LayerGradients:
            out = to_attended(grad_value)
            heads = to_heads(out.x.reshape(shape).swapaxes(-1, -2))
            of_qkv = to_x(np.stack(heads[:3], -4).swapaxes(-1, -2).reshape(qkv.shape))
            return LayerGradients(of_qkv.x, None, of_parts(to_qkv=of_qkv, to_out=out), heads.bias)

        return value, vjp

    @spelled_out(MapOptions)
    def with_weights(self, x: Any, **options: Unpack[MapOptions]) -> tuple[Array, Array]:
        """Return the output, the same bits as without, and the attention weights.

        Parameters
        ----------
        x, mask, bias, dropout, backend
            As in a call of the layer.

        Returns
        -------
        output : array, shape (..., dim, h, w)
        weights : array, shape (..., heads, h * w, h * w)
            After dropout where it is given.
        """
        given = known_to_layers(options, MapOptions)
        qkv = self._qkv(x)
        attended, weights = sdpa_and_weights(*self._heads(qkv), **given)
        return self.to_out(self._map(attended, qkv)), weights

    def _checked(self, x: Any) -> Array:
        return checked_input("x", x, "dim h w", dim=self.dim)

    def _qkv(self, x: Any) -> Array:
        """Return the channels of queries, keys and values, ``(..., 3 * heads * dim_head, h, w)``."""
        return self.to_qkv(self._checked(x))

    def _heads(self, qkv: Array) -> list[Array]:
        """Return query, key and value, ``(..., heads, h * w, dim_head)``."""
        *lead, _, h, w = qkv.shape
        tokens = qkv.reshape(*lead, 3, self.heads, self.dim_head, h * w).swapaxes(-1, -2)
        return [tokens[..., part, :, :, :] for part in range(3)]

    def _map(self, attended: Array, qkv: Array) -> Array:
        """Return the output of the heads as channels of a map."""
        *lead, _, h, w = qkv.shape
        return attended.swapaxes(-1, -2).reshape(*lead, self.heads * self.dim_head, h, w)


def patchify(image: Any, patch: int) -> Array:
    """Return an image as a row of square patches.

    Parameters
    ----------
    image : array, shape (..., h, w, channels)
        Of any type.
    patch : int
        Side of a patch; h and w are multiples of it.

    Returns
    -------
    array, shape (..., (h // patch) * (w // patch), patch * patch * channels)
        Patches, and the values in them, in row-major order with channels last.

    Examples
    --------
    >>> patchify(np.zeros((32, 32, 3)), 4).shape
    (64, 48)
    >>> patchify(np.arange(8).reshape(2, 4, 1), 2)
    array([[0, 1, 4, 5],
           [2, 3, 6, 7]])
    """
    image = checked_input("image", image, "h w channels")
    *lead, h, w, channels = image.shape
    rows, columns = _patches(h, w, patch)
    blocks = image.reshape(*lead, rows, patch, columns, patch, channels).swapaxes(-3, -4)
    return blocks.reshape(*lead, rows * columns, patch * patch * channels)


def unpatchify(tokens: Any, shape: tuple[int, ...], patch: int) -> Array:
    """Return the image from its patches, the inverse of `patchify`.

    Parameters
    ----------
    tokens : array, shape (..., (h // patch) * (w // patch), patch * patch * channels)
        The patches.
    shape : tuple of int
        Shape of the image, ``(..., h, w, channels)``; leading axes may be left out, they are those of `tokens`.
    patch : int
        Side of a patch.

    Returns
    -------
    array, shape (..., h, w, channels)

    Examples
    --------
    >>> unpatchify(np.array([[0, 1, 4, 5], [2, 3, 6, 7]]), (2, 4, 1), 2)[..., 0]
    array([[0, 1, 2, 3],
           [4, 5, 6, 7]])
    """
    shape = checked_shape(shape)
    if len(shape) < 3:
        raise ValueError(f"shape must be that of the image, (..., h, w, channels), got {shape}")
    *lead, h, w, channels = shape
    rows, columns = _patches(h, w, patch)
    sizes = {"patches": rows * columns, "values": patch * patch * channels}
    tokens = checked_input("tokens", tokens, "patches values", **sizes)
    if lead and tuple(lead) != tokens.shape[:-2]:
        raise ValueError(f"shape must begin with the leading axes of tokens, {tokens.shape[:-2]}, got {shape}")
    lead = tokens.shape[:-2]
    blocks = tokens.reshape(*lead, rows, columns, patch, patch, channels).swapaxes(-3, -4)
    return blocks.reshape(*lead, h, w, channels)


def _patches(h: int, w: int, patch: int) -> tuple[int, int]:
    """Return the number of patches down and across."""
    checked_sizes(patch=patch)
    if h % patch or w % patch:
        raise ValueError(f"height and width must be multiples of patch = {patch}, got h = {h} and w = {w}")
    return h // patch, w // patch
