"""Pages that several caches share: counted references, and a copy on the first write of a shared page."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from sdpa_ref._problem.checks import checked_sizes
from sdpa_ref.arrays import Array
from sdpa_ref.stored import files
from sdpa_ref.stored.cache import Cache, CacheFull
from sdpa_ref.stored.geometry import Geometry, Parts, read_only
from sdpa_ref.stored.paged import Paged
from sdpa_ref.stored.rows import Index, Number, settled


class PagePool:
    """Pages of keys and values of one layer, which caches take as they grow and give back.

    Rows that were selected twice or joined share their pages until one of them writes to a page.

    Parameters
    ----------
    pages : int
        How many pages there are; they are allocated at once.
    heads, page, E : int
        Key heads, tokens of a page, and the width of keys.
    Ev, dtype, store, tied, layout, like
        As in `KVCache`.

    Attributes
    ----------
    pages, page : int
    free : int
        Pages that nobody has.
    nbytes : int
        Memory of all pages.

    Examples
    --------
    >>> import numpy as np
    >>> pool = PagePool(8, heads=2, page=4, E=16)
    >>> cache = pool.cache(1)
    >>> cache.append(*np.ones((2, 1, 2, 6, 16), np.float32))  # a prompt of six tokens
    >>> cache.select([0, 0, 0])  # three answers: two pages are shared
    >>> pool
    PagePool(8 pages of 4, heads=2, E=16, float32, 6 free)
    >>> cache.append(*np.ones((2, 3, 2, 1, 16), np.float32))  # two rows copy the page that is not full
    >>> pool.free
    4
    >>> cache.key
    Paged((3, 2, 8, 16), float32, 8 pages of 4, lengths 7..7)
    """

    def __init__(
        self,
        pages: int,
        heads: int,
        page: int,
        E: int,
        Ev: int | None = None,
        *,
        dtype: Any = np.float32,
        store: Any = None,
        tied: bool = False,
        layout: str = "HLE",
        like: Any = None,
    ) -> None:
        self.pages, self.page = checked_sizes(pages=pages, page=page).values()
        self._geometry = Geometry(heads, E, Ev, dtype, store, tied, layout, like)
        self._arrays = self._geometry.empty(self.pages, self.page)
        self._tokens = self._geometry.by_token(self._arrays)
        self._meant = self._geometry.meant(tuple(map(read_only, self._arrays)))
        self._references = np.zeros(self.pages, np.int64)
        self._unused = list(range(self.pages - 1, -1, -1))
        self._forked = False  # whether a page may have two references

    def cache(
        self, batch: int | tuple[int, ...], *, window: int | None = None, first: int = 0, slack: int = 0
    ) -> "PagedCache":
        """Return an empty cache over these pages, with the interface of `KVCache`.

        Its `key` and `value` are `Paged`, and carry the lengths. It gives its pages back when it is closed or deleted.

        Parameters
        ----------
        batch, window, first, slack
            As in `KVCache`. A window lets go of whole pages.
        """
        return PagedCache(self, batch, window, first, slack)

    @property
    def free(self) -> int:
        """How many pages nobody has."""
        return len(self._unused)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(int(array.nbytes) for array in self._arrays)

    def from_state_dict(self, entries: Mapping[str, Any], **expected: Any) -> "PagedCache":
        """Return the cache that `state_dict` of a cache described, in pages of this pool.

        Parameters
        ----------
        entries : mapping of str to array
        **expected
            Of ``batch``, ``window``, ``first`` and ``slack``, what the entries must agree with.

        Raises
        ------
        CacheFull
            There are not enough pages. None is taken.
        ValueError
            Entries are missing, damaged or of another geometry; the message lists all that differs.
        """
        file = files.Entries(entries, PagedCache.__name__, self._arrays[0])
        got = file.arguments() | {"page": file.told.get("page")}
        file.check(got, expected | self._geometry.described() | {"page": self.page})
        cache = self.cache(got["batch"], window=got["window"], first=got["first"], slack=got["slack"])
        cache._fill(*file.tokens(self._geometry, cache.first))
        return cache

    def load(self, path: str | PathLike[str], **expected: Any) -> "PagedCache":
        """Return the cache that its `save` wrote, in pages of this pool; see `from_state_dict`.

        Raises
        ------
        OSError
            There is no such file.
        ValueError
            It is damaged or of another geometry; the message lists all that differs.
        """
        return files.loaded(path, lambda entries: self.from_state_dict(entries, **expected))

    def _taken(self, number: int) -> Index:
        """Return pages that nobody had; there are enough."""
        pages = np.array([self._unused.pop() for _ in range(number)], np.int64)
        self._references[pages] = 1
        return pages

    def _shared(self, pages: Index) -> None:
        """Count one more reference to each of these pages."""
        np.add.at(self._references, pages, 1)
        self._forked = True

    def _given_back(self, pages: Index) -> None:
        """Count one reference less to each of these pages."""
        np.subtract.at(self._references, pages, 1)
        self._unused.extend(np.unique(pages[self._references[pages] == 0]).tolist())

    def _freed_by(self, pages: Index) -> int:
        """Return how many pages nobody has after these references are given back."""
        own, counts = np.unique(pages, return_counts=True)
        return int((self._references[own] == counts).sum())

    def __repr__(self) -> str:
        return f"PagePool({self.pages} pages of {self.page}, {self._geometry!r}, {self.free} free)"


class PagedCache(Cache):
    """A cache whose rows lie in pages of a pool; `PagePool.cache` makes it, and `KVCache` says what it does."""

    _lease: list[bool] | None = None  # of the views that are good until the next change
    _table: Index

    def __init__(self, pool: PagePool, batch: Any, window: Any, first: Any, slack: Any) -> None:
        self._pool, self._granule = pool, pool.page
        super().__init__(pool._geometry, batch, window, first, slack)
        self._tokens = pool._tokens
        self._table = np.full((self._B, 0), -1, np.int64)
        self._closed = False

    def close(self) -> None:
        """Give all pages back. The cache cannot be used any more; to close it again does nothing."""
        if not self._closed:
            self._closed = True
            self._touch()
            self._pool._given_back(self._table[self._table >= 0])

    def __del__(self) -> None:
        if "_closed" in self.__dict__:
            self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the cache is closed, and has given its pages back")

    def _touch(self) -> None:
        if self._lease is not None:
            self._lease[0] = False
            self._lease = None
        super()._touch()

    def _make_views(self) -> tuple[Any, Any]:
        self._check_open()
        lengths = self._of_rows(self._n - self._shift).reshape(self.batch)
        table = self._table.reshape(*self.batch, -1) if self._table.size else self._table.reshape(*self.batch, 0)
        table.setflags(write=False)
        lengths.setflags(write=False)
        self._lease = [True]
        key, value = (
            Leased._of(pages, table, lengths, self._geometry.layout, self._lease) for pages in self._pool._meant
        )
        return key, value

    def _slots(self) -> int:
        return int(self._table.shape[1]) * self._granule

    def _length_rule(self) -> tuple[Any, ...]:
        return ()

    def _at(self, b: Index, slots: Index) -> tuple[Index, Index]:
        columns, within = np.divmod(slots, self._granule)
        return self._table[b, columns], within

    def _write(self, start: Number, T: int, parts: Parts, which: Any) -> None:
        if which is not None or type(start) is not int or T != 1 or self._geometry.kind != "numpy":
            super()._write(start, T, parts, which)
            return
        column, within = divmod(start, self._granule)
        pages = self._table[:, column] if self._B != 1 else int(self._table[0, column])
        for array, part in zip(self._tokens, parts, strict=True):
            array[pages, within] = part.reshape(self._B, *array.shape[2:])

    def _columns(self, slots: Number) -> Number:
        """Return how many pages hold so many slots."""
        return -(-slots // self._granule)

    def _room(self, added: Number, gone: Number) -> None:
        self._check_open()
        pool, page = self._pool, self._granule
        shift = self._shifted(gone)
        used = self._n - shift
        have, want = self._columns(used), self._columns(used + added)
        if not pool._forked and type(want) is int and type(have) is int and want == have and shift is self._shift:
            return
        have, want, used = self._of_rows(have), self._of_rows(want), self._of_rows(used)
        dropped = (self._of_rows(shift) - self._of_rows(self._shift)) // page
        fixed, columns = self._fixed // page, np.arange(self._table.shape[1])
        evicted = (columns >= fixed) & (columns < fixed + dropped[:, None])
        writing = np.nonzero((used % page != 0) & (self._of_rows(added) > 0))[0]
        rows, places = self._copied(
            writing, (used + self._of_rows(shift) - self._of_rows(self._shift))[writing] // page
        )
        needed = int((want - have).sum()) + len(rows)
        free = pool.free + (pool._freed_by(self._table[evicted]) if dropped.any() else 0)
        if needed > free:
            raise CacheFull(needed, free, "pages")
        most = int(want.max(initial=0))
        wider = len(columns) * 3 // 2 if most > len(columns) else len(columns)
        table = np.full((self._B, max(wider, most)), -1, np.int64)
        table[:, : len(columns)] = self._table
        if dropped.any():
            pool._given_back(self._table[evicted])
        table[rows, places] = self._copies(rows, places)
        if dropped.any():
            source = np.arange(table.shape[1])
            source = source + np.where(source >= fixed, dropped[:, None], 0)
            moved = np.take_along_axis(table, np.minimum(source, table.shape[1] - 1), 1)
            table = np.where(source < table.shape[1], moved, -1)
        columns = np.arange(table.shape[1])
        new = (columns >= have[:, None]) & (columns < want[:, None])
        table[new] = pool._taken(int(new.sum()))
        self._table = table
        if shift is not self._shift:
            self._shift, self._places = shift, None

    def _copied(self, b: Index, columns: Index) -> tuple[Index, Index]:
        """Return those rows and columns, of such as are written to, whose page has to be copied first."""
        pages = self._table[b, columns]
        if not self._pool._forked or not len(b):
            return b[:0], columns[:0]
        order = np.argsort(pages, kind="stable")
        rank = np.empty(len(b), np.int64)  # among those that write to the same page: the last one may keep it
        rank[order] = np.arange(len(b)) - np.searchsorted(pages[order], pages[order])
        copied = rank < self._pool._references[pages] - 1
        return b[copied], columns[copied]

    def _copies(self, b: Index, columns: Index) -> Index:
        """Return new pages with what these pages hold."""
        old, new = self._table[b, columns], self._pool._taken(len(b))
        if len(b):
            asarray = self._geometry.module.asarray
            for array in self._pool._arrays:
                array[asarray(new)] = array[asarray(old)]
            self._pool._given_back(old)
        return new

    def _own(self, b: Index, slots: Index) -> None:
        pairs = np.unique(np.stack([b, slots // self._granule]), axis=1)
        rows, columns = self._copied(*pairs)
        if len(rows) > self._pool.free:
            raise CacheFull(len(rows), self._pool.free, "pages")
        self._table = self._table.copy()
        self._table[rows, columns] = self._copies(rows, columns)

    def _settle(self, n: Number, shift: Number, gone: Number) -> None:
        self._check_open()
        keep = self._of_rows(self._columns(n - shift))
        unused = (np.arange(self._table.shape[1]) >= keep[:, None]) & (self._table >= 0)
        if unused.any():
            self._pool._given_back(self._table[unused])
            self._table = np.where(unused, -1, self._table)
        self._places = None
        super()._settle(n, shift, gone)

    def select(self, index: Any) -> None:
        """Make row b the old row ``index[b]``, -1 an empty one, as `KVCache.select`; rows share pages until written."""
        self._check_open()
        rows = self._old_rows(index)
        table = np.full((len(rows), self._table.shape[1]), -1, np.int64)
        table[rows >= 0] = self._table[rows[rows >= 0]]
        numbers = self._numbers_of(rows)
        self._pool._shared(table[table >= 0])
        self._pool._given_back(self._table[self._table >= 0])
        self._replace(table, numbers)

    def join(self, other: "PagedCache") -> None:
        """Add the rows of another cache of the same pool, whose pages both share until one of them writes."""
        self._check_alike(other)
        self._check_open()
        other._check_open()
        if other._pool is not self._pool:
            raise ValueError("caches can be joined within a pool, and the other is of another pool")
        M = max(self._table.shape[1], other._table.shape[1])
        table = np.full((self._B + other._B, M), -1, np.int64)
        table[: self._B, : self._table.shape[1]] = self._table
        table[self._B :, : other._table.shape[1]] = other._table
        self._pool._shared(other._table[other._table >= 0])
        both = zip((self._n, self._shift, self._gone), (other._n, other._shift, other._gone), strict=True)
        n, shift, gone = (settled(np.concatenate([self._of_rows(a), other._of_rows(b)])) for a, b in both)
        self._replace(table, (n, shift, gone))

    def _replace(self, table: Index, numbers: tuple[Number, Number, Number]) -> None:
        """Take other rows, whose references are counted."""
        self._table, self.batch, self._B = table, (len(table),), len(table)
        self._axes, self._places = (len(table), self._geometry.heads), None
        self._n, self._shift, self._gone = numbers
        self._touch()

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that the cache has, shared ones too, and of its table."""
        pages = len(np.unique(self._table[self._table >= 0]))
        return pages * self._granule * self._geometry.token_bytes + int(self._table.nbytes)

    def state_dict(self) -> dict[str, Array]:
        """Return the tokens, lengths and positions, and what the cache is; see `KVCache.state_dict`."""
        self._check_open()
        return files.entries_of(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write `state_dict` to a safetensors file, as a whole or not at all; `PagePool.load` reads it."""
        files.save(self.state_dict(), path)

    def _told(self) -> dict[str, Any]:
        return super()._told() | {"page": self._granule}

    def _described(self) -> dict[str, Any]:
        return super()._described() | {"page": self._granule}

    def _size(self) -> str:
        if self._closed:
            return "closed"
        return f"{len(np.unique(self._table[self._table >= 0]))} pages of {self._granule}"


class Leased(Paged):
    """A view of a cache, good until the cache changes: then its pages may be another's."""

    @classmethod
    def _of(cls, pages: Any, table: Index, lengths: Index, layout: str, lease: list[bool]) -> "Leased":
        """Return a view whose parts need no checks."""
        view = object.__new__(cls)
        view.__dict__.update(pages=pages, table=table, lengths=lengths, layout=layout, _lease=lease)
        return view

    def __repr__(self) -> str:
        return super().__repr__() if self.__dict__["_lease"][0] else "Paged(of a cache that has changed since)"

    @property
    def table(self) -> Index:
        """The table of pages; a ValueError where the cache has changed since."""
        if not self.__dict__["_lease"][0]:
            raise ValueError("the cache has changed since it gave this view: take its key and value again")
        table: Index = self.__dict__["table"]
        return table
