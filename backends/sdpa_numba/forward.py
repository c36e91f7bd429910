"""One call of a forward kernel: the record that it reads, and the arrays that it fills."""

import struct
from typing import Any

import numpy as np

from sdpa_ref.backend import Problem, Result
from sdpa_ref.masks import Band

from .kernels.record import ALL, BAND, FORWARD, INTERVALS
from .plan import FEW_ROWS, plan_for
from .runtime.threads import run

BIAS_CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
_ONLY_OUTPUT = frozenset({"output"})
_WRITTEN = FORWARD.fields["B"][1]  # type: ignore[index]  # bytes of the record that Python writes
_REST = FORWARD.itemsize - _WRITTEN
_PLAIN = struct.Struct(f"=5qd{FORWARD.itemsize - 48}x")
_FULL = struct.Struct(f"=5qd{(_WRITTEN - 64) // 8}q2d{_REST}x")
_NO_BAND = (0,) * len(Band._fields)


def attend(problem: Problem, want: frozenset[str], score_mod: Any = None, final: bool = False) -> Result:
    """Return what is wanted of a problem that the kernels take as it is; `final`: its bias holds the scores."""
    (form, query, key, value, _, scale, softcap, visible, keep, bias, slopes, offset, positions, sink, _, dropout,
     first_row, *_) = problem  # fmt: skip
    simple = keep is None and bias is None and slopes is None and score_mod is None and dropout is None
    simple = simple and "weights" not in want
    group = form.Hq // form.Hkv if form.Hkv else 1
    few = simple and query.shape[-2] * group <= FEW_ROWS and "output" in want
    plan = plan_for(form.dtype, few, not few and (not simple or softcap is not None), score_mod)
    output = problem.new_output() if "output" in want else None
    first = id(query), id(key), 0 if value is None else id(value), 0 if output is None else id(output)
    if simple and visible is None and sink is None and softcap is None and want == _ONLY_OUTPUT:
        run(plan.kernel, _PLAIN.pack(*first, plan.sizes, scale), plan.settle)
        return Result(output)
    lse = np.empty(query.shape[:-1], form.acc_dtype) if "lse" in want else None
    m, z = (np.empty_like(lse), np.empty_like(lse)) if "m" in want else (None, None)
    weights = np.zeros((*query.shape[:-1], key.shape[-2]), form.dtype) if "weights" in want else None
    kind, band, table, place = ALL, None, None, _NO_BAND
    prefix = start = stop = None
    if isinstance(visible, Band):
        kind, band = BAND, visible
    elif visible is not None:
        kind, (prefix, start, stop) = INTERVALS, visible
    if band is None and slopes is not None and positions is None:
        band = Band(offset)
    if band is not None:
        place = band
        if not all(type(number) is int for number in band):
            place, table = _NO_BAND, banded(band, form.batch)
    seed, threshold, factor = (0, 0, 1.0) if dropout is None else (dropout.seed, dropout.threshold, dropout.factor)
    sink = None if sink is None else rounded_sink(problem)
    arrays = (lse, m, z, weights, prefix, start, stop, keep, bias, slopes, positions, sink)
    record = _FULL.pack(
        *first, plan.sizes, scale, *[0 if array is None else id(array) for array in arrays],
        kind, *((0, 0, 0) if table is None else (table.ctypes.data, table.strides[0], 8)),
        0 if bias is None else BIAS_CODES[bias.dtype.name], not final, first_row, threshold, seed & 0xFFFFFFFF,
        seed >> 32, *place, softcap or 0.0, factor,
    )  # fmt: skip
    run(plan.kernel, record, plan.settle)
    return Result(output, lse, weights, m, z)


def rounded_sink(problem: Problem) -> Any:
    """Return the sinks, float64, as numbers of the accumulation type: as scores are, beside which they count."""
    return problem.sink.astype(problem.acc_dtype).astype(np.float64)


def banded(band: Band, batch: tuple[int, ...]) -> Any:
    """Return the numbers of a band as an int64 array, one row a number and one column a batch entry."""
    table = np.empty((len(band), *batch), np.int64)
    for row, number in enumerate(band):
        table[row] = number
    return table.reshape(len(band), -1)
