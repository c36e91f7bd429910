"""The traps of other libraries' caches, a test each. Each was a public bug report somewhere."""

import numpy as np
import pytest
from token_lists import EV, GROUP, HEADS, Kind, Rows, poison
from token_lists import E as WIDTH

import sdpa_ref as sr
from sdpa_ref.testing import assert_close, assert_same_bits

STORAGES = {
    "array": {},
    "pages": {"page": 4},
    "int8": {"storage": "int8"},
    "pages of int4": {"storage": "int4", "page": 3},
    "LHE, tied": {"layout": "LHE", "tied": True},
}
stored = pytest.mark.parametrize("how", STORAGES.values(), ids=STORAGES)
WINDOWS = {"array": {}, "pages": {"page": 4}, "pages of float8": {"storage": "float8", "page": 2}}
windows = pytest.mark.parametrize("how", WINDOWS.values(), ids=WINDOWS)


class Pair:
    """A cache and its model, which do the same."""

    def __init__(self, how, batch=3, **more):
        self.kind, self.rng = Kind(**how, **more), np.random.default_rng(0)
        self.cache, self.rows = self.kind.make(batch), Rows(self.kind, batch)
        self.kind.caches = [self.cache]

    def append(self, T, lengths=None):
        keys, values = self.kind.tokens(self.rng, len(self.rows.keys), T)
        self.cache.append(self.kind.turned(keys), self.kind.turned(values), lengths)
        self.rows.append(keys, values, [T] * len(self.rows.keys) if lengths is None else lengths)

    def both(self, what, *args):
        getattr(self.cache, what)(*args)
        getattr(self.rows, what)(*args)

    def check(self, backend=None, L=1, lengths=None, fresh=True):
        self.rows.check_tokens(self.cache)
        if backend is not None:
            self.rows.check_attention(self.cache, self.rng, L, backend, lengths, fresh)


@pytest.fixture
def pages():
    """Return six pages of two heads and four slots, keys and values."""
    return np.random.default_rng(1).standard_normal((2, 6, 2, 4, 8)).astype(np.float32)


QUERY = np.random.default_rng(2).standard_normal((2, 4, 1, 8)).astype(np.float32)


def paged(pages, table, lengths, query=QUERY, **options):
    keys, values = (sr.Paged(x, table, lengths) for x in pages)
    return sr.sdpa(query, keys, values, **options)


@stored
def test_trap_01_crop_to_0_is_empty_and_a_negative_length_an_error(how, backend):
    pair = Pair(how)
    pair.append(6)
    with pytest.raises(ValueError, match=r"n must be in \[0, lengths\], got -5 for row 0, which has 6"):
        pair.cache.crop(-5)
    pair.check(backend)
    pair.both("crop", [0, 0, 0])
    pair.check(backend, L=0)
    pair.append(2)
    pair.check(backend, L=2)


@stored
def test_trap_02_a_negative_count_never_grows_a_cache(how):
    pair = Pair(how)
    pair.append(3)
    for wrong in ([-1, 0, 0], [4, 4, 4]):
        with pytest.raises(ValueError, match=r"lengths must be in \[0, T\] = \[0, 2\]"):
            pair.append(2, wrong)
        with pytest.raises(ValueError, match=r"of must be in \[0, lengths\]"):
            pair.cache.accept([[-1]] * 3, wrong)
    pair.check()


@windows
def test_trap_03_a_crop_behind_what_a_window_has_let_go(how, backend):
    pair = Pair(how, window=4, first=1, slack=2)
    for _ in range(20):
        pair.append(1)
    for n in (2, 16):
        with pytest.raises(ValueError, match=r"row 0 cannot become .* smallest length is 17, or one up to first = 1"):
            pair.cache.crop(n)
    pair.check(backend)
    pair.both("crop", [17, 18, 20])
    pair.append(1)
    pair.check(backend)
    pair.both("crop", [1, 0, 20])
    pair.append(6)
    pair.check(backend)


@stored
def test_trap_04_rows_accept_different_counts(how, backend):
    pair, good = Pair(how), np.array([5, 0, 2])
    pair.append(7)
    pair.append(5)
    pair.check(backend, L=5)
    pair.both("crop", pair.cache.lengths - 5 + good)
    assert pair.cache.lengths.tolist() == [12, 7, 9]
    pair.append(1)
    pair.check(backend)


