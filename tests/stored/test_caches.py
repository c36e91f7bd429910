"""Caches: what they show, their views, their files, devices, shapes, what they cost, and bad input."""

import copy
import gc
import os
import pickle
import sys
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import strict_cupy
from token_lists import EV, HEADS, STORES, Kind, Rows
from token_lists import E as WIDTH

import sdpa_ref as sr
from sdpa_ref.testing import assert_same_bits

RNG = np.random.default_rng(0)
KINDS = {"array": {}, "pages": {"page": 4}, "LHE": {"layout": "LHE", "storage": "int8"}, "window": {"window": 3}}
every = pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)


def filled(how, batch=2, T=6, lengths=None):
    """Return a cache with tokens, its model and its kind."""
    kind = Kind(**how)
    cache, rows = kind.make(batch), Rows(kind, batch)
    keys, values = kind.tokens(RNG, batch, T)
    cache.append(kind.turned(keys), kind.turned(values), lengths)
    rows.append(keys, values, [T] * batch if lengths is None else lengths)
    return cache, rows, kind


def test_attend_is_sdpa_over_what_the_cache_shows(backend):
    for how in KINDS.values():
        cache, _, kind = filled(how)
        cache.append(*(kind.turned(x) for x in kind.tokens(RNG, 2, 3)))
        query = kind.turned(RNG.standard_normal((2, 2, 4, WIDTH)).astype(np.float32))
        by_hand = sr.sdpa(
            query, cache.key, cache.value, mask=cache.mask, query_offset="end", key_positions=cache.positions,
            layout=kind.layout, backend=backend,
        )  # fmt: skip
        got = cache.attend(query, backend=backend)
        assert_same_bits(got, by_hand)
        out = np.empty_like(got)
        assert cache.attend(query, backend=backend, out=out) is out


def test_options_and_masks_of_the_caller_are_joined(backend):
    cache, rows, _ = filled({})
    query = RNG.standard_normal((2, 4, 1, WIDTH)).astype(np.float32)
    some = np.arange(cache.key.shape[-2]) % 2 == 0
    k, v = (np.stack([x[b] for b in range(2)]).swapaxes(1, 2) for x in (rows.keys, rows.values))
    got = cache.attend(query, mask=some, sink=0.5, softcap=3.0, backend=backend)
    wanted = sr.sdpa(query, k[:, :, ::2], v[:, :, ::2], sink=0.5, softcap=3.0, backend=backend)
    assert abs(got - wanted).max() < 1e-6


@pytest.mark.parametrize("batch", [(), (1,), (2, 3), (0,), 2])
@pytest.mark.parametrize("how", [{}, {"page": 2}, {"layout": "LHE"}], ids=["array", "pages", "LHE"])
def test_batch_axes(batch, how, backend):
    kind = Kind(**how)
    cache = kind.make(batch)
    lead = batch if isinstance(batch, tuple) else (batch,)
    assert cache.batch == cache.lengths.shape == cache.key_lengths.shape == lead
    keys, values = (np.moveaxis(x, -2, -3) if not how.get("layout") else x for x in kind.tokens(RNG, *lead, 5))
    cache.append(keys, values)
    cache.append(keys, values, lengths=3)
    cache.append(keys, values, lengths=np.arange(np.prod(lead, dtype=int)).reshape(lead) % 6)
    query = np.ones((*lead, 4, 2, WIDTH) if not how.get("layout") else (*lead, 2, 4, WIDTH), np.float32)
    assert cache.attend(query, backend=backend).shape == (*query.shape[:-1], EV)
    cache.crop(2)
    assert (cache.lengths == 2).all()
    cache.accept(np.zeros((*lead, 1), int), 2)
    assert (cache.lengths == 1).all()
    if len(lead) != 1:
        for change in (lambda: cache.select([0]), lambda: cache.join(cache)):
            with pytest.raises(ValueError, match="where there is one batch axis, here batch="):
                change()
    twin = (
        kind.pool.from_state_dict(cache.state_dict()) if kind.pool else sr.KVCache.from_state_dict(cache.state_dict())
    )
    assert (twin.lengths == 1).all()
    assert twin.batch == lead


