"""A checked attention problem: every argument error is raised here, and backends see only what is left."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arrays import (
    FLOATS,
    Array,
    accumulation_dtype,
    as_array,
    is_float,
    kind,
    module_of,
    result_dtype,
)
from sdpa_ref.biases import ALiBi
from sdpa_ref.dropout import Dropout
from sdpa_ref.masks import Grid, Intervals, Mask, as_mask, place_queries, reduce_mask
from sdpa_ref.masks.algebra import check_sizes
from sdpa_ref.masks.checks import check_broadcast

ScoreMod = Callable[..., Any]


class Result(NamedTuple):
    """What a backend computed, in canonical order; None for what was not wanted."""

    output: Array = None
    lse: Array = None
    weights: Array = None


@dataclass(frozen=True, eq=False)
class Problem:
    """Attention in canonical form: checked, broadcast, heads before lengths.

    Attributes
    ----------
    query, key, value : array
        Views ``(*batch, Hq, L, E)``, ``(*batch, Hkv, S, E)``, ``(*batch, Hkv, S, Ev)`` of type `dtype`, native and aligned,
        with any strides; `value` is None where only weights are wanted.
    out : array or None
        View ``(*batch, Hq, L, Ev)`` that receives the output.
    intervals : Intervals or None
        The keys ``[0, prefix)`` and ``[start, stop)`` that a row sees; None for all.
    dense : bool array or None
        View ``(*batch, Hq, L, S)`` of the caller's boolean mask, to be joined to `intervals` by "and".
    bias : float array or None
        View ``(*batch, Hq, L, S)`` in the caller's type.
    slopes : float64 array (Hq,) or None
        ALiBi: ``-slopes[h] * abs(positions[b, i] - j)`` is added.
    positions : int64 array, broadcast to (*batch, L), or None
        Where each query stands, in units of key indices.
    sink : float64 array (Hq,) or None
        One logit a head that only adds to the denominator.
    first_row : int
        Index of row 0 in the caller's problem.
    blockwise : bool
        Whether mask or bias exist in part as rules only; then `rows` evaluates them, and `dense` and `bias` say nothing.
    plans : dict
        Shared by all problems that differ in nothing but their numbers; a backend keeps its plan here.
    """

    query: Array
    key: Array
    value: Array
    out: Array
    dtype: np.dtype[Any]
    acc_dtype: np.dtype[Any]
    batch: tuple[int, ...]
    Hq: int
    Hkv: int
    L: int
    S: int
    E: int
    Ev: int
    scale: float
    softcap: float | None
    sink: Array
    intervals: Intervals | None
    dense: Array
    bias: Array
    slopes: Array
    positions: Array
    score_mod: ScoreMod | None
    dropout: Dropout | None
    layout: str
    headless: bool  # whether the caller's arrays have no head axis
    kind: str
    grid: Grid
    rules: tuple[Mask, ...]
    biases: tuple[Array, ...]
    blockwise: bool
    as_given: bool  # whether the canonical views are the caller's arrays themselves
    first_row: int = 0
    plans: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
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
    ) -> "Problem":
        """Return the problem that these arguments state, or raise the error of the first that is wrong."""
        name = None
        if (
            type(query) is np.ndarray
            and type(key) is np.ndarray
            and type(value) is np.ndarray
            and bias is None
            and sink is None
            and out is None
            and (mask is None or (isinstance(mask, Mask) and mask.cacheable))
            and (query_offset is None or type(query_offset) is str or type(query_offset) is int)
            and (scale is None or type(scale) is float)
            and (softcap is None or type(softcap) is float)
            and (score_mod is None and (dropout is None or type(dropout) is Dropout))
        ):
            name = (query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
                    mask, scale, softcap, query_offset, dropout, layout)  # fmt: skip
            known = _known.get(name)
            if known is not None and query.flags.aligned and key.flags.aligned and value.flags.aligned:
                return known._with(query, key, value)
        problem = _state(
            query, key, value, mask, bias, scale, softcap, sink, query_offset, score_mod, dropout, layout, out
        )
        if name is not None and problem.as_given and problem.L <= _KNOWN_ROWS:
            if len(_known) >= _KNOWN:
                _known.clear()
            _known[name] = replace(problem, query=None, key=None, value=None)
        return problem

    @property
    def B(self) -> int:
        """Number of batch entries."""
        return math.prod(self.batch)

    @property
    def group(self) -> int:
        """How many query heads read one key/value head."""
        return self.Hq // self.Hkv if self.Hkv else 1

    def rows(self, i0: int, i1: int) -> "Problem":
        """Return the problem of the query rows [i0, i1), with the rules of mask and bias evaluated for them."""
        rows = slice(i0, i1)
        dense, bias = self.dense, self.bias
        shape = (*self.batch, self.Hq, i1 - i0, self.S)
        if self.rules:
            dense = True
            for rule in self.rules:
                dense = dense & rule._keep(self.grid, self.first_row + i0, self.first_row + i1)
            dense = np.broadcast_to(dense, shape)
        elif dense is not None:
            dense = dense[..., rows, :]
        if len(self.biases) > 1:
            bias = _sum([each[..., rows, :] for each in self.biases])
        elif bias is not None:
            bias = bias[..., rows, :]
        return replace(
            self,
            query=self.query[..., rows, :],
            out=None if self.out is None else self.out[..., rows, :],
            L=i1 - i0,
            intervals=None if self.intervals is None else Intervals(*(x[..., rows] for x in self.intervals)),
            positions=None if self.positions is None else self.positions[..., rows],
            dense=dense,
            bias=bias,
            rules=(),
            biases=() if bias is None else (bias,),
            blockwise=False,
            first_row=self.first_row + i0,
            plans={},
        )

    def incoming(self, grad_output: Any, grad_lse: Any) -> tuple[Array, Array]:
        """Return the incoming gradients in canonical order, or raise the error of the first that is wrong."""
        if self.score_mod is not None and not callable(getattr(self.score_mod, "derivative", None)):
            raise NotImplementedError(
                "gradients need the derivative of score_mod by s: set score_mod.derivative = f(s, b, h, i, j)"
            )
        views = []
        for name, given, width in (("grad_output", grad_output, (self.Ev,)), ("grad_lse", grad_lse, ())):
            if given is None and name == "grad_lse":
                views.append(None)
                continue
            array = as_array(name, given)
            if not is_float(array.dtype):
                raise TypeError(f"{name} must be {FLOATS}, got {array.dtype}")
            _one_kind({"query": self.query, name: array})
            shape = (*self.batch, *((self.Hq, self.L) if self.layout == "HLE" else (self.L, self.Hq)), *width)
            shape = (self.L, *width) if self.headless else shape
            if array.shape != shape:
                raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
            if self.headless:
                array = array[None]
            elif self.layout == "LHE":
                array = array.swapaxes(-2, -3) if width else array.swapaxes(-1, -2)
            views.append(array)
        return views[0], views[1]

    def new_output(self) -> Array:
        """Return the array to fill with the output: `out`, or a new one in the caller's layout, seen in canonical order."""
        if self.out is not None:
            return self.out
        if self.layout == "HLE":
            return module_of(self.kind).empty((*self.batch, self.Hq, self.L, self.Ev), self.dtype)
        return module_of(self.kind).empty((*self.batch, self.L, self.Hq, self.Ev), self.dtype).swapaxes(-2, -3)

    def to_caller(self, array: Array, *, rows_last: bool = False) -> Array:
        """Return a canonical output (or lse, `rows_last`) in the caller's layout and number of axes."""
        if self.headless:
            return array[0]
        if self.layout == "HLE":
            return array
        return array.swapaxes(-1, -2) if rows_last else array.swapaxes(-2, -3)

    def _with(self, query: Array, key: Array, value: Array) -> "Problem":
        """Return this problem with other numbers: what `dataclasses.replace` does, in a tenth of the time."""
        problem = object.__new__(Problem)
        problem.__dict__.update(self.__dict__, query=query, key=key, value=value)
        return problem


