"""What layers need between their attentions and NumPy is slow at."""

import struct
from functools import cache
from typing import Any

import numpy as np

from .kernels.activations import BLOCK, kernel
from .plan import host_registers, sizes_for
from .runtime.call import HEADER
from .runtime.threads import run, team

_CALL = struct.Struct(f"{HEADER}3q")


def gelu(x: Any) -> Any:
    """Return the exact GELU of an array whose numbers are computed in float32, as a new one."""
    x = np.asarray(x, x.dtype.newbyteorder("="), order="C")
    y = np.empty_like(x)
    pool, threads = team()
    run(_CALL.pack(_address(x.dtype.name), 0, pool, min(threads, (x.size - 1) // BLOCK), id(x), id(y), x.size))
    return y


@cache
def _address(dtype: str) -> int:
    address: int = kernel(dtype, sizes_for("float32", *host_registers()).lanes).address
    return address
