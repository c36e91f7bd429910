"""How keys and values lie that are no dense array: in pages, as codes with scales, or both."""

from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arrays import Array, kind, module_of
from sdpa_ref.sources import Source


class Stored(NamedTuple):
    """Keys or values as kernels read them where they lie.

    Attributes
    ----------
    numbers : array
        ``(..., Hkv, S, E)``, or pages ``(N, Hkv, P, E)``: floats, or codes that mean
        ``scale * (code - zero) + offset``. Where `bits` is 4, two codes share a byte and the last axis is half as long.
    table : integer array ``(*batch, M)`` of the host, or None
        Key j of an entry is slot ``j % P`` of page ``table[..., j // P]``. Entries outside [0, N) are not needed.
    scale, offset : float array or None
        Each axis of length s serves an axis of `numbers` of length n in runs of n / s; axes are aligned from the right.
    zero, bits : int
        `bits` is 0 where the numbers are floats.
    shape : tuple of int
        That of the dense array.
    dtype : dtype
        The type that counts for the type of the result: that of the query where the numbers are codes.
    layout : str or None
        The layout that pages were made for.
    lengths : int, int64 array or None
        Valid keys of each batch entry.
    """

    numbers: Array
    table: Any
    scale: Array
    offset: Array
    zero: int
    bits: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: str | None = None
    lengths: Any = None

    @property
    def ndim(self) -> int:
        """Number of axes of the dense array."""
        return len(self.shape)

    @property
    def page(self) -> int:
        """Keys of a page, 0 where there are no pages."""
        return 0 if self.table is None else int(self.numbers.shape[-2])

    def heads_first(self, layout: str) -> "Stored":
        """Return the same in canonical order: heads before lengths, and always a head axis."""
        axes = self.numbers.ndim
        turn = layout == "LHE" and axes > 2
        if not turn and axes > 2:
            return self

        def turned(array: Array) -> Array:
            if array is None or not turn or array.ndim < 2:
                return array
            return array.swapaxes(-2, -3) if array.ndim > 2 else array[:, None]

        numbers = self.numbers[None] if axes == 2 else turned(self.numbers)
        shape = (1, *self.shape) if axes == 2 else (*self.shape[:-3], self.shape[-2], self.shape[-3], self.shape[-1])
        return self._replace(numbers=numbers, scale=turned(self.scale), offset=turned(self.offset), shape=shape)

    def rows(self, j0: int, j1: int) -> Array:
        """Return the keys [j0, j1) in canonical order, ``(..., Hkv, j1 - j0, E)``; codes as float64."""
        numbers = self._taken(self.numbers, j0, j1)
        if self.bits == 4:
            pairs = module_of(kind(numbers)).stack([numbers & 15, numbers >> 4], -1)
            numbers = pairs.reshape(*numbers.shape[:-1], 2 * numbers.shape[-1])
        if self.bits == 0:
            return numbers
        with np.errstate(all="ignore"):
            exact = self._spread(self.scale, numbers, j0, j1) * (numbers.astype(np.float64) - self.zero)
            return exact if self.offset is None else exact + self._spread(self.offset, numbers, j0, j1)

    def dense(self) -> Array:
        """Return all keys, as `rows`."""
        return self.rows(0, self.shape[-2])

    def _spread(self, array: Array, numbers: Array, j0: int, j1: int) -> Array:
        """Return scale or offset in float64, with the heads and columns of `numbers`."""
        array = self._taken(array, j0, j1).astype(np.float64)
        for axis in {*range(-array.ndim, 0)} - {-2}:
            n, s = numbers.shape[axis], array.shape[axis]
            if s not in (1, n):
                array = array.repeat(n // s, axis)
        return array

    def _taken(self, array: Array, j0: int, j1: int) -> Array:
        """Return what `numbers`, or an array that serves it in blocks, has for the keys [j0, j1)."""
        whole, j = self.numbers.shape, np.arange(j0, j1)
        array = array.reshape((1,) * (len(whole) - array.ndim) + array.shape)
        run = max(1, whole[-2] // max(1, array.shape[-2]))
        module = module_of(kind(array))
        if self.table is None:
            return array[..., module.asarray(j // run), :] if run > 1 else array[..., j0:j1, :]
        N, P = whole[0], whole[-2]
        table = np.asarray(self.table)[..., j // max(1, P)]
        if N == 0 or P == 0:
            return module.zeros((*table.shape[:-1], array.shape[1], len(j), array.shape[3]), array.dtype)
        pages = np.where((table >= 0) & (table < N), table, 0) // (N // array.shape[0])
        taken: Array = array[module.asarray(pages), :, module.asarray(j % P // run)]
        return taken.swapaxes(-2, -3)


def arrays_in(part: Any) -> list[Array]:
    """Return the arrays that keys or values consist of, the table of the host apart."""
    if isinstance(part, Source):
        return [part.array] if isinstance(part.array, np.ndarray) else []
    parts = (part.numbers, part.scale, part.offset) if isinstance(part, Stored) else (part,)
    return [array for array in parts if array is not None]
