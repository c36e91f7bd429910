"""What a mask is laid over: the sizes of a problem, and where its queries stand."""

import math
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arrays import module_of
from sdpa_ref.masks.intervals import Bound, Rows

_BEYOND = (1 << 41) + 1  # every position of a key, and those of what is no key, are nearer
_APART = 1 << 43


class Grid(NamedTuple):
    """What a mask is laid over: the sizes, and where each query stands.

    `positions` are in units of key indices and `origin` is the key index of position 0 (the first key of the row's
    document); both broadcast to ``(*batch, L)``. `offset` is the position of the first query, an int or an array that
    broadcasts to ``(*batch,)``, or None where rows of a batch entry belong to several documents. `lengths` says how
    many keys an entry has, None for all S. `key_positions` are the positions of the keys where they are not 0, 1, 2
    and so on, as `placed_keys` returns them.
    """

    batch: tuple[int, ...]
    heads: int
    L: int
    S: int
    offset: Any
    documents: tuple[Bound, Bound] | None = None
    kind: str = "numpy"  # of the arrays that are attended over
    lengths: Any = None
    key_positions: Bound | None = None

    @property
    def positions(self) -> Bound:
        """Where each query stands."""
        if self.documents is not None:
            return self.documents[0]
        positions: Bound = np.arange(self.L) + np.asarray(self.offset)[..., None]
        return positions

    @property
    def origin(self) -> Bound:
        """The key that has position 0 in the row's document."""
        return np.zeros(1, np.int64) if self.documents is None else self.documents[1]

    def slots(self, rows: Rows) -> Rows:
        """Return intervals of positions as intervals of the keys that have them."""
        if self.key_positions is None:
            return rows
        return [(self._slot(start), self._slot(stop)) for start, stop in rows]

    def _slot(self, bound: Bound) -> Bound:
        """Return the number of keys whose position is below each bound."""
        keys = np.asarray(self.key_positions)
        if keys.ndim == 1:
            return np.searchsorted(keys, bound)
        lead = np.broadcast_shapes(keys.shape[:-1], bound.shape[:-1])
        entries = np.arange(math.prod(lead)).reshape(*lead, 1)
        keys, bound = np.broadcast_to(keys, (*lead, self.S)), np.clip(bound, -_BEYOND, _BEYOND)
        # the keys of all entries are one sorted row when each entry lies behind the one before it
        row, sought = (keys + entries * _APART).ravel(), bound + entries * _APART
        return np.searchsorted(row, sought) - entries * self.S

    def held(self, mask: Any, i0: int, i1: int) -> Any:
        """Return which keys the rows [i0, i1) see as an array of that kind, whether an array said so or a rule did."""
        return module_of(self.kind).asarray(mask._keep(self, i0, i1))

    def there(self, bounds: Bound) -> Any:
        """Return numbers of a few rows or keys where the pairs of these are compared: in the memory of the device."""
        return module_of(self.kind).asarray(bounds) if self.kind == "cupy" else bounds

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights, ``(*batch, Hq, L, S)``."""
        return (*self.batch, self.heads, self.L, self.S)