def test_what_caches_show():
    cache, *_ = filled({}, lengths=[6, 2])
    assert repr(cache) == "KVCache(2, heads=2, E=8, Ev=4, float32, 16 slots, lengths 2..6)"
    assert cache.nbytes == 2 * 16 * HEADS * (WIDTH + EV) * 4
    assert repr(sr.KVCache((), 1, 4, store=sr.Int8(), tied=True, layout="LHE", window=3, first=1)) == (
        'KVCache((), heads=1, E=4, Int8(), tied, layout="LHE", window=3, first=1, slack=0, 16 slots, lengths 0..0)'
    )
    assert repr(sr.KVCache(0, 1, 4)) == "KVCache(0, heads=1, E=4, float32, 16 slots, no rows)"
    cache, _, kind = filled({"page": 4, "storage": "int8"}, lengths=[6, 2])
    assert repr(cache) == "PagedCache(2, heads=2, E=8, Ev=4, Int8(), 3 pages of 4, lengths 2..6)"
    token = HEADS * (WIDTH + 2 + EV + 2)
    assert cache.nbytes == 3 * 4 * token + cache._table.nbytes
    assert kind.pool.nbytes == kind.pool.pages * 4 * token
    assert repr(kind.pool) == f"PagePool(1000 pages of 4, heads=2, E=8, Ev=4, Int8(), {kind.pool.free} free)"
    assert repr(cache.key) == "Paged((2, 2, 8, 8), codes int8, 1000 pages of 4, lengths 2..6)"


def test_views_are_read_only_and_those_of_pools_know_when_they_are_stale(backend):
    cache, _, kind = filled({})
    for x in (cache.key, cache.value):
        with pytest.raises(ValueError, match="read-only"):
            x[...] = 0
    S = cache.key.shape
    for _ in range(10):
        cache.append(*(kind.turned(x) for x in kind.tokens(RNG, 2, 1)))
        assert cache.key.shape == S  # only growth changes it
    coded = filled({"storage": "int4"})[0].key
    for part in (coded.codes, coded.scale):
        assert not part.flags.writeable
    cache, _, kind = filled({"page": 4})
    changes = {
        "append": lambda: cache.append(*(kind.turned(x) for x in kind.tokens(RNG, 2, 1))),
        "crop": lambda: cache.crop(5),
        "accept": lambda: cache.accept([[0], [0]], 2),
        "select": lambda: cache.select([1, 0]),
        "join": lambda: cache.join(kind.make(1)),
        "close": lambda: cache.close(),
    }
    query = np.ones((1, 4, 1, 8), np.float32)
    uses = (lambda k, v: k.table, lambda k, v: v.dense(), lambda k, v: sr.sdpa(query, k, v, backend=backend))
    for change in changes.values():
        key, value = cache.key, cache.value
        assert cache.key is key
        assert not key.table.flags.writeable
        assert not key.pages.flags.writeable
        change()
        for use in uses:
            with pytest.raises(ValueError, match="the cache has changed since it gave this view"):
                use(key, value)
        assert repr(key) == "Paged(of a cache that has changed since)"


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_go_their_own_ways(clone):
    cache, rows, kind = filled({"storage": "int8", "window": 4, "first": 1}, lengths=[6, 3])
    twin = clone(cache)
    cache.append(*(kind.turned(x) for x in kind.tokens(RNG, 2, 2)))
    rows.check_tokens(twin)
    keys, values = kind.tokens(RNG, 2, 3)
    twin.append(keys.swapaxes(1, 2), values.swapaxes(1, 2))
    rows.append(keys, values, [3, 3])
    rows.check_tokens(twin)
    pool = sr.PagePool(4, 2, 4, 8)
    for each in (pool, pool.cache(1)):
        with pytest.raises(TypeError, match="cannot be copied"):
            clone(each)


