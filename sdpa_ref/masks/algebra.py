"""The algebra of masks: what all masks share, and what ``&``, ``|`` and ``~`` make of them."""

import itertools
import operator
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, TypeVar, dataclass_transform

import numpy as np

from sdpa_ref.arrays import as_array, kind
from sdpa_ref.frozen import Frozen
from sdpa_ref.masks import looking
from sdpa_ref.masks.band import Band
from sdpa_ref.masks.block import Block
from sdpa_ref.masks.checks import check_broadcast, count
from sdpa_ref.masks.grid import Grid
from sdpa_ref.masks.intervals import Bound, Intervals, Rows, complement, intersection

_SHORT = 64  # keys up to which a boolean array stays one


_M = TypeVar("_M", bound="Mask")


class Mask(Frozen):
    """What the mask objects share: the operators, and the ways to show a mask.

    A mask states its rule in one of three ways: as a `Band` (`_band`), as intervals of keys (`_rows`), or as a test of
    pairs (`_pairs`).
    """

    positional = False  # whether the meaning depends on where the queries stand
    counts_in_documents = False  # whether `Packed` or `key_positions` change what is counted

    def __and__(self, other: Any) -> "Mask":
        return All((*_flat(self, All), *_flat(as_mask(other), All)))

    def __rand__(self, other: Any) -> "Mask":
        return as_mask(other) & self

    def __or__(self, other: Any) -> "Mask":
        return AnyOf((*_flat(self, AnyOf), *_flat(as_mask(other), AnyOf)))

    def __ror__(self, other: Any) -> "Mask":
        return as_mask(other) | self

    def __invert__(self) -> "Mask":
        return Not((self,))

    def __bool__(self) -> bool:
        raise TypeError("a mask is neither true nor false: combine masks with &, | and ~ instead of and, or and not")

    __array_ufunc__ = None  # a NumPy array on the left of & hands over to __rand__
    __pandas_priority__ = 5000  # and so does what is of pandas, whose own are below

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(_short, self.__getstate__().values()))})"

    def dense(self, L: int, S: int, *, batch: tuple[int, ...] | None = None, heads: int | None = None,
              query_offset: Any = None) -> np.ndarray[Any, np.dtype[np.bool_]]:  # fmt: skip
        """Return the mask as a boolean array, True where the query may attend.

        Parameters
        ----------
        L, S : int
            Query and key length.
        batch : tuple of int, optional
            Leading axes; by default those that the mask's own arrays have.
        heads : int, optional
            Query heads Hq; by default those that the mask's own arrays have.
        query_offset : int, array of int, "start" or "end", optional
            As in `sdpa`.

        Returns
        -------
        numpy.ndarray
            Shape ``(L, S)``, or ``(*batch, Hq, L, S)`` where there are batch axes or heads.

        Examples
        --------
        >>> from sdpa_ref import Causal
        >>> Causal().dense(2, 3, query_offset="end").astype(int)
        array([[1, 1, 0],
               [1, 1, 1]])
        """
        grid = self._grid(L, S, batch, heads, query_offset)
        keep = np.ascontiguousarray(np.broadcast_to(self._keep(grid, 0, grid.L), grid.shape))
        return keep if grid.batch or heads is not None or grid.heads != 1 else keep[0]

    def show(self, L: int, S: int, *, batch: tuple[int, ...] | None = None, heads: int | None = None,
             query_offset: Any = None) -> str:  # fmt: skip
        """Return a text picture of the mask: one line a query, ``#`` where it may attend and ``.`` where not.

        The parameters are those of `dense`. A long side is thinned out, and the picture says so; several batch entries
        or heads are drawn below one another.

        Examples
        --------
        >>> from sdpa_ref import FirstTokens, Window
        >>> print((Window(1, 0) | FirstTokens(1)).show(4, 4))
            0123
          0 #...
          1 ##..
          2 ###.
          3 #.##
        """
        return looking.picture(self.dense(L, S, batch=batch, heads=heads, query_offset=query_offset))

    def explain(self, i: int, j: int, L: int, S: int, *, b: int = 0, h: int = 0, batch: tuple[int, ...] | None = None,
                heads: int | None = None, query_offset: Any = None) -> str:  # fmt: skip
        """Return in words which parts of the mask keep or drop key `j` for query `i`.

        Parameters
        ----------
        i, j : int
            Query row and key.
        L, S, batch, heads, query_offset
            As in `dense`.
        b, h : int
            Batch entry (over the flattened leading axes) and query head.

        Examples
        --------
        >>> from sdpa_ref import Causal, Window
        >>> print((Causal() & Window(2, 0)).explain(3, 0, 4, 4))
        query 3 may not attend to key 0
          drop  Causal() & Window(2, 0)
            keep  Causal()
            drop  Window(2, 0)
        """
        return looking.explanation(self, self._grid(L, S, batch, heads, query_offset), i, j, b, h)

    def _grid(self, L: int, S: int, batch: tuple[int, ...] | None, heads: int | None, query_offset: Any) -> Grid:
        """Return the grid of a mask that is shown on its own, with the axes that its arrays need."""
        from sdpa_ref.masks.positions import place_queries, valid_keys  # they read rules, made of this class

        L, S = count("L", L), count("S", S)
        try:
            axes = [part._axes() for part in leaves(self)]
            if batch is None:
                offset = () if query_offset is None or isinstance(query_offset, str) else np.shape(query_offset)
                batch = np.broadcast_shapes(offset, *(own for own, _ in axes))
        except ValueError:
            raise ValueError(f"the batch axes of {self!r} and of query_offset must broadcast") from None
        batch = tuple(count("batch", size) for size in np.atleast_1d(np.array(batch, dtype=object)))
        heads = max(own for _, own in axes) if heads is None else count("heads", heads)
        self._check(batch, heads, L, S)
        offset, documents = place_queries(self, query_offset, batch, L, S)
        return Grid(batch, heads, L, S, offset, documents, lengths=valid_keys(self, L))

    def _band(self) -> Band | None:
        """Return the visible keys as a band, or None where none can say it."""
        return None

    def _rows(self, grid: Grid) -> Rows | None:
        """Return the visible keys as intervals, or None where intervals cannot say it."""
        band = self._band()
        if band is None:
            return None
        if not self.counts_in_documents:
            return band.on(grid.positions, 0)
        return grid.slots(band.on(grid.positions, grid.origin))

    def _pairs(self, grid: Grid, i0: int, i1: int) -> Any:
        """Return which keys the rows [i0, i1) see: booleans that broadcast to (*batch, Hq, i1 - i0, S)."""
        raise AssertionError("a mask states its rule as a band, as intervals or as pairs")

    def _keep(self, grid: Grid, i0: int, i1: int) -> Any:
        """Return what `_pairs` returns, from the intervals where the rule is stated so."""
        rows = self._rows(grid)
        if rows is None:
            return self._pairs(grid, i0, i1)
        j = grid.there(np.arange(grid.S))
        keep = grid.there(np.zeros((i1 - i0, 1), bool)) & (j < 0)
        for start, stop in rows:
            start, stop = (
                grid.there(np.broadcast_to(x, np.broadcast_shapes(x.shape, (grid.L,)))[..., i0:i1])
                for x in (start, stop)
            )
            keep = keep | ((j >= start[..., None]) & (j < stop[..., None]))
        return keep[..., None, :, :] if keep.ndim > 2 else keep

    def _settled(self, grid: Grid) -> "Mask":
        """Return the mask in a form of which `_within` takes parts: intervals where these can say it."""
        rows = self._rows(grid)
        return self if rows is None else Given(tuple(rows))

    def _within(self, block: Block) -> "Mask":
        """Return a settled mask of this block alone, whose first row and key are 0."""
        raise AssertionError("a settled mask is intervals, an operator, or has a way of its own")

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        """Raise the error of a mask that does not fit these sizes."""

    def _axes(self) -> tuple[tuple[int, ...], int]:
        """Return the batch axes and the number of heads that the mask's own arrays need."""
        return (), 1


