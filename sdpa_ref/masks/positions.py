"""Where the queries stand: the one place that decides what ``query_offset`` means."""

from typing import Any

import numpy as np

from sdpa_ref.arrays import as_array, kind
from sdpa_ref.masks.algebra import Mask, joined, leaves
from sdpa_ref.masks.band import Number
from sdpa_ref.masks.checks import broadcastable
from sdpa_ref.masks.documents import Packed
from sdpa_ref.masks.intervals import Bound
from sdpa_ref.masks.rules import KeyLengths, QueryLengths

_FAR = 1 << 40  # positions up to here can be added and compared in int64 without care


def place_queries(
    mask: Mask | None, query_offset: Any, batch: tuple[int, ...], L: int, S: int, *, alibi: bool = False
) -> tuple[Number, tuple[Bound, Bound] | None]:
    """Return the position of the first query, and where documents say more, that of each query and of its first key.

    The offset is an int or an int64 array that broadcasts to the batch axes; both arrays broadcast to ``(*batch, L)``
    and are in units of key indices. A ValueError asks for `query_offset` where the lengths differ and something is
    positional.
    """
    parts, positional, packed = leaves(mask) if mask is not None else (), alibi, None
    for part in parts:
        positional |= part.positional
        packed = part if isinstance(part, Packed) else packed
    if packed is not None:
        packed = _the_documents(mask, parts, positional)
    if packed is None:
        if query_offset is None:
            if positional and L != S:
                raise _unset(f"L = {L} and S = {S} differ")
            return 0, None
        if isinstance(query_offset, str):
            return _named(query_offset, mask, parts, L, S), None
        return _number(query_offset, batch), None
    first_query, first_key, queries, keys = packed.documents(L)
    offset: Any = 0
    if query_offset is None:
        if positional and (packed.q_lengths != packed.k_lengths).any():
            raise _unset("the q_lengths and k_lengths of a document differ")
    elif isinstance(query_offset, str):
        offset = keys - queries if _checked(query_offset) == "end" else 0
    else:
        offset = np.asarray(_number(query_offset, batch))[..., None]
    return 0, (np.arange(L) - first_query + first_key + offset, first_key)


def _unset(why: str) -> ValueError:
    return ValueError(
        f"query_offset must say where the first query stands when {why}: "
        'query_offset="start" puts it on the first key, "end" puts the last query on the last key'
    )


def _the_documents(mask: Mask | None, parts: tuple[Mask, ...], positional: bool) -> Packed | None:
    packed = [part for part in parts if isinstance(part, Packed)]
    if not packed or not (positional or any(part.counts_in_documents for part in parts)):
        return None
    if any(other != packed[0] for other in packed):
        raise ValueError("mask: what counts within documents needs one Packed, got several different ones")
    if packed[0] not in joined(mask):
        raise ValueError("mask: Packed must be joined by & at the top when something counts within its documents")
    return packed[0]


def _checked(name: str) -> str:
    if name not in ("start", "end"):
        raise ValueError(f'query_offset must be an int, an array of int, "start" or "end", got {name!r}')
    return name


def _named(name: str, mask: Mask | None, parts: tuple[Mask, ...], L: int, S: int) -> Number:
    if _checked(name) == "start":
        return 0
    queries = keys = None
    for part in parts:
        rule = type(part)
        if rule is QueryLengths or rule is KeyLengths:
            if not any(part is other for other in joined(mask)):
                raise ValueError(
                    f'query_offset="end" cannot read {rule.__name__} under | or ~: give the offset as numbers'
                )
            if (queries if rule is QueryLengths else keys) is not None:
                number = sum(type(other) is rule for other in parts)
                raise ValueError(f'query_offset="end" reads at most one {rule.__name__}, got {number}')
            queries, keys = (part.n, keys) if rule is QueryLengths else (queries, part.n)  # type: ignore[attr-defined]
    return (S if keys is None else keys) - (L if queries is None else queries)


def _number(query_offset: Any, batch: tuple[int, ...]) -> Number:
    if type(query_offset) is int and abs(query_offset) <= _FAR:
        return query_offset
    offset = as_array("query_offset", query_offset) if not isinstance(query_offset, int) else np.array(query_offset)
    if kind(offset) == "cupy":
        raise TypeError("query_offset is read by the host, and is a cupy array: pass query_offset.get()")
    if offset.dtype == object:
        offset = np.array(np.iinfo(np.int64).max)  # beyond int64, and so beyond what is allowed
    if offset.dtype.kind not in "iu":
        raise TypeError(
            f'query_offset must be an int, an array of int, "start" or "end", got {offset.dtype} ({query_offset!r:.60})'
        )
    if not broadcastable(offset.shape, batch):
        raise ValueError(f"query_offset must broadcast to the batch axes {batch}, got shape {offset.shape}")
    if (abs(offset.astype(np.float64)) > _FAR).any():
        raise ValueError(f"query_offset must be within +-2**40, got {query_offset!r:.60}")
    return offset.astype(np.int64) if offset.ndim else int(offset)