def test_pages_come_back():
    pool = sr.PagePool(20, 1, 2, 4)
    x = np.ones((2, 3, 1, 5, 4), np.float32)
    cache = pool.cache(3)
    cache.append(*x)
    view = cache.key
    assert pool.free == 20 - 9
    cache.crop([5, 2, 0])
    assert pool.free == 20 - 4
    cache.select([0, -1, 0, 0])
    assert pool.free == 20 - 3
    del cache
    gc.collect()
    assert pool.free == 20
    with pytest.raises(ValueError, match="has changed"):
        view.dense()
    cache = pool.cache(3)
    cache.append(*x)
    cache.close()
    cache.close()
    assert pool.free == 20
    assert "closed" in repr(cache)
    uses = [
        lambda: cache.append(*x),
        lambda: cache.crop(0),
        lambda: cache.key,
        lambda: cache.select([0]),
        cache.state_dict,
    ]
    for use in uses:
        with pytest.raises(ValueError, match="the cache is closed"):
            use()
    with pytest.raises(ValueError, match="the cache is closed"):
        pool.cache(3).join(cache)
    window = pool.cache(1, window=2, first=1)
    for _ in range(50):
        window.append(*x[:, :1, :, :1])
    assert pool.free >= 20 - 3
    del pool, window  # a cycle would keep them


def test_a_pool_that_is_full_takes_nothing():
    pool = sr.PagePool(5, 1, 2, 4)
    x = np.ones((2, 2, 1, 9, 4), np.float32)
    first, second = pool.cache(2), pool.cache(2)
    first.append(*x[..., :3, :])
    with pytest.raises(sr.CacheFull, match="2 pages are needed, 1 are free"):
        second.append(*x[..., :1, :])
    assert pool.free == 1
    first.select([0, 0, 1])
    x = np.ones((2, 3, 1, 1, 4), np.float32)
    first.append(*x, lengths=[1, 0, 0])  # the page that row 1 shares is copied
    assert pool.free == 0
    first.append(*x, lengths=[0, 1, 1])
    with pytest.raises(sr.CacheFull) as full:
        first.append(*x)
    assert (full.value.needed, full.value.free) == (3, 0)
    assert first.lengths.tolist() == [4, 4, 4]
    first.select([0, 0, -1])
    first.crop([3, 4, 0])
    entries, free = first.state_dict(), pool.free
    with pytest.raises(sr.CacheFull):
        pool.from_state_dict(entries)
    assert pool.free == free
    third = pool.cache(1)
    third.append(*np.ones((2, 1, 1, 5, 4), np.float32))
    with pytest.raises(
        sr.CacheFull, match="2 pages are needed, 0 are free"
    ):  # both rows move tokens within pages that they share
        first.accept([[1], [1], [-1]], [2, 2, 0])
    assert first.lengths.tolist() == [3, 4, 0]


def test_appends_touch_no_used_slot_and_cost_no_memory():
    cache, _, kind = filled({}, T=1000)
    before = cache.key[:, :, :1000].copy()
    one = [kind.turned(x) for x in kind.tokens(RNG, 2, 1)]
    cache.append(*one)
    cache.append(*one)
    tracemalloc.start()
    for _ in range(100):
        cache.append(*one)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000  # of the cache's 384 kB
    assert_same_bits(cache.key[:, :, :1000], before)


@pytest.mark.parametrize("page", [None, 4])
def test_windows_hold_a_bounded_number_of_slots(page):
    cache, _, kind = filled({"window": 20, "first": 3, "slack": 2, "page": page}, T=1)
    moved = []
    for _ in range(500):
        before = cache.positions
        cache.append(*(kind.turned(x) for x in kind.tokens(RNG, 2, 1)))
        moved.append(cache.positions is not before)
    assert cache.key.shape[-2] <= 48
    assert sum(moved) < 150  # tokens move seldom
    fixed = sr.KVCache(2, HEADS, WIDTH, EV, window=20, first=3, capacity=23)
    for _ in range(100):
        fixed.append(*(kind.turned(x) for x in kind.tokens(RNG, 2, 1)))
    assert fixed.key.shape[-2] == 23
    with pytest.raises(sr.CacheFull, match="2 tokens are needed, 1 are free"):
        fixed.append(*(kind.turned(x) for x in kind.tokens(RNG, 2, 2)))