@stored
def test_trap_05_a_tree_accepts_what_does_not_stand_in_a_row(how, backend):
    pair = Pair(how)
    pair.append(6)
    pair.append(4)
    pair.both("accept", [[0, 2, 3], [-1, -1, -1], [1, 3, -1]], [4, 4, 4])
    assert pair.cache.lengths.tolist() == [9, 6, 8]
    pair.append(1)
    pair.check(backend)
    for wrong in ([[0, 0, -1]] * 3, [[2, 1, -1]] * 3, [[0, 4, -1]] * 3, [[-2, 0, 1]] * 3):
        with pytest.raises(ValueError, match="index must be strictly increasing"):
            pair.cache.accept(wrong, 4)


@stored
def test_trap_06_nan_in_free_slots_and_pages(how, backend):
    pair = Pair(how)
    pair.append(9, [9, 0, 5])
    query = pair.kind.turned(pair.rng.standard_normal((3, 1, HEADS * GROUP, WIDTH)).astype(np.float32))
    options = {"backend": backend, "scale": 0.5, "lengths": [1, 0, 1]}
    before = pair.cache.attend(query, **options)
    poison(pair.cache, pair.kind)
    assert_same_bits(pair.cache.attend(query, **options), before)
    pair.append(3)
    pair.check(backend)


@stored
def test_trap_07_padding_is_never_stored(how, backend):
    pair = Pair(how)
    keys, values = pair.kind.tokens(pair.rng, 3, 6)
    for x in (keys, values):
        if x is not None:
            x[0, 2:], x[1] = np.nan, np.inf
    pair.cache.append(*map(pair.kind.turned, (keys, values)), [2, 0, 6])
    pair.rows.append(keys, values, [2, 0, 6])
    pair.check(backend, 2, [2, 0, 1])
    for x in pair.cache._tokens:
        assert np.isfinite(x.astype(np.float32)).all()


@pytest.mark.parametrize("wrong", [-1, 6, 2**40])
def test_trap_08_a_needed_entry_that_names_no_page(pages, wrong, backend):
    table = [[0, wrong, wrong], [1, 2, wrong]]
    with pytest.raises(ValueError, match=rf"(?s)table.*{wrong}"):
        paged(pages, table, [5, 8], backend=backend)
    right = paged(pages, [[0, 0, 0], [1, 2, 0]], [4, 8], backend=backend)
    assert_same_bits(paged(pages, table, [4, 8], backend=backend), right)


def test_trap_09_a_length_beyond_the_table(pages):
    with pytest.raises(ValueError, match=r"lengths must be in \[0, M \* P\] = \[0, 8\], got 9"):
        sr.Paged(pages[0], [[0, 1], [2, 3]], [9, 1])


def test_trap_10_the_stale_tail_of_a_table_row(pages, backend):
    right = paged(pages, [[4, 5], [1, 3]], [6, 7], backend=backend)
    pages[:, [0, 2]] = np.nan
    assert_same_bits(paged(pages, [[4, 5, 0, 2], [1, 3, 2, 0]], [6, 7], backend=backend), right)


def test_trap_11_a_length_that_fills_its_pages(pages, backend):
    keys, values = (x[[1, 2]].swapaxes(0, 1).reshape(2, 8, 8) for x in pages)
    got = paged(pages, [[1, 2, 3]], [8], QUERY[:1], backend=backend, mask=sr.Causal(), query_offset="end")
    assert_close(got[0], QUERY[0], keys, values, mask=sr.Causal(), query_offset="end")
    for how in ({"page": 4}, {"page": 1}):
        pair = Pair(how, batch=1)
        for _ in range(9):
            pair.append(1)
            pair.check(backend)


@stored
@pytest.mark.parametrize("lengths", [[0, 3, 0], [0, 0, 0]])
def test_trap_12_rows_of_length_0(how, lengths, backend):
    pair = Pair(how)
    pair.append(3, lengths)
    pair.check(backend, 2, [min(n, 1) for n in lengths])
    options = {"mask": pair.cache.mask, "query_offset": 0, "scale": 1.0, "backend": backend, "layout": pair.kind.layout}
    query = pair.kind.turned(np.ones((3, 2, HEADS * GROUP, WIDTH), np.float32))
    state = sr.sdpa_state(query, pair.cache.key, pair.cache.value, **options)
    assert not state.output[0].any()
    assert np.isneginf(state.lse[0]).all()


