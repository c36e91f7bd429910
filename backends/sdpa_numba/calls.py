"""One call of a forward kernel: the record that it reads, and the arrays that it fills."""

import struct
from functools import cache
from typing import Any

import numpy as np

from sdpa_ref.backend import OUTPUT, Problem, Result, Sums
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
_BANDED = struct.Struct(f"{HEADER}5qd{_SEEN - 48}x2q{_BAND - _SEEN - 16}x10q{FORWARD.itemsize - _BAND - 80}x")
_NO_BAND: Any = (0,) * len(Band._fields)


def solve(
    problem: Problem, want: frozenset[str], score_mod: Any = None, final: bool = False, sums: Sums | None = None
) -> Result:
    """Return what is wanted of a problem that the kernels take as it is; `final`: its bias holds the scores.

    With `sums` it is added to them, in place; an output that is wanted is then that of all keys.
    """
    if problem.plain and (want is OUTPUT or want == OUTPUT):
        return _solve_short(problem, _PLAIN)
    (form, query, key, value, out, scale, softcap, visible, keep, bias, slopes, offset, positions, sink, _, dropout,
     first_row) = problem[:17]  # fmt: skip
    only_output = want is OUTPUT or want == OUTPUT
    stored = type(key) is Stored or type(value) is Stored
    bare = not stored and bias is None and keep is None and slopes is None and sink is None and softcap is None
    if bare and score_mod is None and dropout is None and only_output and sums is None:
        if visible is None:
            return _solve_short(problem, _PLAIN)
        if type(visible) is Band:
            entries, place, arrays = numbers_of(visible)
            return _solve_short(problem, _BANDED, BAND, entries, *place)  # it reads the arrays until it is done
    few = sums is None and ("output" in want or "weights" in want)
    few = few and query.shape[-2] * form.Hq <= FEW_ROWS * form.Hkv
    changes = keep is not None or bias is not None or slopes is not None or softcap is not None
    general = not few and (changes or "weights" in want or score_mod is not None or dropout is not None)
    if "output" not in want:
        out = None
    elif out is None:
        out = problem.new_output()
    coded = stored and any(type(x) is Stored and (x.bits or x.numbers.dtype != form.dtype) for x in (key, value))
    kernel, settle, sizes = plan_for(form.dtype, few, general, score_mod, stored, coded)
    source, kept = 0, None
    if stored:
        key, value, source, kept = described(problem)
    values, output = 0 if value is None else id(value), 0 if out is None else id(out)
    pool, helpers = team()
    lse = m = z = weights = arrays = None
    results: tuple[int, ...] = (0, 0, 0)
    intervals: tuple[int, ...] = (0, 0, 0)
    if not only_output:
        lse = np.empty(query.shape[:-1], form.acc_dtype) if "lse" in want else None
        m, z = (np.empty_like(lse), np.empty_like(lse)) if "m" in want else (None, None)
        if "weights" in want:  # in few rows scores lie there meanwhile
            weights = np.zeros((*query.shape[:-1], problem.S), form.acc_dtype if few else form.dtype)
        results = _address(lse), _address(m), _address(z)
    if sums is not None:
        m, z = sums.m, sums.z
        results = _address(lse), id(m), id(z)
    kind, band, entries, place = ALL, None, 0, _NO_BAND
    if type(visible) is Band:
        kind, band = BAND, visible
    elif isinstance(visible, Intervals):
        kind, intervals = INTERVALS, tuple(map(id, visible))
    if band is None and slopes is not None and positions is None:
        band = Band(offset)
    if band is not None:
        entries, place, arrays = numbers_of(band)
    threshold = seed = 0
    if dropout is not None:
        seed, threshold = dropout.seed, dropout.threshold
    call = _FULL.pack(
        kernel, settle, pool, helpers, id(query), id(key), values, output, sizes, scale,
        *results, _address(weights), *intervals, _address(keep), _address(bias), _address(slopes), _address(positions),
        _address(problem.key_positions), _address(sink),
        0 if sums is None else id(sums.total), kind, entries, 0 if bias is None else bias_code(bias.dtype),
        not final, first_row, problem.first_key, problem.first_head, problem.first_entry, threshold, seed & 0xFFFFFFFF,
        seed >> 32, *place, source, softcap or 0.0, 1.0 if dropout is None else dropout.factor,
    )  # fmt: skip
    run(call)
    del arrays, kept  # until here the kernel reads them
    if weights is not None and weights.dtype != form.dtype:
        with np.errstate(over="ignore"):
            weights = weights.astype(form.dtype)
    return Result(out, lse, weights, m, z)


def _solve_short(problem: Problem, layout: struct.Struct, *options: int) -> Result:
    """Return the output of a problem with no option but these, in half the time that a test of each would take."""
    form, query, key, value, out, scale = problem[:6]
    out = problem.new_output() if out is None else out
    few = query.shape[-2] * form.Hq <= FEW_ROWS * form.Hkv
    kernel, settle, sizes = plan_for(form.dtype, few, False, None)
    pool, helpers = team()
    run(layout.pack(kernel, settle, pool, helpers, id(query), id(key), id(value), id(out), sizes, scale, *options))
    return tuple.__new__(Result, (out, None, None, None, None))


_INTEGERS = {int}


@cache
def bias_code(dtype: np.dtype[Any]) -> int:
    """Return how the record names the type of a bias."""
    return BIAS_CODES[dtype.name]


def _address(array: Any) -> int:
    """Return the address of the array's object, 0 for none."""
    return 0 if array is None else id(array)


def rounded_sink(problem: Problem) -> Any:
    """Return the sinks, float64, as numbers of the accumulation type: as scores are, beside which they count."""
    return problem.sink.astype(problem.acc_dtype).astype(np.float64)


def numbers_of(band: Band) -> tuple[int, Any, Any]:
    """Return a band as the record has it: which numbers are arrays, bit by bit, all numbers, and the arrays to keep."""
    if {*map(type, band)} == _INTEGERS:
        return 0, band, None
    entries, numbers, arrays = 0, [], []
    for place, number in enumerate(band):
        if type(number) is not int:
            array = np.asarray(number, np.int64)
            arrays.append(array)
            entries, number = entries | 1 << place, id(array)
        numbers.append(number)
    return entries, numbers, arrays
