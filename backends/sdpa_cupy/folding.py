"""Problems of more leading axes than the parameter block has: the axes as one, repeated numbers repeated in memory."""

import math
from typing import Any

import numpy as np

from sdpa_ref.backend import Problem
from sdpa_ref.masks import Band, Intervals

Array = Any


def folded(problem: Problem) -> Problem:
    """Return the problem with one leading axis; a copy only of arrays whose own axes cannot be seen as one."""
    p, n = problem, problem.B

    def one(array: Array, inner: int) -> Array:
        """Return an array of so many axes behind the leading ones with a leading axis of n entries, or of one."""
        if not hasattr(array, "ndim") or array.ndim <= inner:
            return array
        own = array.shape[array.ndim - inner :]
        if math.prod(array.shape[: array.ndim - inner]) == 1:
            return array.reshape(1, *own)
        return np.broadcast_to(array, (*p.batch, *own)).reshape(n, *own)

    visible = p.visible
    if isinstance(visible, Band):
        visible = Band(*(one(number, 0) for number in visible))
    elif visible is not None:
        visible = Intervals(*(one(bound, 1) for bound in visible))
    return p._replace(
        form=p.form._replace(batch=(n,)), query=one(p.query, 3), key=one(p.key, 3), value=one(p.value, 3), out=None,
        visible=visible, keep=one(p.keep, 3), bias=one(p.bias, 3), slopes=one(p.slopes, 1), offset=one(p.offset, 0),
        positions=one(p.positions, 1),
    )  # fmt: skip
