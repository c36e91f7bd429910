"""From arguments to a checked problem: every argument error is raised here, and backends see only what is left."""

import sys
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref._problem import checks
from sdpa_ref._problem.caller import Caller
from sdpa_ref._problem.form import Arrays, arrays_alike, arrays_of
from sdpa_ref._problem.stored import check_layout, check_tables, of_one_kind, stored_or_array, with_lengths
from sdpa_ref.arrays import Array, as_array, module_of, real_number, result_dtype
from sdpa_ref.backend import Form, Problem, ScoreMod
from sdpa_ref.biases import ALiBi
from sdpa_ref.dropout import Dropout
from sdpa_ref.masks import (
    FAR,
    Band,
    BooleanArray,
    Grid,
    Intervals,
    Mask,
    as_mask,
    leaves,
    normal,
    place_queries,
    placed_keys,
    valid_keys,
)
from sdpa_ref.storage import Stored, arrays_in

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
    key_positions: Any = None,
    score_mod: ScoreMod | None = None,
    dropout: Dropout | None = None,
    layout: str = "HLE",
    out: Any = None,
    output: bool = False,
) -> tuple[Problem, Caller]:
    """Return the problem that these arguments state and what turns results back, or raise the first error.

    With `output` the problem has somewhere to put the output: `out`, or a new array in the caller's layout.
    """
    stored, whose = False, "numpy"
    if _is_of_cupy(query, key, value):
        whose = "cupy"
    elif type(value) is not np.ndarray or type(key) is not np.ndarray or type(query) is not np.ndarray:
        query = as_array("query", query)
        key = stored_or_array("key", key, query.dtype)
        value = None if value is NO_VALUE else stored_or_array("value", value, query.dtype)
        query, key, value, whose = of_one_kind(query, key, value)
        checks.one_kind({"query": query, "key": key} | ({} if value is None else {"value": value}))
        stored = type(key) is Stored or type(value) is Stored
        if stored:
            check_layout(layout, key=key, value=value)
            mask = with_lengths(mask, key, value)
    arrays, L, S = _arrays(query, key, value, layout, whose)
    form, headless, heads_missing, as_given, own_scale, largest, tiny, caller = arrays
    q, k, v = query, key, value
    if heads_missing or layout == "LHE":
        q, k = checks.heads_first(q, layout), checks.heads_first(k, layout)
        v = None if v is None else checks.heads_first(v, layout)
    if not as_given:
        q, k = checks.native(q, form.dtype), checks.native(k, form.dtype)
        v = None if v is None else checks.native(v, form.dtype)
        if q.shape[:-3] != form.batch:
            q = np.broadcast_to(q, (*form.batch, *q.shape[-3:]))

    plain = mask is None and bias is None and sink is None and scale is None and softcap is None
    plain = plain and query_offset is None and score_mod is None and dropout is None
    if plain and key_positions is None and not stored:
        place = None  # where the backend puts the output
        if out is not None:
            place, caller = _given(out, output, (query, key, value), (), arrays, layout, L, S)
        elif output:
            place = _new_output(form, L, headless or layout == "HLE")
        plain_problem: Problem = tuple.__new__(Problem, (form, q, k, v, place, own_scale) + _NO_OPTIONS)  # noqa: RUF005  # a list first
        return plain_problem, caller

    biases: tuple[Array, ...] = ()
    seen, slopes = _ALL, None
    if bias is not None:
        biases, slopes = checks.bias_parts(bias, form.batch, form.Hq, L, S)
    if mask is not None or slopes is not None or query_offset is not None or key_positions is not None:
        mask = None if mask is None else as_mask(mask)
        if key_positions is not None:
            key_positions = placed_keys(key_positions, mask, form.batch, S)
        seen = _seen(mask, query_offset, form, L, S, slopes is not None, key_positions)
    if stored:
        check_tables(form, seen.visible, L, S, key=k, value=v)
    if (biases or seen.boolean) and ("cupy" in sys.modules or "dask.array" in sys.modules):
        named = {f"bias {n}": part for n, part in enumerate(biases)}
        named |= {f"mask {n}": part.array for n, part in enumerate(seen.boolean)}
        checks.one_kind({"query": q} | named)
    scale = own_scale if scale is None else min(max(real_number("scale", scale), -largest), largest)
    if softcap is not None:
        softcap = min(max(checks.soft_cap(softcap), tiny), largest / 4)
    if sink is not None:
        logits = checks.sink_logits(sink, form.Hq, form.acc_dtype)
    if score_mod is not None:
        checks.check_score_mod(score_mod, (*form.batch, form.Hq, L, S), module_of(form.kind))
    if dropout is not None:
        if not isinstance(dropout, Dropout):
            raise TypeError(f"dropout must be a Dropout(p, seed), got {type(dropout).__name__}")
        dropout = None if dropout.p == 0 else dropout

    place = None
    if out is not None:
        masked = mask if seen.boolean or seen.rules else None  # anything else has no array of the caller's
        more = _arrays_among(masked, bias, sink)
        place, caller = _given(out, output, (query, key, value), more, arrays, layout, L, S)
    elif output:
        place = _new_output(form, L, headless or layout == "HLE")
    visible, keep, offset, positions, rules, grid, _ = seen
    problem: Problem = tuple.__new__(
        Problem,
        (form, q, k, v, place, scale, softcap, visible, keep, biases[0] if len(biases) == 1 else None, slopes, offset,
         positions, None if sink is None else logits, score_mod, dropout, 0, False,
         grid is not None or len(biases) > 1, rules, biases, grid, key_positions if slopes is not None else None,
         0, 0, 0),
    )  # fmt: skip
    return problem, caller


