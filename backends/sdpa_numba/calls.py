"""One call of a forward kernel: the record that it reads, and the arrays that it fills."""

import struct
from typing import Any

import numpy as np

from sdpa_ref.backend import OUTPUT, Problem, Result
from sdpa_ref.masks import Band, Intervals
from sdpa_ref.storage import Stored

from .kernels.record import ALL, BAND, FORWARD, INTERVALS
from .plan import FEW_ROWS, plan_for
from .runtime.call import HEADER
from .runtime.threads import run, team
from .stored import described

BIAS_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
_WRITTEN = FORWARD.fields["B"][1]  # type: ignore[index]  # bytes of the record that Python writes
_PLAIN = struct.Struct(f"{HEADER}5qd{FORWARD.itemsize - 48}x")
_FULL = struct.Struct(f"{HEADER}5qd{(_WRITTEN - 64) // 8}q2d{FORWARD.itemsize - _WRITTEN}x")
_SEEN, _BAND = (FORWARD.fields[name][1] for name in ("visible", "band_offset"))  # type: ignore[index]
_BANDED = struct.Struct(f"{HEADER}5qd{_SEEN - 48}xq{_BAND - _SEEN - 8}x10q{FORWARD.itemsize - _BAND - 80}x")
_NO_BAND = (0,) * len(Band._fields)


def solve(problem: Problem, want: frozenset[str], score_mod: Any = None, final: bool = False) -> Result:
    """Return what is wanted of a problem that the kernels take as it is; `final`: its bias holds the scores."""
    if problem.plain and (want is OUTPUT or want == OUTPUT):
        return _solve_short(problem, _PLAIN)
    (form, query, key, value, out, scale, softcap, visible, keep, bias, slopes, offset, positions, sink, _, dropout,
     first_row) = problem[:17]  # fmt: skip
    stored = type(key) is Stored or type(value) is Stored
    bare = not stored and bias is None and keep is None and slopes is None and sink is None and softcap is None
    if bare and type(visible) is Band and score_mod is None and dropout is None and (want is OUTPUT or want == OUTPUT):
        if {*map(type, visible)} == _INTEGERS:
            return _solve_short(problem, _BANDED, BAND, *visible)
    few = score_mod is None and dropout is None and "output" in want and "weights" not in want
    few = few and query.shape[-2] * form.Hq <= FEW_ROWS * form.Hkv
    options = keep, bias, slopes, score_mod, dropout, softcap
    general = not few and ("weights" in want or any(option is not None for option in options))
    if "output" not in want:
        out = None
    elif out is None:
        out = problem.new_output()
    kernel, settle, sizes = plan_for(form.dtype, few, general, score_mod, stored)
    source, kept = 0, None
    if stored:
        key, value, source, kept = described(problem)
    values, output = 0 if value is None else id(value), 0 if out is None else id(out)
    pool, helpers = team()
    lse = np.empty(query.shape[:-1], form.acc_dtype) if "lse" in want else None
    m, z = (np.empty_like(lse), np.empty_like(lse)) if "m" in want else (None, None)
    weights = np.zeros((*query.shape[:-1], key.shape[-2]), form.dtype) if "weights" in want else None
    sink = None if sink is None else rounded_sink(problem)
    kind, band, place, table = ALL, None, _NO_BAND, (0, 0, 0)
    prefix = start = stop = numbers = None
    if type(visible) is Band:
        kind, band = BAND, visible
    elif isinstance(visible, Intervals):
        kind, prefix, start, stop = INTERVALS, visible.prefix, visible.start, visible.stop
    if band is None and slopes is not None and positions is None:
        band = Band(offset)
    if band is not None:
        place = band
        if {*map(type, band)} != _INTEGERS:
            numbers = banded(band, form.batch)
            place, table = _NO_BAND, (numbers.ctypes.data, numbers.strides[0], 8)
    threshold = seed = 0
    if dropout is not None:
        seed, threshold = dropout.seed, dropout.threshold
    call = _FULL.pack(
        kernel, settle, pool, helpers, id(query), id(key), values, output, sizes, scale,
        *map(_address, (lse, m, z, weights, prefix, start, stop, keep, bias, slopes, positions,
                        problem.key_positions, sink)),
        kind, *table, 0 if bias is None else BIAS_CODES[bias.dtype.name], not final, first_row, threshold,
        seed & 0xFFFFFFFF, seed >> 32, *place, source, softcap or 0.0, 1.0 if dropout is None else dropout.factor,
    )  # fmt: skip
    run(call)
    del numbers, kept  # until here the kernel reads them
    return Result(out, lse, weights, m, z)


def _solve_short(problem: Problem, layout: struct.Struct, *options: int) -> Result:
    """Return the output of a problem with no option but these, in half the time that asking for each would take."""
    form, query, key, value, out, scale = problem[:6]
    out = problem.new_output() if out is None else out
    few = query.shape[-2] * form.Hq <= FEW_ROWS * form.Hkv
    kernel, settle, sizes = plan_for(form.dtype, few, False, None)
    pool, helpers = team()
    run(layout.pack(kernel, settle, pool, helpers, id(query), id(key), id(value), id(out), sizes, scale, *options))
    return tuple.__new__(Result, (out, None, None, None, None))


_INTEGERS = {int}


def _address(array: Any) -> int:
    """Return the address of the array's object, 0 for none."""
    return 0 if array is None else id(array)


def rounded_sink(problem: Problem) -> Any:
    """Return the sinks, float64, as numbers of the accumulation type: as scores are, beside which they count."""
    return problem.sink.astype(problem.acc_dtype).astype(np.float64)


def banded(band: Band, batch: tuple[int, ...]) -> Any:
    """Return the numbers of a band as an int64 array, one row a number and one column a batch entry."""
    table = np.empty((len(band), *batch), np.int64)
    for row, number in enumerate(band):
        table[row] = number
    return table.reshape(len(band), -1)
