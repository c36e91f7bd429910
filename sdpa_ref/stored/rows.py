"""How many tokens each row of a cache has, where they lie, and what a window has dropped."""

import math
from typing import Any, TypeAlias

import numpy as np

from sdpa_ref._problem.checks import checked_shape, checked_sizes
from sdpa_ref.arrays import host_array

Number: TypeAlias = Any  # an int that all rows share, or an int64 array with one number a row
Index = np.ndarray[Any, np.dtype[np.int64]]

_ANY = 1 << 62


class Rows:
    """Rows of tokens in slots.

    A row has `_n` tokens, by position 0 to n - 1. Slots hold them in order: position p below `_fixed` is slot p, any
    other slot ``p - shift``. In a window cache positions from `first` to `gone` are dropped: nothing reads them, and
    slots that still hold them are used again when room is needed, by a larger shift.
    """

    batch: tuple[int, ...]
    window: int | None
    first: int
    slack: int
    _granule = 1  # slots that are dropped at once

    def __init__(self, batch: Any, window: Any, first: Any, slack: Any) -> None:
        self.batch = checked_shape(batch if isinstance(batch, (tuple, list)) else (batch,))
        self._B = math.prod(self.batch)
        if window is None and (first or slack):
            raise ValueError("first and slack are those of a window: pass window= too")
        self.window = None if window is None else checked_sizes(window=window)["window"]
        self.first, self.slack = checked_sizes(0, first=first, slack=slack).values()
        self._fixed = -(-self.first // self._granule) * self._granule
        self._keep = 0 if self.window is None else self.window - 1 + self.slack
        self._reach: int | None = None  # how many last tokens can be queries, where that is known
        self._count(0, 0, 0)

    def _count(self, n: Number, shift: Number, gone: Number) -> None:
        """Take these numbers of tokens, by how much they moved, and of positions that are dropped."""
        self._n, self._shift, self._gone = n, shift, gone
        self._used = n if type(shift) is int and shift == 0 else n - shift  # slots
        self._most = self._used if type(self._used) is int else int(self._used.max(initial=0))

    def _least(self) -> Number:
        """Return the smallest length beyond `first` to which each row can be cropped; 0 where nothing was dropped."""
        if self.window is None:
            return 0
        if type(self._gone) is int:
            return self._gone + self.window - 1 if self._gone > self.first else 0
        return np.where(self._gone > self.first, self._gone + self.window - 1, 0)

    def _reached(self) -> int:
        """Return the number of last tokens that can be queries in every row."""
        reach = self._n - self._least()
        self._reach = reach if type(reach) is int else int(reach.min(initial=_ANY))
        if self._B == 0:
            self._reach = _ANY
        return self._reach

    def _check_reach(self, queries: Index) -> None:
        """Raise the error of rows with more queries than tokens whose keys are there."""
        reach = self._of_rows(self._n - self._least())
        wrong = np.nonzero((queries > reach) & (queries > 0))[0]
        if wrong.size:
            b, most = int(wrong[0]), int(reach[wrong].min())
            n = int(self._of_rows(self._n)[b])
            where = f"row {b} has {n} tokens" if self.window is None or most == n else (
                f"row {b} has {n} tokens, and its window has dropped keys that earlier queries see"
            )  # fmt: skip
            raise ValueError(
                f"the queries are the last tokens, at most {max(most, 0)} of them here, got {queries[b]}: {where} "
                "(append the keys of the queries first; a row without queries has length 0 in lengths=)"
            )

    def _shortened(self, wanted: Index) -> tuple[Number, Number, Number]:
        """Return n, shift and gone of rows of these lengths, or raise the error of what a window has dropped."""
        old, least = self._of_rows(self._n), self._of_rows(self._least())
        wrong = np.nonzero((wanted < np.minimum(least, old)) & (wanted > self.first))[0]
        if wrong.size:
            b = int(wrong[0])
            raise ValueError(
                f"row {b} cannot become {wanted[b]} tokens long: its window has dropped keys that the next query "
                f"would see; the smallest length is {least[b]}"
                + (f", or one up to first = {self.first}" if self.first else "")
                + " (a larger slack= keeps more)"
            )  # fmt: skip
        if self.window is None:
            return settled(wanted), 0, 0
        whole = wanted <= self.first  # all that is left is among the first tokens
        shift, gone = (np.where(whole, 0, self._of_rows(number)) for number in (self._shift, self._gone))
        return settled(wanted), settled(shift), settled(gone)

    def _slot(self, b: Index, positions: Index) -> Index:
        """Return the slots of positions in rows."""
        return np.where(positions < self._fixed, positions, positions - self._of_rows(self._shift)[b])

    def _of_rows(self, number: Number) -> Index:
        """Return one number a row."""
        return np.full(self._B, number, np.int64) if type(number) is int else number

    def _over_batch(self, number: Number) -> Any:
        """Return a number of all rows, or an array over the batch axes."""
        return number if type(number) is int else number.reshape(self.batch)

    def _numbers(self, name: str, given: Any) -> Index:
        """Return integers of the caller's, one a row."""
        array = host_array(name, given)
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"{name} must be integers, got {array.dtype}")
        numbers = np.empty(self.batch, np.int64)
        try:
            numbers[...] = array
        except ValueError:
            raise ValueError(f"{name} must broadcast to the batch axes {self.batch}, got {array.shape}") from None
        return numbers.reshape(self._B)

    def _old_rows(self, index: Any) -> Index:
        """Return which old row each new one is."""
        self._one_axis()
        rows = host_array("index", index)
        rows = rows if rows.size else rows.astype(np.int64)
        if rows.dtype.kind not in "iu":
            raise TypeError(f"index must be integers, got {rows.dtype}")
        if rows.ndim != 1:
            raise ValueError(f"index must have one axis, got shape {rows.shape}")
        wrong = (rows < -1) | (rows >= self._B) if rows.dtype.kind == "i" else rows >= self._B
        if wrong.any():
            raise ValueError(f"index must be rows in [0, {self._B}), or -1 for an empty one, got {rows[wrong][0]}")
        old: Index = rows.astype(np.int64)
        return old

    def _one_axis(self) -> None:
        if len(self.batch) != 1:
            raise ValueError(f"rows can be selected and joined where there is one batch axis, here batch={self.batch}")

    def _numbers_of(self, rows: Index) -> tuple[Number, Number, Number]:
        """Return n, shift and gone of new rows that are these old ones."""
        new = [np.zeros(len(rows), np.int64) for _ in range(3)]
        there = rows >= 0
        for target, number in zip(new, (self._n, self._shift, self._gone), strict=True):
            target[there] = self._of_rows(number)[rows[there]]
        n, shift, gone = map(settled, new)
        return n, shift, gone

    def _kept(self) -> tuple[Index, Index]:
        """Return row and position of all tokens that were not dropped."""
        lost = self._lost()
        counts = self._of_rows(self._n) - lost
        b = np.repeat(np.arange(self._B), counts)
        place = np.arange(len(b)) - np.repeat(counts.cumsum() - counts, counts)
        return b, np.where(place < self.first, place, place + lost[b])

    def _lost(self) -> Index:
        """Return how many tokens each row has dropped."""
        return np.maximum(self._of_rows(self._gone) - self.first, 0)

    def _shift_of(self, gone: Number) -> Number:
        """Return by how much tokens can move when these are dropped, in whole granules."""
        if type(gone) is int:
            return max(gone // self._granule * self._granule - self._fixed, 0) if gone > self.first else 0
        shift = gone // self._granule * self._granule - self._fixed
        return settled(np.where(gone > self.first, np.maximum(shift, 0), 0))

    def _shifted(self, gone: Number) -> Number:
        """Return the shift when these are dropped, the same object where nothing can move."""
        if self.window is None:
            return self._shift
        shift = self._shift_of(gone)
        if type(shift) is int and type(self._shift) is int:
            return shift if shift > self._shift else self._shift
        return settled(np.maximum(shift, self._shift)) if np.any(shift > self._shift) else self._shift


def settled(numbers: Number) -> Number:
    """Return the number that all rows share, or one for each where they differ."""
    if isinstance(numbers, int):
        return numbers
    if not numbers.size:
        return 0
    low = int(numbers.min())
    return low if low == numbers.max() else numbers