def _is_of_cupy(query: Any, key: Any, value: Any) -> bool:
    """Return whether all three are CuPy arrays, about which there is nothing to ask."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and type(query) is type(key) is type(value) is cupy.ndarray


_NO_OPTIONS = tuple(True if name == "plain" else value for name, value in Problem._field_defaults.items())


def _new_output(form: Form, L: int, heads_first: bool) -> Array:
    """Return a new array for the output, in canonical order, whose memory is in the caller's."""
    if form.kind == "dask":
        return None
    empty = np.empty if form.kind == "numpy" else module_of(form.kind).empty
    if heads_first:
        new: Array = empty((*form.batch, form.Hq, L, form.Ev), form.dtype)
        return new
    return empty((*form.batch, L, form.Hq, form.Ev), form.dtype).swapaxes(-2, -3)


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


def _arrays(query: Array, key: Array, value: Array, layout: Any, whose: str) -> tuple[Arrays, int, int]:
    """Return what the arrays are, L and S, or raise the error of the first that does not fit."""
    try:
        q, k, v, dtype = query.shape, key.shape, key.shape if value is None else value.shape, query.dtype
        if layout == "LHE":
            q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
        S, E = k[-2], q[-1]
        if v[-2] == S and layout in ("HLE", "LHE"):
            if value is None:
                return arrays_of(whose, layout, dtype, q[:-2], E, key.dtype, k[:-2], k[-1], None, (), 0), q[-2], S
            if key.dtype is dtype and value.dtype is dtype and k[-1] == E:
                return arrays_alike(whose, layout, dtype, q[:-2], k[:-2], v[:-2], E, v[-1]), q[-2], S
            others = key.dtype, k[:-2], k[-1], value.dtype, v[:-2], v[-1]
            return arrays_of(whose, layout, dtype, q[:-2], E, *others), q[-2], S
    except (IndexError, TypeError, ValueError):
        pass
    raise _misfit({"query": query, "key": key} | ({} if value is None else {"value": value}), layout)


