"""Where the tokens of a cache's rows lie, and how they get there."""

from typing import Any

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.masks import Mask
from sdpa_ref.stored.geometry import Geometry, Parts
from sdpa_ref.stored.rows import Index, Number, Rows, settled


class Slots(Rows):
    """Rows whose tokens lie in arrays, which each kind of cache has in its own way."""

    _tokens: Parts  # views (pages, page, heads, width)
    _places: Any = None  # the positions of slots where they are known

    def __init__(self, geometry: Geometry, batch: Any, window: Any, first: Any, slack: Any) -> None:
        super().__init__(batch, window, first, slack)
        self._geometry = geometry
        self._hle = geometry.layout == "HLE"
        self._axes = (*self.batch, geometry.heads)
        self._touch()

    def _touch(self) -> None:
        """Forget what was derived from lengths."""
        self._mask: Mask | None = None
        self._views: tuple[Any, Any] | None = None
        self._reach = None

    # what each kind has its own

    def _room(self, added: Number, gone: Number) -> None:
        """Make room for tokens behind those that there are, or raise `CacheFull` and change nothing."""
        raise NotImplementedError

    def _behind(self, T: int) -> Parts | None:
        """Return views of the next T slots as `append` gets tokens, None where room must be made or they lie apart."""
        return None

    def _at(self, b: Index, slots: Index) -> tuple[Index, Index]:
        """Return the pages and the slots in them that hold these slots of these rows."""
        raise NotImplementedError

    def _own(self, b: Index, slots: Index) -> None:
        """Make sure that no other row has these slots, or raise `CacheFull` and change nothing."""

    def _make_views(self) -> tuple[Any, Any]:
        """Return key and value over all slots."""
        raise NotImplementedError

    def _slots(self) -> int:
        """Return S, the number of slots of a row."""
        raise NotImplementedError

    # what all have

    def _settle(self, n: Number, shift: Number, gone: Number) -> None:
        """Take these numbers, and give back what is no longer used."""
        self._count(n, shift, gone)
        self._places = None
        self._touch()

    def _view(self) -> tuple[Any, Any]:
        self._views = self._make_views()
        return self._views

    def _write(self, start: Number, T: int, parts: Parts, which: Any) -> None:
        """Put tokens into the slots from `start` on."""
        if which is not None:
            b, t = which
            self._put(b, (start if type(start) is int else start[b]) + t, parts)
            return
        if T == 1:
            slots = np.full(self._B, start) if type(start) is int else start
            self._put(np.arange(self._B), slots, tuple(p.reshape(self._B, self._geometry.heads, -1) for p in parts))
            return
        rows, behind = np.arange(self._B)[:, None], np.arange(T)
        slots = np.broadcast_to(start + behind if type(start) is int else start[:, None] + behind, (self._B, T))
        self._put(rows, slots, tuple(map(self._by_token, parts)))

    def _put(self, b: Index, slots: Index, tokens: Parts) -> None:
        index = self._index(b, slots)
        for array, part in zip(self._tokens, tokens, strict=True):
            array[index] = part

    def _take(self, b: Index, slots: Index) -> Parts:
        index = self._index(b, slots)
        return tuple(array[index] for array in self._tokens)

    def _index(self, b: Index, slots: Index) -> Any:
        places = self._at(b, slots)
        return places if self._geometry.kind == "numpy" else tuple(map(self._geometry.module.asarray, places))

    def _by_token(self, array: Array) -> Array:
        """Return an array of the caller's as ``(rows, T, heads, width)``."""
        array = array.reshape(self._B, *array.shape[-3:])
        return array.swapaxes(-2, -3) if self._hle else array

    def _chosen(self, array: Array, which: tuple[Index, Index]) -> Array:
        if self._geometry.kind != "numpy":
            which = tuple(map(self._geometry.module.asarray, which))
        return self._by_token(array)[which]

    def _fill(self, n: Index, lost: Index, tokens: Parts) -> None:
        """Give an empty cache these numbers of tokens, and those that were not dropped."""
        gone = settled(np.where(lost > 0, lost + self.first, 0))
        shift = self._shift_of(gone)
        self._room(settled(np.asarray(n - shift)), 0)
        Slots._settle(self, settled(n), shift, gone)
        b, p = self._kept()
        self._put(b, self._slot(b, p), tokens)
