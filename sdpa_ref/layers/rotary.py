"""Rotary positions: query and key are turned by angles that grow with the position."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sdpa_ref.arrays import (
    FLOATS,
    Array,
    accumulation_dtype,
    as_array,
    as_integer,
    host_array,
    is_float,
    kind,
    module_of,
    real_number,
)
from sdpa_ref.floating_point import ieee
from sdpa_ref.layers.scalings import Scaling

_KEPT = 1 << 17  # angles, at most, of a call whose cosines and sines are kept


def rotary(
    x: Any,
    positions: Any,
    *,
    base: float = 10000.0,
    width: int | None = None,
    interleaved: bool = False,
    scaling: Scaling | None = None,
    layout: str = "HLE",
) -> Array:
    """Return queries or keys turned by their positions, so that scores depend on distances.

    Pair n of the numbers in a head is turned by ``position * base**(-2 * n / width)``.

    Parameters
    ----------
    x : float array, shape (..., H, L, E)
        Queries or keys, heads before lengths as in `sdpa`; ``(..., L, H, E)`` in layout "LHE". Two axes mean one head
        without a head axis.
    positions : array of real numbers, shape ``(L,)`` or ``(*batch, L)``
        Where the tokens stand, for all batch entries or for each.
    base : float
        Above 0; models that read long texts have a larger one.
    width : int, optional
        How many numbers of a head are turned, the first ones; even. The rest stays as it is. E by default.
    interleaved : bool
        Whether neighbours are a pair, ``(0, 1), (2, 3)``, as in the paper, GPT-J and Llama's own code; else the halves
        are, ``(0, width / 2), (1, width / 2 + 1)``, as in GPT-NeoX and all of Hugging Face's Llama.
    scaling : LinearScaling, DynamicScaling, YarnScaling or Llama3Scaling, optional
        What a model does to reach beyond the length that it was trained on first.
    layout : {"HLE", "LHE"}
        Order of heads and lengths in x.

    Returns
    -------
    array, shape of x
        In the type of x. Angles are float64; the rotation of 16-bit types is float32.

    Notes
    -----
    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021).

    Examples
    --------
    >>> rotary(np.array([[1.0, 0.0], [1.0, 0.0]]), [0, 1]).round(4)
    array([[1.    , 0.    ],
           [0.5403, 0.8415]])

    Only the distance counts: both moved by five, a query and a key have the same score.

    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 8))
    >>> scores = [rotary(q, [2 + n]) @ rotary(k, [7 + n]).T for n in (0, 5)]
    >>> bool(np.allclose(*scores))
    True

    Keys go into a cache as they were turned, each by its own position:

    >>> from sdpa_ref import KVCache
    >>> cache, tokens = KVCache(2, 3, 8), np.ones((2, 3, 1, 8), np.float32)
    >>> for step in range(4):
    ...     places = cache.lengths[:, None]
    ...     cache.append(rotary(tokens, places), tokens)
    ...     output = cache.attend(rotary(tokens, places))
    >>> places.tolist(), output.shape
    ([[3], [3]], (2, 3, 1, 8))
    """
    return _turned("x", x, positions, base, width, interleaved, scaling, layout)


def rotary_vjp(
    grad_value: Any,
    positions: Any,
    *,
    base: float = 10000.0,
    width: int | None = None,
    interleaved: bool = False,
    scaling: Scaling | None = None,
    layout: str = "HLE",
) -> Array:
    """Return the gradient of `rotary` by x: the rotation back of the gradient by its value.

    Parameters
    ----------
    grad_value : float array, shape of x
        Gradient by the value.
    positions, base, width, interleaved, scaling, layout
        As in `rotary`.

    Returns
    -------
    array, shape of x
        In the type of `grad_value`.

    Examples
    --------
    >>> x = np.random.default_rng(0).standard_normal((3, 8))
    >>> bool(np.allclose(rotary_vjp(rotary(x, range(3)), range(3)), x))
    True
    """
    return _turned("grad_value", grad_value, positions, base, width, interleaved, scaling, layout, back=True)


@dataclass(frozen=True)
class Rotary:
    """The rotary positions of a `MultiHeadAttention`: what its queries and keys are turned by.

    Parameters
    ----------
    base, width, interleaved, scaling
        As in `rotary`.

    Examples
    --------
    >>> from sdpa_ref import Causal, MultiHeadAttention
    >>> layer = MultiHeadAttention(48, num_heads=4, rotary=Rotary(base=100000.0), rng=0)
    >>> x = np.random.default_rng(0).standard_normal((2, 5, 48))
    >>> bool(np.allclose(layer(x, mask=Causal()), layer(x, mask=Causal(), positions=range(7, 12))))
    True
    """

    base: float = 10000.0
    width: int | None = None
    interleaved: bool = False
    scaling: Scaling | None = None

    def __call__(self, x: Array, positions: Any, *, back: bool = False) -> Array:
        """Return heads in layout "LHE" turned by their positions, or back."""
        turn = rotary_vjp if back else rotary
        return turn(
            x, positions, base=self.base, width=self.width, interleaved=self.interleaved, scaling=self.scaling,
            layout="LHE",
        )  # fmt: skip


@ieee
def _turned(
    name: str,
    x: Any,
    positions: Any,
    base: Any,
    width: Any,
    interleaved: Any,
    scaling: Any,
    layout: Any,
    back: bool = False,
) -> Array:
    x = as_array(name, x)
    if not is_float(x.dtype):
        raise TypeError(f"{name} must be {FLOATS}, got {x.dtype}")
    if layout not in ("HLE", "LHE"):
        raise ValueError(f'layout must be "HLE" or "LHE", got {layout!r:.40}')
    if x.ndim < 2:
        raise ValueError(f"{name} must have shape (..., H, L, E), or (L, E) for one head, got {x.shape}")
    width, base = _checked_width(width, x.shape[-1]), real_number("base", base)
    if base <= 0:
        raise ValueError(f"base must be above 0, got {base}")
    if not isinstance(interleaved, (bool, np.bool_)):
        raise TypeError(f"interleaved must be True or False, got {type(interleaved).__name__}")
    if scaling is not None and not isinstance(scaling, Scaling):
        raise TypeError(
            "scaling must be a LinearScaling, DynamicScaling, YarnScaling or Llama3Scaling, "
            f"got {type(scaling).__name__}"
        )
    places = _checked_positions(name, positions, x.shape, layout)
    wide, module = accumulation_dtype(x.dtype.newbyteorder("=")), module_of(kind(x))
    heads = None if x.ndim == 2 else -3 if layout == "HLE" else -2
    with np.errstate(all="ignore"):
        turns = _cos_and_sin if places.size * width <= _KEPT else _cos_and_sin.__wrapped__
        cos, sin = map(module.asarray, turns(places.tobytes(), places.shape, width, base, scaling, heads, wide))
        y = x.astype(x.dtype.newbyteorder("="))
        first, second = _pairs(width, bool(interleaved))
        a, b = (x[..., each].astype(wide, copy=False) for each in (first, second))
        if back:
            a, b, first, second = b, a, second, first
        y[..., first] = a * cos - b * sin
        y[..., second] = b * cos + a * sin
    return y


@lru_cache(maxsize=8)
def _cos_and_sin(
    places: bytes, shape: tuple[int, ...], width: int, base: float, scaling: Any, heads: int | None, dtype: Any
) -> tuple[Array, Array]:
    """Return cosines and sines of all pairs, which are kept: the layers of a model turn by the same angles."""
    positions = np.frombuffer(places).reshape(shape)
    frequencies, factor = (scaling or Scaling()).frequencies(width, base, positions)
    angles = positions[..., None] * frequencies
    if heads is not None:
        angles = np.expand_dims(angles, heads)
    cos, sin = (factor * each for each in (np.cos(angles), np.sin(angles)))
    return cos.astype(dtype), sin.astype(dtype)


def _pairs(width: int, interleaved: bool) -> tuple[slice, slice]:
    """Return where the two numbers of each pair are."""
    if interleaved:
        return slice(0, width, 2), slice(1, width, 2)
    return slice(0, width // 2), slice(width // 2, width)


def _checked_width(width: Any, E: int) -> int:
    wide = E if width is None else as_integer("width", width)
    if wide % 2 or not 2 <= wide <= E:
        got = f"E = {E}; say how many numbers of a head are turned" if width is None else f"{wide}"
        raise ValueError(f"width must be even, at least 2 and at most E = {E}, got {got}")
    return wide


def _checked_positions(name: str, positions: Any, shape: tuple[int, ...], layout: str) -> Array:
    """Return the positions as float64, ``(L,)`` or ``(*batch, L)``."""
    places = host_array("positions", positions)
    whole = places.dtype.kind in "iu"
    if places.size and not (whole or is_float(places.dtype)):
        raise TypeError(f"positions must be real numbers, got {places.dtype}")
    L = shape[-3 if layout == "LHE" and len(shape) > 2 else -2]
    batch, lead = shape[:-3], places.shape[:-1]
    fits = places.ndim and places.shape[-1] == L and len(lead) <= len(batch)
    fits = fits and all(n in (1, m) for n, m in zip(lead[::-1], batch[::-1], strict=False))
    if not fits:
        each = f" or ({', '.join(map(str, (*batch, L)))}) = (*batch, L)" if batch else ""
        raise ValueError(
            f'positions must have shape ({L},) = (L,){each} for {name} of shape {shape} in layout "{layout}", '
            f"got {places.shape}"
        )
    places = places.astype(np.float64)
    if not (whole or np.isfinite(places).all()):
        raise ValueError("positions must be finite")
    return places
