"""The mask objects, a rule each: which key a query may attend to."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdpa_ref.arrays import as_array
from sdpa_ref.masks.algebra import Grid, Mask
from sdpa_ref.masks.checks import broadcasts, count, fits, integers, last_axis, lengths, put
from sdpa_ref.masks.intervals import Bound, Rows

_FAR = 1 << 40  # a bound beyond this is as good as open, and sums of a few of them stay in int64
_ABSENT: Any = ...  # no default, but an error that says what to write


@dataclass(frozen=True, eq=False, repr=False)
class Causal(Mask):
    """A query attends to the keys up to its own position: ``j <= p`` with ``p = i + offset``.

    Examples
    --------
    >>> print(Causal().show(3, 3))
        012
      0 #..
      1 ##.
      2 ###
    """

    positional = counts_in_documents = True

    def _rows(self, grid: Grid) -> Rows:
        return [(np.zeros_like(grid.positions), grid.positions + 1)]


@dataclass(frozen=True, eq=False, repr=False)
class Window(Mask):
    """A query attends to the keys around its position: ``p - left <= j <= p + right``, both inclusive.

    Parameters
    ----------
    left, right : int or None
        How many keys before and after the query's own position are visible, at least 0; None leaves the side open.

    Notes
    -----
    "The query itself and the w - 1 keys before it", as Hugging Face counts, is ``Window(w - 1, 0)``.

    Examples
    --------
    >>> print(Window(1, 0).show(4, 4))
        0123
      0 #...
      1 ##..
      2 .##.
      3 ..##
    """

    left: int | None
    right: int | None = _ABSENT
    positional = counts_in_documents = True

    def __post_init__(self) -> None:
        if self.right is _ABSENT:
            raise TypeError(f"mask: Window(left, right); to look back only: Window({self.left!r}, 0)")
        for side in ("left", "right"):
            bound = getattr(self, side)
            if bound is not None:
                put(self, side, count(f"Window {side}", bound, "; None leaves the side open"))

    def _rows(self, grid: Grid) -> Rows:
        p = grid.positions
        start = np.zeros_like(p) if self.left is None else p - min(self.left, _FAR)
        stop = np.full_like(p, grid.S) if self.right is None else p + (min(self.right, _FAR) + 1)
        return [(start, stop)]


@dataclass(frozen=True, eq=False, repr=False)
class KeyLengths(Mask):
    """Only the first n keys exist: ``j < n[b]`` (right padding, or a buffer that is not full).

    Parameters
    ----------
    n : int or array of int
        Valid keys, in [0, S]; an array broadcasts to the batch axes.
    """

    n: Any

    def __post_init__(self) -> None:
        put(self, "n", lengths("KeyLengths", self.n))

    def _rows(self, grid: Grid) -> Rows:
        return [(np.zeros_like(self.n[..., None]), self.n[..., None])]

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        fits("KeyLengths", self.n, batch, S, "S")

    def _axes(self) -> tuple[tuple[int, ...], int]:
        return self.n.shape, 1


@dataclass(frozen=True, eq=False, repr=False)
class KeyStarts(KeyLengths):
    """The first n keys do not exist: ``j >= n[b]`` (left padding).

    Parameters
    ----------
    n : int or array of int
        Padding keys, in [0, S]; an array broadcasts to the batch axes.
    """

    def __post_init__(self) -> None:
        put(self, "n", lengths("KeyStarts", self.n))

    def _rows(self, grid: Grid) -> Rows:
        return [(self.n[..., None], np.full_like(self.n[..., None], grid.S))]

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        fits("KeyStarts", self.n, batch, S, "S")


@dataclass(frozen=True, eq=False, repr=False)
class QueryLengths(KeyLengths):
    """Only the first n queries exist: ``i < n[b]``; later rows are empty, and their output is 0.

    Parameters
    ----------
    n : int or array of int
        Valid queries, in [0, L]; an array broadcasts to the batch axes.
    """

    def __post_init__(self) -> None:
        put(self, "n", lengths("QueryLengths", self.n))

    def _rows(self, grid: Grid) -> Rows:
        valid = np.arange(grid.L) < self.n[..., None]
        return [(np.zeros_like(valid, np.int64), np.where(valid, grid.S, 0))]

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        fits("QueryLengths", self.n, batch, L, "L")


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(KeyLengths):
    """Causal, with a prefix that everybody sees: ``j < n[b]`` or ``j <= p`` (prefix language model).

    Parameters
    ----------
    n : int or array of int
        Length of the prefix, in [0, S]; an array broadcasts to the batch axes.
    """

    positional = counts_in_documents = True

    def __post_init__(self) -> None:
        put(self, "n", lengths("Prefix", self.n))

    def _rows(self, grid: Grid) -> Rows:
        stop = np.maximum(grid.origin + self.n[..., None], grid.positions + 1)
        return [(np.zeros_like(stop), stop)]

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        fits("Prefix", self.n, batch, S, "S")


@dataclass(frozen=True, eq=False, repr=False)
class Chunked(Mask):
    """Causal within chunks: ``j <= p`` and ``j // size == p // size``.

    Parameters
    ----------
    size : int
        Length of a chunk, at least 1.

    Examples
    --------
    >>> print(Chunked(2).show(4, 4))
        0123
      0 #...
      1 ##..
      2 ..#.
      3 ..##
    """

    size: int
    positional = counts_in_documents = True

    def __post_init__(self) -> None:
        put(self, "size", min(count("Chunked size", self.size, minimum=1), _FAR))

    def _rows(self, grid: Grid) -> Rows:
        place = grid.positions - grid.origin
        return [(place // self.size * self.size + grid.origin, grid.positions + 1)]


@dataclass(frozen=True, eq=False, repr=False)
class FirstTokens(Mask):
    """The first keys, visible from everywhere: ``j < n``.

    Parameters
    ----------
    n : int
        How many keys, at least 0; more than there are is all of them.

    Notes
    -----
    The "attention sinks" of streaming models: ``Window(w, 0) | FirstTokens(4) & Causal()``.
    """

    n: int
    counts_in_documents = True

    def __post_init__(self) -> None:
        put(self, "n", min(count("FirstTokens n", self.n), _FAR))

    def _rows(self, grid: Grid) -> Rows:
        return [(np.zeros_like(grid.origin), grid.origin + self.n)]


@dataclass(frozen=True, eq=False, repr=False)
class Segments(Mask):
    """Queries attend to the keys of their own segment: ``q_ids[i] == k_ids[j]``.

    Parameters
    ----------
    q_ids : array of int, shape (..., L)
        Segment of each query; leading axes broadcast to the batch axes.
    k_ids : array of int, shape (..., S), optional
        Segment of each key; left out, `q_ids` serves both.

    Examples
    --------
    >>> print(Segments([7, 7, 3]).show(3, 3))
        012
      0 ##.
      1 ##.
      2 ..#
    """

    q_ids: Any
    k_ids: Any = None

    def __post_init__(self) -> None:
        put(self, "q_ids", integers("Segments q_ids", self.q_ids, axes=1))
        put(
            self,
            "k_ids",
            self.q_ids if self.k_ids is None else integers("Segments k_ids", self.k_ids, axes=1),
        )

    def _rows(self, grid: Grid) -> Rows | None:
        lead = np.broadcast_shapes(self.q_ids.shape[:-1], self.k_ids.shape[:-1])
        entries = math.prod(lead)
        if entries == 0 or grid.S == 0:
            return []
        ids = [np.broadcast_to(x, (*lead, x.shape[-1])).reshape(entries, -1) for x in (self.q_ids, self.k_ids)]
        names, numbers = np.unique(np.concatenate(ids, 1), return_inverse=True)
        numbers = numbers.reshape(entries, -1) + np.arange(entries)[:, None] * len(
            names
        )  # one name in two entries: two
        queries, keys = numbers[:, : grid.L], numbers[:, grid.L :].ravel()
        first = np.flatnonzero(np.r_[True, keys[1:] != keys[:-1]])  # where the runs of equal ids begin
        order = np.argsort(keys[first], kind="stable")
        sorted_names = keys[first][order]
        if (sorted_names[1:] == sorted_names[:-1]).any():
            return None  # some segment lies in several pieces
        run = np.minimum(np.searchsorted(sorted_names, queries), len(first) - 1)
        found, origin = sorted_names[run] == queries, np.arange(entries)[:, None] * grid.S
        start = np.where(found, first[order][run] - origin, 0)
        stop = np.where(found, np.r_[first[1:], keys.size][order][run] - origin, 0)
        return [(start.reshape(*lead, grid.L), stop.reshape(*lead, grid.L))]

    def _pairs(self, grid: Grid, i0: int, i1: int) -> Any:
        return (self.q_ids[..., i0:i1, None] == self.k_ids[..., None, :])[..., None, :, :]

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        for name, ids, size in (("q_ids", self.q_ids, L), ("k_ids", self.k_ids, S)):
            last_axis(f"Segments {name}", ids, batch, size, "L" if name == "q_ids" else "S")

    def _axes(self) -> tuple[tuple[int, ...], int]:
        return np.broadcast_shapes(self.q_ids.shape[:-1], self.k_ids.shape[:-1]), 1


@dataclass(frozen=True, eq=False, repr=False)
class Packed(Mask):
    """Documents of these lengths lie one after another in a row; each attends to itself only.

    What is positional, and ``query_offset="start"`` or ``"end"``, counts within the document. A tail that belongs to no
    document is empty.

    Parameters
    ----------
    q_lengths : array of int, shape (n,) or (B, n)
        Queries of each document; they add up to at most L.
    k_lengths : array of int, same shape, optional
        Keys of each document; they add up to at most S. Left out, `q_lengths` serves both.

    Examples
    --------
    >>> print((Packed([2, 3]) & Causal()).show(5, 5))
        01234
      0 #....
      1 ##...
      2 ..#..
      3 ..##.
      4 ..###
    """

    q_lengths: Any
    k_lengths: Any = None

    def __post_init__(self) -> None:
        put(self, "q_lengths", lengths("Packed q_lengths", self.q_lengths, axes=1))
        same = self.k_lengths is None
        put(self, "k_lengths", self.q_lengths if same else lengths("Packed k_lengths", self.k_lengths, axes=1))
        if self.q_lengths.shape[-1] != self.k_lengths.shape[-1]:
            raise ValueError(
                "mask: Packed needs as many q_lengths as k_lengths, one a document, "
                f"got {self.q_lengths.shape[-1]} and {self.k_lengths.shape[-1]}"
            )

    def documents(self, L: int) -> tuple[Bound, Bound, Bound, Bound]:
        """Return of each row's document the first query and key, and how many: (..., L) each, 0 in the tail."""
        q, k = np.broadcast_arrays(self.q_lengths, self.k_lengths)
        entries, documents = math.prod(q.shape[:-1]), q.shape[-1] + 1  # the tail counts as one more, empty document
        rows = np.concatenate([q, L - q.sum(-1, keepdims=True)], -1)
        document = np.repeat(np.tile(np.arange(documents), entries), rows.ravel()).reshape(*q.shape[:-1], L)
        first_query, first_key = np.cumsum(q, -1) - q, np.cumsum(k, -1) - k
        tail = np.zeros((*q.shape[:-1], 1), np.int64)
        return tuple(  # type: ignore[return-value]
            np.take_along_axis(np.concatenate([x, tail], -1), document, -1) for x in (first_query, first_key, q, k)
        )

    def _rows(self, grid: Grid) -> Rows:
        _, first_key, _, keys = self.documents(grid.L)
        return [(first_key, first_key + keys)]

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        for name, given, size in (("q_lengths", self.q_lengths, L), ("k_lengths", self.k_lengths, S)):
            broadcasts(f"Packed {name}", given.shape[:-1], batch)
            total = np.minimum(given, size + 1).sum(-1)  # the sum of what was given may be beyond int64
            if (total > size).any():
                axis = "L" if name == "q_lengths" else "S"
                most = np.max(given.astype(object).sum(-1))
                raise ValueError(f"mask: Packed {name} add up to {most}, more than {axis} = {size}")

    def _axes(self) -> tuple[tuple[int, ...], int]:
        return np.broadcast_shapes(self.q_lengths.shape[:-1], self.k_lengths.shape[:-1]), 1