RULES: dict[str, type[Mask]] = {}  # the masks that people write, by name, in the order of their definition


@dataclass_transform(frozen_default=True, eq_default=False)
def rule(mask: type[_M]) -> type[_M]:
    """Make a class of masks a frozen dataclass, and list it among the rules."""
    RULES[mask.__name__] = mask
    return dataclass(frozen=True, eq=False, repr=False)(mask)


@dataclass(frozen=True, eq=False, repr=False)
class _Operator(Mask):
    """A mask that is made of others."""

    parts: tuple[Mask, ...]

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        for part in self.parts:
            part._check(batch, heads, L, S)

    def _settled(self, grid: Grid) -> Mask:
        rows = self._rows(grid)
        return type(self)(tuple(p._settled(grid) for p in self.parts)) if rows is None else Given(tuple(rows))

    def _within(self, block: Block) -> Mask:
        return type(self)(tuple(part._within(block) for part in self.parts))


@dataclass(frozen=True, eq=False, repr=False)
class All(_Operator):
    """Every part keeps the key: what ``&`` makes."""

    def __repr__(self) -> str:
        return " & ".join(f"({p!r})" if isinstance(p, AnyOf) else repr(p) for p in self.parts)

    def _band(self) -> Band | None:
        return self._intersection

    @cached_property
    def _intersection(self) -> Band | None:
        band: Band | None = self.parts[0]._band()
        for part in self.parts[1:]:
            own = part._band()
            if band is None or own is None:
                return None
            band = band.intersection(own)
        return band

    def _rows(self, grid: Grid) -> Rows | None:
        rows = [part._rows(grid) for part in self.parts]
        return None if any(r is None for r in rows) else reduce(intersection, rows)  # type: ignore[arg-type]

    def _pairs(self, grid: Grid, i0: int, i1: int) -> Any:
        return reduce(operator.and_, (grid.held(part, i0, i1) for part in self.parts))


