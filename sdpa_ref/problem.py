"""The problem that a backend is given: checked, and in canonical order.

What a kernel must be compiled for is its `Form` and which of the options are there; lengths, offsets, bounds, strides
and addresses are numbers that change from call to call.
"""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arrays import Array, is_aligned, module_of
from sdpa_ref.dropout import Dropout
from sdpa_ref.floating_point import ieee
from sdpa_ref.masks import Band, Grid, Intervals, Mask
from sdpa_ref.storage import Stored

ScoreMod = Callable[..., Any]


class Form(NamedTuple):
    """What does not change while sequences grow: types, batch axes, heads and widths.

    Attributes
    ----------
    dtype, acc_dtype : dtype
        Of query, key, value and output, in native byte order; and that in which scores and sums are accumulated.
    kind : str
        "numpy" or "cupy"; "dask" or "store" before a problem is cut into blocks.
    batch : tuple of int
        The leading axes, broadcast.
    Hq, Hkv, E, Ev : int
        Query heads, key heads, width of queries and keys, and width of values (0 where there are none).
    """

    dtype: np.dtype[Any]
    acc_dtype: np.dtype[Any]
    kind: str
    batch: tuple[int, ...]
    Hq: int
    Hkv: int
    E: int
    Ev: int


class Problem(NamedTuple):
    """Attention in canonical form: checked, and heads before lengths.

    Arrays are in native byte order and lie in memory in any way: any strides, and addresses that are no multiples of
    their items' size (`aligned` copies those). Those beside the query broadcast by NumPy's rules.

    Attributes
    ----------
    query, key, value : array; key and value also Stored
        Views ``(*batch, Hq, L, E)``, ``(..., Hkv, S, E)`` and ``(..., Hkv, S, Ev)`` of type `dtype`; the leading axes
        of key and value broadcast to the batch. `value` is None where only weights are wanted. Pages and codes are
        `Stored`, in types of their own.
    out : array or None
        View ``(*batch, Hq, L, Ev)`` that receives the output; None: a new array.
    scale, softcap : float, float or None
        Within the range of `acc_dtype`, so that ``scale * score`` and ``tanh(score / softcap)`` are never 0 / 0.
    visible : Band, Intervals or None
        The keys that a row sees, as numbers a batch entry or a row; None for all.
    keep : bool array or None
        Broadcasts to ``(*batch, Hq, L, S)``: the caller's boolean mask, to be joined to `visible` by "and".
    bias : float array or None
        Broadcasts to ``(*batch, Hq, L, S)``, in the caller's type; -inf drops the key. A finite number beyond the range
        of `acc_dtype` stands for the largest within it.
    slopes : float64 array, (Hq,) or broadcasting to (..., Hq), or None
        ALiBi: ``-slopes[h] * abs(position - j)`` is added.
    offset, positions : int or int64 array, int64 array or None
        A query stands at ``offset + i``, the offset broadcast to the batch axes; or at ``positions``, ``(*batch, L)``,
        where documents share a row.
    key_positions : int64 array or None
        The positions of the keys for ALiBi, broadcastable to ``(*batch, S)``, where they are not 0, 1, 2 and so on.
    sink : float64 array (Hq,) or None
        One logit a head that only adds to the denominator.
    score_mod : callable or None
        ``f(s, b, h, i, j)``, to be applied to the scores.
    dropout : Dropout or None
    first_row, first_key, first_head, first_entry : int
        Indices of row 0, key 0, head 0 and entry 0 in the caller's problem, which `dropout` and `score_mod` count from;
        under dropout `first_key` is a multiple of 4.
    plain : bool
        Only where none of the options above is there, and so nothing has to be asked for each of them.
    blockwise : bool
        Whether mask or bias exist in part as rules only: then `rows` evaluates them for some rows, and `keep` and
        `bias` do not count before.
    """

    form: Form
    query: Array
    key: Array
    value: Array
    out: Array
    scale: float
    softcap: float | None = None
    visible: Band | Intervals | None = None
    keep: Array = None
    bias: Array = None
    slopes: Array = None
    offset: Any = 0
    positions: Array = None
    sink: Array = None
    score_mod: ScoreMod | None = None
    dropout: Dropout | None = None
    first_row: int = 0
    plain: bool = False
    blockwise: bool = False
    rules: tuple[Mask, ...] = ()
    biases: tuple[Array, ...] = ()
    grid: Grid | None = None  # what the rules are laid over
    key_positions: Array = None
    first_key: int = 0
    first_head: int = 0
    first_entry: int = 0

    @property
    def stored(self) -> bool:
        """Whether keys or values are pages or codes."""
        return type(self.key) is Stored or type(self.value) is Stored

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of query, key, value and output."""
        return self.form.dtype

    @property
    def acc_dtype(self) -> np.dtype[Any]:
        """Type of scores and sums."""
        return self.form.acc_dtype

    @property
    def kind(self) -> str:
        """Kind of the arrays, "numpy" or "cupy"."""
        return self.form.kind

    @property
    def batch(self) -> tuple[int, ...]:
        """The leading axes."""
        return self.form.batch

    @property
    def B(self) -> int:
        """Number of batch entries."""
        return math.prod(self.form.batch)

    @property
    def Hq(self) -> int:
        """Number of query heads."""
        return self.form.Hq

    @property
    def Hkv(self) -> int:
        """Number of key heads."""
        return self.form.Hkv

    @property
    def group(self) -> int:
        """How many query heads read one key head."""
        return self.form.Hq // self.form.Hkv if self.form.Hkv else 1

    @property
    def L(self) -> int:
        """Number of queries."""
        return int(self.query.shape[-2])

    @property
    def S(self) -> int:
        """Number of keys."""
        return int(self.key.shape[-2])

    @property
    def E(self) -> int:
        """Width of queries and keys."""
        return self.form.E

    @property
    def Ev(self) -> int:
        """Width of values."""
        return self.form.Ev

    @property
    def scores_shape(self) -> tuple[int, ...]:
        """Shape of the weights, ``(*batch, Hq, L, S)``."""
        return (*self.form.batch, self.form.Hq, self.L, self.S)

    @property
    def intervals(self) -> Intervals | None:
        """What `visible` says, as arrays ``(*batch, L)``."""
        if isinstance(self.visible, Band):
            return self.visible.intervals(self.L, self.S, self.form.batch)
        shape = (*self.form.batch, self.L)
        return self.visible and Intervals(*(np.broadcast_to(bound, shape) for bound in self.visible))

    def rows(self, i0: int, i1: int) -> "Problem":
        """Return the problem of the query rows [i0, i1), with the rules of mask and bias evaluated for them."""
        keep, bias, visible = _some_rows(self.keep, i0, i1), _some_rows(self.bias, i0, i1), self.visible
        if self.rules:
            first = self.first_row
            held = (self.grid.held(rule, first + i0, first + i1) for rule in self.rules if self.grid is not None)
            keep = reduce(np.logical_and, held)
        if len(self.biases) > 1:
            bias = sum_of_biases([_some_rows(each, i0, i1) for each in self.biases])
        if isinstance(visible, Band):
            visible = visible._replace(offset=visible.offset + i0, rows=visible.rows - i0)
        elif visible is not None:
            visible = Intervals(*(x if x.shape[-1] == 1 else x[..., i0:i1] for x in visible))
        return self._replace(
            query=self.query[..., i0:i1, :],
            out=None if self.out is None else self.out[..., i0:i1, :],
            visible=visible,
            keep=keep,
            bias=bias,
            offset=self.offset + i0,
            positions=None if self.positions is None else self.positions[..., i0:i1],
            first_row=self.first_row + i0,
            plain=False,
            blockwise=False,
            rules=(),
            biases=() if bias is None else (bias,),
        )

    def aligned(self) -> "Problem":
        """Return the problem with copies of the inputs that do not lie at multiples of their items' size."""
        moved: dict[str, Any] = {}
        for name in ("query", "key", "value", "keep", "bias"):
            part = getattr(self, name)
            if type(part) is Stored:
                odd = {
                    own: x.copy() for own in ("numbers", "scale", "offset") if not is_aligned(x := getattr(part, own))
                }
                moved |= {name: part._replace(**odd)} if odd else {}
            elif not is_aligned(part):
                moved[name] = part.copy()
        return self._replace(**moved) if moved else self

    def kept(self) -> Array:
        """Return which keys each row keeps, ``(*batch, Hq, L, S)``; of a problem that is not blockwise."""
        module, j = module_of(self.kind), np.arange(self.S)
        keep = np.ones(self.scores_shape, bool)
        intervals = self.intervals
        if intervals is not None:
            prefix, start, stop = (bound[..., None, :, None] for bound in intervals)
            keep &= (j < prefix) | ((start <= j) & (j < stop))
        keep = module.asarray(keep)
        if self.keep is not None:
            keep &= self.keep
        if self.bias is not None:
            keep &= self.bias != -np.inf
        return keep

    def added(self) -> Array:
        """Return what bias and ALiBi add to the scores, in float64 and broadcastable to them, or 0.

        The problem is not blockwise.
        """
        total: Array = 0
        if self.bias is not None:
            most = float(np.finfo(self.acc_dtype).max)
            wide = self.bias.astype(np.float64)
            total = np.where(np.isfinite(wide), np.clip(wide, -most, most), wide)
        if self.slopes is not None:
            total = total - module_of(self.kind).asarray(self.slopes[..., None, None] * self.distances())
        return total

    def distances(self) -> Any:
        """Return how far each key is from each query's position, a NumPy array that broadcasts to the scores."""
        keys = np.arange(self.S) if self.key_positions is None else self.key_positions[..., None, None, :]
        return np.abs(self.stands()[..., None, :, None] - keys)

    def stands(self) -> Any:
        """Return where each query stands, an int64 array that broadcasts to ``(*batch, L)``."""
        return np.arange(self.L) + np.asarray(self.offset)[..., None] if self.positions is None else self.positions

    def indices(self) -> tuple[Array, Array, Array, Array]:
        """Return b, h, i and j as `score_mod` counts them, arrays that broadcast to the scores."""
        b = np.arange(self.first_entry, self.first_entry + self.B).reshape(*self.batch, 1, 1, 1)
        h = np.arange(self.first_head, self.first_head + self.Hq)
        i = np.arange(self.first_row, self.first_row + self.L)
        return b, h[:, None, None], i[:, None], np.arange(self.first_key, self.first_key + self.S)

    def kept_by_dropout(self) -> Array:
        """Return the keep bits of the weights, ``(*batch, Hq, L, S)``; there is a dropout."""
        first = self.first_entry, self.first_head, self.first_row, self.first_key
        assert self.dropout is not None
        return self.dropout.keep(self.scores_shape, first=first)

    def new_output(self) -> Array:
        """Return the array to fill with the output: `out`, or a new one."""
        if self.out is not None:
            return self.out
        return module_of(self.kind).empty((*self.query.shape[:-1], self.form.Ev), self.form.dtype)


def _some_rows(array: Array, i0: int, i1: int) -> Array:
    """Return the rows [i0, i1) of an array that broadcasts to the scores, None of none."""
    if array is None or array.ndim < 2 or array.shape[-2] == 1:
        return array
    return array[..., i0:i1, :]


@ieee
def sum_of_biases(biases: list[Array]) -> Array:
    """Return the sum in float64: -inf in any drops the key, and finite numbers stay finite."""
    wide = [each.astype(np.float64) for each in biases]
    with np.errstate(over="ignore", invalid="ignore"):
        total: Array = sum(wide)
    if np.isfinite(total).all():
        return total
    finite = reduce(np.logical_and, map(np.isfinite, wide))
    dropped = reduce(np.logical_or, (each == -np.inf for each in wide))
    most = np.finfo(np.float64).max
    return np.where(dropped, -np.inf, np.where(finite, np.clip(total, -most, most), total))
