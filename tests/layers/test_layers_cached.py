"""Layers over caches: token by token, in a chunk, and across to the tokens of an encoder."""

import numpy as np
import pytest

import sdpa_ref as sr
from sdpa_ref import Causal, KeyLengths, KVCache, MultiHeadAttention

layer = MultiHeadAttention(24, 3, rng=0, dtype=np.float64)
x = np.random.default_rng(0).standard_normal((2, 9, 24))


def caches():
    """Return the caches that a layer of three heads of 8 can have."""
    pool = sr.PagePool(20, 3, 2, 8, dtype=np.float64)
    return {
        "HLE": KVCache(2, 3, 8, dtype=np.float64),
        "LHE": KVCache(2, 3, 8, dtype=np.float64, layout="LHE"),
        "pages": pool.cache(2),
    }


@pytest.mark.parametrize("kind", ["HLE", "LHE", "pages"])
@pytest.mark.parametrize("steps", [[9], [1] * 9, [4, 1, 3, 1]])
def test_a_cache_gives_what_one_causal_call_gives(backend, kind, steps):
    cache, ends = caches()[kind], np.cumsum(steps)
    parts = [layer(x[:, end - n : end], cache=cache, backend=backend) for n, end in zip(steps, ends, strict=True)]
    np.testing.assert_allclose(np.concatenate(parts, 1), layer(x, mask=Causal(), backend="reference"), atol=1e-13)
    np.testing.assert_array_equal(cache.lengths, [9, 9])


def test_a_window_of_the_cache_is_that_of_the_mask():
    cache = KVCache(2, 3, 8, dtype=np.float64, window=3)
    steps = [layer(x[:, t : t + 1], cache=cache) for t in range(9)]
    np.testing.assert_allclose(np.concatenate(steps, 1), layer(x, mask=sr.Window(2, 0)), atol=1e-13)


@pytest.mark.parametrize("store", [None, sr.Int8()])
def test_cross_attention_reads_a_cache_that_was_made_once(backend, store):
    words = np.random.default_rng(1).standard_normal((2, 6, 24))
    cross = layer.cached(words, [6, 4], store=store)
    expected = layer(x, words, mask=KeyLengths([6, 4]), backend=backend)
    for n in (1, 4):
        got = layer(x[:, :n], cross, backend=backend)
        np.testing.assert_allclose(got, expected[:, :n], atol=1e-13 if store is None else 0.02)
    np.testing.assert_array_equal(cross.lengths, [6, 4])
    keep = np.random.default_rng(2).random((2, 1, 9, 6)) < 0.7
    got = layer(x, cross, mask=keep, backend=backend)
    bound = 1e-13 if store is None else 0.05
    np.testing.assert_allclose(got, layer(x, words, mask=KeyLengths([6, 4]) & keep, backend=backend), atol=bound)


@pytest.mark.parametrize("kind", ["HLE", "LHE", "pages"])
def test_a_call_that_fails_leaves_the_cache_as_it_was(kind):
    cache = caches()[kind]
    layer(x[:, :4], cache=cache)
    with pytest.raises(ValueError, match="mask must broadcast"):
        layer(x[:, 4:6], cache=cache, mask=np.ones((7, 7), bool))
    np.testing.assert_array_equal(cache.lengths, [4, 4])
    step = layer(x[:, 4:5], cache=cache)
    np.testing.assert_allclose(step, layer(x[:, :5], mask=Causal())[:, 4:], atol=1e-13)


def test_errors():
    cache = KVCache(2, 3, 8, dtype=np.float64)
    with pytest.raises(TypeError, match="context and cache exclude each other"):
        layer(x, x, cache=cache)
    with pytest.raises(TypeError, match="cache must be a KVCache or a cache of a PagePool, got dict"):
        layer(x, cache={})
    with pytest.raises(TypeError, match="query_offset= is known to the cache"):
        layer(x, cache=cache, query_offset=3)
    with pytest.raises(ValueError, match=r"key must have shape .*heads"):
        layer(x, cache=KVCache(2, 4, 8, dtype=np.float64))
    np.testing.assert_array_equal(cache.lengths, [0, 0])
