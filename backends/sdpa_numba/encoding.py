"""Codes and scales of the tokens that a cache stores."""

import struct
from functools import cache
from typing import Any

import numpy as np

from .kernels.encode import BLOCK, kernel
from .plan import host_registers, sizes_for
from .runtime.call import HEADER
from .runtime.threads import run, team

_CALL = struct.Struct(f"{HEADER}10q")
_NONE = None, None, None


def encode(code: str, group: int, first: tuple[Any, Any, Any], second: tuple[Any, Any, Any] = _NONE) -> bool:
    """Write codes and scales of an array, or of two of one shape, and return whether all numbers could be coded.

    Parameters
    ----------
    code : str
        A key of `kernels.encode.SPANS`.
    group : int
        How many numbers share a scale.
    first, second : tuple of array
        Numbers, and where their codes and scales belong, in the order of the numbers.
    """
    (x, codes, scale), (y, more_codes, more_scale) = first, second
    if y is not None and y.dtype is not x.dtype and y.dtype != x.dtype:
        x, y = x.astype(np.float64), y.astype(np.float64)
    if not (x.flags.c_contiguous and x.dtype.isnative):
        x = _contiguous(x)
    if y is not None and not (y.flags.c_contiguous and y.dtype.isnative):
        y = _contiguous(y)
    pool, threads = team()
    width = x.shape[-1]
    tokens = x.size // width
    helpers = min(threads, ((tokens if y is None else 2 * tokens) - 1) // BLOCK)
    others = (0, 0, 0) if y is None else (id(y), id(more_codes), id(more_scale))
    call = _CALL.pack(
        _address(x.dtype, code), 0, pool, helpers, id(x), id(codes), id(scale), *others, tokens, width, group, 0
    )
    run(call)
    return not any(call[-8:])


def _contiguous(array: Any) -> Any:
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")


@cache
def _address(dtype: np.dtype[Any], code: str) -> int:
    address: int = kernel(dtype.name, code, sizes_for("float64", *host_registers()).lanes).address
    return address
