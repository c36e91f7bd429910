"""Five hundred tokens, one at a time and at once."""

import numpy as np
import pytest

import sdpa_ref as sr

STEPS, HEADS, GROUP, E = 500, 2, 3, 16


def caches(store):
    """Return caches of each kind that hold rows of tokens."""
    pool = sr.PagePool(2 * STEPS // 16 + 2, HEADS, 16, E, store=store)
    return {
        "contiguous": sr.KVCache(2, HEADS, E, store=store),
        "LHE": sr.KVCache(2, HEADS, E, store=store, layout="LHE"),
        "pages": pool.cache(2),
    }


@pytest.mark.parametrize("store", [None, sr.Int8(), sr.Int4(group=16)], ids=str)
@pytest.mark.parametrize("kind", ["contiguous", "LHE", "pages"])
def test_a_decode_of_500_steps_has_the_bits_of_the_prefill(fast_backend, kind, store):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((2, HEADS * GROUP, STEPS, E), np.float32)
    key, value = rng.standard_normal((2, 2, HEADS, STEPS, E), np.float32)
    by_token, at_once = caches(store)[kind], caches(store)[kind]

    def turned(x):
        return x.swapaxes(1, 2) if kind == "LHE" else x

    at_once.append(turned(key), turned(value))
    prefill = turned(at_once.attend(turned(query), backend=fast_backend))
    for t in range(STEPS):
        one = slice(t, t + 1)
        by_token.append(turned(key[:, :, one]), turned(value[:, :, one]))
        step = turned(by_token.attend(turned(query[:, :, one]), backend=fast_backend))
        np.testing.assert_array_equal(step, prefill[:, :, one])


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("E", [64, 128])
@pytest.mark.parametrize("page", [5, 8, 16, 48, 128])
def test_rows_over_pages_have_the_bits_of_the_array_that_they_mean(fast_backend, page, E, dtype):
    """One row, four and others are taken in different ways; pages hold a few panels of keys, or parts of one."""
    rng, length = np.random.default_rng(page), 307
    count = -(-length // page)
    table = rng.permutation(count + 3)[:count]
    pages = rng.standard_normal((2, count + 3, 2, page, E)).astype(dtype)
    pages[:, np.setdiff1d(np.arange(count + 3), table)] = np.nan  # pages that nobody needs
    key, value = (sr.Paged(numbers, table, length) for numbers in pages)
    for group in (1, 3, 4):
        query = rng.standard_normal((2 * group, 1, E)).astype(dtype)
        paged = sr.sdpa(query, key, value, backend=fast_backend)
        dense = sr.sdpa(query, key.dense()[:, :length], value.dense()[:, :length], backend=fast_backend)
        np.testing.assert_array_equal(paged, dense)
        assert np.isfinite(paged).all()