def test_a_decode_is_a_prefill_bit_for_bit(backend):
    n = 150
    q, k, v = RNG.standard_normal((3, 2, 4, n, 16)).astype(np.float32)
    k, v = k[:, :2], v[:, :2]
    whole = sr.sdpa(q, k, v, mask=sr.Causal(), backend=backend)
    for cache in (sr.KVCache(2, 2, 16), sr.PagePool(60, 2, 7, 16).cache(2)):
        for t in range(n):
            cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
            if t % 7 == 0:
                assert_same_bits(cache.attend(q[:, :, t : t + 1], backend=backend), whole[:, :, t : t + 1])


@pytest.mark.parametrize("storage", STORES)
@pytest.mark.parametrize("page", [None, 3])
def test_files(storage, page, tmp_path):
    cache, rows, kind = filled({"storage": storage, "page": page, "window": 4, "first": 1}, batch=3, lengths=[6, 0, 3])
    for _ in range(4):
        keys, values = kind.tokens(RNG, 3, 2)
        cache.append(kind.turned(keys), kind.turned(values))
        rows.append(keys, values, [2] * 3)
    path = tmp_path / "cache.safetensors"
    cache.save(path)
    load = kind.pool.load if page else sr.KVCache.load
    twin = load(path, window=4, first=1, batch=3)
    rows.check_tokens(twin)
    kept = twin.state_dict()
    for name, array in cache.state_dict().items():
        assert_same_bits(kept[name], array)
    keys, values = kind.tokens(RNG, 3, 2)
    for each in (cache, twin):
        each.append(kind.turned(keys), kind.turned(values))
    rows.append(keys, values, [2] * 3)
    rows.check_tokens(twin)
    with pytest.raises(ValueError, match=r"another one: window is 4, not 5; first is 1, not 0"):
        load(path, window=5, first=0)
    with pytest.raises(TypeError, match="and no width"):
        load(path, width=5)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "none")
    os.chmod(path, 0o400)
    if os.access(path, os.W_OK):  # the superuser's are never protected
        return
    with pytest.raises(PermissionError):
        cache.save(path)


@pytest.mark.parametrize("page", [None, 4])
def test_damaged_entries(page):
    cache, _, kind = filled({"page": page, "storage": "int8", "window": 3, "first": 1}, T=9)
    cache.append(*(kind.turned(x) for x in kind.tokens(RNG, 2, 1)))
    entries = cache.state_dict()
    load = kind.pool.from_state_dict if page else sr.KVCache.from_state_dict
    load(entries)
    free = kind.pool.free if page else None
    for name, array in entries.items():
        for wrong in (None, array[..., :-1], array.astype(np.float64), array[None], array[:-1]):
            damaged = {**entries, name: wrong}
            if wrong is None:
                del damaged[name]
            with pytest.raises(ValueError, match=name.replace("about", "about|no cache")):
                load(damaged)
    for name in ("lengths", "kept", "positions"):
        for change in (-1, 1, 10**6):
            with pytest.raises(ValueError, match=r"lengths|kept|positions|key"):
                load({**entries, name: entries[name] + change})
    about = bytes(entries["about"])
    changes = {
        '"version": 1': '"version": 2', '"heads": 2': '"heads": 0', '"Int8"': '"Int9"', '"E": 8': '"E": -',
        '"batch": [2]': '"batch": ["2"]', 'Cache"': 'Cash"', '"window": 3': '"window": 0', "float32": "int32",
    }  # fmt: skip
    for old, new in ((old.encode(), new.encode()) for old, new in changes.items()):
        assert old in about
        with pytest.raises(ValueError, match=r"."):
            load({**entries, "about": np.frombuffer(about.replace(old, new), np.uint8)})
    with pytest.raises(TypeError, match="from a mapping of names to arrays, got list"):
        load([1])
    if page:
        assert kind.pool.free == free
        with pytest.raises(ValueError, match="a PagedCache was saved here, not a KVCache"):
            sr.KVCache.from_state_dict(entries)


