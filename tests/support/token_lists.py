"""The model of a cache: a list of tokens for each row, attended densely. It has no slots, pages and codes."""

import numpy as np

import sdpa_ref as sr
from sdpa_ref.testing import assert_close, assert_same_bits

HEADS, E, EV, GROUP = 2, 8, 4, 3  # key heads, widths, query heads a key head
STORES = {
    "float32": None,
    "float16": None,
    "int8": sr.Int8(),
    "int8 center": sr.Int8(center=np.linspace(-1, 1, HEADS * E).reshape(HEADS, E)),
    "int4": sr.Int4(group=4),
    "float8": sr.Float8("e4m3fn", group=2),
    "int8 keys": (sr.Int8(4), None),
}


class Kind:
    """How caches are made: `make(batch)` returns an empty one, always of the same kind."""

    def __init__(self, storage="float32", page=None, layout="HLE", tied=False, window=None, first=0, slack=0, **more):
        self.dtype = np.dtype("float16" if storage == "float16" else "float32")
        store = STORES[storage]
        store = (store, None) if storage == "int8 center" else store  # the value has another width
        self.store, self.layout, self.tied, self.page = store, layout, tied, page
        self.window, self.first, self.slack = window, first, slack
        geometry = dict(dtype=self.dtype, store=store, tied=tied, layout=layout)
        rows = dict(window=window, first=first, slack=slack) if window else {}
        self.pool = None
        if page:
            self.pool = sr.PagePool(more.pop("pages", 4000 // page), HEADS, page, E, EV, **geometry)
            self.make = lambda batch: self.pool.cache(batch, **rows)
        else:
            self.make = lambda batch: sr.KVCache(batch, HEADS, E, EV, **geometry, **rows, **more)

    def tokens(self, rng, *lead):
        """Return keys and values (*lead, heads, width) of the type that is appended; a tied value is None."""
        keys = rng.standard_normal((*lead, HEADS, E)).astype(self.dtype)
        return keys, None if self.tied else rng.standard_normal((*lead, HEADS, EV)).astype(self.dtype)

    def turned(self, tokens):
        """Return (B, T, heads, width) in the layout of the cache."""
        return tokens if tokens is None or self.layout == "LHE" else tokens.swapaxes(1, 2)

    def meant(self, keys, values):
        """Return what is stored of tokens (n, heads, width), in float64."""
        pair = self.store if isinstance(self.store, tuple) else (self.store, self.store)
        dense = [
            x.astype(np.float64) if recipe is None or x is None else recipe.encode(x, "LHE").dense()
            for x, recipe in zip((keys, values), pair, strict=True)
            if x is not None
        ]
        return dense[0], dense[0][..., :EV] if self.tied else dense[1]

    def mask(self):
        near = sr.Window(self.window - 1, 0) if self.window else None
        return sr.Causal() if near is None else sr.Causal() & (near | sr.FirstTokens(self.first))


class Rows:
    """The model: tokens of each row, and how many a window may have let go."""

    def __init__(self, kind, batch):
        self.kind = kind
        self.keys = [[] for _ in range(batch)]
        self.values = [[] for _ in range(batch)]
        self.begun = [0] * batch  # the greatest length at which an append began

    lengths = property(lambda self: [len(row) for row in self.keys])

    def append(self, keys, values, lengths):
        for b, t in enumerate(lengths):
            self.begun[b] = max(self.begun[b], len(self.keys[b])) if t else self.begun[b]
            self.keys[b] += list(keys[b, :t].copy())
            self.values[b] += [None] * t if values is None else list(values[b, :t].copy())

    def least(self, b):
        """Return the smallest length beyond `first` that row b can be cropped to."""
        kind = self.kind
        if not kind.window or self.begun[b] - (kind.window - 1 + kind.slack) <= kind.first:
            return 0
        return self.begun[b] - kind.slack

    def can_crop(self, b, n):
        return 0 <= n <= len(self.keys[b]) and (n <= self.kind.first or n >= self.least(b))

    def reach(self):
        return min((len(row) - self.least(b) for b, row in enumerate(self.keys)), default=9)

    def crop(self, lengths):
        for b, n in enumerate(lengths):
            del self.keys[b][n:], self.values[b][n:]
            self.begun[b] = 0 if n <= self.kind.first else self.begun[b]

    def accept(self, index, of):
        for b, (kept, count) in enumerate(zip(index, of, strict=True)):
            base = len(self.keys[b]) - count
            for row in (self.keys[b], self.values[b]):
                row[base:] = [row[base + i] for i in kept if i >= 0]
            if len(self.keys[b]) <= self.kind.first:
                self.begun[b] = 0

    def select(self, index):
        pick = lambda rows, empty: [list(rows[i]) if i >= 0 else empty for i in index]  # noqa: E731
        self.keys, self.values = pick(self.keys, []), pick(self.values, [])
        self.begun = [self.begun[i] if i >= 0 else 0 for i in index]
        self.keys, self.values = [list(row) for row in self.keys], [list(row) for row in self.values]

    def join(self, other):
        self.keys += [list(row) for row in other.keys]
        self.values += [list(row) for row in other.values]
        self.begun += other.begun

    def row(self, b):
        """Return keys and values (n, heads, width) of a row as they were appended."""
        keys = np.array(self.keys[b], self.kind.dtype).reshape(-1, HEADS, E)
        return keys, None if self.kind.tied else np.array(self.values[b], self.kind.dtype).reshape(-1, HEADS, EV)

    def check_tokens(self, cache):
        """Check lengths, and that every token that was not let go is in the slot of its position, exactly."""
        kind = self.kind
        assert cache.lengths.tolist() == self.lengths
        assert cache.lengths.dtype == np.int64
        key, value = (x if type(x) is np.ndarray else x.dense() for x in (cache.key, cache.value))
        if kind.layout == "HLE":
            key, value = key.swapaxes(1, 2), value.swapaxes(1, 2)
        S, used = key.shape[1], cache.key_lengths
        places = cache.positions
        if places is None:
            places = np.arange(S)
            assert (used == cache.lengths).all()
        places = np.broadcast_to(places, (len(self.keys), S))
        for b, n in enumerate(self.lengths):
            keys, values = kind.meant(*self.row(b))
            there = places[b, : used[b]]
            assert (np.diff(there) > 0).all()
            gone = self.least(b) - kind.window + 1 if self.least(b) else 0
            needed = [p for p in range(n) if p < kind.first or p >= gone]
            assert set(needed) <= set(there.tolist())
            slots = np.searchsorted(there, needed)
            np.testing.assert_array_equal(key[b, slots], keys[needed])
            np.testing.assert_array_equal(value[b, slots], values[needed])

    def check_attention(self, cache, rng, L, backend, lengths=None, fresh=True):
        """Check the attention of the last L tokens against the rows one by one, and against a new cache."""
        kind, B = self.kind, len(self.keys)
        query = rng.standard_normal((B, L, HEADS * GROUP, E)).astype(kind.dtype)
        given = kind.turned(query)
        options = {"backend": backend, "scale": 0.3, "lengths": lengths}
        output = cache.attend(given, **options)
        got = output if kind.layout == "LHE" else output.swapaxes(1, 2)
        coded = kind.store is not None
        for b, n in enumerate(self.lengths):
            rows = L if lengths is None else int(lengths[b])
            assert not got[b, rows:].any()
            keys, values = kind.meant(*self.row(b)) if coded else self.row(b)
            values = keys[..., :EV] if kind.tied else values
            q, k, v = query[b, :rows].swapaxes(0, 1), keys.swapaxes(0, 1), values.swapaxes(0, 1)
            how = {"mask": kind.mask(), "query_offset": n - rows, "scale": 0.3}
            if coded:  # what is stored is known exactly (`check_tokens`); this sees wrong slots and scales
                expected = sr.sdpa(q.astype(np.float64), k, v, backend="reference", **how)
                assert abs(got[b, :rows].swapaxes(0, 1) - expected).max(initial=0) < 1e-4
            else:
                assert_close(got[b, :rows].swapaxes(0, 1), q, k, v, **how)
        if fresh and not kind.window:
            new = kind.make(B)
            n = max(self.lengths, default=0)
            keys, values = np.full((B, n, HEADS, E), np.nan, kind.dtype), np.full((B, n, HEADS, EV), np.nan, kind.dtype)
            for b, length in enumerate(self.lengths):
                k, v = self.row(b)
                keys[b, :length], values[b, :length] = k, 0 if v is None else v
            new.append(kind.turned(keys), None if kind.tied else kind.turned(values), self.lengths)
            assert_same_bits(new.attend(given, **options), output)


def poison(cache, kind):
    """Put NaN into every slot that holds no token, and into every page that nobody has."""
    free = np.ones(cache._tokens[0].shape[:2], bool)
    caches = [cache] if kind.pool is None else kind.caches
    for each in caches:
        used = each.key_lengths.ravel()
        b = np.repeat(np.arange(len(used)), used)
        free[each._at(b, np.arange(len(b)) - np.repeat(used.cumsum() - used, used))] = False
    for array in cache._tokens:
        array[free] = np.iinfo(array.dtype).max if array.dtype.kind in "iu" else np.nan
