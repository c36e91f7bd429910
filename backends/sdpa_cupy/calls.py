"""Calls that only their numbers tell apart: what a decode loop makes, with little Python before the launch.

They want an output, and have no options but numbers: scale, soft cap, a mask of few numbers, ALiBi, sinks. What such
calls share is settled once: the kernels, and where in the parameter block the numbers of a call stand.
"""

import math
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sdpa_ref.backend import OUTPUT, Form, Problem, Result
from sdpa_ref.masks import Band

from .parameters import AXES, CHUNK, PARAMETERS, VIEW, bands_of
from .plan import PLAIN_SCALES, cut, on_grid, unfit
from .stored import DENSE
from .variants import CHUNKS, LARGEST, LOG2_E, MOST_KERNELS, WIDEST, Kernels, Options, kernels_for

if TYPE_CHECKING:
    from .launch import Launcher


class Kind(NamedTuple):
    """What the calls of one kind share.

    Attributes
    ----------
    kernels : Kernels
    block : Struct
        The parameter block, of which a call brings the numbers.
    heads, widths : bytes
        The fields from `out_chunks` to `Hkv`, and from `E` to `group`.
    odd : int
        Of the first bytes of the words that are addresses and strides, as one number: the bits that are 0 in those of
        whole chunks of 16 bytes.
    lead : tuple of int
        The axes of keys and values before the last two.
    entries, itemsize, state : int
        Batch entries, bytes of a number, and what a block keeps of a row whose keys several share.
    unit, least, most : float
        That of ``Parameters``, and between which scales a score needs nothing else.
    """

    kernels: Kernels
    block: struct.Struct
    heads: bytes
    widths: bytes
    odd: int
    lead: tuple[int, ...]
    entries: int
    itemsize: int
    state: int
    unit: float
    least: float
    most: float