@pytest.mark.parametrize("page", [None, 4])
def test_a_file_with_other_bytes_is_an_error_or_another_file(page, tmp_path):
    cache, _, kind = filled(
        {"page": page, "storage": "int8 center", "window": 4, "first": 1}, batch=3, lengths=[6, 0, 3]
    )
    path, rng = tmp_path / "cache", np.random.default_rng(0)
    cache.save(path)
    whole = np.frombuffer(path.read_bytes(), np.uint8)
    about = path.read_bytes().find(b'"kind"')
    free, load = kind.pool.free if page else None, kind.pool.load if page else sr.KVCache.load
    for _ in range(200):
        low, high = ((0, len(whole)), (0, 900), (about, about + 250))[rng.integers(3)]
        changed = whole.copy()
        changed[rng.integers(low, min(high, len(whole)), rng.integers(1, 4))] = rng.integers(256)
        path.write_bytes(changed[: rng.integers(len(whole)) if rng.random() < 0.2 else None].tobytes())
        with suppress(ValueError):  # and no other: numbers may differ, what does not fit together is seen
            load(path)
        assert not page or kind.pool.free == free


def test_joining_needs_the_same_geometry():
    cache = sr.KVCache(1, 2, 8)
    others = {
        "heads is 1, not 2; E is 4, not 8; Ev is 4, not 8": sr.KVCache(1, 1, 4),
        "dtype is 'float16', not 'float32'": sr.KVCache(1, 2, 8, dtype=np.float16),
        "window is 3, not None": sr.KVCache(1, 2, 8, window=3),
        "layout is 'LHE', not 'HLE'": sr.KVCache(1, 2, 8, layout="LHE"),
        r"store is \(Int8\(\), Int8\(\)\), not \(None, None\)": sr.KVCache(1, 2, 8, store=sr.Int8()),
    }
    for words, other in others.items():
        with pytest.raises(ValueError, match=f"the other cache has other tokens: .*{words}"):
            cache.join(other)
    with pytest.raises(TypeError, match="other must be a KVCache, got PagedCache"):
        cache.join(sr.PagePool(4, 2, 4, 8).cache(1))
    with pytest.raises(ValueError, match="the other is of another pool"):
        sr.PagePool(4, 2, 4, 8).cache(1).join(sr.PagePool(4, 2, 4, 8).cache(1))
    small = sr.KVCache(1, 2, 8, capacity=3)
    cache.append(*np.ones((2, 1, 2, 4, 8), np.float32))
    with pytest.raises(sr.CacheFull, match="4 tokens are needed, 3 are free"):
        small.join(cache)
    assert small.batch == (1,)
    small.join(sr.KVCache(2, 2, 8))
    assert small.batch == (3,)


def test_tied_keys(backend):
    x = RNG.standard_normal((2, 1, 6, 12)).astype(np.float32)
    q = RNG.standard_normal((2, 8, 1, 12)).astype(np.float32)
    for store in (None, sr.Int8(4), sr.Int4(4), sr.Int8()):
        cache = sr.KVCache(2, 1, 12, 8, tied=True, store=store)
        cache.append(x)
        got = cache.attend(q, scale=0.2, backend=backend)
        k = x if store is None else store.encode(x).dense()
        wanted = sr.sdpa(q.astype(k.dtype), k, k[..., :8], scale=0.2, backend="reference")
        assert abs(got - wanted).max() < 1e-5
        assert len(cache._tokens) == (1 if store is None else 2)
        with pytest.raises(TypeError, match="scale must be given for a tied cache"):
            cache.attend(q)
        with pytest.raises(TypeError, match="append the key alone"):
            cache.append(x, x[..., :8])
    for Ev, store in ((6, sr.Int8(4)), (7, sr.Int4(None)), (13, None)):
        with pytest.raises(ValueError, match=f"the Ev .*{Ev}"):
            sr.KVCache(2, 1, 12, Ev, tied=True, store=store)


