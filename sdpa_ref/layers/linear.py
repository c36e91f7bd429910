"""Affine maps: of the last axis, and of the channels of a feature map."""

import sys
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, ClassVar

import numpy as np

from sdpa_ref.arrays import Array, accumulation_dtype, as_array, result_dtype
from sdpa_ref.floating_point import ieee
from sdpa_ref.layers.coded import dense, in_place
from sdpa_ref.layers.gradients import LayerGradients, Vjp, affine, checked_gradient, like
from sdpa_ref.layers.kernels import kernel
from sdpa_ref.layers.layer import Layer
from sdpa_ref.layers.weights import Axes, checked_input
from sdpa_ref.stored.quantized import Quantized

_FEW = 256  # rows, at most, of which a kernel makes the product with float32 weights


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
    weight : array or Quantized, shape (out_features, in_features)
    bias : array, shape (out_features,), or None

    Notes
    -----
    Random weights, here and in the layers made of this one, are uniform within ``1 / sqrt(in_features)``, as PyTorch
    draws them. The result has the common type of input and weights; sums of 16-bit types are float32.

    Weights that are loaded may be codes with scales, `Quantized`, such as those of a GGUF file; their type does not
    count. The Numba backend reads weights of 16 bits, and codes of which 32 or more in a row share a scale, as they
    are stored. Everything else, and all of it without that backend, is widened in each call.

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

    def __call__(self, x: Any, *, backend: str | None = None) -> Array:
        """Return the map of an array.

        Parameters
        ----------
        x : array, shape (..., in_features)
        backend : str, optional
            Whose kernel reads weights that are stored in few bytes, and multiplies a few rows: "numba", or "reference"
            for NumPy. By default the kernel where it is installed. All else is NumPy.

        Returns
        -------
        array, shape (..., out_features)
        """
        plain = type(x) is np.ndarray and x.dtype == np.float32 and x.flags.c_contiguous
        if plain and x.shape[-1:] == (self.in_features,):
            rows, bias = x.size // self.in_features, self.bias
            multiply = self._product(rows, backend)
            if multiply is not None and (bias is None or (bias.dtype == np.float32 and bias.flags.c_contiguous)):
                y: Array = multiply(x.reshape(rows, -1), bias)
                return y.reshape(*x.shape[:-1], self.out_features)
        return self._general(x, backend)

    @ieee
    def _general(self, x: Any, backend: str | None) -> Array:
        """Return the map where NumPy multiplies, or where the numbers are not float32 yet."""
        x, weight, bias = checked_input("x", x, "in_features", in_features=self.in_features), self.weight, self.bias
        dtype, wide = _types(x.dtype, _counted(weight), None if bias is None else bias.dtype)
        rows = x.reshape(-1, self.in_features)  # one product, where NumPy would make one of each batch entry
        bias, multiply = None if bias is None else dense(bias, wide), self._product(len(rows), backend)
        with np.errstate(all="ignore"):
            if multiply is not None and wide == np.float32 and type(x) is np.ndarray:
                y = multiply(np.ascontiguousarray(rows, wide), None if bias is None else np.ascontiguousarray(bias))
            else:
                y = dense(rows, wide) @ dense(weight, wide).T
                if bias is not None:
                    y += bias
            return y.reshape(*x.shape[:-1], self.out_features).astype(dtype, copy=False)

    def _product(self, rows: int, backend: str | None) -> Any:
        """Return a kernel's product of so many rows with the weights as they are stored, None where NumPy makes it."""
        if backend is not None:
            affine = kernel("affine", backend, "product with stored weights")
            return affine(self.weight) if affine is not None and 0 < rows <= self._most else None
        return self._kernel if 0 < rows <= self._most else None

    @cached_property
    def _kernel(self) -> Any:
        affine = kernel("affine", None, "product with stored weights")
        return None if affine is None else affine(self.weight)

    @cached_property
    def _most(self) -> int:
        """How many rows a kernel multiplies; NumPy is faster at many rows of float32, which it rearranges first."""
        most = _FEW if self.weight.dtype == np.float32 else sys.maxsize
        return most if in_place(self.weight) else 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what is kept of a layer that is copied or pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def value_and_vjp(self, x: Any) -> tuple[Array, Vjp]:
        """Return the map of `x`, and the function that gives its gradients: see `MultiHeadAttention.value_and_vjp`.

        There is none by weights that are codes.
        """
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
    dtype, wide = _types(x.dtype, _counted(weight), None if bias is None else bias.dtype)
    return dtype, *(None if array is None else dense(array, wide) for array in (x, weight, bias))


def _counted(weight: Any) -> np.dtype[Any] | None:
    """Return the type of weights as it counts for the result: codes have none."""
    return None if isinstance(weight, Quantized) else weight.dtype


@lru_cache(maxsize=64)
def _types(x: Any, weight: Any, bias: Any) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the common type of x, weight and bias, and that in which the result is summed."""
    given = {name: dtype for name, dtype in {"x": x, "weight": weight, "bias": bias}.items() if dtype is not None}
    dtype = result_dtype(**given)
    return dtype, accumulation_dtype(dtype)