_known: dict[Any, Problem] = {}  # problems without their arrays, by all that determines the rest
_KNOWN = 256
_KNOWN_ROWS = 4096  # a known problem holds a few numbers a row


def _state(query: Any, key: Any, value: Any, mask: Any, bias: Any, scale: Any, softcap: Any, sink: Any, query_offset: Any,
           score_mod: Any, dropout: Any, layout: Any, out: Any) -> Problem:  # fmt: skip
    if layout not in ("HLE", "LHE"):
        raise ValueError(f'layout must be "HLE" (..., H, L, E) or "LHE" (..., L, H, E), got {layout!r}')
    given = {"query": as_array("query", query), "key": as_array("key", key)}
    if value is not None:
        given["value"] = as_array("value", value)
    dtype = result_dtype(**given)
    acc_dtype = accumulation_dtype(dtype)
    for name, array in given.items():
        if array.ndim < 2:
            raise ValueError(f"{name} must have at least 2 axes, (..., H, length, width), got shape {array.shape}")
    headless = all(array.ndim == 2 for array in given.values())
    views = {name: _heads_first(array, layout) for name, array in given.items()}
    batch, Hq, Hkv, L, S, E, Ev = _sizes(views, {name: array.shape for name, array in given.items()}, layout)

    if mask is not None:
        mask = as_mask(mask)
        check_sizes(mask, batch, Hq, L, S)
    biases, slopes = _biases(bias, batch, Hq, L, S)
    positions, origin, positional = place_queries(mask, query_offset, batch, L, S, alibi=slopes is not None)
    grid = Grid(batch, Hq, L, S, positions, origin)
    intervals, arrays, rules = reduce_mask(mask, grid)
    if len(arrays) == 1 and not rules:
        dense = np.broadcast_to(arrays[0].array, grid.shape)
    else:
        dense, rules = None, [*rules, *arrays]
    sink = None if sink is None else _sink(sink, Hq, acc_dtype)
    _one_kind({**given, **{"mask": a.array for a in arrays}, **{f"bias[{n}]": b for n, b in enumerate(biases)}})
    canonical = {name: _canonical(view, dtype, (*batch, *view.shape[-3:])) for name, view in views.items()}
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a function f(s, b, h, i, j), got {type(score_mod).__name__}")
    if dropout is not None and not isinstance(dropout, Dropout):
        raise TypeError(f"dropout must be a Dropout(p, seed), got {type(dropout).__name__}")
    if out is not None:
        shape = (*batch, Hq, L, Ev) if value is not None else (*batch, Hq, L, S)
        if layout == "LHE" and value is not None:
            shape = (*batch, L, Hq, Ev)
        used = [*given.values(), *(a.array for a in arrays), *biases, *([] if sink is None else [sink])]
        _check_out(out, shape[1:] if headless else shape, dtype, used)
        usable = value is not None and out.flags.aligned  # else the result is copied into it
        out = _heads_first(out, layout) if usable else None
    return Problem(
        query=canonical["query"],
        key=canonical["key"],
        value=canonical.get("value"),
        out=out,
        dtype=dtype,
        acc_dtype=acc_dtype,
        batch=batch,
        Hq=Hq,
        Hkv=Hkv,
        L=L,
        S=S,
        E=E,
        Ev=Ev,
        scale=(1 / math.sqrt(E) if E else 1.0) if scale is None else _real("scale", scale),
        softcap=None if softcap is None else _softcap(softcap),
        sink=sink,
        intervals=intervals,
        dense=dense,
        bias=np.broadcast_to(biases[0], grid.shape) if len(biases) == 1 else None,
        slopes=slopes,
        positions=np.broadcast_to(positions, (*batch, L)) if positional else None,
        score_mod=score_mod,
        dropout=None if dropout is None or dropout.p == 0 else dropout,
        layout=layout,
        headless=headless,
        kind=kind(given["query"]),
        grid=grid,
        rules=tuple(rules),
        biases=tuple(np.broadcast_to(each, grid.shape) for each in biases),
        blockwise=bool(rules) or len(biases) > 1,
        as_given=all(canonical[name] is given[name] for name in given),
    )


