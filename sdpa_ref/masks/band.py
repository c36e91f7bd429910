"""The cheapest form of a mask: a few numbers a batch entry, from which a kernel computes what each row sees."""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sdpa_ref.masks.intervals import Intervals, Rows

FAR = 1 << 41  # beyond every position and length, and sums of a few such numbers stay in int64
Number: TypeAlias = Any  # an int, or an int64 array that broadcasts to the batch axes


class Band(NamedTuple):
    """What each row sees, as numbers a batch entry: ints, or int64 arrays that broadcast to the batch axes.

    Row i stands at ``p = i + offset``. Where ``i < rows`` it sees the keys

        [max(start, p - left, p - p % chunk), min(stop, max(floor, p + right + 1)))  and  [0, min(first, p + reach + 1))

    within [0, S), and elsewhere none. Causal, window, lengths, padding, prefix and chunks, and most of what ``&`` makes
    of them, are such numbers.
    """

    offset: Number = 0
    start: Number = 0
    stop: Number = FAR
    left: Number = FAR
    right: Number = FAR
    floor: Number = 0
    chunk: Number = FAR
    first: Number = 0
    reach: Number = FAR
    rows: Number = FAR

    def at(self, offset: Number) -> "Band":
        """Return the band of queries of which the first stands there."""
        moved: Band = tuple.__new__(Band, (offset,) + self[1:])  # noqa: RUF005  # unpacking makes a list first
        return moved

    def intersection(self, other: "Band") -> "Band | None":
        """Return the keys in both, None where that is no band."""
        a, b = self, other
        if not (_is(b.first, 0) or _is(a.first, 0)) or not (_is(a.chunk, FAR) or _is(b.chunk, FAR)):
            return None
        first: Number = 0
        reach: Number = FAR
        for one, two in ((a, b), (b, a)):
            if not _is(one.first, 0):
                if not (_is(two.start, 0) and _is(two.left, FAR) and _is(two.chunk, FAR) and _is(two.floor, 0)):
                    return None
                first, reach = least(one.first, two.stop), least(one.reach, two.right)
        floor: Number = 0
        if not (_is(a.floor, 0) and _is(b.floor, 0)):
            if _is(a.right, FAR) or _is(b.right, FAR):  # one of them ends nowhere
                floor = most(a.floor, b.floor)
            elif _is(a.right, b.right):
                floor = least(a.floor, b.floor)
            else:
                return None
        return Band(
            a.offset, most(a.start, b.start), least(a.stop, b.stop), least(a.left, b.left), least(a.right, b.right),
            floor, least(a.chunk, b.chunk), first, reach, least(a.rows, b.rows),
        )  # fmt: skip

    def union(self, other: "Band") -> "Band | None":
        """Return the keys in either, None where that is no band: one of them must begin at the first key."""
        if not (_is(self.first, 0) and _is(other.first, 0) and _is(self.rows, FAR) and _is(other.rows, FAR)):
            return None
        for one, two in ((self, other), (other, self)):
            if _is(two.start, 0) and _is(two.left, FAR) and _is(two.chunk, FAR) and _is(two.floor, 0):
                return one._replace(first=two.stop, reach=two.right)
        return None

    def intervals(self, L: int, S: int, batch: tuple[int, ...]) -> Intervals:
        """Return the same as arrays, a number a row."""
        positions = np.arange(L) + np.asarray(self.offset)[..., None]
        shape = (*batch, L)
        parts = [np.minimum(np.maximum(bound, 0), S) for pair in self.on(positions, 0) for bound in pair]
        start, stop, _, prefix = parts if len(parts) == 4 else (*parts, parts[0], np.zeros(1, np.int64))
        some = start < stop
        start, stop = np.where(some, start, 0), np.where(some, stop, 0)
        joins = some & (prefix > 0) & (start <= prefix)  # the two parts touch: they are one prefix
        return Intervals(
            *(
                np.broadcast_to(bound, shape)
                for bound in (
                    np.where(joins, 0, prefix),
                    np.where(joins, 0, start),
                    np.where(joins, np.maximum(stop, prefix), stop),
                )
            )
        )

    def on(self, positions: Any, origin: Any) -> Rows:
        """Return the intervals of rows at these positions, where keys are counted from the key `origin` on."""
        columns = [x if isinstance(x, int) else x[..., None] for x in self]
        _, start, stop, left, right, floor, chunk, first, reach, rows = columns
        place = positions - origin
        begin = np.maximum(start, positions - left)
        if not _is(chunk, FAR):
            begin = np.maximum(begin, origin + place - place % chunk)
        end = np.minimum(origin + stop, np.maximum(origin + floor, positions + right + 1))
        parts = [(begin, end)]
        if not _is(first, 0):
            parts.append((np.zeros_like(begin), np.minimum(origin + first, positions + reach + 1)))
        if not _is(rows, FAR):
            valid = np.arange(positions.shape[-1]) < rows
            parts = [(begin, np.where(valid, end, 0)) for begin, end in parts]
        return parts


EVERYTHING = Band()


def least(a: Number, b: Number) -> Number:
    """Return the lesser number."""
    if type(a) is int and type(b) is int:
        return a if a < b else b
    return np.minimum(a, b)


def most(a: Number, b: Number) -> Number:
    """Return the greater number."""
    if type(a) is int and type(b) is int:
        return a if a > b else b
    return np.maximum(a, b)


def _is(a: Number, b: Number) -> bool:
    return type(a) is int and type(b) is int and a == b
