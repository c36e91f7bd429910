"""What is decided once for a shape, a type and options: kernels, their tasks, and the numbers that they are told."""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from .target import target

NUMBERS = np.dtype(
    [(name, np.int64) for name in (
        "B", "Hq", "Hkv", "L", "S", "E", "Ev", "group", "first_row",  # as in the problem
        "fold", "units", "regular",  # heads whose rows share tiles, groups of such heads, whether rows are equidistant
        "tiles", "strip", "strips",  # tiles of a unit, tiles of a strip, strips of a unit
        "block_bytes", "packed", "counters",  # size of a packed block, whether all are packed beforehand, of counters
        "bias_code", "bias_drops", "seed_low", "seed_high", "dropout_threshold",
    )]
    + [(name, np.float64) for name in ("scale", "softcap", "dropout_factor")]
)  # fmt: skip
BIAS_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
SMALL = 2**20  # multiplications that take less time than to share them
FEW_ROWS = 8  # up to here keys and values are read where they lie instead of being packed
STRIP = 8  # tiles, at most, that share a pass over the keys


class Sizes(NamedTuple):
    """How a processor is served: lanes of a register, shape of a tile, keys of a panel, a block and a chunk."""

    acc: str
    lanes: int
    tile_rows: int
    panel: int
    tile_vectors: int = 3
    block: int = 128
    chunk: int = 1024


class Plan(NamedTuple):
    """What one call does: all tasks of a kernel, on numbers that the calls share."""

    numbers: np.ndarray[Any, Any]  # what lies at `address`
    address: int
    kernel: Any
    tasks: int
    memory: int  # bytes that the tasks share
    counters: int  # bytes of them that are zero at first
    alone: bool  # whether the problem is too small for more than the calling thread
    bare: bool  # whether query, key and value are all there is


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


def in_range(problem: Any) -> tuple[float, float | None]:
    """Return scale and softcap within the accumulation type, beyond which 0 * scale and tanh(s / softcap) are NaN."""
    limits, softcap = np.finfo(problem.acc_dtype), problem.softcap
    scale = min(max(problem.scale, float(limits.min)), float(limits.max))
    return scale, None if softcap is None else min(max(softcap, float(limits.tiny)), float(limits.max) / 4)


def numbers_of(problem: Any, final: bool, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return one record of this type with the sizes and options of a problem; `final` is as in `make_plan`."""
    numbers = np.zeros(1, dtype)
    n = numbers[0]
    for name in ("B", "Hq", "Hkv", "L", "S", "E", "Ev", "group", "first_row"):
        n[name] = getattr(problem, name)
    n["scale"], softcap = in_range(problem)
    n["softcap"] = softcap or 0
    n["bias_drops"] = not final
    if problem.bias is not None:
        n["bias_code"] = BIAS_CODES[problem.bias.dtype.name]
    if problem.dropout is not None:
        n["dropout_threshold"], n["dropout_factor"] = problem.dropout.threshold, problem.dropout.factor
        n["seed_low"], n["seed_high"] = problem.dropout.seed & 0xFFFFFFFF, problem.dropout.seed >> 32
    return numbers


def make_plan(problem: Any, want: frozenset[str], score_mod: Any, final: bool) -> Plan:
    """Return the plan for what is wanted; `final` says that the bias holds the scores, of which -inf drops no key."""
    from . import decode, panels  # they take their numbers and sizes from here

    sizes = sizes_for(problem.acc_dtype.name, *host_registers())
    lanes = sizes.lanes * sizes.tile_vectors
    B, Hkv, L, S, group = problem.B, problem.Hkv, problem.L, problem.S, problem.group
    size, blocks, chunks = problem.acc_dtype.itemsize, -(-S // sizes.block), max(1, -(-S // sizes.chunk))
    fold = group if lanes > L and group else 1
    units, tiles = B * (problem.Hq // fold), -(-fold * L // lanes)
    strips = -(-tiles // STRIP)
    strip = -(-tiles // strips) if strips else 0
    packed = strips * (group // fold) > 1 and S > 0
    block_bytes = sizes.block * (problem.E + problem.Ev + -problem.Ev % sizes.tile_rows) * size
    block_bytes += -block_bytes % 64 + 64

    numbers = numbers_of(problem, final, NUMBERS)
    n = numbers[0]
    n["fold"], n["units"], n["regular"] = fold, units, fold == 1 or L == 1
    n["tiles"], n["strip"], n["strips"] = tiles, strip, strips
    n["block_bytes"], n["packed"] = block_bytes, packed

    changes = (problem.dense, problem.bias, problem.slopes, score_mod, problem.dropout)
    simple = all(change is None for change in changes) and "weights" not in want
    shared, dtype = 0, problem.dtype.name  # bytes
    if simple and L * group <= FEW_ROWS and "output" in want:
        kernel, tasks = decode.kernel(dtype, sizes), B * Hkv * chunks
        if chunks > 1:
            shared = tasks * group * L * (problem.Ev + sizes.panel + 2) * size
    else:
        general = not simple or problem.softcap is not None
        kernel, tasks = panels.kernel(dtype, sizes, general, score_mod), units * strips
        if packed:
            tasks += B * Hkv * blocks
            shared = B * Hkv * blocks * block_bytes
    bare = simple and problem.intervals is None and problem.sink is None
    alone = (problem.Hq * L + Hkv) * B * S * (problem.E + problem.Ev) <= SMALL
    counters = B * Hkv * 8 + -(B * Hkv * 8) % 64 if shared else 0
    n["counters"] = counters
    return Plan(numbers, numbers.ctypes.data, kernel, tasks, counters + shared, counters, alone, bare)