def _heads_first(array: Array, layout: str) -> Array:
    """Return a view (..., H, length, width)."""
    if array.ndim == 2:
        return array[None]
    return array.swapaxes(-2, -3) if layout == "LHE" else array


def _sizes(views: dict[str, Array], shapes: dict[str, Any], layout: str) -> tuple[tuple[int, ...], *tuple[int, ...]]:
    """Return batch, Hq, Hkv, L, S, E, Ev."""
    (Hq, L, E), (Hkv, S, key_width) = views["query"].shape[-3:], views["key"].shape[-3:]
    got = ", ".join(f"{name} {shape}" for name, shape in shapes.items()) + (
        f" in layout {layout}" if layout != "HLE" else ""
    )
    if key_width != E:
        raise ValueError(f"query and key must have the same width E, got {E} and {key_width}: {got}")
    Ev = 0
    if "value" in views:
        value_heads, value_length, Ev = views["value"].shape[-3:]
        if value_length != S:
            raise ValueError(f"key and value must have the same length S, got {S} and {value_length}: {got}")
        if value_heads != Hkv:
            raise ValueError(
                f"key and value must have the same number of heads Hkv, got {Hkv} and {value_heads}: {got}"
            )
    if Hq and (Hkv == 0 or Hq % Hkv):
        raise ValueError(f"the query heads Hq = {Hq} must be a multiple of the key heads Hkv = {Hkv}: {got}")
    try:
        batch = np.broadcast_shapes(*(view.shape[:-3] for view in views.values()))
    except ValueError:
        raise ValueError(f"the leading axes of {', '.join(views)} must broadcast: {got}") from None
    return batch, Hq, Hkv, L, S, E, Ev