@pytest.mark.parametrize("P", [1, 3, 256])
def test_trap_13_shuffled_pages_of_any_size(P, backend):
    rng = np.random.default_rng(P)
    keys, values = rng.standard_normal((2, 2, 2, 300, 16)).astype(np.float32)
    query = rng.standard_normal((2, 4, 3, 16)).astype(np.float32)
    lengths, M = np.array([300, 123]), -(-300 // P)
    table = rng.permutation(2 * M).reshape(2, M)
    parts = np.full((2, 2 * M, 2, P, 16), np.nan, np.float32)
    for source, target in zip((keys, values), parts, strict=True):
        for b in range(2):
            for j in range(lengths[b]):
                target[table[b, j // P], :, j % P] = source[b, :, j]
    options = {"query_offset": "end", "backend": backend}
    got = paged(parts, table, lengths, query, mask=sr.Causal(), **options)
    assert_same_bits(got, sr.sdpa(query, keys, values, mask=sr.Causal() & sr.KeyLengths(lengths), **options))


def test_trap_14_addresses_beyond_32_bits(backend):
    try:
        pages = np.zeros((2**20 + 1, 1, 64, 64), np.int8)  # 4 GiB of addresses, of which two pages are touched
    except MemoryError:
        pytest.skip("this system does not lend addresses without memory")
    rng = np.random.default_rng(0)
    pages[2**20], pages[3] = rng.integers(-9, 9, (2, 1, 64, 64))
    query = rng.standard_normal((1, 1, 1, 64)).astype(np.float32)
    stored = sr.Quantized(pages, np.float32(0.1))
    near = sr.Quantized(pages[[3, 2**20]], np.float32(0.1))
    got = sr.sdpa(query, *[sr.Paged(stored, [[2**20, 3]], 100)] * 2, backend=backend)
    assert_same_bits(got, sr.sdpa(query, *[sr.Paged(near, [[1, 0]], 100)] * 2, backend=backend))


def test_trap_15_the_layout_decides_where_heads_and_slots_are_alike(backend):
    pages = np.random.default_rng(1).standard_normal((2, 6, 4, 4, 8)).astype(np.float32)
    table, lengths = [[0, 3], [5, 1]], [7, 5]
    head_first = paged(pages, table, lengths, backend=backend)
    keys, values = (sr.Paged(x.swapaxes(1, 2), table, lengths, "LHE") for x in pages)
    turned = sr.sdpa(QUERY.swapaxes(1, 2), keys, values, layout="LHE", backend=backend)
    assert_same_bits(turned.swapaxes(1, 2), head_first)
    with pytest.raises(ValueError, match=r'layout "LHE".*layout="HLE"'):
        sr.sdpa(QUERY, keys, values, backend=backend)
    assert not np.allclose(paged(pages.swapaxes(2, 3), table, lengths, backend=backend), head_first)


@stored
def test_trap_16_capacity_is_not_length(how, backend):
    pair = Pair(how)
    pair.append(17, [17, 2, 5])
    assert pair.cache.key.shape[-2 if pair.kind.layout == "HLE" else -3] >= 17
    pair.append(1)
    assert pair.cache.lengths.tolist() == [18, 3, 6]
    pair.check(backend)


@pytest.mark.parametrize("how", [{"capacity": 5}, {"page": 1, "pages": 15}, {"page": 5, "pages": 3}])
def test_trap_17_one_token_too_many(how, backend):
    pair = Pair(how)
    pair.append(5)
    before = [x.copy() for x in pair.cache._tokens]
    for lengths in ([1, 1, 1], [0, 1, 0]):
        with pytest.raises(sr.CacheFull, match=r"the cache is full: . (tokens|pages) are needed, 0 are free") as full:
            pair.append(1, lengths)
        assert full.value.needed == (sum(lengths) if "page" in how else 1)
        assert full.value.free == 0
    for x, old in zip(pair.cache._tokens, before, strict=True):
        assert_same_bits(x, old)
    pair.check(backend, fresh=False)  # a new cache would find no pages
    pair.both("crop", [5, 4, 5])
    pair.append(1, [0, 1, 0])
    pair.check(backend, fresh=False)  # a new cache would find no pages


@stored
def test_trap_18_keys_of_zeros_count(how, backend):
    pair = Pair(how)
    keys, values = pair.kind.tokens(pair.rng, 3, 4)
    keys[:, 1:] = 0
    pair.cache.append(*map(pair.kind.turned, (keys, values)))
    pair.rows.append(keys, values, [4] * 3)
    assert pair.cache.lengths.tolist() == [4] * 3
    pair.check(backend, 2)


@stored
def test_trap_19_lengths_that_were_held_do_not_change(how):
    pair = Pair(how)
    pair.append(3, [3, 1, 0])
    held, slots, mask = pair.cache.lengths, pair.cache.key_lengths, pair.cache.mask
    shown = repr(mask)
    pair.append(1)
    pair.append(1)
    assert held.tolist() == slots.tolist() == [3, 1, 0]
    assert repr(mask) == shown
    held[:] = 99
    pair.check()


@pytest.mark.parametrize("how", [{"storage": "float16"}, {"storage": "float16", "page": 3}])
def test_trap_20_types_stay_where_empty_rows_join(how, backend):
    pair = Pair(how, batch=2)
    pair.append(4)
    pair.cache.join(pair.kind.make(1))
    pair.rows.join(Rows(pair.kind, 1))
    pair.cache.select([2, 0, -1])
    pair.rows.select([2, 0, -1])
    assert pair.cache.key.dtype == pair.cache.value.dtype == np.float16
    assert pair.cache.attend(np.zeros((3, 4, 0, WIDTH), np.float16), backend=backend).dtype == np.float16
    pair.append(2)
    pair.check(backend)


def test_trap_21_another_type_is_an_error():
    import ml_dtypes

    for dtype, other in ((np.float16, ml_dtypes.bfloat16), (np.float32, np.float64), (np.float32, np.float16)):
        for make in (sr.KVCache, lambda *sizes, **how: sr.PagePool(4, 2, 4, 8, **how).cache(1)):
            cache = make(1, 2, 8, dtype=dtype)
            with pytest.raises(TypeError, match=rf"key must be {np.dtype(dtype)}, the type of the cache, got"):
                cache.append(*np.zeros((2, 1, 2, 3, 8), other))
            assert not cache.lengths.any()
    cache = sr.KVCache(1, 2, 8, store=sr.Int8())
    cache.append(np.ones((1, 2, 3, 8), ml_dtypes.bfloat16), np.ones((1, 2, 3, 8), np.float64))
    with pytest.raises(TypeError, match=r"key must be float16, .* got int64"):
        cache.append(*np.ones((2, 1, 2, 3, 8), int))


@stored
def test_trap_22_beams_go_their_own_ways(how, backend):
    pair = Pair(how, batch=2)
    pair.append(6)
    pair.both("select", [0, 0, 1])
    pair.append(1)
    pair.check(backend)
    pair.both("select", [1, 1, 2])
    pair.append(3)
    pair.check(backend)


def test_trap_23_a_partial_page_with_two_writers_is_copied(backend):
    pair = Pair({"page": 4}, batch=1)
    pool = pair.kind.pool
    pair.append(6)
    pair.both("select", [0, 0, 0])
    assert pool.pages - pool.free == 2
    pair.append(1, [0, 1, 0])
    assert pool.pages - pool.free == 3
    pair.append(1)
    assert pool.pages - pool.free == 4  # one writer may keep the page
    pair.check(backend)
    other = pair.kind.make(1)
    other.append(*(x.swapaxes(1, 2) for x in pair.kind.tokens(pair.rng, 1, 3)))
    shared = other.key.dense().copy()
    pair.cache.join(other)
    pair.cache.append(*(np.zeros((4, HEADS, 1, w), np.float32) for w in (WIDTH, EV)))
    assert_same_bits(other.key.dense(), shared)
    pair.cache.crop(0)
    assert_same_bits(other.key.dense(), shared)
    assert pool.pages - pool.free == 1


@stored
def test_trap_24_rows_follow_the_index(how, backend):
    pair = Pair(how)
    pair.append(5, [5, 2, 0])
    for index in ([2, 0, 1], [1, -1, 0, 1], [0], [], [-1, -1]):
        pair.both("select", index)
        pair.check(backend, 0)
    pair.append(2)
    pair.check(backend)
    for wrong in ([2], [-2]):
        with pytest.raises(ValueError, match=r"index must be rows in \[0, 2\), or -1"):
            pair.cache.select(wrong)


@windows
def test_trap_25_a_chunk_longer_than_the_window(how, backend):
    pair = Pair(how, window=3, first=2)
    pair.append(4)
    pair.append(9)
    pair.check(backend, L=9)
    pair.append(1)
    pair.check(backend, L=1)
    with pytest.raises(ValueError, match=r"at most 1 of them here, got 2: row 0 has 14 tokens, and its window"):
        pair.cache.attend(np.zeros((3, 4, 2, WIDTH), np.float32))


@windows
@pytest.mark.parametrize("first", [0, 2])
def test_trap_26_a_window_of_one(how, first, backend):
    pair = Pair(how, window=1, first=first)
    for T in (1, 1, 3, 1, 1, 1):
        pair.append(T)
        pair.check(backend, L=T)
    if first == 0:
        value = pair.kind.meant(*pair.rows.row(0))[1][-1]
        got = pair.cache.attend(np.ones((3, 4, 1, WIDTH), np.float32), backend=backend)
        assert abs(got[0, :, 0] - np.repeat(value, 2, axis=0)).max() < 1e-6


@windows
def test_trap_27_positions_are_those_of_the_text(how, backend):
    pair = Pair(how, window=3, first=1)
    for _ in range(30):
        pair.append(1)
    places = np.broadcast_to(pair.cache.positions, (3, pair.cache.key.shape[-2]))
    used = pair.cache.key_lengths
    for b in range(3):
        assert places[b, used[b] - 3 : used[b]].tolist() == [27, 28, 29]
        assert places[b, 0] == 0
    assert used.max() < 15
    query, bias = np.ones((3, 4, 1, WIDTH), np.float32), sr.ALiBi(0.3)
    got = pair.cache.attend(query, bias=bias, scale=1.0, backend=backend)
    keys, values = (x.swapaxes(0, 1) for x in pair.kind.meant(*pair.rows.row(0)))
    wanted = sr.sdpa(np.ones((4, 1, WIDTH)), keys, values, bias=bias, scale=1.0, mask=pair.kind.mask(), query_offset=29)
    assert abs(got[0] - wanted).max() < 1e-5


def test_trap_28_positional_rules_go_by_positions_and_those_must_increase(backend):
    rng = np.random.default_rng(0)
    query, keys, values = (rng.standard_normal((2, n, 8)).astype(np.float32) for n in (2, 9, 9))
    kept = np.array([0, 1, 4, 7, 8])
    mask, options = sr.Causal() & sr.Window(4, 0), {"backend": backend}
    got = sr.sdpa(query, keys[:, kept], values[:, kept], mask=mask, query_offset="end", key_positions=kept, **options)
    dense = sr.sdpa(query, keys, values, mask=mask & np.isin(np.arange(9), kept), query_offset="end", **options)
    assert abs(got - dense).max() < 1e-6
    with pytest.raises(ValueError, match="key_positions must increase strictly"):
        sr.sdpa(
            query, keys[:, kept], values[:, kept], mask=mask, query_offset="end", key_positions=kept[[1, 0, 2, 3, 4]]
        )


@pytest.mark.parametrize("recipe", [sr.Int8(), sr.Int4(4), sr.Float8(), sr.Int8(2)])
def test_trap_29_groups_of_zeros_and_constants(recipe, backend):
    cache = sr.KVCache(1, 2, 8, store=recipe)
    keys = np.zeros((2, 1, 2, 5, 8), np.float32)
    keys[:, :, :, 2] = 3.5
    keys[:, :, :, 3, :4] = -1e-30
    cache.append(*keys)
    dense = cache.key.dense()
    assert not dense[:, :, [0, 1, 4]].any()
    assert np.isfinite(dense).all()
    assert np.isfinite(cache.attend(np.ones((1, 2, 5, 8), np.float32), backend=backend)).all()


def test_trap_30_float8_is_clipped_and_its_scale_multiplies(backend):
    x = np.random.default_rng(0).standard_normal((1, 2, 6, 16)).astype(np.float32) * 1e4
    x[..., 0] = 465
    cache = sr.KVCache(1, 2, 16, store=sr.Float8())
    cache.append(x, x)
    assert np.isfinite(cache.key.codes.astype(np.float32)).all()
    error, scale = abs(cache.key.dense()[:, :, :6] - x), cache.key.scale[:, :, :6]
    assert (error <= np.maximum(abs(x) / 16, scale / 512)).all()
    assert np.isfinite(cache.attend(x[:, :, :1] / 1e4, backend=backend)).all()


@pytest.mark.parametrize("width", [80, 96])
@pytest.mark.parametrize("store", [None, sr.Int8(), sr.Int8(16), sr.Int4(16)])
def test_trap_31_widths_that_fill_no_vector(width, store, backend):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 2, 2, 40, width)).astype(np.float32)
    cache = sr.KVCache(2, 2, width, store=store)
    cache.append(-abs(x[1]), x[2])  # all scores are below those of lanes that would be 0
    got = cache.attend(abs(x[0]) * 9, backend=backend)
    q, k = abs(x[0]) * 9, -abs(x[1])
    k, v = (k, x[2]) if store is None else (store.encode(k).dense(), store.encode(x[2]).dense())
    wanted = sr.sdpa(q.astype(np.float64), k, v, mask=sr.Causal(), backend="reference")
    assert abs(got - wanted).max() < 1e-4


def test_trap_32_a_group_that_does_not_divide_the_width():
    with pytest.raises(ValueError, match="group must divide the width E = 80, got 32; its divisors are 1, 2, 4, 5, 8"):
        sr.KVCache(1, 2, 80, store=sr.Int4())
    with pytest.raises(ValueError, match="width E = 40, got 16"):
        sr.PagePool(4, 2, 4, 80, 40, store=sr.Int8(16))


@pytest.mark.parametrize("storage", ["int8", "int4", "float8", "int8 center", "int8 keys"])
@pytest.mark.parametrize("page", [None, 3])
def test_trap_33_crop_and_reorder_take_every_part(storage, page, backend):
    pair = Pair({"storage": storage, "page": page}, batch=2)
    pair.append(7, [7, 4])
    pair.both("crop", [5, 4])
    pair.both("select", [1, 0, 1])
    pair.append(3)
    pair.both("accept", [[0, 2], [2, -1], [-1, -1]], [3, 3, 3])
    pair.append(1)
    pair.check(backend)


@stored
def test_trap_34_a_file_of_another_cache_or_half_a_file(how, tmp_path):
    pair = Pair(how)
    pair.append(9, [9, 0, 4])
    path, pool = tmp_path / "cache", pair.kind.pool
    pair.cache.save(path)
    before = pool.free if pool else None
    load = pool.load if pool else sr.KVCache.load
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot read"):
        load(path)
    path.write_bytes(whole)
    other = Kind(**{"page": None, **how, "storage": "int8 keys"})
    wrong = other.pool.load if pool else lambda path: sr.KVCache.load(path, store=other.store, heads=7)
    with pytest.raises(ValueError, match=r"cache.* another one: .*store is ") as raised:
        wrong(path)
    assert pool or "heads is 2, not 7" in str(raised.value)
    assert not pool or (pool.free == before and other.pool.free == other.pool.pages)
    pair.check()
    pair.cache = load(path)
    pair.check()


def test_trap_35_left_padding_and_ragged_appends(backend):
    rng = np.random.default_rng(0)
    query, keys, values = (rng.standard_normal((2, 2, 5, 8)).astype(np.float32) for _ in range(3))
    pad = np.array([0, 2])
    mask = sr.Causal() & sr.KeyStarts(pad)
    padded = sr.sdpa(query, keys, values, mask=mask, backend=backend)
    cache = sr.KVCache(2, 2, 8)
    moved = [np.stack([x[0], np.roll(x[1], -2, axis=1)]) for x in (query, keys, values)]
    cache.append(*moved[1:], lengths=5 - pad)
    got = cache.attend(moved[0], lengths=5 - pad, backend=backend)
    assert abs(got[0] - padded[0]).max() < 1e-6
    assert abs(got[1, :, :3] - padded[1, :, 2:]).max() < 1e-6


def test_trap_36_two_empty_states(backend):
    cache = sr.KVCache(2, 2, 8)
    empty = sr.sdpa_state(QUERY[:, :2], cache.key, cache.value, mask=cache.mask, query_offset="end", backend=backend)
    both = empty + empty
    assert np.isneginf(both.lse).all()
    assert not both.output.any()


@stored
def test_trap_37_a_neighbour_grows(how, backend):
    pair = Pair(how)
    pair.append(7)
    query = pair.kind.turned(pair.rng.standard_normal((3, 1, HEADS * GROUP, WIDTH)).astype(np.float32))
    options = {"backend": backend, "scale": 0.5}
    before = pair.cache.attend(query, **options)
    for _ in range(50):
        pair.append(3, [0, 3, 0])
    after = pair.cache.attend(query, **options)
    assert_same_bits(after[[0, 2]], before[[0, 2]])
