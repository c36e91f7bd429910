"""Which kernels serve a kind of call, and how they are specialised: remembered by types, widths, options and device.

Many rows take 4 warps a block, each 16 or 32 rows. Few rows take a warp for 16 rows, the heads of a group together.

A kernel for Hopper's wgmma and TMA would be one more source beside ``attend.cu``, chosen in `_attend` for arch 90 and
problems without `general`: the parameter block, the row table and the walk over tiles are the same.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

from sdpa_ref.backend import Form

from .stored import DECODED, TYPES

SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory that a block may have, in KiB. sm_75 has no cp.async, bfloat16 or TF32 either."""

LOG2_E = math.log2(math.e)
LARGEST = 2**31 - 2**10  # rows, keys and blocks are counted in 32 bits, bytes in 64
WIDEST = 256  # columns of an output whose sums fit the registers of a block
WIDEST_KEYS = 2 * WIDEST  # columns of keys, which only pass through shared memory
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
        return table_bytes(self.rows, self.warps) + max(tiles, self.rows * value_row)


class Kernels(NamedTuple):
    """What serves all calls of one kind, whatever their lengths: launches without a grid, and rows of a block."""

    launches: tuple[Launch, ...] = ()
    rows: int = 1
    general: bool = True  # whether scores need more than their scale before the softmax


NO_KERNELS = Kernels()


class Options(NamedTuple):
    """What scores need more than their scale, as far as kernels are specialised by it.

    Attributes
    ----------
    general : bool
        Whether they need more before the softmax, or after it.
    softcap, dropout : int
        Whether there is such, 0 or 1.
    bias : int
        The type of a bias array by its place in TYPES, -1 without one.
    mod : str
        What a traced `score_mod` does, empty without one.
    """

    general: bool = False
    softcap: int = 0
    bias: int = -1
    dropout: int = 0
    mod: str = ""


@lru_cache(maxsize=MOST_KERNELS)
def kernels_for(
    form: Form, arch: int, rows: int, split: bool, options: Options, want: frozenset[str], vector: bool, stored: int
) -> Kernels:
    """Return the kernels for blocks of up to so many rows; `split`: whether several blocks share a head's keys.

    What is decoded takes plain.cu, where a number keeps the accumulation type. The largest score of a row, where it is
    wanted, is one that weights are made of again: it is that of scores as they are, without a factor that is rounded.
    """
    by_matrices = has_matrix_units(form, arch) and stored != DECODED
    general = options.general or not by_matrices or "m" in want
    launches, block_rows = [], 1
    defines = (("ELEMENT", TYPES[form.dtype.name]), ("TURING", int(arch < 80)))
    lie = (
        ("STORED", stored), ("SOFTCAP", options.softcap), ("BIAS", options.bias), ("DROPOUT", options.dropout),
        *((("SCORE_MOD", options.mod),) if options.mod else ()),
    )  # fmt: skip
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


_KEYS = (64, 32, 16)


def fits(form: Form, arch: int) -> bool:
    """Return whether the tiles of keys wider than WIDEST fit the shared memory of a device."""
    if not has_matrix_units(form, arch):
        return _plain(form, arch).shared <= room_of(arch)
    return Tile(1, 1, _KEYS[-1]).shared(padded(form.E), padded(form.Ev), form.dtype.itemsize) <= room_of(arch)


def room_of(arch: int) -> int:
    """Return the bytes of shared memory that a block may have."""
    return next(kib for known, kib in sorted(SHARED.items(), reverse=True) if known <= arch) * 1024


def has_matrix_units(form: Form, arch: int) -> bool:
    """Return whether the device multiplies matrices of this type; TF32 for float32 where sums hide its rounding."""
    name = form.dtype.name
    return name == "float16" or (arch >= 80 and (name == "bfloat16" or (name == "float32" and form.E >= 16)))


def _attend(form: Form, arch: int, rows: int, general: bool, vector: bool) -> tuple[Launch, int]:
    """Return the launch of attend.cu, its grid still empty, and the rows of a block."""
    width, value_width, size = padded(form.E), padded(form.Ev), form.dtype.itemsize
    widest = max(width, value_width)
    room = room_of(arch)
    row_tiles = 2 if widest * size <= 256 and not general else 1
    tiles = [Tile(warps, row_tiles, keys) for warps in ((4, 2) if width <= WIDEST else (4, 2, 1)) for keys in _KEYS]
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
    shared = table_bytes(PLAIN_ROWS, 4) + numbers * form.acc_dtype.itemsize
    return Launch("attend_plainly", "plain.cu", defines, (0, 1, 1), 128, shared)


def table_bytes(rows: int, warps: int) -> int:
    """Return the bytes of ``Table`` of rows.h, a multiple of 16."""
    size = TASK_BYTES + (1 + warps) * SPAN_BYTES + rows * ROW_BYTES
    return size + -size % 16


def padded(width: int) -> int:
    """Return a width in whole steps of the matrix units."""
    return max(16, width + -width % 16)
