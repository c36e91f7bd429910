"""Normalisation of tokens: by mean and variance, and by the root mean square alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sdpa_ref._problem.checks import checked_sizes
from sdpa_ref.arrays import Array, accumulation_dtype, result_dtype
from sdpa_ref.floating_point import ieee
from sdpa_ref.layers.gradients import LayerGradients, Vjp, checked_gradient, like
from sdpa_ref.layers.layer import Layer
from sdpa_ref.layers.weights import Axes, checked_input, float_dtype


@dataclass(init=False, eq=False, repr=False)
class LayerNorm(Layer):
    """Tokens of mean 0 and variance 1: ``(x - mean) / sqrt(variance + eps) * weight + bias``.

    Parameters
    ----------
    width : int
        Width of the tokens.
    bias : bool
        Whether there is a bias.
    eps : float
        At least 0. It is not saved with the weights: `from_state_dict` and `load` take it, too. BERT has 1e-12.
    dtype : dtype
        Type of the weights, which begin as ones, and of the bias, which begins as zeros.

    Attributes
    ----------
    weight : array, shape (width,)
    bias : array, shape (width,), or None

    Notes
    -----
    Ba, Kiros and Hinton, "Layer Normalization" (2016), as `torch.nn.LayerNorm` over the last axis. The result has the
    common type of input and weights; for 16-bit types all of it is computed in float32.

    Examples
    --------
    >>> norm = LayerNorm.from_state_dict({"weight": np.array([1.0, 1.0, 2.0, 2.0]), "bias": np.ones(4)}, eps=0.0)
    >>> norm
    LayerNorm(width=4, eps=0.0)
    >>> norm(np.array([3.0, 5.0, 3.0, 5.0]))
    array([ 0.,  2., -1.,  3.])
    """

    width: int
    eps: float
    weight: Array
    bias: Array

    _weights: ClassVar[Axes] = {"weight": "width"}
    _biases: ClassVar[Axes] = {"bias": "width"}
    _numbers: ClassVar[Mapping[str, float]] = {"eps": 1e-5}

    def __init__(self, width: int, bias: bool = True, *, eps: float = 1e-5, dtype: Any = np.float32) -> None:
        biases, sizes, dtype = self._chosen(bias), checked_sizes(width=width), float_dtype(dtype)
        arrays = {"weight": np.ones(sizes["width"], dtype)} | {name: np.zeros(sizes["width"], dtype) for name in biases}
        self._fill(arrays, {**sizes, "eps": eps})

    def __call__(self, x: Any) -> Array:
        """Return the normalised tokens.

        Parameters
        ----------
        x : array, shape (..., width)

        Returns
        -------
        array, shape (..., width)
        """
        return self.value_and_vjp(x)[0]

    def value_and_vjp(self, x: Any) -> tuple[Array, Vjp]:
        """Return the normalised tokens, and the function that gives the gradients: see `MultiHeadAttention`."""
        return _normalised(self, x, self.bias, centred=True)


@dataclass(init=False, eq=False, repr=False)
class RMSNorm(Layer):
    """Tokens whose mean square is 1: ``x / sqrt(mean(x**2) + eps) * weight``.

    Parameters
    ----------
    width : int
        Width of the tokens.
    eps : float
        At least 0. It is not saved with the weights: `from_state_dict` and `load` take it, too.
    dtype : dtype
        Type of the weights, which begin as ones.

    Attributes
    ----------
    weight : array, shape (width,)

    Notes
    -----
    Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). Gemma saves its weights minus 1. The
    result has the common type of input and weights; for 16-bit types all of it is computed in float32, and rounded
    once.

    Examples
    --------
    >>> RMSNorm(4, eps=0.0, dtype=np.float64)(np.array([1.0, -1.0, 7.0, 7.0]))
    array([ 0.2, -0.2,  1.4,  1.4])
    """

    width: int
    eps: float
    weight: Array

    _weights: ClassVar[Axes] = {"weight": "width"}
    _numbers: ClassVar[Mapping[str, float]] = {"eps": 1e-6}

    def __init__(self, width: int, *, eps: float = 1e-6, dtype: Any = np.float32) -> None:
        sizes = checked_sizes(width=width)
        self._fill({"weight": np.ones(sizes["width"], float_dtype(dtype))}, {**sizes, "eps": eps})

    def __call__(self, x: Any) -> Array:
        """Return the normalised tokens, ``(..., width)`` as x is."""
        return self.value_and_vjp(x)[0]

    def value_and_vjp(self, x: Any) -> tuple[Array, Vjp]:
        """Return the normalised tokens, and the function that gives the gradients: see `MultiHeadAttention`."""
        return _normalised(self, x, None, centred=False)


@ieee
def _normalised(layer: Any, x: Any, bias: Array | None, centred: bool) -> tuple[Array, Vjp]:
    """Return the value and the vjp of both layers, which differ in whether the mean is taken off."""
    given = checked_input("x", x, "width", width=layer.width)
    dtype = result_dtype(x=given.dtype, weight=layer.weight.dtype, **({} if bias is None else {"bias": bias.dtype}))
    wide = accumulation_dtype(dtype)
    weight = layer.weight.astype(wide, copy=False)
    with np.errstate(all="ignore"):
        unit, share = given.astype(wide, copy=False), wide.type(1 / layer.width)
        if centred:
            unit = unit - share * np.add.reduce(unit, -1, keepdims=True)
        squares = np.einsum("...i,...i->...", unit, unit)[..., None]  # no array of squares is made
        rate = 1 / np.sqrt(share * squares + wide.type(layer.eps))
        unit = unit * rate
        y = unit * weight
        if bias is not None:
            y += bias.astype(wide, copy=False)
    y = y.astype(dtype, copy=False)

    @ieee
    def vjp(grad_value: Any) -> LayerGradients:
        grad = checked_gradient(grad_value, y.shape).astype(wide, copy=False)
        asked = grad.any(-1, keepdims=True)  # a token without gradient adds nothing, whatever it holds
        with np.errstate(all="ignore"):
            seen, slope = np.where(asked, unit, 0), np.where(asked, rate, 0)
            by_unit = grad * weight
            by_x = by_unit - seen * (by_unit * seen).mean(-1, keepdims=True)
            if centred:
                by_x -= by_unit.mean(-1, keepdims=True)
            rows = (-1, layer.width)
            weights = {"weight": like((grad * seen).reshape(rows).sum(0), layer.weight)}
            if bias is not None:
                weights["bias"] = like(grad.reshape(rows).sum(0), bias)
            return LayerGradients(like(by_x * slope, given), None, weights)

    return y, vjp