def _canonical(view: Array, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return the view in the result type and shape; a copy only where type, byte order or alignment ask for it."""
    if view.dtype != dtype or not view.flags.aligned:
        view = view.astype(dtype)
    return view if view.shape == shape else np.broadcast_to(view, shape)


def _biases(bias: Any, batch: tuple[int, ...], Hq: int, L: int, S: int) -> tuple[list[Array], Array]:
    """Return the bias arrays, and the ALiBi slopes (Hq,) or None."""
    arrays, slopes = [], None
    for part in () if bias is None else bias if isinstance(bias, tuple) else (bias,):
        if isinstance(part, ALiBi):
            if part.slopes.shape not in ((), (Hq,)):
                raise ValueError(
                    f"bias: ALiBi slopes must be a number or have shape (Hq,) = ({Hq},), got {part.slopes.shape}"
                )
            slopes = part.slopes + (np.zeros(Hq) if slopes is None else slopes)
            continue
        array = as_array("bias", part)
        if array.dtype == np.bool_:
            raise TypeError("bias must be float numbers that are added to the scores; pass a boolean array as mask=")
        if not is_float(array.dtype):
            raise TypeError(f"bias must be {FLOATS}, got {array.dtype}")
        check_broadcast("bias", array.shape, batch, Hq, L, S)
        native = array.dtype.newbyteorder("=")
        arrays.append(array if array.dtype == native and array.flags.aligned else array.astype(native))
    return arrays, slopes


def _sum(biases: list[Array]) -> Array:
    """Return the sum in float64: -inf in any drops the key, and finite numbers stay finite."""
    wide = [each.astype(np.float64) for each in biases]
    with np.errstate(over="ignore", invalid="ignore"):
        total = sum(wide)
    finite = np.logical_and.reduce(list(map(np.isfinite, wide)))
    dropped = np.logical_or.reduce([each == -np.inf for each in wide])
    most = np.finfo(np.float64).max
    return np.where(dropped, -np.inf, np.where(finite, np.clip(total, -most, most), total))


def _sink(sink: Any, Hq: int, acc_dtype: np.dtype[Any]) -> Array:
    array = as_array("sink", sink)
    if not is_float(array.dtype) and array.dtype.kind not in "iu":
        raise TypeError(f"sink must be real numbers, got {array.dtype}")
    if array.shape not in ((), (Hq,)):
        raise ValueError(f"sink must be a number or have shape (Hq,) = ({Hq},), got {array.shape}")
    logits = np.broadcast_to(array.astype(np.float64), (Hq,))
    most = float(np.finfo(acc_dtype).max)
    return np.where(np.isfinite(logits), np.clip(logits, -most, most), logits)


def _real(name: str, value: Any) -> float:
    number = np.asarray(value)
    if number.ndim or number.dtype.kind not in "fiu":
        raise TypeError(f"{name} must be a real number, got {type(value).__name__} {value!r:.40}")
    if not np.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value}")
    return float(number)


def _softcap(value: Any) -> float:
    cap = np.asarray(value)
    if cap.ndim or cap.dtype.kind not in "fiu":
        raise TypeError(f"softcap must be a real number or None, got {type(value).__name__} {value!r:.40}")
    if not (np.isfinite(cap) and cap > 0):
        raise ValueError(f"softcap must be finite and above 0 (None turns it off), got {value}")
    return float(cap)


def _one_kind(arrays: dict[str, Array]) -> None:
    kinds = {name: kind(array) for name, array in arrays.items()}
    if len(set(kinds.values())) > 1:
        got = ", ".join(f"{name} is a {k} array" for name, k in kinds.items())
        raise TypeError(f"all arrays must be of one kind, nothing is moved between host and device: {got}")


def _check_out(out: Any, shape: tuple[int, ...], dtype: np.dtype[Any], used: list[Array]) -> None:
    module = module_of(kind(used[0]))
    if not isinstance(out, module.ndarray):
        raise TypeError(f"out must be a {module.__name__} array, got {type(out).__name__}")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(f"out must have shape {shape} and dtype {dtype}, got {out.shape} and {out.dtype}")
    if not getattr(out.flags, "writeable", True):
        raise ValueError("out must be writeable, got a read-only array")
    if any(stride == 0 and size > 1 for stride, size in zip(out.strides, out.shape, strict=True)):
        raise ValueError("out must not overlap itself, got an array with a stride of 0")
    for array in used:
        if module.may_share_memory(out, array) and _overlap(module, out, array):
            raise ValueError("out must not share memory with query, key, value, mask, bias or sink")


def _overlap(module: Any, a: Array, b: Array) -> bool:
    try:
        return bool(module.shares_memory(a, b, max_work=10_000))
    except np.exceptions.TooHardError:
        return True
