"""A checked attention problem: every argument error is raised here, and backends see only what is left."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arguments import (
    bias_parts,
    canonical_view,
    check_out,
    check_score_mod,
    heads_first,
    one_kind,
    real_number,
    sink_logits,
    sizes,
    soft_cap,
    sum_of_biases,
)
from sdpa_ref.arrays import (
    FLOATS,
    Array,
    accumulation_dtype,
    as_array,
    is_aligned,
    is_float,
    kind,
    module_of,
    result_dtype,
)
from sdpa_ref.biases import ALiBi
from sdpa_ref.dropout import Dropout
from sdpa_ref.masks import Grid, Intervals, Mask, as_mask, place_queries, reduce_mask, walk
from sdpa_ref.masks.algebra import BooleanArray, check_sizes

ScoreMod = Callable[..., Any]
NO_VALUE: Any = object()  # instead of a value where only weights are wanted


class Result(NamedTuple):
    """What a backend computed, in canonical order; None for what was not wanted.

    `m` is the largest score of each row, the sink's included, and `z` the sum of the exponentials beside it; -inf and 0
    for a row without any. Weights are made again from these two: in the lse the logarithm of z drowns beside a large m.
    """

    output: Array = None
    lse: Array = None
    weights: Array = None
    m: Array = None
    z: Array = None


class Problem(NamedTuple):
    """Attention in canonical form: checked, broadcast, heads before lengths.

    Attributes
    ----------
    query, key, value : array
        Views ``(*batch, Hq, L, E)``, ``(*batch, Hkv, S, E)``, ``(*batch, Hkv, S, Ev)`` of type `dtype`, native and
        aligned, with any strides; `value` is None where only weights are wanted.
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
        Whether mask or bias exist in part as rules only; then `rows` evaluates them, and `dense` and `bias` do not
        count.
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
    first_row: int
    plans: dict[Any, Any]

    @staticmethod
    def of(
        query: Any,
        key: Any,
        value: Any,
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
            (type(query) is np.ndarray or kind(query) == "cupy")
            and type(key) is type(query)
            and type(value) is type(query)
            and bias is None
            and sink is None
            and out is None
            and (mask is None or (isinstance(mask, Mask) and mask.cacheable))
            and type(layout) is str
            and (query_offset is None or type(query_offset) is str or type(query_offset) is int)
            and (scale is None or type(scale) is float)
            and (softcap is None or type(softcap) is float)
            and (score_mod is None and (dropout is None or type(dropout) is Dropout))
        ):
            name = (type(query), query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype,
                    mask, scale, softcap, query_offset, dropout, layout)  # fmt: skip
            known = _known.get(name)
            if known is not None and (
                type(query) is not np.ndarray or (query.flags.aligned and key.flags.aligned and value.flags.aligned)
            ):
                return tuple.__new__(Problem, (query, key, value) + known)  # noqa: RUF005  # unpacking makes a list first
        problem = _state(
            query, key, value, mask, bias, scale, softcap, sink, query_offset, score_mod, dropout, layout, out
        )
        if name is not None and problem.as_given and problem.L <= _KNOWN_ROWS:
            if len(_known) >= _KNOWN:
                _known.clear()
            _known[name] = problem[3:]
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
                dense = dense & self.grid.held(rule, self.first_row + i0, self.first_row + i1)
            dense = np.broadcast_to(dense, shape)
        elif dense is not None:
            dense = dense[..., rows, :]
        if len(self.biases) > 1:
            varies = [each.ndim > 1 and each.shape[-2] != 1 for each in self.biases]
            parts = [each[..., rows, :] if own else each for each, own in zip(self.biases, varies, strict=True)]
            bias = np.broadcast_to(sum_of_biases(parts), shape)
        elif bias is not None:
            bias = bias[..., rows, :]
        return self._replace(
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

    def differentiable(self) -> "Problem":
        """Return the problem itself, or raise the error of a score_mod that nobody can differentiate."""
        if self.score_mod is not None and not callable(getattr(self.score_mod, "derivative", None)):
            raise NotImplementedError(
                "gradients need the derivative of score_mod by s: set score_mod.derivative = f(s, b, h, i, j)"
            )
        return self

    def incoming(self, grad_output: Any, grad_lse: Any) -> tuple[Array, Array]:
        """Return the incoming gradients in canonical order, or raise the error of the first that is wrong."""
        views: list[Array] = []
        for name, given, width in (("grad_output", grad_output, (self.Ev,)), ("grad_lse", grad_lse, ())):
            if given is None and name == "grad_lse":
                views.append(None)
                continue
            array = as_array(name, given)
            if not is_float(array.dtype):
                raise TypeError(f"{name} must be {FLOATS}, got {array.dtype}")
            one_kind({"query": self.query, name: array})
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
        """Return the array to fill with the output, in canonical order: `out`, or a new one in the caller's layout."""
        if self.out is not None:
            return self.out
        empty = np.empty if self.kind == "numpy" else module_of(self.kind).empty
        if self.layout == "HLE":
            return empty(self.query.shape[:-1] + (self.Ev,), self.dtype)  # noqa: RUF005
        return empty((*self.batch, self.L, self.Hq, self.Ev), self.dtype).swapaxes(-2, -3)

    def to_caller(self, array: Array, *, rows_last: bool = False) -> Array:
        """Return a canonical output (or lse, `rows_last`) in the caller's layout and number of axes."""
        if self.headless:
            return array[0]
        if self.layout == "HLE":
            return array
        return array.swapaxes(-1, -2) if rows_last else array.swapaxes(-2, -3)


_known: dict[Any, tuple[Any, ...]] = {}  # what follows query, key and value, by all that determines it
_KNOWN = 256
_KNOWN_ROWS = 4096  # a known problem holds a few numbers a row


def _state(
    query: Any, key: Any, value: Any, mask: Any, bias: Any, scale: Any, softcap: Any, sink: Any, query_offset: Any,
    score_mod: Any, dropout: Any, layout: Any, out: Any,
) -> Problem:  # fmt: skip
    if layout not in ("HLE", "LHE"):
        raise ValueError(f'layout must be "HLE" (..., H, L, E) or "LHE" (..., L, H, E), got {layout!r}')
    given = {"query": as_array("query", query), "key": as_array("key", key)}
    if value is not NO_VALUE:
        given["value"] = as_array("value", value)
    dtype = result_dtype(**given)
    acc_dtype = accumulation_dtype(dtype)
    for name, array in given.items():
        if array.ndim < 2:
            raise ValueError(f"{name} must have at least 2 axes, (..., H, length, width), got shape {array.shape}")
    headless = all(array.ndim == 2 for array in given.values())
    views = {name: heads_first(array, layout) for name, array in given.items()}
    batch, Hq, Hkv, L, S, E, Ev = sizes(views, {name: array.shape for name, array in given.items()}, layout)

    if mask is not None:
        mask = as_mask(mask)
        check_sizes(mask, batch, Hq, L, S)
    biases, slopes = bias_parts(bias, batch, Hq, L, S)
    positions, origin, positional = place_queries(mask, query_offset, batch, L, S, alibi=slopes is not None)
    grid = Grid(batch, Hq, L, S, positions, origin, kind(given["query"]))
    intervals, arrays, rules = reduce_mask(mask, grid)
    if len(arrays) == 1 and not rules:
        dense = np.broadcast_to(arrays[0].array, grid.shape)
    else:
        dense, rules = None, [*rules, *arrays]
    logits = None if sink is None else sink_logits(sink, Hq, acc_dtype)
    one_kind(
        {
            **given,
            **{f"mask {n}": a.array for n, a in enumerate(arrays)},
            **{f"bias {n}": b for n, b in enumerate(biases)},
        }
    )
    canonical = {name: canonical_view(view, dtype, (*batch, *view.shape[-3:])) for name, view in views.items()}
    if score_mod is not None:
        check_score_mod(score_mod, (*batch, Hq, L, S), module_of(grid.kind))
    if dropout is not None and not isinstance(dropout, Dropout):
        raise TypeError(f"dropout must be a Dropout(p, seed), got {type(dropout).__name__}")
    if out is not None:
        shape = (*batch, Hq, L, Ev) if "value" in given else (*batch, Hq, L, S)
        if layout == "LHE" and "value" in given and not headless:
            shape = (*batch, L, Hq, Ev)
        masks = [] if mask is None else [part.array for part in walk(mask) if isinstance(part, BooleanArray)]
        added = [part for part in (bias if isinstance(bias, tuple) else (bias,)) if not isinstance(part, ALiBi)]
        used = [*given.values(), *masks, *(as_array("bias", part) for part in (*added, sink) if part is not None)]
        check_out(out, shape[1:] if headless else shape, dtype, used)
        usable = "value" in given and is_aligned(out)  # else the result is copied into it
        out = heads_first(out, layout) if usable else None
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
        scale=(1 / math.sqrt(E) if E else 1.0) if scale is None else real_number("scale", scale),
        softcap=None if softcap is None else soft_cap(softcap),
        sink=logits,
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
        biases=tuple(biases),
        blockwise=bool(rules) or len(biases) > 1,
        as_given=all(canonical[name] is given[name] for name in given),
        first_row=0,
        plans={},
    )
