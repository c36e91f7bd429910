"""What caches share: append, attend, crop and accept, over storage that each kind has its own."""

from typing import Any

import numpy as np

from sdpa_ref.api import sdpa
from sdpa_ref.arrays import Array, kind, memory_array
from sdpa_ref.masks import All, Causal, FirstTokens, KeyLengths, Mask, QueryLengths, Window
from sdpa_ref.stored.drafts import kept_drafts
from sdpa_ref.stored.geometry import Geometry
from sdpa_ref.stored.rows import Index, Number, settled
from sdpa_ref.stored.slots import Slots

_OWN = frozenset({"query_offset", "key_positions", "layout"})  # what a cache says itself in each call
_ALL = slice(None)


class CacheFull(ValueError):
    """The error of an `append` for which there is no room. The cache is as it was before.

    Attributes
    ----------
    needed, free : int
        Tokens of the row that needs most (`KVCache`), or pages over all rows (caches of a `PagePool`).

    Examples
    --------
    >>> from sdpa_ref import KVCache
    >>> try:
    ...     KVCache(1, 1, 4, capacity=3).append(*np.ones((2, 1, 1, 5, 4), np.float32))
    ... except CacheFull as full:
    ...     print(full)
    the cache is full: 5 tokens are needed, 3 are free
    """

    needed: int
    free: int

    def __init__(self, needed: int, free: int, unit: str = "tokens") -> None:
        super().__init__(needed, free, unit)
        self.needed, self.free, self._unit = needed, free, unit

    def __str__(self) -> str:
        return f"the cache is full: {self.needed} {self._unit} are needed, {self.free} are free"


