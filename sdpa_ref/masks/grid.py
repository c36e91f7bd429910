"""What a mask is laid over: the sizes of a problem, and where its queries stand."""

from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arrays import module_of
from sdpa_ref.masks.intervals import Bound


class Grid(NamedTuple):
    """What a mask is laid over: the sizes, and where each query stands.

    `positions` are in units of key indices and `origin` is the key index of position 0 (the first key of the row's
    document); both broadcast to ``(*batch, L)``. `offset` is the position of the first query, an int or an array that
    broadcasts to ``(*batch,)``, or None where rows of a batch entry belong to several documents.
    """

    batch: tuple[int, ...]
    heads: int
    L: int
    S: int
    offset: Any
    documents: tuple[Bound, Bound] | None = None
    kind: str = "numpy"  # of the arrays that are attended over

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

    def held(self, mask: Any, i0: int, i1: int) -> Any:
        """Return which keys the rows [i0, i1) see as an array of that kind, whether an array said so or a rule did."""
        return module_of(self.kind).asarray(mask._keep(self, i0, i1))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights, ``(*batch, Hq, L, S)``."""
        return (*self.batch, self.heads, self.L, self.S)