@dataclass(frozen=True, eq=False, repr=False)
class Tree(Mask):
    """Queries are nodes of a tree and attend to themselves and their ancestors (speculative decoding).

    The nodes are the last L keys; every key before them is visible to all.

    Parameters
    ----------
    parents : array of int, shape (..., L)
        Parent of each node, -1 for a root; a parent stands before its child.

    Examples
    --------
    >>> print(Tree([-1, 0, 0, 2]).show(4, 5))
        01234
      0 ##...
      1 ###..
      2 ##.#.
      3 ##.##
    """

    parents: Any

    def __post_init__(self) -> None:
        parents = integers("Tree parents", self.parents, axes=1)
        wrong = (parents < -1) | (parents >= np.arange(parents.shape[-1]))
        if wrong.any():
            node = int(np.argwhere(wrong)[0][-1])
            raise ValueError(
                f"mask: Tree parents must be -1 (a root) or an earlier node, got {parents[wrong][0]} for node {node}"
            )
        put(self, "parents", parents)

    def _pairs(self, grid: Grid, i0: int, i1: int) -> Any:
        past = grid.S - grid.L
        keep = np.zeros((*self.parents.shape[:-1], i1 - i0, grid.S), bool)
        keep[..., :past] = True
        node = np.broadcast_to(np.arange(i0, i1), keep.shape[:-1])
        while (node >= 0).any():  # all rows climb towards their roots together
            at = np.nonzero(node >= 0)
            keep[(*at, past + node[at])] = True
            node = np.where(node >= 0, np.take_along_axis(self.parents, np.maximum(node, 0), -1), -1)
        return keep[..., None, :, :]

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        last_axis("Tree parents", self.parents, batch, L, "L")
        if S < L:
            raise ValueError(f"mask: Tree needs its L = {L} nodes among the keys, but S = {S}")

    def _axes(self) -> tuple[tuple[int, ...], int]:
        return self.parents.shape[:-1], 1


