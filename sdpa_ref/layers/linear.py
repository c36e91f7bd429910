"""Affine maps: of the last axis, and of the channels of a feature map."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np

from sdpa_ref.arrays import Array, accumulation_dtype, as_array, result_dtype
from sdpa_ref.floating_point import ieee
from sdpa_ref.layers.gradients import LayerGradients, Vjp, affine, checked_gradient, like
from sdpa_ref.layers.layer import Layer
from sdpa_ref.layers.weights import Axes, checked_input


@dataclass(init=False, eq=False, repr=False)
class Linear(Layer):
    """An affine map of the last axis: ``x @ weight.T + bias``.

    Parameters
    ----------
    in_features, out_features : int
        Widths, at least 1.
    bias : bool
        Whether there is a bias.
    rng : int or numpy.random.Generator, optional
        Seed or source of the random weights; fresh ones by default.
    dtype : dtype
        Type of the weights: float16, bfloat16, float32 or float64.

    Attributes
    ----------
    weight : array, shape (out_features, in_features)
    bias : array, shape (out_features,), or None

    Notes
    -----
    Random weights, here and in the layers made of this one, are uniform within ``1 / sqrt(in_features)``, as PyTorch
    draws them. The result has the common type of input and weights; sums of 16-bit types are float32.

    Examples
    --------
    >>> layer = Linear.from_state_dict({"weight": np.array([[1.0, 2.0], [0.0, -1.0], [3.0, 0.0]])})
    >>> layer, layer(np.array([10.0, 1.0]))
    (Linear(in_features=2, out_features=3), array([12., -1., 30.]))
    """

    in_features: int
    out_features: int
    weight: Array
    bias: Array

    _weights: ClassVar[Axes] = {"weight": "out_features in_features"}
    _biases: ClassVar[Axes] = {"bias": "out_features"}

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, rng: Any = None, dtype: Any = np.float32
    ) -> None:
        self._draw(rng, dtype, bias, in_features=in_features, out_features=out_features)

    @ieee
    def __call__(self, x: Any) -> Array:
        """Return the map of `x`, ``(..., in_features)`` to ``(..., out_features)``."""
        x = checked_input("x", x, "in_features", in_features=self.in_features)
        dtype, x, weight, bias = _widened(x, self.weight, self.bias)
        with np.errstate(all="ignore"):
            y = (
                x.reshape(-1, self.in_features) @ weight.T
            )  # one product, where NumPy would make one of each batch entry
            if bias is not None:
                y += bias
            return y.reshape(*x.shape[:-1], self.out_features).astype(dtype, copy=False)

    def value_and_vjp(self, x: Any) -> tuple[Array, Vjp]:
        """Return the map of `x`, and the function that gives its gradients: see `MultiHeadAttention.value_and_vjp`."""
        given = as_array("x", x)
        y = self(given)

        @ieee
        def vjp(grad_value: Any) -> LayerGradients:
            _, x, weight, _ = _widened(given, self.weight, self.bias)
            with np.errstate(all="ignore"):
                grad = checked_gradient(grad_value, y.shape).astype(x.dtype, copy=False)
                weights = affine(self, x.reshape(-1, self.in_features), grad.reshape(-1, self.out_features))
                return LayerGradients(like(grad @ weight, given), None, weights)

        return y, vjp


@dataclass(init=False, eq=False, repr=False)
class Conv1x1(Layer):
    """A convolution of a feature map with a kernel of one pixel: an affine map of its channels.

    Parameters
    ----------
    in_channels, out_channels : int
        Channels, at least 1.
    bias, rng, dtype
        As in `Linear`.

    Attributes
    ----------
    weight : array, shape (out_channels, in_channels, 1, 1)
    bias : array, shape (out_channels,), or None

    Examples
    --------
    >>> Conv1x1(3, 8)(np.zeros((2, 3, 32, 32), np.float32)).shape
    (2, 8, 32, 32)
    """

    in_channels: int
    out_channels: int
    weight: Array
    bias: Array

    _weights: ClassVar[Axes] = {"weight": "out_channels in_channels 1 1"}
    _biases: ClassVar[Axes] = {"bias": "out_channels"}

    def __init__(
        self, in_channels: int, out_channels: int, bias: bool = True, *, rng: Any = None, dtype: Any = np.float32
    ) -> None:
        self._draw(rng, dtype, bias, in_channels=in_channels, out_channels=out_channels)

    @ieee
    def __call__(self, x: Any) -> Array:
        """Return the map of `x`, ``(..., in_channels, h, w)`` to ``(..., out_channels, h, w)``."""
        x = checked_input("x", x, "in_channels h w", in_channels=self.in_channels)
        dtype, x, weight, bias = _widened(x, self.weight[:, :, 0, 0], self.bias)
        *lead, channels, h, w = x.shape
        with np.errstate(all="ignore"):
            y = weight @ x.reshape(*lead, channels, h * w)
            if bias is not None:
                y += bias[:, None]
            return y.reshape(*lead, self.out_channels, h, w).astype(dtype, copy=False)

    def value_and_vjp(self, x: Any) -> tuple[Array, Vjp]:
        """Return the map of `x`, and the function that gives its gradients: see `MultiHeadAttention.value_and_vjp`."""
        given = as_array("x", x)
        y = self(given)

        @ieee
        def vjp(grad_value: Any) -> LayerGradients:
            _, x, weight, _ = _widened(given, self.weight[:, :, 0, 0], self.bias)
            with np.errstate(all="ignore"):
                grad = checked_gradient(grad_value, y.shape).astype(x.dtype, copy=False)
                x, grad = (array.reshape(*array.shape[:-2], -1) for array in (x, grad))
                weights = affine(self, *(np.moveaxis(a, -2, -1).reshape(-1, a.shape[-2]) for a in (x, grad)))
                return LayerGradients(like(weight.T @ grad, given), None, weights)

        return y, vjp


def _widened(x: Array, weight: Array, bias: Array) -> tuple[Any, ...]:
    """Return the type of the result, and the arrays in the type in which it is summed."""
    dtype, wide, alike = _types(x.dtype, weight.dtype, None if bias is None else bias.dtype)
    if alike:
        return dtype, x, weight, bias
    return dtype, *(None if array is None else array.astype(wide, copy=False) for array in (x, weight, bias))


@lru_cache(maxsize=64)
def _types(x: Any, weight: Any, bias: Any) -> tuple[np.dtype[Any], np.dtype[Any], bool]:
    """Return the common type of x, weight and bias, that in which the result is summed, and whether all are of it."""
    given = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    dtype = result_dtype(**given)
    wide = accumulation_dtype(dtype)
    return dtype, wide, all(own == wide for own in given.values())
