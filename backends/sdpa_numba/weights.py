"""Affine maps whose weights are read as they are stored: in 16 bits, or as codes with scales."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_ref.stored.quantized import Quantized

from .kernels.affine import TASK, UNIT, kernel
from .kernels.record import MIDDLE, SMALL
from .plan import host_registers, sizes_for
from .runtime.call import HEADER
from .runtime.threads import run, team
from .vector.dots import Code

_CALL = struct.Struct(f"{HEADER}14q")


def affine(weight: Any) -> Callable[[Any, Any], Any]:
    """Return the function of contiguous rows and a bias, float32, that returns ``rows @ weight.T + bias``."""
    (m, width), numbers, scale, offset, run_of = weight.shape, weight, None, None, weight.shape[1]
    if isinstance(weight, Quantized):
        numbers, scale, offset = weight.codes, weight.scale, weight.offset
        run_of = width // scale.shape[1]
        code = Code("nibble" if weight.bits == 4 else numbers.dtype.name, scale.dtype.name,
                    "" if offset is None else offset.dtype.name, weight.zero)  # fmt: skip
    else:
        code = Code(weight.dtype.name)
    address = kernel(code, sizes_for("float32", *host_registers()).lanes).address
    arrays = id(numbers), 0 if scale is None else id(scale), 0 if offset is None else id(offset)
    strides = numbers.strides[0], *(0 if part is None else part.strides[0] for part in (scale, offset))
    rows = max(1, TASK // (width * UNIT)) * UNIT  # of a task
    tasks = -(-m // rows)

    def multiply(x: Any, bias: Any) -> Any:
        n = len(x)
        y, (pool, helpers), work = np.empty((n, m), np.float32), team(), n * m * width
        helpers = 0 if work <= SMALL else min(helpers, tasks - 1)
        run(_CALL.pack(address, 0, pool, helpers if work > MIDDLE else -helpers, id(x), id(y), *arrays,
                       0 if bias is None else id(bias), n, m, width, run_of, *strides, rows))  # fmt: skip
        return y

    multiply.__dict__["weight"] = weight  # the kernel has addresses of its parts
    return multiply
