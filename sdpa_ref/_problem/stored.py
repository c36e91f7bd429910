"""Arguments that are stored keys: what they come to, and the errors of those that do not fit the call."""

from typing import Any

import numpy as np

from sdpa_ref._problem.checks import native
from sdpa_ref.arrays import Array, as_array, kind, module_of
from sdpa_ref.backend import Form
from sdpa_ref.masks import All, Band, Intervals, KeyLengths, Mask, as_mask, joined
from sdpa_ref.sources import Source, source_of
from sdpa_ref.storage import Stored


def stored_or_array(name: str, value: Any, dtype: np.dtype[Any]) -> Array | Stored | Source:
    """Return an array, what lies in a store, or what `Paged` and `Quantized` come to beside a query of this type."""
    describe = getattr(value, "_stored", None)
    if describe is None:
        source = None if type(value) is np.ndarray else source_of(value)
        return as_array(name, value) if source is None else source
    stored: Stored = describe(dtype)
    parts = {part: getattr(stored, part) for part in ("numbers", "table", "scale", "offset")}
    foreign = {part: array for part, array in parts.items() if array is not None and not array.dtype.isnative}
    if foreign:  # kernels read numbers where they lie
        stored = stored._replace(
            **{part: native(array, array.dtype.newbyteorder("=")) for part, array in foreign.items()}
        )
    return stored


def of_one_kind(query: Array, key: Any, value: Any) -> tuple[Array, Any, Any, str]:
    """Return query, key and value, and their kind; beside a Dask array, arrays become such of one chunk.

    It is "store" where keys or values lie in a store, and the query in memory.
    """
    given = query, key, value
    kinds = {kind(x) for x in given}
    stores = any(type(x) is Source for x in given)
    if "dask" in kinds:
        if any(type(x) is Stored for x in given):
            raise TypeError("key and value must be arrays or stores beside a Dask array, got Paged or Quantized")
        lazy = module_of("dask")
        in_memory = (x is not None and type(x) is not Source and kind(x) != "dask" for x in given)
        query, key, value = (
            lazy.from_array(x, chunks=-1) if there else x for x, there in zip(given, in_memory, strict=True)
        )
        return query, key, value, "dask"
    if not stores:
        return query, key, value, kind(query)
    if "cupy" in kinds or any(type(x) is Stored for x in given):
        raise TypeError("a store is read into the host's memory: beside it key, value and query must be NumPy arrays")
    return query, key, value, "store"


def check_layout(layout: str, **given: Any) -> None:
    """Raise a ValueError where pages were made for another layout."""
    for name, array in given.items():
        own = getattr(array, "layout", None)
        if own is not None and own != layout:
            raise ValueError(f'{name} is Paged in layout "{own}", but the call has layout="{layout}": make them equal')


def with_lengths(mask: Any, key: Any, value: Any) -> Mask | None:
    """Return the mask joined with the lengths that pages carry, as one `KeyLengths`."""
    lengths = [part.lengths for part in (key, value) if type(part) is Stored and part.lengths is not None]
    if not lengths:
        return None if mask is None else as_mask(mask)
    if len(lengths) == 2 and lengths[0] is not lengths[1] and lengths[0].tobytes() != lengths[1].tobytes():
        raise ValueError(f"key and value must be Paged with the same lengths, got {lengths[0]} and {lengths[1]}")
    if mask is None:
        return KeyLengths(lengths[0])
    valid, others = lengths[0], []
    for part in joined(as_mask(mask)):
        if type(part) is KeyLengths:
            valid = np.minimum(valid, part.n)
        else:
            others.append(part)
    own = KeyLengths(valid)
    return All((own, *others)) if others else own


def check_tables(form: Form, visible: Band | Intervals | None, L: int, S: int, **stored: Any) -> None:
    """Raise a ValueError where keys that some row sees lie in a page that does not exist."""
    checked = None
    for name, part in stored.items():
        if type(part) is not Stored or part.table is None:
            continue
        N, table, page = part.numbers.shape[0], part.table, part.page
        if checked == (id(table), N) or in_range(table, N):
            checked = id(table), N
            continue
        wrong = (table < 0) | (table >= N)
        first = np.arange(table.shape[-1]) * page
        if part.lengths is not None:
            wrong = wrong & (first < np.asarray(part.lengths)[..., None])
        if not wrong.any():
            continue
        wrong = np.broadcast_to(wrong, (*form.batch, wrong.shape[-1])) & needed(form, visible, L, S, page)
        if wrong.any():
            *entry, m = (int(x) for x in np.argwhere(wrong)[0])
            value = np.broadcast_to(table, wrong.shape)[(*entry, m)]
            where = f"table[{', '.join(map(str, (*entry, m)))}]"
            raise ValueError(
                f"{name}: {where} is {value}, not one of the {N} pages, but its keys from {m * page} on are visible"
            )


def in_range(table: Array, N: int) -> bool:
    """Return whether all numbers of a table are in [0, N), in one comparison: as unsigned, a negative one is large."""
    if table.dtype.kind == "i" and table.flags.c_contiguous:
        table = table.view(table.dtype.str.replace("i", "u"))
    return bool(table.size == 0 or (table.max() < N and table.dtype.kind == "u"))


def needed(form: Form, visible: Band | Intervals | None, L: int, S: int, page: int) -> Array:
    """Return which entries of a table have a key that some row of the batch entry sees, ``(*batch, M)``."""
    M = S // page
    if visible is None:
        return np.full((*form.batch, M), L > 0)
    if isinstance(visible, Band):
        visible = visible.intervals(L, S, form.batch)
    bounds = [np.broadcast_to(x, (*form.batch, L)).reshape(-1, L) for x in visible]
    prefix, start, stop = bounds
    edges = np.zeros((len(prefix), M + 1), np.int64)
    entries = np.broadcast_to(np.arange(len(prefix))[:, None], prefix.shape)
    for low, high in ((np.zeros_like(prefix), prefix), (start, stop)):
        some = low < high
        np.add.at(edges, (entries[some], low[some] // page), 1)
        np.add.at(edges, (entries[some], (high[some] - 1) // page + 1), -1)
    return (edges.cumsum(-1) > 0)[:, :M].reshape(*form.batch, M)
