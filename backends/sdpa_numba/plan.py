"""What is decided once for a shape, a type and options: sizes of tiles, division into tasks, numbers for the kernels."""

import platform
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np

NUMBERS = np.dtype(
    [(name, np.int64) for name in (
        "B", "Hq", "Hkv", "L", "S", "E", "Ev", "group", "first_row",
        "fold", "regular", "units", "tiles", "strip", "strips", "block_bytes",
        "modified", "bias_code", "bias_drops", "seed_low", "seed_high", "dropout_threshold",
    )]
    + [(name, np.float64) for name in ("scale", "softcap", "dropout_factor")]
)  # fmt: skip
FEW_ROWS = 8  # up to here keys and values are read where they lie instead of being packed
BIAS_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}


class Sizes(NamedTuple):
    """How a processor is served: lanes of a register, shape of a tile, keys of a panel, a block and a chunk."""

    acc: str
    lanes: int
    tile_rows: int
    panel: int
    tile_vectors: int = 3
    block: int = 128
    chunk: int = 1024


def sizes_for(acc, register_bytes, registers):
    """Return the sizes for a processor with this many vector registers of this length."""
    lanes = register_bytes // np.dtype(acc).itemsize
    tile_rows = 8 if registers >= 32 else 4
    return Sizes(acc, lanes, tile_rows, max(lanes, tile_rows))


def host_registers():
    """Return the length in bytes and the number of this processor's vector registers."""
    if platform.machine().lower() in ("arm64", "aarch64"):
        return 16, 32
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512vl"):
        return 64, 32
    return (32, 16) if features.get("avx") else (16, 16)


class Plan(NamedTuple):
    """The numbers of a problem (kept alive for `address`), and how the work is divided."""

    numbers: np.ndarray
    address: int
    sizes: Sizes
    tasks: int
    pack_tasks: int
    packed_bytes: int
    units: int
    chunks: int
    state_bytes: int


def plan(problem, final=False):
    """Return the plan of a problem without a rule or a function that must be evaluated in NumPy."""
    sizes = sizes_for(problem.acc_dtype.name, *host_registers())
    numbers = np.zeros(1, NUMBERS)
    n = numbers[0]
    for name in ("B", "Hq", "Hkv", "L", "S", "E", "Ev", "group", "first_row", "scale"):
        n[name] = getattr(problem, name)
    widest = sizes.lanes * sizes.tile_vectors
    L, S = problem.L, problem.S
    fold = problem.group if L < widest else 1
    rows = L * fold
    tiles = -(-rows // widest)
    strip = min(tiles, 8)
    strips = -(-tiles // strip) if tiles else 0
    width = problem.Ev + -problem.Ev % sizes.tile_rows
    itemsize = problem.acc_dtype.itemsize
    block_bytes = sizes.block * (problem.E + width) * itemsize
    n["fold"], n["regular"], n["units"] = fold, fold == 1 or L == 1, problem.B * (problem.Hq // fold)
    n["tiles"], n["strip"], n["strips"] = tiles, strip, strips
    n["block_bytes"] = block_bytes + -block_bytes % 64 + 64
    n["softcap"] = problem.softcap or 0
    n["modified"] = any(
        part is not None for part in (problem.bias, problem.dense, problem.slopes, problem.score_mod)
    )
    n["bias_drops"] = not final
    if problem.bias is not None:
        n["bias_code"] = BIAS_CODES[problem.bias.dtype.name]
    if problem.dropout is not None:
        n["dropout_threshold"], n["dropout_factor"] = problem.dropout.threshold, problem.dropout.factor
        n["seed_low"], n["seed_high"] = problem.dropout.seed & 0xFFFFFFFF, problem.dropout.seed >> 32
    blocks = problem.B * problem.Hkv * -(-S // sizes.block)
    prepack = strips * (problem.group // fold) > 1
    few = L * problem.group <= FEW_ROWS and not n["modified"] and problem.dropout is None
    kv_units, chunks = problem.B * problem.Hkv, max(1, -(-S // sizes.chunk)) if few else 0
    states = kv_units * chunks * rows * (problem.Ev + sizes.panel + 2) * itemsize if chunks > 1 else 0
    return Plan(numbers, numbers.ctypes.data, sizes, int(n["units"]) * strips, blocks if prepack else 0,
                blocks * int(n["block_bytes"]) if prepack else 0, kv_units, chunks, states)  # fmt: skip
