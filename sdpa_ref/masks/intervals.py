"""Sets of keys that are a few intervals per query row, and the algebra on them: the cheap form of a mask.

A set is a list of pairs ``(start, stop)`` of int64 arrays that broadcast to ``(*batch, L)``; row i holds the union of
its ``[start, stop)``. Bounds may lie outside [0, S] and intervals may overlap until `tidy` has seen them.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

Bound: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Rows: TypeAlias = list[tuple[Bound, Bound]]


class Intervals(NamedTuple):
    """The normal form: a row sees the keys ``[0, prefix)`` and ``[start, stop)``.

    int64 arrays that broadcast to ``(*batch, L)``. Every bound lies in [0, S]; an empty part is ``prefix = 0`` or
    ``start = stop = 0``; where both parts hold keys, ``prefix < start``.
    """

    prefix: Bound
    start: Bound
    stop: Bound


def intersection(a: Rows, b: Rows) -> Rows:
    """Return the keys in both sets."""
    return [(np.maximum(s, t), np.minimum(e, f)) for s, e in a for t, f in b]


def complement(a: Rows, S: int) -> Rows:
    """Return the keys of [0, S) outside the set: the gaps between its intervals."""
    gaps, reached = [], np.zeros((1,), np.int64)
    for start, stop in tidy(a, S):
        used = start < stop
        gaps.append((reached, np.where(used, start, reached)))
        reached = np.where(used, stop, reached)
    return [*gaps, (reached, np.full_like(reached, S))]


def tidy(rows: Rows, S: int) -> Rows:
    """Return the same set, its intervals in [0, S], sorted, disjoint and apart; empty ones are (0, 0) and last."""
    if not rows:
        return []
    bounds = tuple(np.minimum(np.maximum(bound, 0), S) for pair in rows for bound in pair)
    if len(rows) == 1:
        some = bounds[0] < bounds[1]
        return [(np.where(some, bounds[0], 0), np.where(some, bounds[1], 0))]
    bounds = np.broadcast_arrays(*bounds)
    start, stop = _sorted(np.stack(bounds[0::2]), np.stack(bounds[1::2]), S)
    for k in range(1, len(start)):
        joins = (start[k] < stop[k]) & (start[k] <= stop[k - 1])  # overlaps or touches: the later one takes it in
        start[k] = np.where(joins, start[k - 1], start[k])
        stop[k] = np.where(joins, np.maximum(stop[k - 1], stop[k]), stop[k])
        stop[k - 1] = np.where(joins, start[k - 1], stop[k - 1])
    start, stop = _sorted(start, stop, S)
    empty = start >= stop
    start[empty] = stop[empty] = 0
    return [(s, e) for s, e, none in zip(start, stop, empty, strict=True) if not none.all()]


def normal_form(rows: Rows, S: int) -> tuple[Intervals, bool]:
    """Return the set as `Intervals`, and whether they say it all; if not, they are its hull."""
    zero = np.zeros((1,), np.int64)
    parts = tidy(rows, S) or [(zero, zero)]
    (start, stop), (last_start, last_stop) = parts[0], parts[-1]
    prefix, exact = zero, True
    if len(parts) > 1:
        two = last_start < last_stop
        exact = len(parts) == 2 and bool(np.all((start == 0) | ~two))
        if exact:
            prefix = np.where(two, stop, 0)
            start, stop = np.where(two, last_start, start), np.where(two, last_stop, stop)
        else:
            stop = np.maximum.reduce([end for _, end in parts])
    return Intervals(prefix, start, stop), exact


def _sorted(start: Bound, stop: Bound, S: int) -> tuple[Bound, Bound]:
    """Return the intervals of each row in order of their start, the empty ones last."""
    order = np.argsort(np.where(start < stop, start, S + 1), axis=0, kind="stable")
    return np.take_along_axis(start, order, 0), np.take_along_axis(stop, order, 0)
