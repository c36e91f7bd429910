"""Activations of the layers between attention: GELU and SiLU, each with its derivative."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_ref.arrays import FLOATS, Array, accumulation_dtype, as_array, is_float, kind
from sdpa_ref.floating_point import ieee
from sdpa_ref.layers.kernels import kernel

_BLOCK = 1 << 13  # numbers at a time, so that what lies between two steps of a formula stays in the processor's cache
_FAR = 40.0  # beyond it the normal distribution is 0 and 1 in every type
_FAR_SIGMOID = 800.0  # likewise for the logistic function

# Rational approximations of W. J. Cody, "Rational Chebyshev approximations for the error function", Mathematics of
# Computation 23 (1969), 631-637, highest power first: erf(y) / y in y**2 up to 0.46875, exp(y**2) * erfc(y) in y up to
# 4, and beyond it (1 / sqrt(pi) - y * exp(y**2) * erfc(y)) * y**2 in 1 / y**2.
_SMALL = (
    (1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2, 3.77485237685302021e2,
     3.20937758913846947e3),
    (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3),
)  # fmt: skip
_MIDDLE = (
    (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0, 6.61191906371416295e1,
     2.98635138197400131e2, 8.81952221241769090e2, 1.71204761263407058e3, 2.05107837782607147e3,
     1.23033935479799725e3),
    (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2, 1.62138957456669019e3,
     3.29079923573345963e3, 4.36261909014324716e3, 3.43936767414372164e3, 1.23033935480374942e3),
)  # fmt: skip
_LARGE = (
    (1.63153871373020978e-2, 3.05326634961232344e-1, 3.60344899949804439e-1, 1.25781726111229246e-1,
     1.60837851487422766e-2, 6.58749161529837803e-4),
    (1.0, 2.56852019228982242e0, 1.87295284992346725e0, 5.27905102951428412e-1, 6.05183413124413191e-2,
     2.33520497626869185e-3),
)  # fmt: skip


def gelu(x: Any, approximate: str = "none", *, backend: str | None = None) -> Array:
    """Return the Gaussian error linear unit of each number: ``x * Phi(x)``, Phi being the normal distribution.

    Parameters
    ----------
    x : float array
        Of any shape.
    approximate : {"none", "tanh"}
        "tanh" is ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))``, which GPT-2 and Gemma use. It differs
        from the exact one by up to 5e-4.
    backend : str, optional
        What computes the exact form in float32 and 16-bit types: "numba" for its kernel, "reference" for NumPy. By
        default the kernel where Numba is installed. Everything else is computed in NumPy.

    Returns
    -------
    array, shape of x
        In the type of x; 16-bit types are computed in float32.

    Notes
    -----
    Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016). NumPy has no error function: Phi comes from the rational
    approximations of Cody (1969), to full precision, also far out on the negative side. That takes about as long as ten
    exponentials of the array, and "tanh" as long as three; the kernel takes as long as one.

    Examples
    --------
    >>> gelu(np.array([-1.0, 0.0, 1.0, 2.0])).round(4)
    array([-0.1587,  0.    ,  0.8413,  1.9545])
    >>> gelu(np.array([-1.0, 0.0, 1.0, 2.0]), "tanh").round(4)
    array([-0.1588,  0.    ,  0.8412,  1.9546])
    """
    function, x = _GELU[_checked(approximate)][0], _floats(x)
    if function is _gelu and kind(x) == "numpy" and accumulation_dtype(x.dtype.newbyteorder("=")) == np.float32:
        compiled = kernel("gelu", backend, "GELU")
        if compiled is not None:
            value: Array = compiled(x)
            return value
    return _each(function, x)


def gelu_derivative(x: Any, approximate: str = "none") -> Array:
    """Return the derivative of `gelu` at each number. The gradient by x is this times the gradient by the value.

    Parameters
    ----------
    x, approximate
        As in `gelu`.

    Examples
    --------
    >>> gelu_derivative(np.array([-1.0, 0.0, 1.0])).round(4)
    array([-0.0833,  0.5   ,  1.0833])
    """
    return _each(_GELU[_checked(approximate)][1], x)


def silu(x: Any) -> Array:
    """Return the sigmoid linear unit of each number: ``x / (1 + exp(-x))``.

    Parameters
    ----------
    x : float array
        Of any shape.

    Returns
    -------
    array, shape of x
        In the type of x; 16-bit types are computed in float32.

    Examples
    --------
    >>> silu(np.array([-1.0, 0.0, 1.0])).round(4)
    array([-0.2689,  0.    ,  0.7311])
    """
    return _each(_silu, x)


def silu_derivative(x: Any) -> Array:
    """Return the derivative of `silu` at each number. The gradient by x is this times the gradient by the value.

    Parameters
    ----------
    x : float array
        As in `silu`.

    Examples
    --------
    >>> silu_derivative(np.array([-1.0, 0.0, 1.0])).round(4)
    array([0.0723, 0.5   , 0.9277])
    """
    return _each(_silu_derivative, x)


def _floats(x: Any) -> Array:
    x = as_array("x", x)
    if not is_float(x.dtype):
        raise TypeError(f"x must be {FLOATS}, got {x.dtype}")
    return x


@ieee
def _each(function: Callable[[Array], Array], x: Any) -> Array:
    """Return the function of each number, block by block."""
    x = _floats(x)
    dtype, flat = accumulation_dtype(x.dtype.newbyteorder("=")), x.reshape(-1)
    y = np.empty_like(flat, x.dtype.newbyteorder("="))
    block = _BLOCK if kind(x) == "numpy" else max(1, flat.size)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, block):
            y[start : start + block] = function(flat[start : start + block].astype(dtype, copy=False))
    return y.reshape(x.shape)


def _checked(approximate: Any) -> str:
    if not isinstance(approximate, str) or approximate not in _GELU:
        raise ValueError(f'approximate must be "none" or "tanh", got {approximate!r:.40}')
    return approximate


def _gelu(x: Array) -> Array:
    y = _normal(x)
    y *= np.maximum(x, -_FAR)
    return y


def _gelu_derivative(x: Array) -> Array:
    x = np.clip(x, -_FAR, _FAR)
    return _normal(x) + x * np.exp(-0.5 * (x * x)) * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh(x: Array) -> Array:
    x = np.maximum(x, -_FAR)
    return x * _logistic(_inner(x))


def _gelu_tanh_derivative(x: Array) -> Array:
    x = np.clip(x, -_FAR, _FAR)
    inner = _inner(x)
    s = _logistic(inner)
    return s + x * s * _logistic(-inner) * (math.sqrt(8 / math.pi) * (1 + 3 * 0.044715 * (x * x)))


def _silu(x: Array) -> Array:
    x = np.maximum(x, -_FAR_SIGMOID)
    return x * _logistic(x)


def _silu_derivative(x: Array) -> Array:
    x = np.clip(x, -_FAR_SIGMOID, _FAR_SIGMOID)
    s = _logistic(x)
    return s + x * s * _logistic(-x)


_GELU = {"none": (_gelu, _gelu_derivative), "tanh": (_gelu_tanh, _gelu_tanh_derivative)}


def _inner(x: Array) -> Array:
    """Return u such that ``(1 + tanh(u / 2)) / 2``, the logistic function of u, approximates Phi(x)."""
    return math.sqrt(8 / math.pi) * (x + 0.044715 * (x * x * x))


def _logistic(x: Array) -> Array:
    """Return the logistic function; 0 where the exponential is beyond its type."""
    return 1 / (1 + np.exp(-x))


def _normal(x: Array) -> Array:
    """Return the normal distribution up to x."""
    y = abs(x)
    np.minimum(y, _FAR, out=y)
    y *= math.sqrt(0.5)
    p = _erfc(y)
    p *= 0.5
    np.subtract(x >= 0, p, out=p)  # 1 - p on the right, -p on the left
    return np.abs(p, out=p)


def _erfc(y: Array) -> Array:
    """Return the complement of the error function at y, which is at least 0; by one formula where float32 is wanted."""
    if y.dtype != np.float64:
        erfc = y * y
        np.negative(erfc, out=erfc)
        np.exp(erfc, out=erfc)
        erfc *= _ratio(_MIDDLE, y)
        return erfc
    sixteenths = np.floor(y * 16) / 16  # its square is exact, and so the exponential of a large one is
    factor = np.exp(-(sixteenths * sixteenths)) * np.exp(-(y - sixteenths) * (y + sixteenths))
    erfc = factor * _ratio(_MIDDLE, y)
    near, far = y <= 0.46875, y > 4
    if near.any():
        small = y[near]
        erfc[near] = 1 - small * _ratio(_SMALL, small * small)
    if far.any():
        large = y[far]
        inverse = 1 / (large * large)
        erfc[far] = factor[far] * (1 / math.sqrt(math.pi) - inverse * _ratio(_LARGE, inverse)) / large
    return erfc


def _ratio(coefficients: tuple[tuple[float, ...], tuple[float, ...]], t: Array) -> Array:
    """Return the ratio of two polynomials at t, by Horner's rule in place."""
    above, below = (np.full_like(t, each[0]) for each in coefficients)
    for a, b in zip(*(each[1:] for each in coefficients), strict=True):
        above *= t
        above += a
        below *= t
        below += b
    above /= below
    return above
