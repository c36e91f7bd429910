"""A cache whose rows lie one after another in one array that grows."""

from collections.abc import Mapping
from functools import partial
from os import PathLike
from typing import Any, Self

import numpy as np

from sdpa_ref._problem.checks import checked_sizes
from sdpa_ref.arrays import Array
from sdpa_ref.stored import files
from sdpa_ref.stored.cache import Cache, CacheFull
from sdpa_ref.stored.geometry import Geometry, Parts, read_only
from sdpa_ref.stored.rows import Index, Number, settled


class KVCache(Cache):
    """Keys and values of the tokens so far, of one layer.

    A decoding loop appends the keys and values of new tokens and attends with their queries. Rows may have different
    lengths. Results do not depend on the history: a new cache that is given the same tokens gives the same bits.

    Parameters
    ----------
    batch : int or tuple of int
        Rows, over one axis or several; ``()`` for a single row without an axis.
    heads, E : int
        Key heads, and the width of keys.
    Ev : int, optional
        The width of values; E by default.
    dtype : data type
        Of keys and values, float32 by default; it never changes.
    capacity : int, optional
        How many tokens each row has room for; one more is `CacheFull`. By default the cache grows by half.
    window : int, optional
        Each query sees the last `window` tokens, itself among them, and the `first` ones. Others are dropped.
    first, slack : int
        With a window: how many first tokens stay ("attention sinks"), and how many tokens can be cropped.
    store : recipe or pair of recipes, optional
        `Int8`, `Int4` or `Float8`, or one for keys and one for values, of which either may be None.
    tied : bool
        The value is the first Ev numbers of the key, as in multi-head latent attention: `append` takes the key alone.
    layout : {"HLE", "LHE"}
        The order of heads and tokens in all arrays.
    like : array, optional
        An array of the kind that the cache is to have, a CuPy array for a cache on its device.

    Attributes
    ----------
    batch : tuple of int
    key, value : array or Quantized, shape (..., heads, S, E) and (..., heads, S, Ev), or "LHE"
        All slots, used or not; read-only, and good until the next change. S changes only when the cache grows.
    lengths, key_lengths : int64 array over the batch
        Tokens appended less cropped, and slots in use: less than tokens where a window has dropped some.
    positions : int64 array or None
        The position of each slot's token, `key_positions` of `sdpa`; None where they are the slots.
    mask : Mask
        ``Causal()``, the window, and ``KeyLengths(key_lengths)``.
    nbytes : int
        Memory of all slots.

    Notes
    -----
    ``cache.attend(query)`` is ``sdpa(query, cache.key, cache.value, mask=cache.mask, query_offset="end",
    key_positions=cache.positions)``. There are no locks: many may read, or one may write.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_ref import Causal, sdpa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 4, 9, 8), np.float32)  # two rows, four heads
    >>> cache = KVCache(2, 4, 8)
    >>> cache.append(k[:, :, :6], v[:, :, :6])  # the prompt
    >>> for t in range(6, 9):  # a token at a time
    ...     cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
    ...     output = cache.attend(q[:, :, t : t + 1])
    >>> bool(np.allclose(output, sdpa(q, k, v, mask=Causal())[:, :, -1:], atol=1e-6))
    True
    >>> cache.crop(cache.lengths - [3, 0])  # the first row takes three tokens back
    >>> cache
    KVCache(2, heads=4, E=8, float32, 16 slots, lengths 6..9)
    """

    def __init__(
        self,
        batch: int | tuple[int, ...],
        heads: int,
        E: int,
        Ev: int | None = None,
        *,
        dtype: Any = np.float32,
        capacity: int | None = None,
        window: int | None = None,
        first: int = 0,
        slack: int = 0,
        store: Any = None,
        tied: bool = False,
        layout: str = "HLE",
        like: Any = None,
    ) -> None:
        super().__init__(Geometry(heads, E, Ev, dtype, store, tied, layout, like), batch, window, first, slack)
        self.capacity: int | None = None if capacity is None else checked_sizes(0, capacity=capacity)["capacity"]
        self._hold(self._geometry.blank(self._B, _FEWEST if self.capacity is None else self.capacity))

    def _hold(self, arrays: Parts) -> None:
        """Take arrays ``(rows, heads, S, width)``, or "LHE", as the slots."""
        self._arrays = arrays
        self._tokens = self._geometry.by_token(arrays)
        self._whole = tuple(array.reshape(*self.batch, *array.shape[1:]) for array in arrays)
        self._S = int(self._tokens[0].shape[1])
        shown = tuple(read_only(array) for array in self._whole)
        self._meant = self._geometry.meant(shown)

    def _make_views(self) -> tuple[Any, Any]:
        return self._meant

    def _slots(self) -> int:
        return self._S

    def _at(self, b: Index, slots: Index) -> tuple[Index, Index]:
        return b, slots

    def _behind(self, T: int) -> Parts | None:
        start = self._used
        if type(start) is not int or start + T > self._S:
            return None
        place: Any = (..., slice(start, start + T), slice(None))
        if not self._hle:
            place += (slice(None),)
        return tuple([array[place] for array in self._whole])

    def _room(self, added: Number, gone: Number) -> None:
        S = self._S
        if type(added) is int:
            if self._most + added <= S:
                return
        elif int((self._used + added).max()) <= S:
            return
        shift = self._shifted(gone)
        used = self._n - shift
        most = int(np.max(used + added))
        if self.capacity is not None:
            if most > S:
                b = int(np.argmax(self._of_rows(used + added)))
                raise CacheFull(int(self._of_rows(added)[b]), S - int(self._of_rows(used)[b]))
        elif self.window is None:
            S = max(most, S + S // 2)
        elif most + most // 2 > S:  # room enough that tokens move seldom
            S = most + most // 2
        self._move(S, shift)

    def _move(self, S: int, shift: Number) -> None:
        """Take a new array of S slots, with the tokens that a larger shift leaves."""
        arrays = self._geometry.blank(self._B, S)
        new, used = self._geometry.by_token(arrays), self._used
        if type(used) is int and type(shift) is int and type(self._shift) is int:
            _copy(self._tokens, new, slice(None), self.first, shift - self._shift, used)
        else:
            shifts, ends = self._of_rows(shift) - self._of_rows(self._shift), self._of_rows(used)
            for b in range(self._B):
                _copy(self._tokens, new, b, self.first, int(shifts[b]), int(ends[b]))
        self._hold(arrays)
        self._count(self._n, shift, self._gone)
        self._places = None

    def select(self, index: Any) -> None:
        """Make row b the old row ``index[b]``: reorder rows, copy them, leave them out, or begin empty ones.

        Parameters
        ----------
        index : int array, shape (K,)
            Old rows; -1 for an empty one. The cache has K rows afterwards. It needs one batch axis.

        Examples
        --------
        >>> import numpy as np
        >>> cache = KVCache(2, 1, 4)
        >>> cache.append(np.ones((2, 1, 5, 4), np.float32), np.ones((2, 1, 5, 4), np.float32), lengths=[5, 3])
        >>> cache.select([1, 1, -1])
        >>> cache.lengths
        array([3, 3, 0])
        """
        rows = self._old_rows(index)
        arrays = self._geometry.blank(len(rows), self._S)
        old, new = self._tokens, self._geometry.by_token(arrays)
        used = self._most
        if self._B and len(rows):
            chosen = self._geometry.module.asarray(np.maximum(rows, 0))
            for source, target in zip(old, new, strict=True):
                target[:, :used] = source[chosen, :used]
        numbers = self._numbers_of(rows)
        self._resize(len(rows))
        self._hold(arrays)
        self._settle(*numbers)

    def join(self, other: "KVCache") -> None:
        """Add the rows of another cache behind those of this one; the other stays as it is.

        Parameters
        ----------
        other : KVCache
            Of the same heads, widths, types, recipe, layout and window. Both have one batch axis.

        Raises
        ------
        CacheFull
            A row of the other has more tokens than the capacity.
        ValueError
            The two differ; the message lists in what.

        Examples
        --------
        >>> import numpy as np
        >>> cache, new = KVCache(1, 1, 4), KVCache(1, 1, 4)
        >>> new.append(*np.ones((2, 1, 1, 5, 4), np.float32))
        >>> cache.join(new)
        >>> cache.lengths
        array([0, 5])
        """
        self._check_alike(other)
        n, shift = other._of_rows(other._n), other._lost()
        most = int((n - shift).max(initial=0))
        if self.capacity is not None and most > self._S:
            raise CacheFull(most, self._S)
        b, p = other._kept()
        tokens = other._take(b, other._slot(b, p))
        arrays = self._geometry.blank(self._B + other._B, max(self._S, most))
        new, used = self._geometry.by_token(arrays), self._most
        for source, target in zip(self._tokens, new, strict=True):
            target[: self._B, :used] = source[:, :used]
        own = (self._n, self._shift, self._gone)
        joined = zip(own, (n, shift, other._of_rows(other._gone)), strict=True)
        numbers = tuple(settled(np.concatenate([self._of_rows(mine), theirs])) for mine, theirs in joined)
        first = self._B
        self._resize(self._B + other._B)
        self._hold(arrays)
        self._settle(*numbers)
        self._put(b + first, self._slot(b + first, p), tokens)

    def _resize(self, rows: int) -> None:
        self.batch: tuple[int, ...] = (rows,)
        self._B = rows
        self._axes = (rows, self._geometry.heads)
        self._places = None

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(int(array.nbytes) for array in self._arrays)

    def _size(self) -> str:
        return f"{self._S} slots"

    # files

    def state_dict(self) -> dict[str, Array]:
        """Return the tokens, lengths and positions, and what the cache is, as arrays by name.

        ``key`` and ``value`` (or codes and scales of each) are ``(tokens, heads, width)``, one row after another.
        """
        return files.entries_of(self)

    @classmethod
    def from_state_dict(cls, entries: Mapping[str, Any], *, like: Any = None, **expected: Any) -> Self:
        """Return the cache that `state_dict` described.

        Parameters
        ----------
        entries : mapping of str to array
        like : array, optional
            As in `KVCache`.
        **expected
            Arguments of `KVCache`, such as ``heads=8``, with which the entries must agree.

        Raises
        ------
        ValueError
            Entries are missing, damaged, or not as expected; the message lists all that differs.

        Examples
        --------
        >>> import numpy as np
        >>> cache = KVCache(1, 1, 4)
        >>> cache.append(*np.ones((2, 1, 1, 5, 4), np.float32))
        >>> entries = cache.state_dict()
        >>> {name: entries[name].shape for name in ("key", "value", "lengths")}
        {'key': (5, 1, 4), 'value': (5, 1, 4), 'lengths': (1,)}
        >>> KVCache.from_state_dict(entries, heads=1, E=4).lengths
        array([5])
        """
        file = files.Entries(entries, cls.__name__, like)
        arguments = file.arguments()
        file.check(arguments, expected)
        tokens = file.tokens(file.geometry(), arguments["first"])
        cache = cls(**arguments, like=like)
        cache._fill(*tokens)
        return cache

    def save(self, path: str | PathLike[str]) -> None:
        """Write `state_dict` to a safetensors file, which is replaced as a whole or not at all.

        Raises
        ------
        OSError
            There is no such folder, no space, or `path` is write-protected or no regular file.
        """
        files.save(self.state_dict(), path)

    @classmethod
    def load(cls, path: str | PathLike[str], *, like: Any = None, **expected: Any) -> Self:
        """Return the cache that `save` wrote; the parameters are those of `from_state_dict`.

        Raises
        ------
        OSError
            There is no such file.
        ValueError
            It is damaged, or not as expected; the message lists all that differs.
        """
        return files.loaded(path, lambda entries: cls.from_state_dict(entries, like=like, **expected))

    def __reduce__(self) -> Any:
        """Return what makes a copy, also in another process: the tokens are all that there is."""
        like = None if self._geometry.kind == "numpy" else self._arrays[0][:0]
        return partial(type(self).from_state_dict, like=like), (self.state_dict(),)

    def _told(self) -> dict[str, Any]:
        return super()._told() | {"capacity": self.capacity}


_FEWEST = 16  # slots that a cache begins to grow with


def _copy(old: Parts, new: Parts, rows: Any, first: int, gap: int, end: int) -> None:
    """Copy the slots [0, end) of some rows, without `gap` of them behind the first ones."""
    for source, target in zip(old, new, strict=True):
        if gap:
            target[rows, :first] = source[rows, :first]
            target[rows, first : end - gap] = source[rows, first + gap : end]
        else:
            target[rows, :end] = source[rows, :end]
