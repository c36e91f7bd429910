"""The two products of attention, as sums over the last axis of arrays in C order: the same bits whatever is around."""

import numpy as np

from sdpa_ref.arrays import Array


def product(rows: Array, columns: Array) -> Array:
    """Return the dot products ``(..., n, m)`` of vectors ``(..., n, w)`` with vectors ``(..., m, w)``."""
    terms = np.empty((*rows.shape[:-1], *columns.shape[-2:]), rows.dtype)
    np.multiply(rows[..., :, None, :], columns[..., None, :, :], out=terms)
    return terms.sum(-1)


def mixed(weights: Array, keep: Array, values: Array) -> Array:
    """Return, ``(..., n, w)``, the sums of the values ``(..., m, w)`` with weights ``(..., n, m)``.

    What `keep` drops is left out, and not multiplied by 0.
    """
    across = np.ascontiguousarray(values.swapaxes(-1, -2))
    terms = np.zeros((*weights.shape[:-1], *across.shape[-2:]), weights.dtype)
    np.multiply(weights[..., :, None, :], across[..., None, :, :], out=terms, where=keep[..., :, None, :])
    return terms.sum(-1)
