"""The instruction cvt: from one type of number to another, with the roundings that PTX names."""

from collections.abc import Callable

import numpy as np

from .faults import Array
from .registers import TYPES

Function = Callable[..., Array]
TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
PACKED = {"f16x2": "f16", "bf16x2": "bf16"}
TF32_BITS, TF32_HALF = np.uint32(0xFFFFE000), np.uint32(0x1000)


def conversion(how: tuple[str, ...], to: str, of: str) -> Function:
    """Return the function that converts numbers; a KeyError for a rounding that is not known."""
    if to in PACKED:
        _only(how, "rn")
        return lambda high, low: _bits(high, PACKED[to]).astype(np.uint32) << np.uint32(16) | _bits(low, PACKED[to])
    if to == "tf32":
        _only(how, "rna")
        return lambda x: x.view(np.uint32) + TF32_HALF & TF32_BITS
    target, source = TYPES[to], TYPES[of]
    integral = next((TO_INTEGER[part] for part in how if part in TO_INTEGER), None)
    if integral is not None:
        _only(how, *TO_INTEGER, "ftz", "sat")
        return (
            (lambda x: _to_integer(integral(x), target))
            if target.kind in "iu"
            else lambda x: integral(x).astype(target)
        )
    _only(how, "rn", "ftz", "sat")
    if "sat" in how and target.kind in "iu":
        limits = np.iinfo(target)
        return lambda x: np.clip(
            x, max(limits.min, np.iinfo(source).min), min(limits.max, np.iinfo(source).max)
        ).astype(target)
    if "sat" in how:
        return lambda x: np.fmin(np.fmax(x, 0), 1).astype(target)
    return lambda x: x.astype(target)


def _only(how: tuple[str, ...], *known: str) -> None:
    if not set(how) <= set(known):
        raise KeyError(how)


def _bits(x: Array, kind: str) -> Array:
    return x.astype(TYPES[kind]).view(np.uint16)


def _to_integer(x: Array, target: np.dtype) -> Array:
    """Return the nearest integers that the type has, 0 for NaN."""
    limits = np.iinfo(target)
    inside = (x >= float(limits.min)) & (x < float(limits.max) + 1)
    nearest = np.where(x > 0, limits.max, np.where(np.isnan(x), 0, limits.min)).astype(target)
    return np.where(inside, np.where(inside, x, 0).astype(target), nearest)
