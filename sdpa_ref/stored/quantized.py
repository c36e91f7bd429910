"""Keys or values as codes of few bits with scales: what they mean, and the checks."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np

from sdpa_ref.arrays import FLOATS, Array, as_integer, is_float, kind, memory_array, module_of
from sdpa_ref.floating_point import ieee
from sdpa_ref.storage import Stored

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
_LIMITS = {"b": (-128, 127), "B": (0, 255)}  # of zero points, by the character of the type of the codes


@dataclass(frozen=True, eq=False, repr=False)
class Quantized:
    """Keys or values as codes with scales: ``scale * (codes - zero) + offset``, a `key` or `value` of `sdpa`.

    It holds views of the arrays, and copies nothing. Scales and offsets broadcast in blocks: aligned from the right, an
    axis of length s serves one of length n in runs of n / s. So neither an axis nor a group has to be named: for codes
    ``(S, E)`` a scale ``(S, 1)`` is one a token, ``(S, E // 32)`` one for each group of 32 numbers of a token,
    ``(S // 32, E)`` one a channel of 32 tokens and ``(1, E)`` one a channel.

    Parameters
    ----------
    codes : array of int8, uint8, float8_e4m3fn or float8_e5m2
        In the shape of the keys. With ``bits=4``, uint8 of half that width: number 2i is in the low half of byte i.
    scale : float array
        Its axes divide those of the keys. It is not searched for NaN.
    offset : float array, optional
        Likewise; for codes that lie between a minimum and a maximum. A constant group has scale 0.
    zero : int, optional
        The code that means 0: 8 for the four-bit codes of ONNX Runtime and ggml.
    bits : {8, 4}, optional
        Bits of a code.

    Attributes
    ----------
    shape, ndim, dtype
        Those of `dense`.
    nbytes : int
        Memory of codes, scale and offset.

    Raises
    ------
    TypeError, ValueError
        The parts have wrong types, or do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> codes = np.array([[127, -64], [0, 5]], np.int8)
    >>> keys = Quantized(codes, np.array([[0.5], [2.0]]))  # a scale a token
    >>> keys
    Quantized((2, 2), codes int8, scale float64 (2, 1))
    >>> keys.dense()
    array([[ 63.5, -32. ],
           [  0. ,  10. ]])
    """

    codes: Array
    scale: Array
    offset: Array | None = None
    _: KW_ONLY
    zero: int = 0
    bits: int = 8

    def __post_init__(self) -> None:
        put, codes, zero, bits = object.__setattr__, self.codes, self.zero, self.bits
        if type(codes) is not np.ndarray:
            put(self, "codes", codes := memory_array("codes", codes))
        letter = codes.dtype.char
        if letter not in _LIMITS and codes.dtype.name not in FLOAT8:
            raise TypeError(f"codes must be int8, uint8, {FLOAT8[0]} or {FLOAT8[1]}, got {codes.dtype}")
        if bits != 8 and (bits != 4 or letter != "B"):
            if bits == 4:
                raise TypeError(f"codes of bits=4 must be uint8, two a byte, got {codes.dtype}")
            raise ValueError(f"bits must be 8 or 4, got {bits!r}")
        if type(zero) is not int or zero:
            put(self, "zero", zero := as_integer("zero", zero))
            low, high = (0, 15) if bits == 4 else _LIMITS.get(letter, (0, 0))
            if not low <= zero <= high:
                raise ValueError(f"zero must be a code, {low} to {high} for {bits} bits of {codes.dtype}, got {zero}")
        shape = self.shape
        _check_part(self, "scale", codes, shape)
        if self.offset is not None:
            _check_part(self, "offset", codes, shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `dense`."""
        shape: tuple[int, ...] = self.codes.shape
        return shape if self.bits == 8 or not shape else (*shape[:-1], 2 * shape[-1])

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.codes.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of `dense`: float64, which does not count in the type of a result."""
        return np.dtype(np.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scale and offset."""
        return sum(int(part.nbytes) for part in (self.codes, self.scale, self.offset) if part is not None)

    @ieee
    def dense(self) -> Array:
        """Return the numbers that are meant, in float64 and of the kind of the codes."""
        numbers = self.codes
        if self.bits == 4:
            numbers = module_of(kind(numbers)).stack([numbers & 15, numbers >> 4], axis=-1).reshape(self.shape)
        with np.errstate(all="ignore"):  # codes of float8 and scales may be NaN, and products infinite
            numbers = (numbers.astype(np.float64) - self.zero) * _spread(self.scale, self.shape)
            return numbers if self.offset is None else numbers + _spread(self.offset, self.shape)

    def __repr__(self) -> str:
        bits = f"{self.codes.dtype} {self.codes.shape}, bits=4" if self.bits == 4 else f"{self.codes.dtype}"
        parts = [f"codes {bits}", f"scale {self.scale.dtype} {self.scale.shape}"]
        parts += [] if self.offset is None else [f"offset {self.offset.dtype} {self.offset.shape}"]
        parts += [f"zero={self.zero}"] if self.zero else []
        return f"Quantized({self.shape}, {', '.join(parts)})"

    def __reduce__(self) -> Any:
        return partial(Quantized, zero=self.zero, bits=self.bits), (self.codes, self.scale, self.offset)

    def _stored(self, dtype: np.dtype[Any]) -> Stored:
        """Return what backends see beside a query of this type."""
        return Stored(self.codes, None, self.scale, self.offset, self.zero, self.bits, self.shape, dtype)

    def _map(self, of_part: Callable[[Array], Array]) -> "Quantized":
        """Return what has these parts of codes, scale and offset."""
        offset = None if self.offset is None else of_part(self.offset)
        return Quantized(of_part(self.codes), of_part(self.scale), offset, zero=self.zero, bits=self.bits)


def _check_part(self: Quantized, name: str, codes: Array, shape: tuple[int, ...]) -> None:
    """Raise the error of a scale or an offset that does not fit codes of this meaning."""
    part = getattr(self, name)
    if type(part) is not np.ndarray:
        object.__setattr__(self, name, part := memory_array(name, part))
    if part.dtype.char not in "efd" and not is_float(part.dtype):
        raise TypeError(f"{name} must be {FLOATS}, got {part.dtype}")
    if shape and not part.shape:  # so that backends find an axis
        object.__setattr__(self, name, part := part.reshape(1))
    own = part.shape
    fits = len(own) <= len(shape)
    if fits and own != shape[len(shape) - len(own) :]:
        axes = zip(reversed(own), reversed(shape), strict=False)
        fits = all(s == n or (s != 0 and n % s == 0) for s, n in axes)
    if not fits:
        raise ValueError(
            f"{name} must have axes that divide those of the numbers {shape}, counted from the right, got shape {own}"
        )
    if kind(part) != kind(codes):
        raise TypeError(f"codes and {name} must be of one kind, got {kind(codes)} and {kind(part)}")


def _spread(part: Array, shape: tuple[int, ...]) -> Array:
    """Return a part in float64 that broadcasts to this shape in NumPy's way: each block is repeated."""
    part = part.astype(np.float64)
    axes = shape[len(shape) - part.ndim :]
    if all(s in (1, n) for s, n in zip(part.shape, axes, strict=True)):
        return part
    runs = [(s, n // s) if s else (0, 1) for s, n in zip(part.shape, axes, strict=True)]
    blocks = part.reshape([length for s, _ in runs for length in (s, 1)])
    wide = module_of(kind(part)).broadcast_to(blocks, tuple(length for run in runs for length in run))
    return wide.reshape([math.prod(run) for run in runs])
