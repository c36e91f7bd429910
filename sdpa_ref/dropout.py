"""Dropout whose keep bits are a function of (seed, b, h, i, j): Philox 4x32-10 as a counter-based generator."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sdpa_ref.arrays import as_integer, real_number

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85  # what the key moves by in each round
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


@dataclass(frozen=True)
class Dropout:
    """Dropout of attention weights with probability `p`, reproducible from `seed` on every backend.

    The keep bit of a weight depends on nothing but the seed and the weight's own indices (b, h, i, j), so that
    any blocking, any backend and the backward pass see the same bits. Kept weights are multiplied by ``1 / (1 - p)``.

    Parameters
    ----------
    p : float
        Probability of dropping a weight, ``0 <= p < 1``.
    seed : int
        ``0 <= seed < 2**64``. There is no default: equal seeds mean equal bits.

    Notes
    -----
    Philox 4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). Counter
    ``(j // 4, i, h, b)``, key ``(seed & 0xffffffff, seed >> 32)``; key j is kept iff word ``j % 4`` is at least
    ``floor(p * 2**32)``.

    Examples
    --------
    >>> from sdpa_ref import Dropout
    >>> Dropout(0.5, seed=7).keep((2, 6)).astype(int)
    array([[1, 1, 0, 0, 0, 1],
           [0, 0, 1, 1, 0, 0]])
    """

    p: float
    seed: int

    def __post_init__(self) -> None:
        p = real_number("dropout: p", self.p)
        if not 0 <= p < 1:
            raise ValueError(f"dropout: p must be in [0, 1), got {p}")
        seed = as_integer("dropout: seed", self.seed)
        if not 0 <= seed < 2**64:
            raise ValueError(f"dropout: seed must be in [0, 2**64), got {seed}")
        object.__setattr__(self, "p", p)
        object.__setattr__(self, "seed", seed)

    @property
    def threshold(self) -> int:
        """The smallest 32-bit word that keeps a weight."""
        return int(self.p * 2**32)

    @property
    def factor(self) -> float:
        """What a kept weight is multiplied by."""
        return 1 / (1 - self.p)

    def keep(
        self, shape: tuple[int, ...], *, first_row: int = 0, first: tuple[int, int, int, int] | None = None
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return the keep bits of weights of this shape, ``(..., Hq, L, S)``; two axes mean one head.

        Parameters
        ----------
        shape : tuple of int
            Shape of the weights; the leading axes are flattened into the batch index b.
        first_row : int
            Index i of the first row, for a block of rows of a longer problem.
        first : tuple of int, optional
            Indices b, h, i and j of the first weight, instead of `first_row`, for a block of a larger problem; j is a
            multiple of 4.
        """
        if not all(isinstance(size, (int, np.integer)) and size >= 0 for size in shape):
            raise ValueError(f"shape must be sizes of at least 0, got {shape}")
        *batch, heads, rows, keys = (1,) * (3 - len(shape)) + tuple(shape)
        entries = int(np.prod(batch, dtype=np.int64))
        b0, h0, i0, j0 = first or (0, 0, first_row, 0)
        if j0 % 4:
            raise ValueError(f"first: the first key must be a multiple of 4, got {j0}")
        quads = j0 // 4
        b, h, i, quad = np.ogrid[b0 : b0 + entries, h0 : h0 + heads, i0 : i0 + rows, quads : quads + (keys + 3) // 4]
        words = np.stack(_philox((quad, i, h, b), (self.seed & 0xFFFFFFFF, self.seed >> 32)), axis=-1)
        kept = words.reshape(entries, heads, rows, words.shape[3] * 4)[..., :keys] >= self.threshold
        return kept.reshape(shape)


def _philox(counter: tuple[Any, ...], key: tuple[int, int]) -> Any:
    """Return the four 32-bit words (as uint64 arrays) that ten rounds make of the counter."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word).astype(np.uint64) & _LOW for word in counter))
    for turn in range(10):
        k0, k1 = (np.uint64((k + turn * w) & 0xFFFFFFFF) for k, w in zip(key, _WEYL, strict=True))
        product0, product1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> _HALF) ^ c1 ^ k0,
            product1 & _LOW,
            (product0 >> _HALF) ^ c3 ^ k1,
            product0 & _LOW,
        )
    return c0, c1, c2, c3