def test_on_a_device(monkeypatch):
    cupy = strict_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    like = cupy.asarray(np.zeros(1))
    k, v = RNG.standard_normal((2, 2, 2, 7, 8)).astype(np.float32)
    one = [cupy.asarray(x[:, :, :1]) for x in (k, v)]
    for store in (None, sr.Int8(), sr.Int4(4)):
        for make in (sr.KVCache, lambda batch, *sizes, **how: sr.PagePool(40, 2, 4, 8, **how).cache(batch)):
            here, there = make(2, 2, 8, store=store), make(2, 2, 8, store=store, like=like)
            for cache, move in ((here, np.asarray), (there, cupy.asarray)):
                cache.append(move(k), move(v), lengths=[7, 3])
                cache.append(move(k[:, :, :1]), move(v[:, :, :1]))
                cache.select([1, 0, 1])
                cache.accept([[0, 2]] * 3, 3)
                cache.join(cache)
                cache.crop([3, 4, 3, 2, 1, 0])
            dense = there.key.dense() if hasattr(there.key, "dense") else there.key
            wanted = here.key.dense() if hasattr(here.key, "dense") else here.key
            assert (dense.get() == wanted)[:, :, :1].all()
            for name, array in here.state_dict().items():
                other = there.state_dict()[name]
                assert_same_bits(other if isinstance(other, np.ndarray) else other.get(), array)
    with pytest.raises(TypeError, match="key must be a cupy array, as the cache is, got a numpy array"):
        sr.KVCache(2, 2, 8, like=like).append(k, v)
    with pytest.raises(TypeError, match="key must be a numpy array"):
        sr.KVCache(2, 2, 8).append(*one)


X = np.ones((2, 2, 3, 8), np.float32)
MADE = {
    "heads": (dict(heads=0), ValueError, "heads must be at least 1, got 0"),
    "width": (dict(E=2.5), TypeError, "E must be an integer, got float"),
    "batch": (dict(batch=-1), ValueError, r"shape\[0\] must be at least 0, got -1"),
    "dtype": (
        dict(dtype=np.int8),
        TypeError,
        r"dtype must be float16.* got int8; a recipe of codes is passed as store=",
    ),
    "layout": (dict(layout="NHD"), ValueError, "layout must be"),
    "store": (
        dict(store="int8"),
        TypeError,
        r"store must be a recipe, such as Int8\(\), or a pair of those, got str, str",
    ),
    "three": (dict(store=(None, None, None)), TypeError, "store must be"),
    "tied": (dict(tied=1), TypeError, "tied must be True or False, got int"),
    "capacity": (dict(capacity=-1), ValueError, "capacity must be at least 0, got -1"),
    "window": (dict(window=0), ValueError, "window must be at least 1, got 0"),
    "first": (dict(first=4), ValueError, "first and slack are those of a window"),
    "slack": (dict(window=4, slack=-1), ValueError, "slack must be at least 0, got -1"),
    "like": (dict(like="gpu"), TypeError, "like must be an array"),
    "center": (
        dict(store=sr.Int8(center=np.ones((3, 8)))),
        ValueError,
        r"center must have shape \(heads, E\) = \(2, 8\)",
    ),
}


@pytest.mark.parametrize("what", MADE)
def test_errors_of_making(what):
    changed, error, message = MADE[what]
    with pytest.raises(error, match=message):
        sr.KVCache(**(dict(batch=2, heads=2, E=8) | changed))