@lru_cache(maxsize=MOST_KERNELS)
def kind_of(form: Form, arch: int, rows: int, split: bool, options: Options) -> Kind | None:
    """Return what such calls share, whose rows are read by chunks of 16 bytes, or None where there are none.

    Up to so many rows share tiles; `split`: several blocks share a head's keys.
    """
    size, acc, axes, B = form.dtype.itemsize, form.acc_dtype.itemsize, len(form.batch), math.prod(form.batch)
    if unfit(form, arch, False) or axes > AXES or form.Ev > WIDEST or 0 in (B, form.Hq, form.E, form.Ev):
        return None
    if form.E * size % CHUNK or form.Ev * size % CHUNK:
        return None
    kernels = kernels_for(form, arch, rows, split, options, OUTPUT, True, DENSE)
    unit, state = LOG2_E if kernels.general else 1.0, (form.Ev + 2) * acc if split else 0
    sizes = struct.pack(f"<{2 + AXES}q", 1, *form.batch, *(0,) * (AXES - axes), axes)
    heads, lead = sizes + struct.pack("<3q", B, form.Hq, form.Hkv), (*form.batch, form.Hkv)
    widths = struct.pack("<3q", form.E, form.Ev, form.Hq // form.Hkv)
    block = _block(axes, len(heads), len(widths))
    return Kind(kernels, block, heads, widths, _odd_bits(), lead, B, size, state, unit, *PLAIN_SCALES[acc])


def _odd_bits() -> int:
    odd = np.zeros(1, PARAMETERS)
    for name in _ARRAYS:
        for part in ("data", "batch", "head", "row"):
            odd[name][part] = CHUNK - 1
    return int.from_bytes(odd.tobytes()[:_END:8], "little")


def _block(axes: int, heads: int, widths: int) -> struct.Struct:
    """Return the parameter block of such calls, 0 in all that they have not."""
    parts = dict.fromkeys(_ARRAYS, f"Q{axes}q{8 * (AXES - axes)}x3q") | {
        "out_chunks": f"{heads}s", "L": "2q", "E": f"{widths}s", "fold": "4q", "banded": f"{len(_ALL)}q", "scale": "4d",
    }  # fmt: skip
    layout, end = "<", 0  # as every device reads
    for name, part in parts.items():
        layout += f"{_place(name) - end}x{part}"
        end = _place(name) + struct.calcsize(f"<{part}")
    return struct.Struct(f"{layout}{PARAMETERS.itemsize - end}x")


def _place(name: str) -> int:
    place: int = PARAMETERS.fields[name][1]  # type: ignore[index]
    return place


def attend(problem: Problem, want: frozenset[str], arch: int, launcher: "Launcher") -> Result | None:
    """Return the output of a problem of such a kind, or None, with nothing done, of any other."""
    form, query, key, value, out, scale = problem[:6]
    if out is None or not type(query) is type(key) is type(value) or want != OUTPUT:
        return None
    seen, options, visible, slopes, sink, place, cap = _ALL, _PLAIN, None, None, None, 0, 0.0
    if not problem.plain:
        softcap, visible, keep, bias, slopes, place, positions, sink, score_mod, dropout = problem[6:16]
        if problem.blockwise or not (keep is bias is None and score_mod is None and dropout is None):
            return None
        if visible is not None:
            if type(visible) is not Band:
                return None
            seen = (1, *visible)
        if softcap is not None:
            options, cap = _CAPPED, softcap
        if slopes is not None:
            if positions is not None or type(place) is not int or slopes.ndim != 1 or problem.key_positions is not None:
                return None
            options = _GENERAL if softcap is None else _CAPPED
        if sink is not None and type(sink) is not np.ndarray:  # numbers that only the device has
            return None
    L, S = query.shape[-2], key.shape[-2]
    fold, chunks, chunk, rows = cut(form, L, S)
    kind = kind_of(form, arch, rows, chunks > 1, options)
    if kind is None:
        return None
    kernels, layout, heads, widths, odd, lead, entries, itemsize, state, unit, least, most = kind
    Hq = form.Hq
    count, q, k, v, o = entries * Hq * L, query.strides, key.strides, value.strides, out.strides
    if not (key.shape[:-2] == value.shape[:-2] == lead and q[-1] == k[-1] == v[-1] == o[-1] == itemsize
            and least < scale < most and 0 < S <= LARGEST >= count * CHUNKS > 0):  # fmt: skip
        return None
    tiles, at, block = -(-fold * L // kernels.rows), launcher.address, bytearray(layout.size)
    bands = None
    try:
        layout.pack_into(
            block, 0, at(query), *q, at(key), *k, at(value), *v, at(out), *o, heads, L, S, widths, fold, tiles, chunks,
            chunk, *seen, scale, cap, 1.0, unit,
        )  # fmt: skip
    except TypeError:  # a mask with arrays of numbers
        bands = launcher.moved(bands_of(visible, form.batch))
        layout.pack_into(
            block, 0, at(query), *q, at(key), *k, at(value), *v, at(out), *o, heads, L, S, widths, fold, tiles, chunks,
            chunk, *_ALL, scale, cap, 1.0, unit,
        )  # fmt: skip
        _ADDRESS.pack_into(block, _BANDS, at(bands))
    if int.from_bytes(block[:_END:8], "little") & odd:
        return None
    if slopes is not None:
        slopes = launcher.moved(slopes)
        _OF_HEADS.pack_into(block, _SLOPES, at(slopes), slopes.strides[0] if form.Hq > 1 else 0)
        _PLACE.pack_into(block, _OFFSET, place)
    if sink is not None:
        sink = launcher.moved(sink)
        _OF_HEADS.pack_into(block, _SINK, at(sink), sink.strides[0] if form.Hq > 1 else 0)
    if state:
        workspace = launcher.empty((count * chunks * state,), np.uint8)
        _ADDRESS.pack_into(block, _WORKSPACE, at(workspace))
    parameters = np.frombuffer(block, PARAMETERS)
    tasks = entries * (Hq // fold) * tiles * chunks
    run = launcher.run
    for launch in kernels.launches:
        run(on_grid(launch, tasks, count), parameters)
    return tuple.__new__(Result, (out, None, None, None, None))


_ALL: tuple[Any, ...] = (0,) * (1 + len(Band._fields))
_ARRAYS = "query", "key", "value", "out"
_PLAIN, _GENERAL, _CAPPED = Options(), Options(True), Options(True, 1)
_OF_HEADS, _PLACE = struct.Struct(f"<Q{8 * AXES}xq"), struct.Struct("<q")
_BANDS, _SLOPES, _SINK, _OFFSET = _place("bands"), _place("slopes"), _place("sink"), _place("place")
_ADDRESS, _WORKSPACE, _END = struct.Struct("<Q"), _place("workspace"), _place("out") + VIEW.itemsize
