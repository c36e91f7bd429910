"""The mask objects, a rule each: which key a query may attend to."""

import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np

from sdpa_ref.arrays import as_array
from sdpa_ref.masks.algebra import Mask, rule
from sdpa_ref.masks.band import FAR, Band
from sdpa_ref.masks.block import Block
from sdpa_ref.masks.checks import broadcasts, count, extremes, fits, lengths, put
from sdpa_ref.masks.grid import Grid

__all__ = [
    "Causal", "Chunked", "FirstTokens", "KeyLengths", "KeyStarts", "MaskFunction", "Prefix", "QueryLengths",
    "Window",
]  # fmt: skip
_ABSENT: Any = ...  # no default, but an error that says what to write


@rule
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

    def _band(self) -> Band:
        return _CAUSAL


_CAUSAL = Band(right=0)


@rule
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

    def _band(self) -> Band:
        left, right = self.left, self.right
        return Band(left=FAR if left is None else min(left, FAR), right=FAR if right is None else min(right, FAR))


class _PerEntry(Mask):
    """A rule with one number a batch entry, which counts keys or, where `of` is L, queries."""

    n: Any
    of: ClassVar[str] = "S"

    def __post_init__(self) -> None:
        put(self, "n", lengths(type(self).__name__, self.n))

    @cached_property
    def _largest(self) -> int:
        return extremes(self.n)[1] if np.size(self.n) else 0

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        size = S if self.of == "S" else L
        if type(self.n) is int and self.n <= size:
            return
        if type(self.n) is int or self.n.shape != batch or self._largest > size:
            fits(type(self).__name__, self.n, batch, size, self.of)

    def _axes(self) -> tuple[tuple[int, ...], int]:
        return np.shape(self.n), 1


@rule
class KeyLengths(_PerEntry):
    """Only the first n keys exist: ``j < n[b]`` (right padding, or a buffer that is not full).

    Parameters
    ----------
    n : int or array of int
        Valid keys, in [0, S]; an array broadcasts to the batch axes.

    Examples
    --------
    >>> print(KeyLengths(2).show(3, 4))
        0123
      0 ##..
      1 ##..
      2 ##..
    """

    n: Any

    def _band(self) -> Band:
        return Band(stop=self.n)


@rule
class KeyStarts(_PerEntry):
    """The first n keys do not exist: ``j >= n[b]`` (left padding).

    Parameters
    ----------
    n : int or array of int
        Padding keys, in [0, S]; an array broadcasts to the batch axes.

    Examples
    --------
    >>> print(KeyStarts(1).show(3, 4))
        0123
      0 .###
      1 .###
      2 .###
    """

    n: Any

    def _band(self) -> Band:
        return Band(start=self.n)


@rule
class QueryLengths(_PerEntry):
    """Only the first n queries exist: ``i < n[b]``; later rows are empty, and their output is 0.

    Parameters
    ----------
    n : int or array of int
        Valid queries, in [0, L]; an array broadcasts to the batch axes.

    Examples
    --------
    >>> print(QueryLengths(2).show(3, 4))
        0123
      0 ####
      1 ####
      2 ....
    """

    n: Any
    of = "L"

    def _band(self) -> Band:
        return Band(rows=self.n)


@rule
class Prefix(_PerEntry):
    """Causal, with a prefix that every query sees: ``j < n[b]`` or ``j <= p`` (prefix language model).

    Parameters
    ----------
    n : int or array of int
        Length of the prefix, in [0, S]; an array broadcasts to the batch axes.

    Examples
    --------
    >>> print(Prefix(2).show(4, 4))
        0123
      0 ##..
      1 ##..
      2 ###.
      3 ####
    """

    n: Any
    positional = counts_in_documents = True

    def _band(self) -> Band:
        return Band(floor=self.n, right=0)


@rule
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
        put(self, "size", min(count("Chunked size", self.size, minimum=1), FAR))

    def _band(self) -> Band:
        return Band(chunk=self.size, right=0)


@rule
class FirstTokens(Mask):
    """The first keys, visible to every query: ``j < n``.

    Parameters
    ----------
    n : int
        How many keys, at least 0; a number above S means all.

    Notes
    -----
    The "attention sinks" of streaming models: ``Window(w, 0) | FirstTokens(4) & Causal()``.

    Examples
    --------
    >>> print(FirstTokens(2).show(3, 4))
        0123
      0 ##..
      1 ##..
      2 ##..
    """

    n: int
    counts_in_documents = True

    def __post_init__(self) -> None:
        put(self, "n", min(count("FirstTokens n", self.n), FAR))

    def _band(self) -> Band:
        return Band(stop=self.n)


@rule
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

    def _within(self, block: Block) -> Mask:
        return MaskFunction(partial(_shifted, self.f, block.first))

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        if 0 not in (*batch, heads, L, S):
            self._kept(*np.zeros((4, 1, 1, 1, 1), np.int64))  # what it returns shows before any work

    def _kept(self, *indices: Any) -> Any:
        kept = as_array("the result of MaskFunction", self.f(*indices))
        if kept.dtype != np.bool_:
            raise TypeError(f"mask: the function of MaskFunction must return booleans, got {kept.dtype}")
        broadcasts("the result of MaskFunction", kept.shape, np.broadcast_shapes(*(np.shape(x) for x in indices)))
        return kept


def _shifted(f: Callable[..., Any], first: tuple[int, ...], *indices: Any) -> Any:
    """Return what a function of indices says in a block whose first ones these are."""
    return f(*(index + start for index, start in zip(indices, first, strict=True)))
