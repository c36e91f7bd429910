"""What is decided once for a type and the options that are there: a kernel, and what settles how its work is cut up."""

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from .compile.parts import native
from .compile.products import products
from .compile.target import target
from .kernels import few_rows, many_rows
from .kernels.record import SIZES, Sizes, settle_few_rows, settle_many_rows

FEW_ROWS = 8  # up to here keys and values are read where they lie instead of being packed


class Plan(NamedTuple):
    """What serves all calls of one kind, whatever their lengths."""

    kernel: int  # address of the compiled function, and so the next
    settle: int
    sizes: int  # address of the sizes


@lru_cache(maxsize=256)
def plan_for(
    dtype: np.dtype[Any], few: bool, general: bool, score_mod: Any, stored: bool = False, coded: bool = False
) -> Plan:
    """Return the plan for inputs of this type; `few`: the kernel for few rows, all of whose options are in one."""
    sizes = forward_sizes(dtype.name, coded)
    if few:
        kernel = few_rows.kernel(dtype.name, sizes, stored, score_mod)
    else:
        kernel = many_rows.kernel(dtype.name, sizes, general, score_mod, stored)
    return Plan(kernel.address, native(settle_few_rows if few else settle_many_rows), _table(sizes).ctypes.data)


@cache
def _table(sizes: Sizes) -> Any:
    """Return the sizes as compiled code reads them, kept for good."""
    return np.array([(np.dtype(sizes.acc).itemsize, *sizes[1:-1], sizes.half)], SIZES)


def forward_sizes(dtype: str, coded: bool = False) -> Sizes:
    """Return the sizes of the forward kernels for this type; what codes mean is no bfloat16, and so never paired."""
    sizes = sizes_for("float64" if dtype == "float64" else "float32", *host_registers())
    return sizes._replace(products=products()) if dtype == "bfloat16" and not coded else sizes


def sizes_for(acc: str, register_bytes: int, registers: int) -> Sizes:
    """Return the sizes for a processor with this many vector registers of this length."""
    lanes = register_bytes // np.dtype(acc).itemsize
    tile_rows = 8 if registers >= 32 else 4
    return Sizes(acc, lanes, tile_rows, max(lanes, tile_rows))


@cache
def host_registers() -> tuple[int, int]:
    """Return the length in bytes and the number of the vector registers of the processor that Numba compiles for."""
    register_bytes, registers, _ = target()
    return register_bytes, registers
