"""Where the queries stand: the one place that decides what ``query_offset`` means."""

from typing import Any

import numpy as np

from sdpa_ref.arrays import as_array, host_array, kind
from sdpa_ref.masks.algebra import Mask, joined, leaves
from sdpa_ref.masks.band import Number, least
from sdpa_ref.masks.checks import broadcastable
from sdpa_ref.masks.documents import Packed, Tree
from sdpa_ref.masks.intervals import Bound
from sdpa_ref.masks.rules import KeyLengths, KeyStarts, QueryLengths

_FAR = 1 << 40  # positions up to here can be added and compared in int64 without care
_BEHIND = 1 << 41  # the position of what lies behind the last key


def place_queries(
    mask: Mask | None, query_offset: Any, batch: tuple[int, ...], L: int, S: int, *, alibi: bool = False,
    key_positions: Bound | None = None,
) -> tuple[Number, tuple[Bound, Bound] | None]:  # fmt: skip
    """Return the position of the first query, and where documents say more, that of each query and of its first key.

    The offset is an int or an int64 array that broadcasts to the batch axes; both arrays broadcast to ``(*batch, L)``
    and are in units of key indices. A ValueError requires `query_offset` where the lengths differ and something is
    positional.
    """
    parts, positional, packed = leaves(mask) if mask is not None else (), alibi, None
    for part in parts:
        positional |= part.positional
        packed = part if isinstance(part, Packed) else packed
    if packed is not None:
        if key_positions is not None:
            raise ValueError("key_positions: not with Packed, whose documents have positions of their own")
        packed = _the_documents(mask, parts, positional)
    if packed is None:
        if query_offset is None:
            if positional and key_positions is not None:
                raise _unset("key_positions are given")
            if positional and L != S:
                raise _unset(f"L = {L} and S = {S} differ")
            return 0, None
        if isinstance(query_offset, str):
            queries, keys = _valid(query_offset, mask, parts, L, S)
            if query_offset == "start":
                return 0, None
            return (keys if key_positions is None else _place_behind_last(key_positions, keys)) - queries, None
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


def valid_keys(mask: Mask | None, L: int) -> Number | None:
    """Return how many keys there are where `KeyLengths` at the top of the mask says so, or raise a `Tree`'s error."""
    lengths = None
    for part in joined(mask):
        if isinstance(part, KeyLengths):
            lengths = part.n if lengths is None else least(lengths, part.n)
    if lengths is not None and mask is not None and any(isinstance(part, Tree) for part in leaves(mask)):
        short = (np.asarray(lengths) < L) & (np.asarray(lengths) > 0)
        if short.any():
            raise ValueError(
                f"mask: Tree needs its L = {L} nodes among the valid keys, but KeyLengths leaves {np.min(lengths)}"
            )
    return lengths


def placed_keys(key_positions: Any, mask: Mask | None, batch: tuple[int, ...], S: int) -> Bound:
    """Return the positions of the keys, int64 and broadcastable to ``(*batch, S)``, or raise the error of wrong ones.

    What `KeyStarts` and `KeyLengths` at the top of the mask leave out has -1 before the valid keys and a number beyond
    all positions behind them: a row is sorted, whatever was given for keys that do not exist.
    """
    given = host_array("key_positions", key_positions)
    if given.dtype.kind not in "iu" and given.size:
        raise TypeError(f"key_positions must be integers, got {given.dtype}")
    if given.ndim < 1 or given.shape[-1] != S or not broadcastable(given.shape[:-1], batch):
        raise ValueError(
            f"key_positions must have shape (S,) or (*batch, S) with S = {S} and batch {batch}, got {given.shape}"
        )
    slots, keys = np.arange(S), np.where(given > _FAR, _FAR + 1, given).astype(np.int64)
    valid = np.ones(1, bool)
    for part in joined(mask):
        if isinstance(part, KeyLengths | KeyStarts):
            n = np.asarray(part.n)[..., None]
            valid = valid & (slots < n if isinstance(part, KeyLengths) else slots >= n)
    valid = np.broadcast_to(valid, np.broadcast_shapes(valid.shape, keys.shape))
    keys = np.broadcast_to(keys, valid.shape)
    if (((keys < 0) | (keys > _FAR)) & valid).any():
        raise ValueError(f"key_positions must be in [0, 2**40], got {given[..., :8].tolist()!r:.60}")
    later = valid[..., 1:] & valid[..., :-1] & (keys[..., 1:] <= keys[..., :-1])
    if later.any():
        *entry, j = (int(x) for x in np.argwhere(later)[0])
        raise ValueError(
            f"key_positions must increase strictly over the valid keys, got {keys[(*entry, j)]} for key {j} and "
            f"{keys[(*entry, j + 1)]} for key {j + 1}" + (f" of batch entry {tuple(entry)}" if entry else "")
        )
    before = np.cumsum(valid, -1) == 0
    return np.where(valid, keys, np.where(before, -1, _BEHIND))


def _place_behind_last(key_positions: Bound, keys: Number) -> Number:
    """Return the position behind that of the last of so many keys, for each batch entry."""
    S = key_positions.shape[-1]
    if S == 0:
        return 0
    last = np.maximum(np.asarray(keys) - 1, 0)
    lead = np.broadcast_shapes(key_positions.shape[:-1], last.shape)
    positions = np.broadcast_to(key_positions, (*lead, S))
    found = np.take_along_axis(positions, np.broadcast_to(last, lead)[..., None], -1)[..., 0]
    behind = np.where((found >= 0) & (found < _BEHIND), found + 1, 0)  # an entry without keys: no row sees any
    return behind if behind.ndim else int(behind)


def _checked(name: str) -> str:
    if name not in ("start", "end"):
        raise ValueError(f'query_offset must be an int, an array of int, "start" or "end", got {name!r}')
    return name


def _valid(name: str, mask: Mask | None, parts: tuple[Mask, ...], L: int, S: int) -> tuple[Number, Number]:
    """Return how many queries and keys there are, which only "end" needs."""
    if _checked(name) == "start":
        return L, S
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
    return L if queries is None else queries, S if keys is None else keys


def _number(query_offset: Any, batch: tuple[int, ...]) -> Number:
    if type(query_offset) is int and abs(query_offset) <= _FAR:
        return query_offset
    offset = as_array("query_offset", query_offset) if not isinstance(query_offset, int) else np.array(query_offset)
    if kind(offset) != "numpy":
        remedy = "get" if kind(offset) == "cupy" else "compute"
        raise TypeError(
            f"query_offset is read by the host, and is a {kind(offset)} array: pass query_offset.{remedy}()"
        )
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