@dataclass(frozen=True, eq=False, repr=False)
class AnyOf(_Operator):
    """At least one part keeps the key: what ``|`` makes."""

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))

    def _band(self) -> Band | None:
        bands = [part._band() for part in self.parts]
        return reduce(lambda a, b: None if a is None or b is None else a.union(b), bands)

    def _rows(self, grid: Grid) -> Rows | None:
        rows = [part._rows(grid) for part in self.parts]
        return None if any(r is None for r in rows) else list(itertools.chain(*rows))  # type: ignore[arg-type]

    def _pairs(self, grid: Grid, i0: int, i1: int) -> Any:
        return reduce(operator.or_, (grid.held(part, i0, i1) for part in self.parts))


@dataclass(frozen=True, eq=False, repr=False)
class Not(_Operator):
    """The part drops the key: what ``~`` makes."""

    def __repr__(self) -> str:
        (part,) = self.parts
        return f"~({part!r})" if isinstance(part, (All, AnyOf)) else f"~{part!r}"

    def _rows(self, grid: Grid) -> Rows | None:
        rows = self.parts[0]._rows(grid)
        return None if rows is None else complement(rows, grid.S)

    def _pairs(self, grid: Grid, i0: int, i1: int) -> Any:
        return ~self.parts[0]._keep(grid, i0, i1)


@dataclass(frozen=True, eq=False, repr=False)
class Given(Mask):
    """Intervals as they are: what any mask that is intervals becomes in a block."""

    rows: tuple[tuple[Bound, Bound], ...]

    def _rows(self, grid: Grid) -> Rows:
        return list(self.rows)

    def _within(self, block: Block) -> Mask:
        return Given(tuple((block.bound(start), block.bound(stop)) for start, stop in self.rows))


