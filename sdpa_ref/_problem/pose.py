"""From arguments to a checked problem: every argument error is raised here, and backends see only what is left."""

from typing import Any, NamedTuple

import numpy as np

from sdpa_ref._problem import checks
from sdpa_ref._problem.caller import Caller
from sdpa_ref._problem.form import Arrays, arrays_of
from sdpa_ref.arrays import Array, as_array, is_aligned, kind, module_of, real_number, result_dtype
from sdpa_ref.backend import Form, Problem, ScoreMod
from sdpa_ref.biases import ALiBi
from sdpa_ref.dropout import Dropout
from sdpa_ref.masks import Band, BooleanArray, Grid, Intervals, Mask, as_mask, normal, place_queries, walk

NO_VALUE: Any = object()  # instead of a value where only weights are wanted


def pose(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
    query_offset: Any = None,
    score_mod: ScoreMod | None = None,
    dropout: Dropout | None = None,
    layout: str = "HLE",
    out: Any = None,
    output: bool = False,
) -> tuple[Problem, Caller]:
    """Return the problem that these arguments state and what turns results back, or raise the first error.

    With `output` the problem has somewhere to put the output: `out`, or a new array in the caller's layout.
    """
    if type(value) is not np.ndarray or type(key) is not np.ndarray or type(query) is not np.ndarray:
        query, key = as_array("query", query), as_array("key", key)
        value = None if value is NO_VALUE else as_array("value", value)
    arrays, L, S = _arrays(query, key, value, layout)
    form = arrays.form
    q, k, v = query, key, value
    if layout == "LHE" or arrays.heads_missing:
        q, k = checks.heads_first(q, layout), checks.heads_first(k, layout)
        v = None if v is None else checks.heads_first(v, layout)
    if not (arrays.as_given and is_aligned(q) and is_aligned(k) and (v is None or is_aligned(v))):
        q, k = checks.native(q, form.dtype), checks.native(k, form.dtype)
        v = None if v is None else checks.native(v, form.dtype)
        if q.shape[:-3] != form.batch:
            q = np.broadcast_to(q, (*form.batch, *q.shape[-3:]))

    biases: list[Array] = []
    seen, slopes = _ALL, None
    if bias is not None:
        biases, slopes = checks.bias_parts(bias, form.batch, form.Hq, L, S)
    if mask is not None or slopes is not None or query_offset is not None:
        mask = None if mask is None else as_mask(mask)
        seen = _seen(mask, query_offset, form, L, S, slopes is not None)
    if form.kind != "numpy" or biases or seen.boolean:
        named = {f"bias {n}": part for n, part in enumerate(biases)}
        named |= {f"mask {n}": part.array for n, part in enumerate(seen.boolean)}
        checks.one_kind({name: x for name, x in (("query", q), ("key", k), ("value", v)) if x is not None} | named)
    if scale is None:
        scale = arrays.scale
    else:
        scale = min(max(real_number("scale", scale), -arrays.largest), arrays.largest)
    if softcap is not None:
        softcap = min(max(checks.soft_cap(softcap), arrays.tiny), arrays.largest / 4)
    logits = None if sink is None else checks.sink_logits(sink, form.Hq, form.acc_dtype)
    if score_mod is not None:
        checks.check_score_mod(score_mod, (*form.batch, form.Hq, L, S), module_of(form.kind))
    if dropout is not None:
        if not isinstance(dropout, Dropout):
            raise TypeError(f"dropout must be a Dropout(p, seed), got {type(dropout).__name__}")
        dropout = None if dropout.p == 0 else dropout
    if out is not None:
        _check_out(out, (query, key, value), mask, bias, sink, arrays, layout, L, S)

    place = out  # where the backend puts the output
    if out is None and output:
        rows = (L, form.Hq) if layout == "LHE" and not arrays.headless else (form.Hq, L)
        shape = (L, form.Ev) if arrays.headless else (*form.batch, *rows, form.Ev)
        place = out = (np if form.kind == "numpy" else module_of(form.kind)).empty(shape, form.dtype)
    elif place is not None and not (output and is_aligned(place)):
        place = None
    in_place = place is not None
    if in_place and (arrays.headless or layout == "LHE"):
        place = checks.heads_first(place, layout)
    problem: Problem = tuple.__new__(
        Problem,
        (form, q, k, v, place, scale, softcap, seen.visible, seen.keep, biases[0] if len(biases) == 1 else None, slopes,
         seen.offset, seen.positions, logits, score_mod, dropout, 0, seen.grid is not None or len(biases) > 1,
         seen.rules, tuple(biases), seen.grid),
    )  # fmt: skip
    return problem, Caller(layout, arrays.headless, out, in_place)


def problem_of(query: Any, key: Any, value: Any = None, **options: Any) -> Problem:
    """Return the problem that `sdpa` would pass to a backend for these arguments, to try one by hand.

    Parameters
    ----------
    query, key, value : array
        As in `sdpa`; without `value` only weights are wanted.
    **options
        As in `sdpa`, apart from `backend`.

    Examples
    --------
    >>> problem = problem_of(np.ones((4, 3, 8)), np.ones((2, 5, 8)), np.ones((2, 5, 8)))
    >>> problem.Hq, problem.group, problem.L, problem.S
    (4, 2, 3, 5)
    """
    return pose(query, key, NO_VALUE if value is None else value, **options)[0]


