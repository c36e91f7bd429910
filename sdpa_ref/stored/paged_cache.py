"""A cache whose rows lie in pages of a pool, some of which are another's too."""

import sys
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.stored import files
from sdpa_ref.stored.cache import Cache, CacheFull
from sdpa_ref.stored.geometry import Parts
from sdpa_ref.stored.paged import Paged
from sdpa_ref.stored.rows import Index, Number, settled
from sdpa_ref.stored.slots import Slots

if TYPE_CHECKING:
    from sdpa_ref.stored.pool import PagePool


class PagedCache(Cache):
    """A cache whose rows lie in pages of a pool; `PagePool.cache` makes it, and `KVCache` describes its methods."""

    _lease: list[bool] | None = None  # of the views that are good until the next change
    _table: Index

    def __init__(self, pool: "PagePool", batch: Any, window: Any, first: Any, slack: Any) -> None:
        self._pool, self._granule = pool, pool.page
        super().__init__(pool._geometry, batch, window, first, slack)
        self._tokens = pool._tokens
        self._table = np.zeros((self._B, 1), np.int64)  # unused entries name page 0
        self._closed = False

    def close(self) -> None:
        """Give all pages back. The cache cannot be used any more; to close it again does nothing."""
        if not self._closed:
            self._closed = True
            self._touch()
            self._pool._given_back(self._held())

    def __del__(self) -> None:
        if "_closed" in self.__dict__ and not sys.is_finalizing():
            self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a cache of a pool cannot be copied: join() shares its pages with another cache of the pool, and "
            "state_dict() returns its tokens"
        )

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
        lengths = self._of_rows(self._used).reshape(self.batch)
        table = self._table.reshape(*self.batch, self._table.shape[1])
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

    def _behind(self, T: int) -> Parts | None:
        if self._B != 1 or not 0 < T <= self._spare or self._pool._forked or self.window is not None:
            return None
        self._check_open()
        start: int = self._n if type(self._n) is int else int(self._n[0])
        column, within = divmod(start, self._granule)
        page = int(self._table[0, column])
        place: Any = (slice(page, page + 1), slice(None), slice(within, within + T))
        if not self._hle:
            place = place[::2]
        return tuple([array[place] for array in self._pool._arrays])

    def _with(self, slots: Number) -> Any:
        """Return which entries of the table have a page when rows use so many slots."""
        return np.arange(self._table.shape[1]) < self._of_rows(self._columns(slots))[:, None]

    def _held(self) -> Index:
        """Return the pages of all rows, a shared one as often as it is shared."""
        pages: Index = self._table[self._with(self._used)]
        return pages

    def _columns(self, slots: Number) -> Number:
        """Return how many pages hold so many slots."""
        return -(-slots // self._granule)

    def _count(self, n: Number, shift: Number, gone: Number) -> None:
        super()._count(n, shift, gone)
        spare = -self._used % self._granule  # slots behind the last token, in the row that has the fewest
        self._spare = spare if type(spare) is int else int(spare.min(initial=self._granule))

    def _room(self, added: Number, gone: Number) -> None:
        self._check_open()
        pool, page, shift = self._pool, self._granule, self._shifted(gone)
        still = shift is self._shift
        if still and not pool._forked and type(added) is int and added <= self._spare:
            self._spare -= added
            return
        used = self._used
        if still and not pool._forked and type(added) is int and type(used) is int:  # all rows alike
            have, want = self._columns(used), self._columns(used + added)
            if (want - have) * self._B > pool.free:
                raise CacheFull((want - have) * self._B, pool.free, "pages")
            self._widen(want)
            self._table[:, have:want] = pool._taken((want - have) * self._B).reshape(self._B, -1)
            self._spare = -(used + added) % page
            return
        before = self._of_rows(self._used)
        moved = self._of_rows(shift) - self._of_rows(self._shift)
        used = before - moved
        have, want = self._columns(used), self._columns(used + added)
        evicted = np.zeros(0, np.int64) if still else self._table[self._evicted(moved)]
        rows = np.zeros(0, np.int64)  # whose last page is shared
        if pool._forked:
            rows = np.nonzero((used % page != 0) & (self._of_rows(added) > 0))[0]
            rows = rows[self._copied(self._table[rows, before[rows] // page])]
        needed, free = int((want - have).sum()) + len(rows), pool.free + (0 if still else pool._freed_by(evicted))
        if needed > free:
            raise CacheFull(needed, free, "pages")
        if not still:
            pool._given_back(evicted)
            self._table = self._table_without(moved)
            self._count(self._n, shift, self._gone)
            self._places = None
        if len(rows):
            columns = used[rows] // page
            self._table[rows, columns] = self._copies(self._table[rows, columns])
        self._allot(have, want)
        self._spare = int((-(used + added) % page).min(initial=page))

    def _allot(self, have: Index, want: Index) -> None:
        """Take new pages for the columns from `have` to `want` of each row."""
        self._widen(int(want.max(initial=0)))
        new = want - have
        b = np.repeat(np.arange(self._B), new)
        columns = np.arange(len(b)) + (have + new - new.cumsum())[b]
        self._table[b, columns] = self._pool._taken(len(b))

    def _widen(self, columns: int) -> None:
        """Let the table have so many columns at least."""
        M = self._table.shape[1]
        if columns > M:
            wider = np.zeros((self._B, max(M * 3 // 2, columns)), np.int64)
            wider[:, :M] = self._table
            self._table = wider

    def _evicted(self, moved: Index) -> Any:
        """Return which entries of the table hold what is dropped when rows move by so many slots."""
        columns, fixed = np.arange(self._table.shape[1]), self._fixed // self._granule
        return (columns >= fixed) & (columns < fixed + (moved // self._granule)[:, None])

    def _table_without(self, moved: Index) -> Index:
        """Return a table without these entries."""
        M, fixed = self._table.shape[1], self._fixed // self._granule
        source = np.arange(M) + np.where(np.arange(M) >= fixed, (moved // self._granule)[:, None], 0)
        table: Index = np.take_along_axis(self._table, np.minimum(source, M - 1), 1)
        table[source >= M] = 0
        return table

    def _copied(self, pages: Index) -> Any:
        """Return which of these pages, each about to be written to, have to be copied first."""
        order = np.argsort(pages, kind="stable")
        rank = np.empty(len(pages), np.int64)  # among those that write to the same page: the last one may keep it
        rank[order] = np.arange(len(pages)) - np.searchsorted(pages[order], pages[order])
        return rank < self._pool._references[pages] - 1

    def _copies(self, old: Index) -> Index:
        """Return new pages with what these hold, which are given back."""
        new = self._pool._taken(len(old))
        if len(old):
            asarray = self._geometry.module.asarray
            for array in self._pool._arrays:
                array[asarray(new)] = array[asarray(old)]
            self._pool._given_back(old)
        return new

    def _own(self, b: Index, slots: Index) -> None:
        rows, columns = np.unique(np.stack([b, slots // self._granule]), axis=1)
        copied = self._copied(self._table[rows, columns])
        rows, columns = rows[copied], columns[copied]
        if len(rows) > self._pool.free:
            raise CacheFull(len(rows), self._pool.free, "pages")
        self._table[rows, columns] = self._copies(self._table[rows, columns])

    def _settle(self, n: Number, shift: Number, gone: Number) -> None:
        self._check_open()
        unused = self._with(self._used) & ~self._with(n - shift)
        if unused.any():
            self._pool._given_back(self._table[unused])
            self._table = np.where(unused, 0, self._table)
        super()._settle(n, shift, gone)

    def select(self, index: Any) -> None:
        """Make row b the old row ``index[b]``, -1 an empty one, as `KVCache.select`; rows share pages until written."""
        self._check_open()
        rows = self._old_rows(index)
        before, numbers = self._held(), self._numbers_of(rows)
        table = np.zeros((len(rows), self._table.shape[1]), np.int64)
        table[rows >= 0] = self._table[rows[rows >= 0]]
        self._replace(table, numbers)
        self._pool._shared(self._held())
        self._pool._given_back(before)

    def join(self, other: "PagedCache") -> None:
        """Add the rows of another cache of the same pool, whose pages both share until one of them writes."""
        self._check_alike(other)
        self._check_open()
        other._check_open()
        if other._pool is not self._pool:
            raise ValueError("caches can be joined within a pool, and the other is of another pool")
        M = max(self._table.shape[1], other._table.shape[1])
        table = np.zeros((self._B + other._B, M), np.int64)
        table[: self._B, : self._table.shape[1]] = self._table
        table[self._B :, : other._table.shape[1]] = other._table
        self._pool._shared(other._held())
        both = zip((self._n, self._shift, self._gone), (other._n, other._shift, other._gone), strict=True)
        n, shift, gone = (settled(np.concatenate([self._of_rows(a), other._of_rows(b)])) for a, b in both)
        self._replace(table, (n, shift, gone))

    def _replace(self, table: Index, numbers: tuple[Number, Number, Number]) -> None:
        """Take other rows, whose references are counted."""
        self.batch: tuple[int, ...] = (len(table),)
        self._table, self._B = table, len(table)
        self._axes, self._places = (len(table), self._geometry.heads), None
        Slots._settle(self, *numbers)

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that the cache has, shared ones too, and of its table."""
        pages = len(np.unique(self._held()))
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
        return f"{len(np.unique(self._held()))} pages of {self._granule}"


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