@dataclass(frozen=True, eq=False, repr=False)
class BooleanArray(Mask):
    """A boolean array, True where the query may attend, as it was given."""

    array: Any

    def __repr__(self) -> str:
        return f"array{self.array.shape}"

    @property
    def key(self) -> Any:
        """What makes two of these equal: the identity of an array that may change."""
        return id(self.array)

    @property
    def per_row(self) -> bool:
        """Whether it has rows of its own for each query."""
        return bool(self.array.ndim > 1 and self.array.shape[-2] != 1)

    def alike(self, S: int) -> bool:
        """Whether it has one row of `S` keys, for all queries, heads and batch entries."""
        return bool(self.array.shape[-1:] == (S,) and self.array.size == S)

    def _rows(self, grid: Grid) -> Rows | None:
        keys = self._keys(grid.S)
        if keys is None:
            return None
        edges = np.count_nonzero(keys[..., 1:] != keys[..., :-1], axis=-1)
        if (edges + keys[..., 0] + keys[..., -1]).max(initial=0) > 2:
            return None
        start = keys.argmax(-1)
        stop = start + np.count_nonzero(keys, axis=-1)
        return [(start[..., None], stop[..., None])]

    def interval(self, S: int) -> Intervals | None:
        """Return the one interval that all rows of all batch entries see, if that is what `alike` keys say."""
        keys = self._keys(S)
        if keys is None:
            return None
        stored = keys.tobytes()  # bytes are searched in a tenth of the time that a few calls of NumPy take
        start, stop = S - len(stored.lstrip(b"\0")), len(stored.rstrip(b"\0"))
        if stored.count(b"\0", start, stop):
            return None
        bounds = np.array([0, start, stop] if start < stop else [0, 0, 0], np.int64)
        return Intervals(bounds[:1], bounds[1:2], bounds[2:])

    def _keys(self, S: int) -> Any:
        """Return the keys that are the same for all rows, as in padding, where it pays to look for intervals."""
        if self.array.ndim < 1 or self.per_row:
            return None
        if kind(self.array) != "numpy":  # reading it would wait for the device, or compute it
            return None
        if self.array.ndim > 2 and self.array.shape[-3] != 1:
            return None
        if S < _SHORT:  # inspecting it takes longer than reading it for every row
            return None
        keys = self.array
        if keys.shape[-1] != S:
            keys = np.broadcast_to(keys, (*keys.shape[:-1], S))
        return keys.reshape(keys.shape[:-3] + keys.shape[-1:]) if keys.ndim > 2 else keys.reshape(S)

    def _pairs(self, grid: Grid, i0: int, i1: int) -> Any:
        return self.array[..., i0:i1, :] if self.per_row else self.array

    def _within(self, block: Block) -> Mask:
        return BooleanArray(block.scores(self.array))

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        check_broadcast("mask", self.array.shape, batch, heads, L, S)

    def _axes(self) -> tuple[tuple[int, ...], int]:
        return self.array.shape[:-3], self.array.shape[-3] if self.array.ndim > 2 else 1


def as_mask(value: Any) -> Mask:
    """Return a mask object; a TypeError says whether ``bias=`` or ``mask=`` was probably meant."""
    if isinstance(value, Mask):
        return value
    if type(value) is np.ndarray and value.dtype.char == "?":
        return BooleanArray(value)
    if isinstance(value, type) and issubclass(value, Mask):
        raise TypeError(f"mask must be a mask object, got the class {value.__name__}: write {value.__name__}(...)")
    if isinstance(value, str):
        raise TypeError("mask must be a mask object or a boolean array, got str; write a mask object, such as Causal()")
    array = as_array("mask", value)
    if array.dtype == np.bool_:
        return BooleanArray(array)
    hint = ""
    if array.dtype.kind in "iu":
        hint = "; use mask.astype(bool) if 1 means that the query may attend"
    elif array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        hint = "; pass numbers that are added to the scores as bias="
    raise TypeError(f"mask must be a mask object or a boolean array (True = may attend), got {array.dtype}{hint}")


def leaves(mask: Mask) -> tuple[Mask, ...]:
    """Return the masks that a mask is made of, itself where it is made of none."""
    if not isinstance(mask, _Operator):
        return (mask,)
    parts: tuple[Mask, ...] = ()
    for part in mask.parts:
        parts += leaves(part) if isinstance(part, _Operator) else (part,)
    return parts


def joined(mask: Mask | None) -> tuple[Mask, ...]:
    """Return the masks that ``&`` joins at the top."""
    if mask is None:
        return ()
    return mask.parts if isinstance(mask, All) else (mask,)


def _flat(mask: Mask, kind: type[All] | type[AnyOf]) -> tuple[Mask, ...]:
    """Return the parts of a mask of this kind, so that a chain of one operator stays one level deep."""
    return mask.parts if isinstance(mask, kind) else (mask,)


def _short(value: Any) -> str:
    if not isinstance(value, np.ndarray):
        return repr(value)
    return str(value.tolist()) if value.size <= 16 else f"array{value.shape}"
