"""Which tokens of a tree of drafts stay in a cache, and where they move."""

from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arrays import Array, host_array


class Kept(NamedTuple):
    """Moves among the drafts of all rows, and how many each row keeps."""

    rows: Array  # of each token that moves
    source: Array  # its place among the drafts
    target: Array
    count: Array  # of kept tokens, over the rows


def kept_drafts(index: Any, batch: tuple[int, ...], of: Array) -> Kept:
    """Return what an `index` of shape (*batch, K) keeps of the last ``of[row]`` tokens, or raise its error."""
    kept = host_array("index", index)
    kept = kept if kept.size else kept.astype(np.int64)
    if kept.dtype.kind not in "iu":
        raise TypeError(f"index must be integers, got {kept.dtype}")
    if kept.ndim < 1 or kept.shape[:-1] != batch:
        raise ValueError(f"index must have shape (*batch, K) with batch {batch}, got {kept.shape}")
    kept = np.minimum(kept, np.iinfo(np.int64).max) if kept.dtype.kind == "u" else kept  # never -1 by overflow
    kept = kept.reshape(of.size, kept.shape[-1]).astype(np.int64)
    there = kept >= 0
    before = np.maximum.accumulate(np.where(there, kept, -1), axis=-1)
    before = np.concatenate([np.full((of.size, 1), -1), before[:, :-1]], -1) if kept.shape[-1] else before
    wrong = (kept < -1) | (kept >= of[:, None]) | (there & (kept <= before))
    if wrong.any():
        row = int(np.nonzero(wrong)[0][0])
        raise ValueError(
            f"index must be strictly increasing in [0, of) = [0, {of[row]}), and -1 for none, got "
            f"{kept[row].tolist()} for row {row}"
        )
    rank = there.cumsum(-1) - 1
    rows, k = np.nonzero(there & (kept != rank))
    return Kept(rows, kept[rows, k], rank[rows, k], there.sum(-1))
