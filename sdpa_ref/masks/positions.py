"""Where the queries stand: the one place that decides what ``query_offset`` means."""

from typing import Any

import numpy as np

from sdpa_ref.arrays import as_array, kind
from sdpa_ref.masks.algebra import Mask, joined, walk
from sdpa_ref.masks.checks import broadcastable
from sdpa_ref.masks.intervals import Bound
from sdpa_ref.masks.rules import KeyLengths, Packed, QueryLengths

_FAR = 1 << 40  # positions up to here can be added and compared in int64 without care


def place_queries(
    mask: Mask | None, query_offset: Any, batch: tuple[int, ...], L: int, S: int, *, alibi: bool
) -> tuple[Bound, Bound, bool]:
    """Return the position of each query, that of its document's first key, and whether anything asks for them.

    Both arrays are in units of key indices and broadcast to ``(*batch, L)``. A ValueError asks for `query_offset` where
    the lengths differ and something is positional.
    """
    parts = [] if mask is None else list(walk(mask))
    positional = alibi or any(part.positional for part in parts)
    packed = _the_documents(mask, parts, positional or any(part.counts_in_documents for part in parts))
    first_query, first_key, queries, keys = (
        packed.documents(L) if packed is not None else map(np.atleast_1d, (0, 0, L, S))
    )
    if query_offset is None:
        differ = L != S if packed is None else bool((packed.q_lengths != packed.k_lengths).any())
        if positional and differ:
            raise ValueError(
                f"query_offset must say where the first query stands when {_lengths_differ(packed, L, S)}: "
                'query_offset="start" puts it on the first key, "end" puts the last query on the last key'
            )
        offset: Any = 0
    elif isinstance(query_offset, str):
        offset = _named(query_offset, mask, parts, packed, queries, keys)
    else:
        offset = _number(query_offset, batch)
    return np.arange(L) - first_query + first_key + offset, first_key, positional


def _the_documents(mask: Mask | None, parts: list[Mask], counted: bool) -> Packed | None:
    packed = [part for part in parts if isinstance(part, Packed)]
    if not packed or not counted:
        return None
    if any(other != packed[0] for other in packed):
        raise ValueError("mask: what counts within documents needs one Packed, got several different ones")
    if packed[0] not in joined(mask):
        raise ValueError("mask: Packed must be joined by & at the top when something counts within its documents")
    return packed[0]


def _named(name: str, mask: Mask | None, parts: list[Mask], packed: Packed | None, queries: Any, keys: Any) -> Any:
    if name == "start":
        return 0
    if name != "end":
        raise ValueError(f'query_offset must be an int, an array of int, "start" or "end", got {name!r}')
    if packed is not None:
        return keys - queries
    for rule in (QueryLengths, KeyLengths):
        given = [part for part in parts if type(part) is rule]
        if len(given) > sum(type(part) is rule for part in joined(mask)):
            raise ValueError(f'query_offset="end" cannot read {rule.__name__} under | or ~: give the offset as numbers')
        if len(given) > 1:
            raise ValueError(f'query_offset="end" reads at most one {rule.__name__}, got {len(given)}')
        if given:
            n = given[0].n[..., None]
            queries, keys = (n, keys) if rule is QueryLengths else (queries, n)
    return keys - queries


def _number(query_offset: Any, batch: tuple[int, ...]) -> Any:
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
    return offset.astype(np.int64)[..., None]


def _lengths_differ(packed: Packed | None, L: int, S: int) -> str:
    return f"L = {L} and S = {S} differ" if packed is None else "the q_lengths and k_lengths of a document differ"