@dataclass(frozen=True, eq=False, repr=False)
class MaskFunction(Mask):
    """Any rule: ``f(b, h, i, j)`` is True where query i of head h in batch entry b may attend to key j.

    Parameters
    ----------
    f : callable
        Takes four integer arrays that broadcast against one another (b counts the flattened leading axes; i and j are
        plain indices) and returns a boolean array.

    Examples
    --------
    >>> print(MaskFunction(lambda b, h, i, j: (i + j) % 2 == 0).show(3, 3))
        012
      0 #.#
      1 .#.
      2 #.#
    """

    f: Callable[..., Any]

    def __post_init__(self) -> None:
        if not callable(self.f):
            raise TypeError(f"mask: MaskFunction needs a function f(b, h, i, j), got {type(self.f).__name__}")

    def _pairs(self, grid: Grid, i0: int, i1: int) -> Any:
        b = np.arange(math.prod(grid.batch)).reshape(*grid.batch, 1, 1, 1)
        return self._kept(b, np.arange(grid.heads)[:, None, None], np.arange(i0, i1)[:, None], np.arange(grid.S))

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        if 0 not in (*batch, heads, L, S):
            self._kept(*np.zeros((4, 1, 1, 1, 1), np.int64))  # what it returns shows before any work

    def _kept(self, *indices: Any) -> Any:
        kept = as_array("the result of MaskFunction", self.f(*indices))
        if kept.dtype != np.bool_:
            raise TypeError(f"mask: the function of MaskFunction must return booleans, got {kept.dtype}")
        broadcasts("the result of MaskFunction", kept.shape, np.broadcast_shapes(*(np.shape(x) for x in indices)))
        return kept
