"""Pages that several caches share: counted references, and a copy on the first write of a shared page."""

from collections.abc import Mapping
from os import PathLike
from typing import Any

import numpy as np

from sdpa_ref._problem.checks import checked_sizes
from sdpa_ref.stored import files
from sdpa_ref.stored.geometry import Geometry, read_only
from sdpa_ref.stored.paged_cache import PagedCache
from sdpa_ref.stored.rows import Index


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
        Pages that no cache has.
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

    pages: int
    page: int

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
        self._arrays = self._geometry.blank(self.pages, self.page)
        self._tokens = self._geometry.by_token(self._arrays)
        self._meant = self._geometry.meant(tuple(map(read_only, self._arrays)))
        self._references = np.zeros(self.pages, np.int64)
        self._unused = list(range(self.pages - 1, -1, -1))
        self._counted = 0  # references altogether

    def cache(
        self, batch: int | tuple[int, ...], *, window: int | None = None, first: int = 0, slack: int = 0
    ) -> PagedCache:
        """Return an empty cache over these pages, with the interface of `KVCache`.

        Its `key` and `value` are `Paged`, and carry the lengths. It gives its pages back when it is closed or deleted.

        Parameters
        ----------
        batch, window, first, slack
            As in `KVCache`. A window drops whole pages.
        """
        return PagedCache(self, batch, window, first, slack)

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._unused)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return sum(int(array.nbytes) for array in self._arrays)

    def from_state_dict(self, entries: Mapping[str, Any], **expected: Any) -> PagedCache:
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
        tokens = file.tokens(self._geometry, got["first"])
        cache = self.cache(got["batch"], window=got["window"], first=got["first"], slack=got["slack"])
        cache._fill(*tokens)
        return cache

    def load(self, path: str | PathLike[str], **expected: Any) -> PagedCache:
        """Return the cache that its `save` wrote, in pages of this pool; see `from_state_dict`.

        Raises
        ------
        OSError
            There is no such file.
        ValueError
            It is damaged or of another geometry; the message lists all that differs.
        """
        return files.loaded(path, lambda entries: self.from_state_dict(entries, **expected))

    @property
    def _forked(self) -> bool:
        """Whether some page has two references."""
        return self._counted > self.pages - len(self._unused)

    def _taken(self, number: int) -> Index:
        """Return free pages; there are enough."""
        pages = np.array([self._unused.pop() for _ in range(number)], np.int64)
        self._references[pages] = 1
        self._counted += number
        return pages

    def _shared(self, pages: Index) -> None:
        """Count one more reference to each of these pages."""
        np.add.at(self._references, pages, 1)
        self._counted += len(pages)

    def _given_back(self, pages: Index) -> None:
        """Count one reference less to each of these pages."""
        np.subtract.at(self._references, pages, 1)
        self._counted -= len(pages)
        self._unused.extend(np.unique(pages[self._references[pages] == 0]).tolist())

    def _freed_by(self, pages: Index) -> int:
        """Return how many pages are free after these references are given back."""
        own, counts = np.unique(pages, return_counts=True)
        return int((self._references[own] == counts).sum())

    def __reduce__(self) -> Any:
        raise TypeError("a pool cannot be copied, because its caches belong to one pool")

    def __repr__(self) -> str:
        return f"PagePool({self.pages} pages of {self.page}, {self._geometry!r}, {self.free} free)"
