"""Rule 26 for grouped heads of a width of their own, and the options of a call that they come with in models."""

import numpy as np
import pytest
from naive import agree, attention

from sdpa_ref import Causal, Int8, KeyLengths, KVCache, MultiHeadAttention
from sdpa_ref.testing import assert_same_bits

layer = MultiHeadAttention(7, 6, num_kv_heads=2, head_size=4, rng=0, dtype=np.float64)
x = np.random.default_rng(0).standard_normal((2, 5, 7))
OPTIONS = {"scale": 0.3, "softcap": 2.0, "sink": np.arange(6.0) - 3}


def heads(part, tokens, H):
    """Return what the projection makes of the tokens, ``(B, H, L, E)``."""
    return (tokens @ part.weight.T + part.bias).reshape(*tokens.shape[:2], H, 4).swapaxes(1, 2)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_rule_26_grouped_heads_are_the_formula(backend, options):
    keep = np.broadcast_to(np.tri(5, dtype=bool), (2, 6, 5, 5))
    q, k, v = heads(layer.query, x, 6), heads(layer.key, x, 2), heads(layer.value, x, 2)
    attended, _, weights = attention(q, k, v, keep=keep, **options)
    expected = attended.swapaxes(1, 2).reshape(2, 5, 24) @ layer.output.weight.T + layer.output.bias
    agree(layer(x, mask=Causal(), backend=backend, **options), expected)
    output, shown = layer.with_weights(x, mask=Causal(), backend=backend, **options)
    assert_same_bits(output, layer(x, mask=Causal(), backend=backend, **options))
    agree(shown, weights)


def test_rule_26_grouped_by_hand():
    """Tokens of one number, two query heads over one key head: equal scores, and twice the mean of what is seen."""
    ones = {f"{name}.weight": np.ones((n, 1)) for name, n in (("query", 2), ("key", 1), ("value", 1))}
    two = MultiHeadAttention.from_state_dict({**ones, "output.weight": np.ones((1, 2))}, num_heads=2)
    assert (two.num_kv_heads, two.head_size) == (1, 1)
    tokens = np.array([[2.0], [4.0]])
    assert two(tokens, scale=0.0).tolist() == [[6.0], [6.0]]
    assert two(tokens, scale=0.0, mask=Causal()).tolist() == [[4.0], [6.0]]
    assert two(tokens, scale=0.0, sink=0.0).tolist() == [[4.0], [4.0]]  # softmax plus one


@pytest.mark.parametrize("layout", ["HLE", "LHE"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "options"])
def test_grouped_heads_over_a_cache(backend, layout, options):
    cache = KVCache(2, 2, 4, dtype=np.float64, layout=layout)
    parts = [layer(x[:, at], cache=cache, backend=backend, **options) for at in (slice(0, 3), slice(3, 4), slice(4, 5))]
    agree(np.concatenate(parts, 1), layer(x, mask=Causal(), backend=backend, **options))


def test_grouped_heads_over_keys_that_were_made_once(backend):
    words = np.random.default_rng(1).standard_normal((2, 6, 7))
    cross = layer.cached(words)
    assert cross.key.shape == (2, 6, 2, 4)
    agree(layer(x, cross, backend=backend, **OPTIONS), layer(x, words, backend=backend, **OPTIONS))


@pytest.mark.parametrize("store", [None, Int8()])
def test_weights_over_keys_that_were_made_once(backend, store):
    words = np.random.default_rng(1).standard_normal((2, 6, 7))
    cross = layer.cached(words, [6, 4], store=store)
    output, weights = layer.with_weights(x, cross, backend=backend, **OPTIONS)
    assert_same_bits(output, layer(x, cross, backend=backend, **OPTIONS))
    expected = layer.with_weights(x, words, mask=KeyLengths([6, 4]), backend=backend, **OPTIONS)[1]
    agree(weights, expected, error=None if store is None else 0.02)
    with pytest.raises(TypeError, match="context must be the tokens themselves where gradients are wanted"):
        layer.value_and_vjp(x, cross)


def test_rule_30_sizes_of_grouped_heads_come_from_the_shapes(tmp_path):
    entries = layer.state_dict()
    assert entries["key.weight"].shape == (8, 7)
    layer.save(tmp_path / "x")
    for given in ({}, {"head_size": 4}, {"num_kv_heads": 2, "head_size": 4}):
        again = MultiHeadAttention.load(tmp_path / "x", num_heads=6, **given)
        assert repr(again) == "MultiHeadAttention(hidden_size=7, num_heads=6, num_kv_heads=2, head_size=4)"
        assert_same_bits(again(x), layer(x))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 3, "head_size": 4}, r"query.weight must have shape .* = \(12, 7\), got \(24, 7\)"),
        ({"num_heads": 6, "num_kv_heads": 3}, r"key.weight must have shape .* = \(12, 7\), got \(8, 7\)"),
        ({"num_heads": 5}, r"query.weight must have shape .* = \(5\*head_size, 7\), got \(24, 7\)"),
        ({"num_heads": 2}, r"key.weight must have shape .* = \(12\*num_kv_heads, 7\), got \(8, 7\)"),
        ({"num_heads": 6, "head_size": 0}, "head_size must be at least 1, got 0"),
    ],
)
def test_rule_30_sizes_that_the_shapes_contradict(sizes, message):
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_state_dict(layer.state_dict(), **sizes)


def test_rule_30_heads_that_no_group_fits():
    entries = dict(layer.state_dict())
    for name in ("key", "value"):
        entries |= {f"{name}.weight": np.zeros((16, 7)), f"{name}.bias": np.zeros(16)}
    with pytest.raises(ValueError, match="num_heads = 6 must be a multiple of num_kv_heads = 4"):
        MultiHeadAttention.from_state_dict(entries, num_heads=6)
    with pytest.raises(
        TypeError, match=r"MultiHeadAttention takes num_heads=, .*= beside the weights, got num_kv_heads="
    ):
        MultiHeadAttention.from_state_dict(entries, num_kv_heads=4)


def test_a_cache_of_other_heads_is_refused():
    with pytest.raises(ValueError, match=r"key must have shape .*heads"):
        layer(x, cache=KVCache(2, 6, 4, dtype=np.float64))
