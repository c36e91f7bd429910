"""What one call does on a device: which kernels, specialised how, on which grid, with which parameter block.

Nothing here needs a GPU. A plan follows from shapes, types, options and the architecture; of the arrays' memory it only
knows whether rows can be copied 16 bytes at a time, which changes how tiles are loaded and no result.

Many rows take 4 warps a block, each 16 or 32 rows. Few rows take a warp for 16 rows, the heads of a group together, and
several blocks share a head's keys: how many follows from the number of keys alone, so that a row's bits do not depend
on the rest of the batch.

A kernel for Hopper's wgmma and TMA would be one more source beside ``attend.cu``, chosen in `_attend` for arch 90 and
problems without `general`: the parameter block, the row table and the walk over tiles are the same.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.backend import Form
from sdpa_ref.dropout import Dropout

AXES = 8
VIEW = np.dtype([("data", np.uint64), ("batch", np.int64, AXES), ("head", np.int64), ("row", np.int64),
                 ("column", np.int64)])  # fmt: skip
VIEWS = {  # the arrays of the parameter block, and the axes that each has behind those of the batch
    "query": "hrc", "key": "hrc", "value": "hrc", "out": "hrc", "lse": "hr", "weights": "hrc",
    "m": "hr", "z": "hr",
    "prefix": "r", "start": "r", "stop": "r", "position": "r", "dense": "hrc", "bias": "hrc",
    "slopes": "h", "sink": "h",
}  # fmt: skip
PARAMETERS = np.dtype(
    [(name, VIEW) for name in VIEWS]
    + [("workspace", np.uint64), ("sizes", np.int64, AXES)]
    + [(name, np.int64) for name in (
        "axes", "B", "Hq", "Hkv", "L", "S", "E", "Ev", "group", "first_row", "fold", "tiles", "chunks", "chunk",
        "bias_type", "out_chunks", "threshold", "seed_low", "seed_high",
    )]
    + [(name, np.float64) for name in ("scale", "softcap", "dropout_factor", "unit")]
)  # fmt: skip
"""One element is the argument of every kernel, ``Parameters`` of ``kernels/parameters.h``; all fields have 8 bytes."""

TYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a block may have, in KiB. sm_75 has no cp.async, bfloat16 or TF32 either."""

LOG2_E = math.log2(math.e)
LARGEST = 2**31 - 2**10  # rows, keys and blocks are counted in 32 bits, bytes in 64
WIDEST = 256
FEW_ROWS = 64  # up to here the heads of a group share tiles, and long keys are split
CHUNKS = 64
SHORTEST_CHUNK = 256
TASK_BYTES, SPAN_BYTES, ROW_BYTES = 48, 24, 72  # of the structs in rows.h
PLAIN_ROWS, PLAIN_KEYS, PLAIN_COLUMNS = 16, 32, 64  # of a tile of plain.cu


class Launch(NamedTuple):
    """One kernel: its ``extern "C"`` name, file, -D options, grid, threads of a block, bytes of its shared memory."""

    kernel: str
    source: str
    defines: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    threads: int
    shared: int


class Options(NamedTuple):
    """What a plan depends on beside types and sizes."""

    first_row: int
    scale: float
    softcap: float | None
    bias: int | None  # one of TYPES
    dropout: Dropout | None
    masked: bool  # by a boolean array or slopes


class Plan(NamedTuple):
    """Launches in order on one stream, on one parameter block and workspace.

    Attributes
    ----------
    launches : tuple of Launch
        Empty where there is nothing to compute.
    workspace : int
        Bytes of device memory, aligned to 16, that the launches share.
    parameters : PARAMETERS array (1,)
        Sizes and numbers; `bound` adds the arrays.
    """

    launches: tuple[Launch, ...]
    workspace: int
    parameters: np.ndarray[Any, Any]


class Tile(NamedTuple):
    """How attend.cu cuts the work: warps of a block, 16-row tiles of a warp, keys of a tile."""

    warps: int
    row_tiles: int
    keys: int

    @property
    def rows(self) -> int:
        """Query rows of a block."""
        return 16 * self.row_tiles * self.warps

    def shared(self, width: int, value_width: int, itemsize: int) -> int:
        """Return the bytes of shared memory: the table, and tiles of Q, K and V, whose place the output takes."""
        key_row, value_row = width * itemsize + 16, value_width * itemsize + 16
        tiles = self.rows * key_row + self.keys * (key_row + value_row)
        return _table(self.rows, self.warps) + max(tiles, self.rows * value_row)