def _heads_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return a shape of layout "LHE" with heads before lengths."""
    return shape if len(shape) < 3 else (*shape[:-3], shape[-2], shape[-3], shape[-1])


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


def _seen(
    mask: Mask | None, query_offset: Any, form: Form, L: int, S: int, alibi: bool, key_positions: Array = None
) -> _Seen:
    """Return what mask and offset come to."""
    if type(mask) is BooleanArray and query_offset is None and not alibi and key_positions is None:
        if mask.per_row or mask.alike(S):
            mask._check(form.batch, form.Hq, L, S)
            interval = None if mask.per_row else mask.interval(S)
            if interval is not None:
                return _Seen(interval)
            return tuple.__new__(_Seen, (None, mask.array, 0, None, (), None, (mask,)))
    if mask is not None:
        known = mask.__dict__.get("_seen")
        same = key_positions is None and (query_offset is None or type(query_offset) in (str, int))
        if known is not None and same:
            name = form, L, S, query_offset, alibi
            if known[0] == name:
                found: _Seen = known[1]
                return found
        for part in (mask,) if key_positions is None else leaves(mask):  # positions may be larger than S
            keys = FAR if key_positions is not None and part.counts_in_documents else S
            part._check(form.batch, form.Hq, L, keys)
    band = None if mask is None or key_positions is not None else mask._band()
    if band is not None and type(query_offset) is int and abs(query_offset) < FAR >> 1:  # of documents there is no band
        return tuple.__new__(_Seen, (band.at(query_offset), None, query_offset, None, (), None, ()))
    offset, documents = place_queries(mask, query_offset, form.batch, L, S, alibi=alibi, key_positions=key_positions)
    positions = None if documents is None or not alibi else np.broadcast_to(documents[0], (*form.batch, L))
    if mask is None:
        return _Seen(offset=offset, positions=positions)
    if band is not None:
        seen: _Seen = tuple.__new__(_Seen, (band.at(offset), None, offset, None, (), None, ()))
        if same:
            mask.__dict__["_seen"] = (form, L, S, query_offset, alibi), seen  # for the next layer of a model
        return seen
    if type(mask) is BooleanArray and mask.per_row:
        return _Seen(None, mask.array, offset, positions, boolean=(mask,))
    lengths = valid_keys(mask, L)
    grid = Grid(form.batch, form.Hq, L, S, offset, documents, form.kind, lengths, key_positions)
    visible, boolean, rules = normal(mask, grid)
    if len(boolean) == 1 and not rules:
        return _Seen(visible, boolean[0].array, offset, positions, boolean=boolean)
    rules = (*rules, *boolean)
    seen = _Seen(visible, None, offset, positions, rules, grid if rules else None, boolean)
    if isinstance(visible, Intervals) and not any(isinstance(part, BooleanArray) for part in leaves(mask)):
        if same:
            mask.__dict__["_seen"] = (form, L, S, query_offset, alibi), seen
    return seen


def _given(
    out: Any, output: bool, inputs: tuple[Any, ...], more: tuple[Array, ...], arrays: Arrays, layout: str, L: int,
    S: int,
) -> tuple[Array, Caller]:  # fmt: skip
    """Return where a backend puts an output that is wanted and what returns `out`, or raise the error of a wrong one.

    It must share no memory with the inputs, and with `more`.
    """
    form, headless = arrays.form, arrays.headless
    if form.kind == "dask":
        raise ValueError("out must be None with Dask arrays, which are computed later: use dask.array.store")
    query, key, value = inputs
    Hq, Ev = form.Hq, form.Ev
    rows = (L,) if headless else (Hq, L) if layout == "HLE" or value is None else (L, Hq)
    used = (query, key, *more) if value is None else (query, key, value, *more)
    if type(key) is Stored or type(value) is Stored:
        tables = [array.table for array in used if type(array) is Stored and array.table is not None]
        used = (*(part for array in used for part in arrays_in(array)), *tables)
    checks.check_out(out, (*form.batch, *rows, S if value is None else Ev), form.dtype, used)
    return checks.heads_first(out, layout) if output else None, tuple.__new__(Caller, (layout, headless, out))


def _arrays_among(mask: Mask | None, bias: Any, sink: Any) -> tuple[Array, ...]:
    """Return the arrays of mask, bias and sink."""
    parts = (*(bias if isinstance(bias, tuple) else (bias,)), sink)
    more = [as_array("bias", part) for part in parts if part is not None and not isinstance(part, ALiBi)]
    more += [part.array for part in leaves(mask) if isinstance(part, BooleanArray)] if mask is not None else []
    return tuple(more)
