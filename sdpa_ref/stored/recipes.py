"""Recipes: the codes of eight and four bits, and floating-point numbers of eight bits."""

from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.extras import install
from sdpa_ref.stored.recipe import Recipe


@dataclass(frozen=True, eq=False, repr=False)
class Int8(Recipe):
    """Codes of eight bits: a number errs by at most half a scale, which is the largest of its group / 127.

    Parameters
    ----------
    group : int, optional
        How many numbers of a token share a scale, a divisor of E; None: all.
    center : float array, shape (heads, E), optional
        Subtracted from each token before coding and added after, such as the mean of the prompt's keys. It removes
        the common part of outlier channels, which would otherwise enlarge the scale of every token.

    Notes
    -----
    The scale is rounded to float16 away from 0, and the codes are rounded by that scale, half to even. Zeros stay
    exact. The center is the smoothing of SageAttention (Zhang et al., ICLR 2025), with the right lse.

    Examples
    --------
    >>> import numpy as np
    >>> keys = Int8().encode(np.array([[1.0, -0.5, 0.25], [0.0, 0.0, 0.0]]))
    >>> keys.codes
    array([[127, -63,  32],
           [  0,   0,   0]], dtype=int8)
    >>> keys.dense().round(3)
    array([[ 1.001, -0.497,  0.252],
           [ 0.   ,  0.   ,  0.   ]])
    """

    group: int | None = None
    center: Array | None = None
    code = "int8"
    codes_dtype: ClassVar[Any] = np.dtype(np.int8)
    span: ClassVar[float] = 127

    def _codes(self, y: Array, module: Any) -> Array:
        return module.rint(y).astype(np.int8)


@dataclass(frozen=True, eq=False, repr=False)
class Int4(Recipe):
    """Codes of four bits, two a byte: a number errs by at most half a scale, on one side of 0 by one scale.

    Parameters
    ----------
    group : int, optional
        How many numbers of a token share a scale, a divisor of E; None: all.
    center : float array, shape (heads, E), optional
        As in `Int8`.

    Notes
    -----
    The scale has the sign with which the largest magnitude of the group (the first of equal ones) becomes code -8. The
    codes reach to 7 on the other side, where a number may err by one scale. They are stored as 0 to 15, with zero point
    8, as in ggml's q4_0 and in ONNX Runtime.

    Examples
    --------
    >>> import numpy as np
    >>> keys = Int4(group=2).encode(np.array([[1.0, -0.5, 0.0, 0.0]]))
    >>> keys
    Quantized((1, 4), codes uint8 (1, 2), bits=4, scale float16 (1, 2), zero=8)
    >>> keys.dense()
    array([[ 1. , -0.5,  0. ,  0. ]])
    """

    group: int | None = 32
    center: Array | None = None
    code = "nibble"
    codes_dtype: ClassVar[Any] = np.dtype(np.uint8)
    span: ClassVar[float] = 8
    zero = 8
    bits = 4

    def _peak(self, y: Array, module: Any) -> Array:
        if not y.shape[-1]:
            return y.sum(-1)
        rows = y.reshape(-1, y.shape[-1])
        largest = rows[module.arange(len(rows)), abs(rows).argmax(-1)]
        return 0.0 - largest.reshape(y.shape[:-1])  # without -0

    def _codes(self, y: Array, module: Any) -> Array:
        codes = module.rint(module.minimum(y, 7)).astype(np.int8).astype(np.uint8) + np.uint8(8)
        pairs = codes.reshape(*codes.shape[:-2], -1, 2) if codes.size else codes.reshape(*codes.shape[:-2], 0, 2)
        return pairs[..., 0] | pairs[..., 1] << 4


@dataclass(frozen=True, eq=False, repr=False)
class Float8(Recipe):
    """Codes that are floating-point numbers of eight bits, which need ml_dtypes.

    A number errs by at most 1/16 of itself (e5m2: 1/8), or half the smallest step of the type times the scale.

    Parameters
    ----------
    format : {"e4m3fn", "e5m2"}
        Three bits of mantissa and numbers to 448, or two and to 57344.
    group : int, optional
        How many numbers of a token share a scale, a divisor of E; None: all.
    center : float array, shape (heads, E), optional
        As in `Int8`.

    Notes
    -----
    The scale, rounded to float32 away from 0, maps the largest magnitude of the group to the largest number of the
    type. Numbers are rounded half to even.

    Examples
    --------
    >>> import numpy as np
    >>> keys = Float8().encode(np.array([[1.0, -0.5, 0.3]]))
    >>> keys
    Quantized((1, 3), codes float8_e4m3fn, scale float32 (1, 1))
    >>> keys.dense().round(3)
    array([[ 1.   , -0.5  ,  0.286]])
    """

    format: str = "e4m3fn"
    group: int | None = None
    center: Array | None = None
    scale_dtype: ClassVar[Any] = np.dtype(np.float32)

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise ValueError(f'format must be "e4m3fn" or "e5m2", got {self.format!r}')
        super().__post_init__()
        try:
            import ml_dtypes  # noqa: F401
        except ImportError:
            raise ModuleNotFoundError(f"float8 needs ml_dtypes: {install('half')}") from None

    @property
    def code(self) -> str:  # type: ignore[override]
        """The name of the type of the codes."""
        return f"float8_{self.format}"

    @property
    def codes_dtype(self) -> Any:
        """Type of the codes."""
        return _float8(self.format)

    @property
    def span(self) -> float:  # type: ignore[override]
        """The largest number of that type."""
        return _FORMATS[self.format][0]

    def _codes(self, y: Array, module: Any) -> Array:
        most, mantissa, lowest = _FORMATS[self.format]
        _, exponent = module.frexp(y)
        step = module.maximum(exponent - 1, lowest) - mantissa  # ml_dtypes rounds twice, by way of float32
        rounded = module.ldexp(module.rint(module.ldexp(y, -step)), step)
        return module.clip(rounded, -most, most).astype(self.codes_dtype)


@cache
def _float8(format: str) -> np.dtype[Any]:
    import ml_dtypes

    dtype: np.dtype[Any] = np.dtype(getattr(ml_dtypes, f"float8_{format}"))
    return dtype


_FORMATS = {"e4m3fn": (448.0, 3, -6), "e5m2": (57344.0, 2, -14)}  # the largest number, bits of mantissa, least exponent