def fused(problem: Any, want: frozenset[str], arch: int) -> str | None:
    """Return why the fused kernels cannot solve a problem, or None where they can.

    Parameters
    ----------
    problem : Problem
    want : frozenset of str
        Of "output", "lse" and "weights".
    arch : int
        Compute capability, 10 * major + minor.
    """
    blocks = problem.B * problem.Hq * -(-problem.L // 4) * (CHUNKS if problem.L <= FEW_ROWS else 1)
    reasons = {
        f"fused kernels need compute capability 7.5 or later, this device has {arch // 10}.{arch % 10}": arch < 75,
        "mask or bias exist as rules only": problem.blockwise,
        "keys or values are Paged or Quantized": problem.stored,
        "ALiBi goes by key_positions": problem.key_positions is not None,
        "score_mod is a Python function": problem.score_mod is not None,
        f"E = {problem.E} and Ev = {problem.Ev}: the fused kernels go up to {WIDEST}": (
            max(problem.E, problem.Ev) > WIDEST
        ),
        f"{len(problem.batch)} leading axes: the fused kernels go up to {AXES}": len(problem.batch) > AXES,
        "the fused kernels count rows, keys and blocks in 31 bits": max(problem.L, problem.S, blocks) > LARGEST,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def make_plan(problem: Any, want: frozenset[str], arch: int) -> Plan:
    """Return the plan for a problem that `fused` has no objection to; arguments as there."""
    p = problem
    bias = None if p.bias is None else TYPES[p.bias.dtype.name]
    masked = p.keep is not None or p.slopes is not None
    options = Options(p.first_row, p.scale, p.softcap, bias, p.dropout, masked)
    return _plan(p.form, p.L, p.S, options, want, arch, _copies_16(p))


def bound(plan: Plan, address: Callable[[Any], int], problem: Any, result: Any, workspace: int) -> np.ndarray[Any, Any]:
    """Return the parameter block for arrays that all lie where the kernels run.

    Parameters
    ----------
    plan : Plan
    address : callable
        Gives the address of an array's first element.
    problem : Problem
        With `visible` as intervals, `positions`, `slopes` and `sink`, all in the device's memory.
    result : Result
        What is to be filled.
    workspace : int
        Address of the workspace, 0 for none.
    """
    intervals = problem.visible or (None, None, None)
    arrays = (problem.query, problem.key, problem.value, *result, *intervals, problem.positions, problem.keep,
              problem.bias, problem.slopes, problem.sink)  # fmt: skip
    axes = len(problem.batch)
    words = []
    for array, (name, inner) in zip(arrays, VIEWS.items(), strict=True):
        words += _view(array, 0 if name == "sink" else axes, inner, address)
    block = plan.parameters.copy()
    block.view(np.int64)[: len(words)] = words
    block["workspace"] = workspace
    output = result.output
    block["out_chunks"] = output is not None and _steps(output, 16 // output.dtype.itemsize, address(output))
    return block


def _view(array: Any, axes: int, inner: str, address: Callable[[Any], int]) -> list[int]:
    """Return the fields of a VIEW; axes that are missing or have one entry get stride 0."""
    if array is None:
        return [0] * (AXES + 4)
    strides = [0 if n == 1 else stride for n, stride in zip(array.shape, array.strides, strict=True)]
    strides = [0] * (axes + len(inner) - array.ndim) + strides
    steps = dict(zip(inner, strides[axes:], strict=True))
    return [address(array), *strides[:axes], *[0] * (AXES - axes), *(steps.get(axis, 0) for axis in "hrc")]


def _steps(array: Any, count: int, address: int) -> bool:
    """Return whether `count` neighbours in each row lie in one aligned word of that many numbers."""
    *outer, column = array.strides
    word = count * array.dtype.itemsize
    return bool(
        array.shape[-1] % count == 0
        and (column == array.dtype.itemsize or array.size == 0)
        and not any(stride % word for stride, n in zip(outer, array.shape, strict=False) if n > 1)
        and address % word == 0
    )


def _copies_16(problem: Any) -> bool:
    """Return whether query, key and value can be read 16 bytes at a time."""
    count = 16 // problem.dtype.itemsize
    arrays = (problem.query, problem.key, problem.value)
    return all(array is None or _steps(array, count, _host_address(array)) for array in arrays)


def _host_address(array: Any) -> int:
    """Return the address of an array of NumPy's or CuPy's."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


@lru_cache(maxsize=1024)
def _plan(form: Form, L: int, S: int, options: Options, want: frozenset[str], arch: int, vector: bool) -> Plan:
    parameters = np.zeros(1, PARAMETERS)
    p = parameters[0]
    B, group = math.prod(form.batch), form.Hq // form.Hkv if form.Hkv else 1
    sizes = {"B": B, "Hq": form.Hq, "Hkv": form.Hkv, "L": L, "S": S, "E": form.E, "Ev": form.Ev, "group": group}
    for name, size in sizes.items():
        p[name] = size
    p["first_row"], p["axes"] = options.first_row, len(form.batch)
    p["sizes"][: len(form.batch)] = form.batch
    matrix_units = _has_matrix_units(form, arch)
    general = _numbers(form, options, p) or not matrix_units
    p["unit"] = LOG2_E if general else 1
    few = L <= FEW_ROWS
    p["fold"] = fold = group if few else 1
    chunk = S
    if few and S > 2 * SHORTEST_CHUNK:
        chunk = max(SHORTEST_CHUNK, -(-S // CHUNKS))
        chunk += -chunk % PLAIN_COLUMNS
    p["chunk"], p["chunks"] = chunk, max(1, -(-S // max(1, chunk)))
    count = B * form.Hq * L
    if count == 0:
        return Plan((), 0, parameters)

    launches, workspace = [], 0
    defines = (("ELEMENT", TYPES[form.dtype.name]), ("TURING", int(arch < 80)))
    if want & {"output", "lse"}:
        units, rows, acc = B * (form.Hq // fold), fold * L, form.acc_dtype.itemsize
        if matrix_units:
            launch, tile_rows = _attend(form, arch, rows, general, vector)
        else:
            launch, tile_rows = _plain(form, arch), PLAIN_ROWS
        p["tiles"] = -(-rows // tile_rows)
        tasks = units * int(p["tiles"] * p["chunks"])
        launches.append(launch._replace(grid=(tasks, 1, 1)))
        if p["chunks"] > 1:
            workspace = int(count * p["chunks"]) * (form.Ev + 2) * acc
            launches.append(Launch("merge", "merge.cu", defines, (-(-count // 4), 1, 1), 128, 0))
    if "weights" in want:
        launches.append(Launch("weigh", "weigh.cu", defines, (-(-count // 4), 1, 1), 128, 0))
    return Plan(tuple(launches), workspace, parameters)


def _numbers(form: Form, options: Options, p: Any) -> bool:
    """Fill in scale, bias and dropout; return whether scores need more than their scale before the softmax."""
    p["dropout_factor"] = 1
    limits, dropout = np.finfo(form.acc_dtype), options.dropout
    p["scale"] = options.scale
    general = options.scale * LOG2_E <= limits.tiny or options.scale >= limits.max / 2 or options.masked
    if options.softcap is not None:
        p["softcap"], general = options.softcap, True
    if options.bias is not None:
        p["bias_type"], general = options.bias, True
    if dropout is not None:
        p["threshold"], p["dropout_factor"], general = dropout.threshold, dropout.factor, True
        p["seed_low"], p["seed_high"] = dropout.seed & 0xFFFFFFFF, dropout.seed >> 32
    return bool(general)


def _has_matrix_units(form: Form, arch: int) -> bool:
    """Return whether the device multiplies matrices of this type; TF32 for float32 where sums hide its rounding."""
    name = form.dtype.name
    return name == "float16" or (arch >= 80 and (name == "bfloat16" or (name == "float32" and form.E >= 16)))


def _attend(form: Form, arch: int, rows: int, general: bool, vector: bool) -> tuple[Launch, int]:
    """Return the launch of attend.cu, its grid still empty, and the rows of a block."""
    width, value_width, size = _padded(form.E), _padded(form.Ev), form.dtype.itemsize
    widest = max(width, value_width)
    room = next(kib for known, kib in sorted(SHARED.items(), reverse=True) if known <= arch) * 1024
    row_tiles = 2 if widest * size <= 256 and not general else 1
    tiles = [Tile(warps, row_tiles, keys) for warps in (4, 2) for keys in (64, 32, 16)]
    tiles = [tile for tile in tiles if tile.shared(width, value_width, size) <= room]
    twice = [tile for tile in tiles if tile.shared(width, value_width, size) <= room // 2 - 1024 and tile.keys > 16]
    tile = (twice or tiles)[0]
    few = next((Tile(warps, 1, tile.keys) for warps in (1, 2, 4) if rows <= 16 * warps < tile.rows), tile)
    defines = (
        ("ELEMENT", TYPES[form.dtype.name]), ("WIDTH", width), ("VALUE_WIDTH", value_width), ("KEYS", few.keys),
        ("WARPS", few.warps), ("ROW_TILES", few.row_tiles), ("GENERAL", int(general)), ("VECTOR", int(vector)),
        ("TURING", int(arch < 80)),
    )  # fmt: skip
    shared = few.shared(width, value_width, size)
    return Launch("attend", "attend.cu", defines, (0, 1, 1), 32 * few.warps, shared), few.rows


def _plain(form: Form, arch: int) -> Launch:
    """Return the launch of plain.cu, its grid still empty."""
    value_width = -(-max(1, form.Ev) // PLAIN_COLUMNS) * PLAIN_COLUMNS
    defines = (
        ("ELEMENT", TYPES[form.dtype.name]), ("VALUE_WIDTH", value_width), ("TURING", int(arch < 80)),
    )  # fmt: skip
    numbers = PLAIN_ROWS * (form.E + PLAIN_KEYS) + PLAIN_KEYS * (PLAIN_COLUMNS + 1)
    shared = _table(PLAIN_ROWS, 4) + numbers * form.acc_dtype.itemsize
    return Launch("attend_plainly", "plain.cu", defines, (0, 1, 1), 128, shared)


def _table(rows: int, warps: int) -> int:
    """Return the bytes of ``Table`` of rows.h, a multiple of 16."""
    size = TASK_BYTES + (1 + warps) * SPAN_BYTES + rows * ROW_BYTES
    return size + -size % 16


def _padded(width: int) -> int:
    """Return a width in whole steps of the matrix units."""
    return max(16, width + -width % 16)