class Cache(Slots):
    """What `KVCache` and the caches of a `PagePool` share."""

    def __init__(self, geometry: Geometry, batch: Any, window: Any, first: Any, slack: Any) -> None:
        super().__init__(geometry, batch, window, first, slack)
        rules: tuple[Mask, ...] = (Causal(),)
        if self.window is not None:
            near = Window(self.window - 1, 0)
            rules += (near | FirstTokens(self.first) if self.first else near,)
        self._rules = rules

    # what is in the cache

    @property
    def layout(self) -> str:
        """The order of heads and tokens, "HLE" or "LHE"."""
        return self._geometry.layout

    @property
    def key(self) -> Any:
        """The keys over all slots, as `sdpa` takes them; read-only, and good until the next change."""
        return (self._views or self._view())[0]

    @property
    def value(self) -> Any:
        """The values over all slots, likewise."""
        return (self._views or self._view())[1]

    @property
    def lengths(self) -> Index:
        """Tokens of each row, appended less cropped; a new int64 array over the batch."""
        return self._of_rows(self._n).reshape(self.batch).copy()

    @property
    def key_lengths(self) -> Index:
        """Slots of each row that are in use; a new int64 array over the batch."""
        return self._of_rows(self._used).reshape(self.batch).copy()

    @property
    def positions(self) -> Index | None:
        """The position of the token in each slot, ``(S,)`` or ``(*batch, S)``; None where they are the slots."""
        if type(self._shift) is int and self._shift == 0:
            return None
        S = self._slots()
        if self._places is None or self._places.shape[-1] != S:
            slots, shift = np.arange(S), self._over_batch(self._shift)
            places = np.where(slots < self._fixed, slots, slots + np.asarray(shift)[..., None])
            places.setflags(write=False)
            self._places = places
        return self._places  # type: ignore[no-any-return]

    @property
    def mask(self) -> Mask:
        """Which slots a query may attend to: `Causal`, the window, and `KeyLengths` where the key does not carry it."""
        if self._mask is None:
            rules = (*self._rules, *self._length_rule())
            self._mask = All(rules) if len(rules) > 1 else rules[0]
        return self._mask

    def _length_rule(self) -> tuple[Mask, ...]:
        lengths = self._over_batch(self._used)
        if type(lengths) is int:
            return (KeyLengths(lengths),)
        rule = object.__new__(KeyLengths)  # its checks are done already, and these are never written to
        lengths.setflags(write=False)
        rule.__dict__["n"] = lengths
        return (rule,)

    def append(self, key: Any, value: Any = None, lengths: Any = None) -> None:
        """Add tokens behind those that there are; keys and values are copied.

        Parameters
        ----------
        key : float array, shape (..., heads, T, E), or (..., T, heads, E) in layout "LHE"
            Of the type of the cache; where it has a recipe, of any float type.
        value : float array, shape (..., heads, T, Ev), likewise
            None where the cache is tied.
        lengths : int or int array over the batch, optional
            How many of the T tokens each row gets, the first ones. The rest is not read.

        Raises
        ------
        CacheFull
            There is no room. Nothing has changed.
        TypeError, ValueError
            For a wrong argument, before anything changes.

        Examples
        --------
        >>> from sdpa_ref import KVCache
        >>> cache = KVCache(3, 2, 8)
        >>> cache.append(*np.ones((2, 3, 2, 5, 8), np.float32), lengths=[5, 2, 0])
        >>> cache.append(*np.ones((2, 3, 2, 1, 8), np.float32))
        >>> cache.lengths
        array([6, 3, 1])
        """
        geometry = self._geometry
        key = self._checked("key", key, geometry.E)
        T = key.shape[-2 if self._hle else -3]
        if geometry.tied:
            if value is not None:
                raise TypeError("value is a part of the key in a tied cache: append the key alone")
        else:
            if value is None:
                raise TypeError("value must be given: the cache is not tied")
            value = self._checked("value", value, geometry.Ev)
            if value.shape[-2 if self._hle else -3] != T:
                raise ValueError(f"key and value must have the same number of tokens, got {key.shape}, {value.shape}")
        n, gone = self._n, self._gone
        added: Number = T
        which = place = None
        if lengths is None:
            place = self._behind(T)
            parts = geometry.coded(key, value, geometry.layout, place)
        else:
            added, which = self._ragged(lengths, T)
            key, value = self._chosen(key, which), None if value is None else self._chosen(value, which)
            parts = geometry.coded(key, value, "LHE")
        if not self._B or (type(added) is int and added == 0):
            return
        if self.window is not None:
            if type(added) is int and type(n) is int and type(gone) is int:
                gone = max(gone, n - self._keep)
            else:
                gone = settled(np.where(np.asarray(added) > 0, np.maximum(gone, n - self._keep), gone))
        self._room(added, gone)
        if place is None:
            self._write(self._used, T, parts, which)
        if which is None:
            used = n is self._used
            self._n, self._gone, self._most = n + T, gone, self._most + T
            self._used = self._n if used else self._used + T
        else:
            self._count(settled(n + added), self._shift, gone)
        self._touch()

    def _checked(self, name: str, given: Any, width: int) -> Array:
        """Return keys or values to be added."""
        geometry = self._geometry
        array = given if type(given) is np.ndarray else memory_array(name, given)
        recipe = geometry.store[name == "value"]
        if array.dtype is not geometry.dtype:
            if recipe is not None:
                recipe._check_type(name, array)
            elif array.dtype != geometry.dtype and array.dtype.newbyteorder("=") != geometry.dtype:
                raise TypeError(f"{name} must be {geometry.dtype}, the type of the cache, got {array.dtype}")
        shape = array.shape
        T = shape[-2 if self._hle else -3] if len(shape) > 2 else 0
        wanted = (*self._axes, T, width) if self._hle else (*self.batch, T, geometry.heads, width)
        if shape != wanted:
            w = "E" if name == "key" else "Ev"
            axes = f"heads, T, {w}" if self._hle else f"T, heads, {w}"
            sizes = (*self._axes, "T", width) if self._hle else (*self.batch, "T", geometry.heads, width)
            shown = f"({', '.join(map(str, sizes))})"
            raise ValueError(f"{name} must have shape (*batch, {axes}) = {shown}, got {shape}")
        own = "numpy" if type(array) is np.ndarray else kind(array)
        if geometry.kind != own:
            raise TypeError(f"{name} must be a {geometry.kind} array, as the cache is, got a {own} array")
        return array

    def _ragged(self, lengths: Any, T: int) -> tuple[Number, tuple[Index, Index]]:
        """Return how many tokens each row gets, and row and index of each of them."""
        added = self._numbers("lengths", lengths)
        if added.size and (added.min() < 0 or added.max() > T):
            wrong = added[(added < 0) | (added > T)][0]
            raise ValueError(f"lengths must be in [0, T] = [0, {T}], got {wrong}")
        b, t = np.nonzero(np.arange(T) < added[:, None])
        return settled(added), (b, t)

    # attention

    def attend(self, query: Any, *, lengths: Any = None, mask: Any = None, **options: Any) -> Array:
        """Return attention of the last tokens over what the cache holds.

        The L queries are those of the last L tokens: append their keys first.

        Parameters
        ----------
        query : float array, shape (..., Hq, L, E), or (..., L, Hq, E) in layout "LHE"
            As in `sdpa`.
        lengths : int or int array over the batch, optional
            How many of the L queries each row has, the first ones, as in an `append` with lengths. The rest gives 0.
        mask : Mask or bool array, optional
            Joined to that of the cache, over slots.
        **options
            Those of `sdpa`, except for `query_offset`, `key_positions` and `layout`, which the cache sets. A tied
            cache needs `scale`: the width of what was projected is not that of the key.

        Raises
        ------
        ValueError
            A row has fewer tokens than queries, or its window has dropped what one of them sees.

        Examples
        --------
        >>> from sdpa_ref import KVCache
        >>> cache = KVCache(1, 2, 8)
        >>> cache.append(*np.ones((2, 1, 2, 5, 8), np.float32))
        >>> cache.attend(np.ones((1, 4, 1, 8), np.float32)).shape  # two query heads a key head, the last token
        (1, 4, 1, 8)
        """
        geometry = self._geometry
        if options and not _OWN.isdisjoint(options):
            names = ", ".join(f"{name}=" for name in options if name in _OWN)
            raise TypeError(f"{names} is known to the cache; use sdpa(query, cache.key, cache.value, ...) to say it")
        if geometry.tied and options.get("scale") is None:
            raise TypeError(f"scale must be given for a tied cache: 1 / sqrt(E = {geometry.E}) is that of its keys")
        if type(query) is not np.ndarray:
            query = memory_array("query", query)
        shape = query.shape
        L = shape[-2 if self._hle or len(shape) < 3 else -3] if len(shape) > 1 else 0
        if lengths is None and L > (self._reached() if self._reach is None else self._reach):
            self._check_reach(np.full(self._B, L))
        key, value = self._views or self._view()
        bare = L == 1 and mask is None and lengths is None and self.window is None and options.get("bias") is None
        if bare and type(self._used) is int and type(key) is type(value) is np.ndarray:
            slots: Any = (..., slice(self._used), *(_ALL,) * (1 if self._hle else 2))  # the last token sees all of them
            return sdpa(query, key[slots], value[slots], layout=geometry.layout, **options)
        own, places = self.mask if self._mask is None else self._mask, None
        if mask is not None or options.get("bias") is not None:
            own, places = own if mask is None else own & mask, self.positions
        if lengths is not None:
            queries = self._numbers("lengths", lengths)
            self._check_reach(queries)
            own = own & QueryLengths(self._over_batch(queries))
        return sdpa(
            query, key, value, mask=own, query_offset="end", key_positions=places, layout=geometry.layout, **options
        )

    # taking back

    def crop(self, n: Any) -> None:
        """Keep the first n tokens of each row, and forget the others.

        Parameters
        ----------
        n : int or int array over the batch
            In [0, lengths]; never counted from the end. What a window has dropped does not come back: there n is at
            most `first`, or one of the last `slack` lengths.

        Raises
        ------
        ValueError
            A row is shorter, or its window has dropped what its next token would see. Nothing has changed.

        Examples
        --------
        >>> from sdpa_ref import KVCache
        >>> cache = KVCache(2, 1, 4)
        >>> cache.append(*np.ones((2, 2, 1, 5, 4), np.float32))
        >>> cache.crop(cache.lengths - [0, 3])  # of three drafts the second row accepts none
        >>> cache.lengths
        array([5, 2])
        """
        wanted = self._numbers("n", n)
        old = self._of_rows(self._n)
        wrong = np.nonzero((wanted < 0) | (wanted > old))[0]
        if wrong.size:
            b = int(wrong[0])
            raise ValueError(f"n must be in [0, lengths], got {wanted[b]} for row {b}, which has {old[b]} tokens")
        self._settle(*self._shortened(wanted))

    def accept(self, index: Any, of: Any) -> None:
        """Keep some of the last tokens of each row: the branch of a tree of drafts that was accepted.

        Parameters
        ----------
        index : int array, shape (..., K)
            Which of the last `of` tokens a row keeps, strictly increasing; -1 for none. They move together, and the
            others are forgotten.
        of : int or int array over the batch
            How many tokens were drafted.

        Raises
        ------
        ValueError
            Something is out of its range. Nothing has changed.

        Examples
        --------
        >>> from sdpa_ref import KVCache
        >>> cache, x = KVCache(1, 1, 1), np.arange(6, dtype=np.float32).reshape(1, 1, 6, 1)
        >>> cache.append(x, x)
        >>> cache.accept([[0, 2]], of=4)  # of the last four tokens the first and the third
        >>> cache.key[0, 0, : cache.lengths[0], 0]
        array([0., 1., 2., 4.], dtype=float32)
        """
        of, n = self._numbers("of", of), self._of_rows(self._n)
        if ((of < 0) | (of > n)).any():
            row = int(np.nonzero((of < 0) | (of > n))[0][0])
            raise ValueError(f"of must be in [0, lengths], got {of[row]} for row {row}, which has {n[row]} tokens")
        b, source, target, count = kept_drafts(index, self.batch, of)
        base, gone = n - of, self._of_rows(self._gone)
        lost = np.nonzero((gone[b] > self.first) & (base[b] < gone[b]))[0]
        if lost.size:
            raise ValueError(f"of reaches back to tokens that the window of row {b[lost[0]]} has dropped")
        target = self._slot(b, base[b] + target)
        numbers = self._shortened(base + count)
        if b.size:
            self._own(b, target)
            self._put(b, target, self._take(b, self._slot(b, base[b] + source)))
        self._settle(*numbers)

    # other caches and files

    def _check_alike(self, other: Any) -> None:
        """Raise the error of another cache whose rows cannot be those of this one."""
        if type(other) is not type(self):
            raise TypeError(f"other must be a {type(self).__name__}, got {type(other).__name__}")
        self._one_axis()
        other._one_axis()
        faults = differences(other._described(), self._described())
        if faults:
            raise ValueError(f"the other cache has other tokens: {faults}")

    def _described(self) -> dict[str, Any]:
        """Return what must agree with another cache, by name."""
        described = self._geometry.described() | {"window": self.window, "first": self.first}
        return described | {"kind of arrays": self._geometry.kind}

    def _told(self) -> dict[str, Any]:
        """Return what a file says of the cache, as JSON has it."""
        geometry = self._geometry
        return {
            "kind": type(self).__name__, "batch": list(self.batch), "heads": geometry.heads, "E": geometry.E,
            "Ev": geometry.Ev, "dtype": geometry.dtype.name, "tied": geometry.tied, "layout": geometry.layout,
            "window": self.window, "first": self.first, "slack": self.slack, "capacity": None, "page": None,
        }  # fmt: skip

    def __repr__(self) -> str:
        n = self._of_rows(self._n)
        batch = self.batch[0] if len(self.batch) == 1 else self.batch
        window = "" if self.window is None else f", window={self.window}, first={self.first}, slack={self.slack}"
        lengths = f"lengths {n.min()}..{n.max()}" if n.size else "no rows"
        return f"{type(self).__name__}({batch}, {self._geometry!r}{window}, {self._size()}, {lengths})"

    def _size(self) -> str:
        raise NotImplementedError


def differences(got: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return in words what differs."""
    return "; ".join(f"{name} is {got[name]!r}, not {wanted[name]!r}" for name in wanted if got[name] != wanted[name])
