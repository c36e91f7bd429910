"""What one call does on a device: which kernels, specialised how, on which grid, with which parameter block.

Nothing here needs a GPU. Kernels are chosen by types, options, widths and the architecture, and remembered by these;
lengths and other numbers are data of a call. Of the arrays' memory a plan only depends on whether rows can be copied 16
bytes at a time, which changes how tiles are loaded and no result.

Several blocks share a head's keys where rows are few: how many follows from the number of keys alone, so that a row's
bits do not depend on the rest of the batch.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.backend import Form
from sdpa_ref.masks import Band
from sdpa_ref.storage import Stored

from .parameters import AXES, NUMBERS, PARAMETERS, bound, in_chunks
from .stored import DECODED, DENSE, STORAGE, TYPES, fields_of, is_served, storage_of, stored_parts
from .tracing import CONSTANTS, Traced
from .variants import (
    CHUNKS,
    FEW_ROWS,
    LARGEST,
    LOG2_E,
    MOST_KERNELS,
    NO_KERNELS,
    PLAIN_COLUMNS,
    SHORTEST_CHUNK,
    WIDEST,
    WIDEST_KEYS,
    Launch,
    Options,
    fits,
    kernels_for,
)

__all__ = ["PARAMETERS", "Launch", "Plan", "bound", "copies_16", "cut", "fused", "make_plan", "on_grid", "unfit"]


class Plan(NamedTuple):
    """Launches in order on one stream, on one parameter block and workspace.

    Attributes
    ----------
    launches : tuple of Launch
        Empty where there is nothing to compute.
    workspace : int
        Bytes of device memory, aligned to 16, that the launches share.
    numbers : bytes
        The parameter block behind the arrays, which `bound` adds.
    """

    launches: tuple[Launch, ...]
    workspace: int
    numbers: bytes


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
    form, L, S = problem.form, problem.query.shape[-2], problem.key.shape[-2]
    stored = False
    if not problem.plain:
        if problem.blockwise:
            return "mask or bias exist as rules only"
        stored = problem.stored
        if stored and not all(is_served(part, form.acc_dtype) for part in stored_parts(problem)):
            return "scales or offsets of float64, or that serve heads or batch entries in runs"
        if problem.key_positions is not None:
            return "ALiBi goes by key_positions"
        if problem.score_mod is not None and type(problem.score_mod) is not Traced:
            return "score_mod is a Python function"
    if reason := unfit(form, arch, stored):
        return reason
    blocks = math.prod(form.batch) * form.Hq * -(-L // 4) * (CHUNKS if L <= FEW_ROWS else 1)
    if L > LARGEST or S > LARGEST or blocks > LARGEST:
        return "the fused kernels count rows, keys and blocks in 31 bits"
    return None


@lru_cache(maxsize=MOST_KERNELS)
def unfit(form: Form, arch: int, stored: bool) -> str | None:
    """Return what of widths and leading axes the fused kernels cannot take, or None."""
    if arch < 75:
        return f"fused kernels need compute capability 7.5 or later, this device has {arch // 10}.{arch % 10}"
    if form.E > WIDEST or form.Ev > WIDEST:
        wide = f"E = {form.E} and Ev = {form.Ev}: the fused kernels go up to"
        if form.E > WIDEST_KEYS or form.Ev > WIDEST_KEYS:
            return f"{wide} {WIDEST_KEYS}"
        if stored or not fits(form._replace(Ev=min(form.Ev, WIDEST)), arch):
            return f"{wide} {WIDEST} for stored keys, and for this type on this device"
    if len(form.batch) > AXES and stored:
        return f"{len(form.batch)} leading axes: the fused kernels go up to {AXES} for stored keys"
    return None


def cut(form: Form, L: int, S: int) -> tuple[int, int, int, int]:
    """Return how the work of so many rows and keys is cut up.

    Returns
    -------
    fold : int
        Heads whose rows share tiles: 1 or the group.
    chunks, chunk : int
        How many blocks share the keys of a head, and how many keys each has.
    most : int
        A bound of the rows of such heads: fewer rows take fewer warps.
    """
    if L > FEW_ROWS:
        return 1, 1, S, LARGEST
    fold, chunk, chunks = form.Hq // form.Hkv if form.Hkv else 1, S, 1
    if S > 2 * SHORTEST_CHUNK:
        chunk = max(SHORTEST_CHUNK, -(-S // CHUNKS))
        chunk += -chunk % PLAIN_COLUMNS
        chunks = -(-S // chunk)
    rows = fold * L
    return fold, chunks, chunk, (16 if rows <= 16 else 32 if rows <= 32 else 64 if rows <= 64 else LARGEST)


def make_plan(problem: Any, want: frozenset[str], arch: int) -> Plan:
    """Return the plan for a problem that `fused` has no objection to; arguments as there."""
    p, form = problem, problem.form
    L, S, B = p.query.shape[-2], p.key.shape[-2], math.prod(form.batch)
    fold, chunks, chunk, block = cut(form, L, S)
    count, rows = B * form.Hq * L, fold * L
    stored = storage_of(p) if p.stored else DENSE
    kernels = kernels_for(form, arch, block, chunks > 1, options_of(p), want,
                          stored != DECODED and copies_16(p), stored) if count else NO_KERNELS  # fmt: skip
    tiles = -(-rows // kernels.rows)
    tasks = B * (form.Hq // fold if fold else 0) * tiles * chunks
    launches = tuple([on_grid(launch, tasks, count) for launch in kernels.launches])
    numbers = numbers_of(p, fold, tiles, chunks, chunk, LOG2_E if kernels.general else 1.0)
    split = count and chunks > 1 and want & _BY_CHUNKS
    workspace = count * chunks * (form.Ev + 2) * form.acc_dtype.itemsize if split else 0
    return Plan(launches, workspace, numbers)


def on_grid(launch: Launch, tasks: int, rows: int) -> Launch:
    """Return the launch for so many tiles of rows and chunks of keys, and so many rows of all heads."""
    name, source, defines, _, threads, shared = launch
    blocks = tasks if source in _BY_TASKS else -(-rows // 4)
    placed: Launch = tuple.__new__(Launch, (name, source, defines, (blocks, 1, 1), threads, shared))
    return placed


def numbers_of(p: Any, fold: int, tiles: int, chunks: int, chunk: int, unit: float) -> bytes:
    """Return the parameter block behind the arrays; how the work is cut as in ``Parameters``."""
    form, dropout, L, S = p.form, p.dropout, p.query.shape[-2], p.key.shape[-2]
    threshold, seed, factor = (0, 0, 1.0) if dropout is None else (dropout.threshold, dropout.seed, dropout.factor)
    constants = p.score_mod.constants if type(p.score_mod) is Traced else ()
    return NUMBERS.pack(
        *form.batch, *_NO_SIZES[len(form.batch) :], len(form.batch), math.prod(form.batch), form.Hq, form.Hkv, L, S,
        form.E, form.Ev, form.Hq // form.Hkv if form.Hkv else 1, p.first_row, p.first_key, p.first_head, p.first_entry,
        fold, tiles, chunks, chunk, threshold, seed & 0xFFFFFFFF, seed >> 32, p.offset if type(p.offset) is int else 0,
        *((1, *p.visible) if is_numbers(p.visible) else _NO_BAND), p.scale, p.softcap or 0.0, factor, unit,
        *constants, *_NO_CONSTANTS[len(constants) :],
        *(fields_of(p.key) + fields_of(p.value) if p.stored else _NOT_STORED),
    )  # fmt: skip


def is_numbers(visible: Any) -> bool:
    """Return whether what rows see is a few ints, which kernels evaluate; arrays are evaluated for them."""
    return type(visible) is Band and all([type(number) is int for number in visible])


def copies_16(problem: Any) -> bool:
    """Return whether query, key and value can be read 16 bytes at a time."""
    for part in (problem.query, problem.key, problem.value):
        array = part.numbers if type(part) is Stored else part
        if array is not None and not in_chunks(array, host_address(array)):
            return False
    return True


def host_address(array: Any) -> int:
    """Return the address of an array of NumPy's or CuPy's."""
    address: int = array.ctypes.data if type(array) is np.ndarray else array.data.ptr
    return address


def options_of(problem: Any) -> Options:
    """Return what scores need more than their scale."""
    p = problem
    least, most = PLAIN_SCALES[p.form.acc_dtype.itemsize]
    softcap, bias, dropout = p.softcap is not None, p.bias is not None, p.dropout is not None
    mod = p.score_mod.text if type(p.score_mod) is Traced else ""
    if not (softcap or bias or dropout or mod or p.keep is not None or p.slopes is not None) and least < p.scale < most:
        return _PLAIN
    return Options(True, int(softcap), TYPES[p.bias.dtype.name] if bias else -1, int(dropout), mod)


_PLAIN = Options()
_LIMITS = (np.finfo(np.float32), np.finfo(np.float64))
PLAIN_SCALES = {limits.dtype.itemsize: (float(limits.tiny) / LOG2_E, float(limits.max) / 2) for limits in _LIMITS}
_NO_BAND = (0,) * (1 + len(Band._fields))
_NO_CONSTANTS = (0.0,) * CONSTANTS
_NO_SIZES, _NOT_STORED = (0,) * AXES, (0,) * len(STORAGE)
_BY_CHUNKS = frozenset({"output", "lse"})  # results whose keys several blocks may share
_BY_TASKS = ("attend.cu", "plain.cu")  # kernels whose blocks are tiles of rows and chunks of keys
