"""Keys or values in pages: where they lie, and the checks."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sdpa_ref.arrays import FLOATS, Array, host_array, is_float, kind, memory_array, module_of
from sdpa_ref.storage import Stored
from sdpa_ref.stored.quantized import FLOAT8, Quantized

_FEW = 64  # numbers below which Python is quicker than NumPy


@dataclass(frozen=True, eq=False, repr=False)
class Paged:
    """Keys or values in pages that a table lists, a `key` or `value` of `sdpa`.

    Key j of batch entry b is slot ``j % P`` of page ``table[b, j // P]``. There are ``S = M * P`` keys, of which the
    first ``lengths[b]`` exist. It holds views of pages and table, and a copy of the lengths.

    Parameters
    ----------
    pages : float array or Quantized, shape (N, Hkv, P, E), or (N, P, Hkv, E) in layout "LHE"
        Slots beyond the length, and pages that no entry needs, have no influence on a result.
    table : int array, shape (..., M)
        Pages of each batch entry, on the host. Entries beyond the length may hold anything.
    lengths : int or int array over the batch
        Keys of each batch entry, in [0, M * P].
    layout : {"HLE", "LHE"}
        The order of heads and slots in a page, and that of the call: in "LHE" a dense array is ``(*batch, S, Hkv, E)``.

    Attributes
    ----------
    shape, ndim, dtype
        Those of `dense`.
    nbytes : int
        Memory of all pages, of the table and of the lengths.

    Raises
    ------
    TypeError, ValueError
        The parts have wrong types or shapes, or a length is out of its range. The entries of the table are checked in
        the call, which checks those that it needs.

    Notes
    -----
    The layouts are those of FlashInfer: "HLE" is its HND and "LHE" its NHD, which is FlashAttention's too.

    Examples
    --------
    >>> import numpy as np
    >>> pages = np.arange(6.0).reshape(3, 1, 2, 1)  # three pages of one head and two slots
    >>> keys = Paged(pages, table=[[2, 0], [1, -1]], lengths=[3, 1])
    >>> keys
    Paged((2, 1, 4, 1), float64, 3 pages of 2, lengths 1..3)
    >>> keys.dense()[:, 0, :, 0]
    array([[4., 5., 0., 0.],
           [2., 0., 0., 0.]])
    """

    pages: Any
    table: Array
    lengths: Array
    layout: str = "HLE"

    def __post_init__(self) -> None:
        pages, table, lengths, layout = self.pages, self.table, self.lengths, self.layout
        put = object.__setattr__
        if type(pages) is not np.ndarray and not isinstance(pages, Quantized):
            put(self, "pages", pages := memory_array("pages", pages))
        if layout != "HLE" and layout != "LHE":
            raise ValueError(f'layout must be "HLE" (N, Hkv, P, E) or "LHE" (N, P, Hkv, E), got {layout!r}')
        if pages.dtype.char not in "efd" and not is_float(pages.dtype):
            codes = pages.dtype.kind in "iu" or pages.dtype.name in FLOAT8
            hint = "; codes and their scale make pages=Quantized(codes, scale)" if codes else ""
            raise TypeError(f"pages must be {FLOATS}, or a Quantized, got {pages.dtype}{hint}")
        shape = pages.shape
        if len(shape) != 4 or not shape[2 if layout == "HLE" else 1]:
            axes = "(N, Hkv, P, E)" if layout == "HLE" else "(N, P, Hkv, E)"
            raise ValueError(f"pages must have shape {axes} with P of at least 1, got {shape}")
        if type(table) is not np.ndarray:
            table = host_array("table", table)
            put(self, "table", table := table if table.size else table.astype(np.int64))  # a list may have no type
        if table.dtype.kind not in "iu":
            raise TypeError(f"table must be integers, got {table.dtype}")
        if not table.ndim:
            raise ValueError("table must have at least one axis, (*batch, M), got a number")
        if type(lengths) is not np.ndarray:
            lengths = host_array("lengths", lengths)
        if lengths.dtype.kind not in "iu" and lengths.size:
            raise TypeError(f"lengths must be integers, got {lengths.dtype}")
        own = np.empty(table.shape[:-1], np.int64)
        try:
            own[...] = lengths
        except ValueError:
            raise ValueError(
                f"lengths must broadcast to the batch axes {own.shape} of the table, got shape {lengths.shape}"
            ) from None
        most, unsigned = table.shape[-1] * self.page, own.view(np.uint64)  # in which a negative number is a large one
        if (max(unsigned.ravel().tolist(), default=0) if own.size < _FEW else int(unsigned.max())) > most:
            wrong = lengths[(lengths < 0) | (lengths > most)].flat[0]
            raise ValueError(f"lengths must be in [0, M * P] = [0, {most}], got {wrong}")
        own.setflags(write=False)
        put(self, "lengths", own)

    @property
    def page(self) -> int:
        """How many slots a page has, P."""
        return int(self.pages.shape[2 if self.layout == "HLE" else 1])

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `dense`."""
        table, pages = self.table.shape, self.pages.shape
        if self.layout == "HLE":
            return (*table[:-1], pages[1], table[-1] * pages[2], pages[3])
        return (*table[:-1], table[-1] * pages[1], pages[2], pages[3])

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.table.shape) + 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the pages; float64 where they are quantised, which does not count in the type of a result."""
        dtype: np.dtype[Any] = self.pages.dtype
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of pages, table and lengths."""
        return int(self.pages.nbytes + self.table.nbytes + self.lengths.nbytes)

    def dense(self) -> Array:
        """Return the keys as one array of shape `shape`, with 0 beyond the lengths; a copy.

        Raises
        ------
        ValueError
            An entry of the table that is needed names no page.
        """
        N, P = self.pages.shape[0], self.page
        table, lengths, S = self.table, self.lengths, self.shape
        needed = np.arange(table.shape[-1]) * P < lengths[..., None]
        wrong = needed & ((table < 0) | (table >= N))
        if wrong.any():
            *b, m = (int(index[0]) for index in np.nonzero(wrong))
            where = f"m = {m}" + (f" of b = {b[0] if len(b) == 1 else tuple(b)}" if b else "")
            raise ValueError(f"table must name pages in [0, {N}) for keys that exist, got {table[(*b, m)]} at {where}")
        codes = self.pages.codes if isinstance(self.pages, Quantized) else self.pages
        module = module_of(kind(codes))
        if not needed.any():
            return module.zeros(S, self.dtype)
        ids = np.where(needed, table, 0).astype(np.int64)
        if isinstance(self.pages, Quantized):
            gathered = self.pages._map(lambda part: _of_pages(part, ids, N, module)).dense()
        else:
            gathered = self.pages[module.asarray(ids)]
        exists = module.asarray(np.arange(ids.shape[-1] * P) < lengths[..., None])
        if self.layout == "HLE":
            gathered, exists = gathered.swapaxes(-4, -3), exists[..., None, :, None]
        else:
            exists = exists[..., None, None]
        return module.where(exists, gathered.reshape(S), module.zeros((), self.dtype))

    def _stored(self, dtype: np.dtype[Any]) -> Stored:
        """Return what backends see beside a query of this type."""
        pages = self.pages
        if type(pages) is np.ndarray:
            parts: tuple[Any, ...] = pages, self.table, None, None, 0, 0, self.shape, pages.dtype
        elif isinstance(pages, Quantized):
            parts = (pages.codes, self.table, pages.scale, pages.offset, pages.zero, pages.bits, self.shape, dtype)
        else:
            parts = pages, self.table, None, None, 0, 0, self.shape, pages.dtype
        return tuple.__new__(Stored, (*parts, self.layout, self.lengths))

    def __repr__(self) -> str:
        n = self.lengths
        lengths = f"lengths {n.min()}..{n.max()}" if n.size else "no batch entry"
        parts = self.pages
        what = f"codes {parts.codes.dtype}" if isinstance(parts, Quantized) else str(parts.dtype)
        layout = "" if self.layout == "HLE" else ', layout="LHE"'
        return f"Paged({self.shape}, {what}, {parts.shape[0]} pages of {self.page}, {lengths}{layout})"

    def __reduce__(self) -> Any:
        return Paged, (self.pages, self.table, self.lengths, self.layout)


def _of_pages(part: Array, ids: Array, N: int, module: Any) -> Array:
    """Return the pages of a part of quantised pages, whose first axis serves the pages in blocks."""
    if part.ndim < 4 or (part.shape[0] == 1 and N > 1):
        return part
    return part[module.asarray(ids // (N // part.shape[0]))]
