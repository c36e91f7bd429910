"""What one call does on a device: which kernels, specialised how, on which grid, with which parameter block.

Nothing here needs a GPU. Kernels are chosen by types, options, widths and the architecture, and remembered by these;
lengths and other numbers are data of a call. Of the arrays' memory a plan only depends on whether rows can be copied 16
bytes at a time, which changes how tiles are loaded and no result.

Many rows take 4 warps a block, each 16 or 32 rows. Few rows take a warp for 16 rows, the heads of a group together, and
several blocks share a head's keys: how many follows from the number of keys alone, so that a row's bits do not depend
on the rest of the batch.

A kernel for Hopper's wgmma and TMA would be one more source beside ``attend.cu``, chosen in `_attend` for arch 90 and
problems without `general`: the parameter block, the row table and the walk over tiles are the same.
"""

import math
import struct
import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.backend import Form
from sdpa_ref.storage import Stored

from .stored import DECODED, STORAGE, TYPES, Pages, fields_of, is_served, parts_of, storage_of, stored_parts

AXES = 8
VIEW = np.dtype([("data", np.uint64), ("batch", np.int64, AXES), ("head", np.int64), ("row", np.int64),
                 ("column", np.int64)])  # fmt: skip
VIEWS = {  # the arrays of the parameter block, and the axes that each has behind those of the batch
    "query": "hrc",
    "key": "hrc", "key_table": "r", "key_scale": "hrc", "key_offset": "hrc",
    "value": "hrc", "value_table": "r", "value_scale": "hrc", "value_offset": "hrc",
    "out": "hrc", "lse": "hr", "weights": "hrc",
    "m": "hr", "z": "hr",
    "prefix": "r", "start": "r", "stop": "r", "position": "r", "dense": "hrc", "bias": "hrc",
    "slopes": "h", "sink": "h",
}  # fmt: skip
COUNTS = (
    "axes", "B", "Hq", "Hkv", "L", "S", "E", "Ev", "group", "first_row",
    "first_key", "first_head", "first_entry", "fold", "tiles", "chunks", "chunk",
    "bias_type", "out_chunks", "threshold", "seed_low", "seed_high",
)  # fmt: skip
PARAMETERS = np.dtype(
    [(name, VIEW) for name in VIEWS]
    + [("workspace", np.uint64), ("sizes", np.int64, AXES)]
    + [(name, np.int64) for name in COUNTS]
    + [(name, np.float64) for name in ("scale", "softcap", "dropout_factor", "unit")]
    + [(name, np.int64) for name in STORAGE]
)  # fmt: skip
"""One element is the argument of every kernel, ``Parameters`` of ``kernels/parameters.h``; all fields have 8 bytes."""

SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a block may have, in KiB. sm_75 has no cp.async, bfloat16 or TF32 either."""

LOG2_E = math.log2(math.e)
LARGEST = 2**31 - 2**10  # rows, keys and blocks are counted in 32 bits, bytes in 64
WIDEST = 256
FEW_ROWS = 64  # up to here the heads of a group share tiles, and long keys are split
CHUNKS = 64
SHORTEST_CHUNK = 256
MOST_KERNELS = 256  # combinations that are remembered, the most recently used ones
TASK_BYTES, SPAN_BYTES, ROW_BYTES = 96, 24, 72  # of the structs in rows.h
PLAIN_ROWS, PLAIN_KEYS, PLAIN_COLUMNS = 16, 32, 64  # of a tile of plain.cu


class Launch(NamedTuple):
    """One kernel: its ``extern "C"`` name, file, -D options, grid, threads of a block, bytes of its shared memory."""

    kernel: str
    source: str
    defines: tuple[tuple[str, Any], ...]
    grid: tuple[int, int, int]
    threads: int
    shared: int


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
        "scales or offsets of float64, or that serve heads or batch entries in runs": not all(
            map(is_served, stored_parts(problem), repeat(problem.acc_dtype))
        ),
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
    p, form = problem, problem.form
    L, S, B, group = p.L, p.S, p.B, p.group
    few = L <= FEW_ROWS
    fold, chunk = group if few else 1, S
    if few and S > 2 * SHORTEST_CHUNK:
        chunk = max(SHORTEST_CHUNK, -(-S // CHUNKS))
        chunk += -chunk % PLAIN_COLUMNS
    chunks, count, rows = max(1, -(-S // max(1, chunk))), B * form.Hq * L, fold * L
    changed = _is_changed(problem)
    stored = storage_of(problem)
    kernels = _kernels(form, arch, next((n for n in _SHORT if rows <= n), LARGEST), chunks > 1, changed, want,
                       stored != DECODED and _copies_16(problem), stored) if count else _NO_KERNELS  # fmt: skip
    tiles = -(-rows // kernels.rows)
    tasks, by_row = B * (form.Hq // fold if fold else 0) * tiles * chunks, -(-count // 4)
    launches = [each._replace(grid=(tasks if each.source in _BY_TASKS else by_row, 1, 1)) for each in kernels.launches]
    dropout = p.dropout
    threshold, seed, factor = (0, 0, 1.0) if dropout is None else (dropout.threshold, dropout.seed, dropout.factor)
    counts = (
        len(form.batch), B, form.Hq, form.Hkv, L, S, form.E, form.Ev, group, p.first_row,
        p.first_key, p.first_head, p.first_entry, fold, tiles, chunks, chunk,
        0 if p.bias is None else TYPES[p.bias.dtype.name], 0, threshold, seed & 0xFFFFFFFF, seed >> 32,
    )  # fmt: skip
    numbers = _NUMBERS.pack(*form.batch, *[0] * (AXES - len(form.batch)), *counts, p.scale, p.softcap or 0.0, factor,
                            LOG2_E if kernels.general else 1.0, *fields_of(p.key), *fields_of(p.value))  # fmt: skip
    split = count and chunks > 1 and want & {"output", "lse"}
    workspace = count * chunks * (form.Ev + 2) * form.acc_dtype.itemsize if split else 0
    return Plan(tuple(launches), workspace, np.frombuffer(bytearray(numbers), PARAMETERS))


_NUMBERS = struct.Struct(f"={PARAMETERS.fields['sizes'][1]}x{AXES + len(COUNTS)}q4d{len(STORAGE)}q")  # type: ignore[index]
_SHORT = (16, 32, 64)  # rows that take fewer warps
_BY_TASKS = ("attend.cu", "plain.cu")  # kernels whose blocks are tiles of rows and chunks of keys


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
    axes, rest = len(problem.batch), (*result, *intervals, problem.positions, problem.keep, problem.bias,
                                      problem.slopes, problem.sink)  # fmt: skip
    arrays = (problem.query, *parts_of(problem.key), *parts_of(problem.value), *rest)
    views = [
        _view(array, 0 if name == "sink" else axes, inner, address)
        for array, (name, inner) in zip(arrays, VIEWS.items(), strict=True)
    ]
    output = result.output
    words = plan.parameters.view(np.int64).copy()  # structured arrays are copied field by field
    words[:_WORKSPACE] = np.frombuffer(b"".join(views), np.int64)
    words[_WORKSPACE] = workspace
    words[_OUT_CHUNKS] = output is not None and _steps(output, 16 // output.dtype.itemsize, address(output))
    return words.view(PARAMETERS)


_WORKSPACE, _OUT_CHUNKS = (PARAMETERS.fields[name][1] // 8 for name in ("workspace", "out_chunks"))  # type: ignore[index]
_NO_VIEW = bytes(VIEW.itemsize)


def _view(array: Any, axes: int, inner: str, address: Callable[[Any], int]) -> bytes:
    """Return a VIEW; axes that are missing or have one entry get stride 0."""
    if array is None:
        return _NO_VIEW
    paged = type(array) is Pages
    array = array.array if paged else array
    shape, strides = (array.shape[1:], array.strides[1:]) if paged else (array.shape, array.strides)
    if 1 in shape:
        strides = tuple([0 if n == 1 else stride for n, stride in zip(shape, strides, strict=True)])
    return address(array).to_bytes(8, sys.byteorder) + _strides(strides, axes, inner)


@lru_cache(maxsize=1024)
def _strides(strides: tuple[int, ...], axes: int, inner: str) -> bytes:
    """Return what stands in a VIEW behind the address."""
    strides = (0,) * (axes + len(inner) - len(strides)) + strides
    steps = dict(zip(inner, strides[axes:], strict=True))
    words = [*strides[:axes], *[0] * (AXES - axes), *(steps.get(axis, 0) for axis in "hrc")]
    return np.array(words, np.int64).tobytes()


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
    arrays = (problem.query, *(part.numbers if type(part) is Stored else part for part in (problem.key, problem.value)))
    return all(array is None or _steps(array, count, _host_address(array)) for array in arrays)


def _host_address(array: Any) -> int:
    """Return the address of an array of NumPy's or CuPy's."""
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr


class Kernels(NamedTuple):
    """What serves all calls of one kind, whatever their lengths: launches without a grid, and rows of a block."""

    launches: tuple[Launch, ...] = ()
    rows: int = 1
    general: bool = True  # whether scores need more than their scale before the softmax


_NO_KERNELS = Kernels()


@lru_cache(maxsize=MOST_KERNELS)
def _kernels(
    form: Form, arch: int, rows: int, split: bool, changed: bool, want: frozenset[str], vector: bool, stored: int
) -> Kernels:
    """Return the kernels for blocks of up to so many rows; `split`: whether several blocks share a head's keys.

    What is decoded takes plain.cu, where a number keeps the accumulation type.
    """
    by_matrices = _has_matrix_units(form, arch) and stored != DECODED
    general = changed or not by_matrices
    launches, block_rows = [], 1
    defines = (("ELEMENT", TYPES[form.dtype.name]), ("TURING", int(arch < 80)))
    lie = (("STORED", stored),)
    if want & {"output", "lse"}:
        if by_matrices:
            launch, block_rows = _attend(form, arch, rows, general, vector)
        else:
            launch, block_rows = _plain(form, arch), PLAIN_ROWS
        launch = launch._replace(defines=launch.defines + lie)
        launches.append(launch)
        if split:
            launches.append(Launch("merge", "merge.cu", defines, (0, 1, 1), 128, 0))
    if "weights" in want:
        launches.append(Launch("weigh", "weigh.cu", defines + lie, (0, 1, 1), 128, 0))
    return Kernels(tuple(launches), block_rows, general)


def _is_changed(problem: Any) -> bool:
    """Return whether scores need more than their scale before the softmax."""
    p, limits = problem, np.finfo(problem.acc_dtype)
    options = (p.keep, p.slopes, p.softcap, p.bias, p.dropout)
    extreme = p.scale * LOG2_E <= limits.tiny or p.scale >= limits.max / 2
    return bool(extreme) or any(option is not None for option in options)


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
