"""A block of the weights, and what of an array that broadcasts to them belongs to it."""

import itertools
from typing import Any, NamedTuple

import numpy as np

Span = tuple[int, int]


class Block(NamedTuple):
    """Some batch entries, heads, rows and keys of a problem; each pair says where they begin and end.

    `batch` has a pair for each batch axis, and `shape` their whole lengths. Where an index counts entries, the block's
    lie one behind the other.
    """

    batch: tuple[Span, ...]
    shape: tuple[int, ...]
    heads: Span
    rows: Span
    keys: Span

    @property
    def first(self) -> tuple[int, int, int, int]:
        """Index of the first batch entry, head, row and key."""
        entry = 0
        for (start, _), n in zip(self.batch, self.shape, strict=True):
            entry = entry * n + start
        return entry, self.heads[0], self.rows[0], self.keys[0]

    @property
    def lead(self) -> tuple[int, ...]:
        """Lengths of the batch axes."""
        return tuple(stop - start for start, stop in self.batch)

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Number of heads, rows and keys."""
        heads, rows, keys = (stop - start for start, stop in (self.heads, self.rows, self.keys))
        return heads, rows, keys

    def entries(self, x: Any, trailing: int) -> Any:
        """Return the block's entries of what broadcasts to the batch axes and has so many axes behind them."""
        for axis, span in enumerate(reversed(self.batch), 1 + trailing):
            x = part(x, -axis, span)
        return x

    def bound(self, x: Any) -> Any:
        """Return key indices, an array that broadcasts to ``(*batch, L)``, counted from the block's first key."""
        return once(self.entries(part(x, -1, self.rows), 1)) - self.keys[0]

    def scores(self, x: Any) -> Any:
        """Return the block's part of what broadcasts to the weights."""
        return self.entries(part(part(part(x, -1, self.keys), -2, self.rows), -3, self.heads), 3)


def part(x: Any, axis: int, span: Span) -> Any:
    """Return the entries of an axis that is counted from the end, unless the array lacks or repeats it."""
    if x.ndim < -axis or x.shape[axis] == 1 or span == (0, x.shape[axis]):
        return x
    return x[(..., slice(*span), *(slice(None),) * (-axis - 1))]


def once(x: Any) -> Any:
    """Return the array with one entry along axes that it repeats: pickle writes repeated axes out in full."""
    return x[tuple(slice(1 if stride == 0 and n > 1 else None) for n, stride in zip(x.shape, x.strides, strict=True))]


def spans(chunks: tuple[int, ...]) -> list[Span]:
    """Return where each of these chunks begins and ends."""
    ends = np.cumsum((0, *chunks)).tolist()
    return [*itertools.pairwise(ends)]