class _Seen(NamedTuple):
    """What mask and offset come to: fields of `Problem`, and the boolean arrays among the mask."""

    visible: Band | Intervals | None = None
    keep: Array = None
    offset: Any = 0
    positions: Array = None
    rules: tuple[Mask, ...] = ()
    grid: Grid | None = None
    boolean: tuple[BooleanArray, ...] = ()


_ALL = _Seen()


def _arrays(query: Array, key: Array, value: Array, layout: Any) -> tuple[Arrays, int, int]:
    """Return what the arrays are, L and S, or raise the error of the first that does not fit."""
    whose = "numpy" if type(query) is np.ndarray else kind(query)
    try:
        if layout == "HLE" and value is not None:
            q, k, v = query.shape, key.shape, value.shape
            if v[-2] == k[-2]:
                arrays = arrays_of(whose, layout, query.dtype, q[:-2], q[-1], key.dtype, k[:-2], k[-1],
                                   value.dtype, v[:-2], v[-1])  # fmt: skip
                return arrays, q[-2], k[-2]
        elif layout in ("HLE", "LHE"):
            (q, L, E), (k, S, width) = _axes(query, layout), _axes(key, layout)
            if value is None:
                return arrays_of(whose, layout, query.dtype, q, E, key.dtype, k, width, None, (), 0), L, S
            v, values, Ev = _axes(value, layout)
            if values == S:
                arrays = arrays_of(whose, layout, query.dtype, q, E, key.dtype, k, width, value.dtype, v, Ev)
                return arrays, L, S
    except (IndexError, TypeError, ValueError):
        pass
    raise _misfit({"query": query, "key": key} | ({} if value is None else {"value": value}), layout)


def _axes(array: Array, layout: str) -> tuple[tuple[int, ...], int, int]:
    """Return the axes before the last two, where heads come before lengths, the length and the width."""
    shape = array.shape
    if layout == "LHE" and len(shape) > 2:
        return (*shape[:-3], shape[-2]), shape[-3], shape[-1]
    return shape[:-2], shape[-2], shape[-1]


def _misfit(arrays: dict[str, Array], layout: Any) -> Exception:
    """Return the error of arrays that do not fit together."""
    if layout not in ("HLE", "LHE"):
        return ValueError(f'layout must be "HLE" (..., H, L, E) or "LHE" (..., L, H, E), got {layout!r}')
    try:
        result_dtype(**{name: array.dtype for name, array in arrays.items()})
        for name, array in arrays.items():
            if array.ndim < 2:
                raise ValueError(f"{name} must have at least 2 axes, (..., H, length, width), got shape {array.shape}")
        shapes = {
            name: array if array.ndim == 2 else checks.heads_first(array, layout) for name, array in arrays.items()
        }
        checks.sizes({name: array.shape for name, array in shapes.items()}, layout)
    except (TypeError, ValueError) as error:
        return error
    raise AssertionError("arrays fit and yet they did not")


def _seen(mask: Mask | None, query_offset: Any, form: Form, L: int, S: int, alibi: bool) -> _Seen:
    """Return what mask and offset come to."""
    if mask is not None:
        known = mask.__dict__.get("_seen")
        name = form, L, S, query_offset, alibi
        repeatable = query_offset is None or type(query_offset) is str or type(query_offset) is int
        if known is not None and repeatable and known[0] == name:
            found: _Seen = known[1]
            return found
        mask._check(form.batch, form.Hq, L, S)
    offset, documents = place_queries(mask, query_offset, form.batch, L, S, alibi=alibi)
    positions = None if documents is None or not alibi else np.broadcast_to(documents[0], (*form.batch, L))
    if mask is None:
        return _Seen(offset=offset, positions=positions)
    grid = Grid(form.batch, form.Hq, L, S, offset, documents, form.kind)
    visible, boolean, rules = normal(mask, grid)
    if len(boolean) == 1 and not rules:
        return _Seen(visible, boolean[0].array, offset, positions, boolean=boolean)
    rules = (*rules, *boolean)
    seen = _Seen(visible, None, offset, positions, rules, grid if rules else None, boolean)
    if repeatable and not isinstance(visible, Band) and not any(isinstance(part, BooleanArray) for part in walk(mask)):
        mask.__dict__["_seen"] = name, seen  # arrays of intervals, for the next layer of a model
    return seen


def _check_out(
    out: Any, inputs: tuple[Any, ...], mask: Mask | None, bias: Any, sink: Any, arrays: Arrays, layout: str, L: int,
    S: int,
) -> None:  # fmt: skip
    """Raise the error of an `out` that cannot receive the result."""
    form = arrays.form
    rows = (form.Hq, L) if layout == "HLE" or arrays.headless else (L, form.Hq)
    shape = (*form.batch, *rows, form.Ev) if inputs[2] is not None else (*form.batch, form.Hq, L, S)
    used = [array for array in inputs if array is not None]
    parts = (*(bias if isinstance(bias, tuple) else (bias,)), sink)
    used += [as_array("bias", part) for part in parts if part is not None and not isinstance(part, ALiBi)]
    used += [part.array for part in walk(mask) if isinstance(part, BooleanArray)] if mask is not None else []
    checks.check_out(out, shape[-2:] if arrays.headless else shape, form.dtype, used)