CALLS = {
    "shape": (
        lambda c: c.append(X[0], X),
        ValueError,
        r"key must have shape \(\*batch, heads, T, E\) = \(2, 2, T, 8\), got \(2, 3, 8\)",
    ),
    "width": (
        lambda c: c.append(X, X[..., :4]),
        ValueError,
        r"value must have shape \(\*batch, heads, T, Ev\) = \(2, 2, T, 8\)",
    ),
    "tokens": (lambda c: c.append(X, X[:, :, :2]), ValueError, "the same number of tokens"),
    "no value": (lambda c: c.append(X), TypeError, "value must be given: the cache is not tied"),
    "text": (lambda c: c.append("abc", X), TypeError, "key must be float32, the type of the cache, got <U3"),
    "lengths": (
        lambda c: c.append(X, X, [1, 2, 3]),
        ValueError,
        r"lengths must broadcast to the batch axes \(2,\), got \(3,\)",
    ),
    "float lengths": (lambda c: c.append(X, X, [1.0, 2.0]), TypeError, "lengths must be integers, got float64"),
    "early query": (lambda c: c.attend(X), ValueError, "at most 2 of them here, got 3: row 0 has 2 tokens .append"),
    "early row": (lambda c: c.attend(X, lengths=[1, 3]), ValueError, "got 3: row 1 has 2 tokens"),
    "negative": (lambda c: c.attend(X, lengths=[1, -1]), ValueError, "QueryLengths must not be negative"),
    "offset": (lambda c: c.attend(X[:, :, :1], query_offset=3), TypeError, "query_offset= is known to the cache"),
    "another": (lambda c: c.attend(X[:, :, :1], is_causal=True), TypeError, "is_causal"),
    "crop": (lambda c: c.crop([1, 3]), ValueError, r"n must be in \[0, lengths\], got 3 for row 1, which has 2"),
    "float crop": (lambda c: c.crop(1.5), TypeError, "n must be integers, got float64"),
    "accept": (lambda c: c.accept([0, 1], 2), ValueError, r"index must have shape \(\*batch, K\)"),
    "float accept": (lambda c: c.accept([[0.0], [1.0]], 2), TypeError, "index must be integers"),
    "huge accept": (lambda c: c.accept(np.uint64([[2**64 - 1], [0]]), 2), ValueError, "must be strictly increasing"),
    "select": (lambda c: c.select([[0]]), ValueError, "index must have one axis"),
    "float select": (lambda c: c.select([0.5]), TypeError, "index must be integers"),
}


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("page", [None, 4])
def test_errors_of_calls_change_nothing(what, page):
    cache = sr.PagePool(10, 2, page, 8).cache(2) if page else sr.KVCache(2, 2, 8)
    cache.append(X[:, :, :2], X[:, :, :2])
    before = cache.state_dict()
    call, error, message = CALLS[what]
    with pytest.raises(error, match=message):
        call(cache)
    after = cache.state_dict()
    for name, array in before.items():
        assert_same_bits(after[name], array)


@pytest.mark.parametrize("page", [None, 4])
def test_any_byte_order_and_strides_are_taken(page):
    cache, plain = (sr.PagePool(10, 2, 4, 8).cache(2) if page else sr.KVCache(2, 2, 8) for _ in range(2))
    x = RNG.standard_normal((2, 2, 3, 8)).astype(np.float32)
    plain.append(x, x)
    cache.append(x.astype(">f4"), x[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1])
    for name, array in plain.state_dict().items():
        assert_same_bits(cache.state_dict()[name], array)


def test_numbers_that_cannot_be_coded_change_nothing():
    cache = sr.KVCache(2, 2, 8, store=sr.Int8())
    cache.append(X, X)
    wrong = X.copy()
    wrong[1, 1, 2, 7] = np.nan
    for keys in ((wrong, X), (X, wrong)):
        with pytest.raises(ValueError, match="must be finite"):
            cache.append(*keys)
    cache.append(wrong, X, lengths=[3, 2])  # what is not stored may hold anything
    assert cache.lengths.tolist() == [6, 5]


@pytest.mark.parametrize("how", [{}, {"page": 4}, {"page": 4, "storage": "int8"}])
def test_a_window_asks_for_no_positions_where_slots_say_the_same(how, backend):
    cache, rows, kind = filled({"window": 5, "first": 2, "slack": 3, **how}, batch=3, lengths=[6, 1, 4])
    for t in range(30):
        keys, values = kind.tokens(RNG, 3, 2)
        lengths = [2, 1, 2 * (t < 4)]  # the third row does not move again
        cache.append(kind.turned(keys), kind.turned(values), lengths)
        rows.append(keys, values, lengths)
        query = RNG.standard_normal((3, 4, 1, WIDTH)).astype(np.float32)
        alone = cache.attend(query, backend=backend)
        everything = np.ones(cache.key.shape[-2], bool)  # with a mask of the caller positions are asked for
        assert abs(cache.attend(query, mask=everything, backend=backend) - alone).max() < 1e-6
    assert cache.positions is not None
