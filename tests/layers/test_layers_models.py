"""What models do to queries and keys inside of a layer: norms, rotary positions, and tokens of other widths."""

import numpy as np
import pytest
from naive import agree

from sdpa_ref import Causal, Embedding, KVCache, MultiHeadAttention, PagePool, Rotary, YarnScaling, rotary, sdpa
from sdpa_ref.testing import assert_same_bits, slope

DOUBLE = {"rng": 1, "dtype": np.float64}
ROTARY = Rotary(50.0, width=4, interleaved=True)
layer = MultiHeadAttention(
    8, 4, num_kv_heads=2, head_size=6, norm=True, eps=0.01, bias=("query",), rotary=ROTARY, **DOUBLE
)
for norm in (layer.query_norm, layer.key_norm):
    norm.weight[:] = np.random.default_rng(3).uniform(0.5, 2, 6)
x = np.random.default_rng(0).standard_normal((2, 7, 8))


def test_norms_and_rotary_positions_are_the_formula(backend):
    """As Qwen3 has it: the heads of query and key are normalised, then turned."""

    def heads(part, H):
        return (x @ part.weight.T + (0 if part.bias is None else part.bias)).reshape(2, 7, H, 6).swapaxes(1, 2)

    def made(y, norm):
        y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 0.01) * norm.weight
        return rotary(y, range(7), base=50.0, width=4, interleaved=True)

    query, key = made(heads(layer.query, 4), layer.query_norm), made(heads(layer.key, 2), layer.key_norm)
    attended = sdpa(query, key, heads(layer.value, 2), mask=Causal(), backend=backend)
    expected = attended.swapaxes(1, 2).reshape(2, 7, 24) @ layer.output.weight.T
    agree(layer(x, mask=Causal(), backend=backend), expected)
    output, weights = layer.with_weights(x, mask=Causal(), backend=backend)
    assert_same_bits(output, layer(x, mask=Causal(), backend=backend))
    assert weights.shape == (2, 4, 7, 7)


@pytest.mark.parametrize("kind", ["HLE", "LHE", "pages"])
def test_positions_continue_where_the_cache_ends(backend, kind):
    pool = PagePool(20, 2, 2, 6, dtype=np.float64)
    cache = pool.cache(2) if kind == "pages" else KVCache(2, 2, 6, dtype=np.float64, layout=kind)
    steps = [layer(x[:, at], cache=cache, backend=backend) for at in (slice(0, 4), slice(4, 5), slice(5, 7))]
    agree(np.concatenate(steps, 1), layer(x, mask=Causal(), backend=backend))


def test_only_distances_count_and_positions_may_be_given():
    moved = layer(x, mask=Causal(), positions=np.arange(7) + np.array([[3], [11]]))
    agree(moved, layer(x, mask=Causal()))
    assert abs(layer(x, positions=range(0, 14, 2)) - layer(x)).max() > 1e-3


def test_rule_30_norms_are_weights_and_rotary_positions_are_given(tmp_path):
    entries = layer.state_dict()
    assert {name for name in entries if "norm" in name} == {"query_norm.weight", "key_norm.weight"}
    layer.save(tmp_path / "x")
    again = MultiHeadAttention.load(tmp_path / "x", num_heads=4, eps=0.01, rotary=ROTARY)
    assert_same_bits(again(x), layer(x))
    assert repr(again) == repr(layer)
    assert "rotary=Rotary(base=50.0, width=4, interleaved=True, scaling=None)" in repr(layer)
    theirs = {name.replace("query", "q").replace("key", "k"): array for name, array in entries.items()}
    qwen = MultiHeadAttention.from_state_dict(theirs, num_heads=4, eps=0.01, rotary=ROTARY)
    assert_same_bits(qwen(x), layer(x))


def test_a_scaling_reaches_the_layer():
    scaled = MultiHeadAttention(8, 2, rotary=Rotary(scaling=YarnScaling(4.0, original_length=16)), **DOUBLE)
    plain = MultiHeadAttention.from_state_dict(scaled.state_dict(), num_heads=2, rotary=Rotary())
    assert abs(scaled(x) - plain(x)).max() > 1e-6


def test_tokens_of_other_widths(backend, tmp_path):
    """Keys and values are made of tokens of widths of their own, of one array or of a pair."""
    other = MultiHeadAttention(8, 2, kdim=5, vdim=3, **DOUBLE)
    assert "kdim=5, vdim=3" in repr(other)
    rng = np.random.default_rng(1)
    keys, values = rng.standard_normal((2, 6, 5)), rng.standard_normal((2, 6, 3))
    query, key, value = (
        (tokens @ part.weight.T + part.bias).reshape(2, -1, 2, 4)
        for tokens, part in ((x, other.query), (keys, other.key), (values, other.value))
    )
    expected = sdpa(query, key, value, layout="LHE").reshape(2, 7, 8) @ other.output.weight.T + other.output.bias
    agree(other(x, (keys, values), backend=backend), expected)
    agree(other(x, other.cached((keys, values)), backend=backend), expected)
    other.save(tmp_path / "x")
    assert_same_bits(MultiHeadAttention.load(tmp_path / "x", num_heads=2)(x, (keys, values)), other(x, (keys, values)))
    alike = MultiHeadAttention(8, 2, kdim=5, vdim=5, **DOUBLE)
    agree(alike(x, keys, backend=backend), alike(x, (keys, keys), backend=backend))
    for wrong in (None, keys, (values, keys)):
        with pytest.raises(ValueError, match=r"(x|context|context\[0\]) must have shape \(..., S, [kv]dim\)"):
            other(x, wrong)


def test_rule_24_of_tokens_of_other_widths(gradient_backend):
    other, rng = MultiHeadAttention(8, 2, kdim=5, vdim=3, **DOUBLE), np.random.default_rng(1)
    given = [x, rng.standard_normal((2, 6, 5)), rng.standard_normal((2, 6, 3))]
    value, vjp = other.value_and_vjp(x, tuple(given[1:]), backend=gradient_backend)
    gradients = vjp(np.ones_like(value))
    ways = [rng.standard_normal(each.shape) for each in given]

    def loss(t):
        query, *pair = (each + t * way for each, way in zip(given, ways, strict=True))
        return float(other(query, tuple(pair), backend=gradient_backend).sum())

    along, error = slope(loss)
    found = (gradients.x, *gradients.context)
    assert abs(sum((each * way).sum() for each, way in zip(found, ways, strict=True)) - along) <= error


def test_errors():
    plain = MultiHeadAttention(8, 2, **DOUBLE)
    with pytest.raises(TypeError, match="positions= is for a layer with rotary= positions"):
        plain(x, positions=range(7))
    for call in (layer, layer.with_weights, layer.value_and_vjp):
        with pytest.raises(TypeError, match="context= excludes rotary positions"):
            call(x, x)
    with pytest.raises(TypeError, match="context= excludes rotary positions"):
        layer.cached(x)
    with pytest.raises(TypeError, match="rotary must be a Rotary, got float"):
        MultiHeadAttention(8, 2, rotary=10000.0)
    with pytest.raises(TypeError, match="norm must be True or False, got str"):
        MultiHeadAttention(8, 2, norm="rms")
    with pytest.raises(TypeError, match="Embedding takes no size"):
        Embedding.from_state_dict({"weight": x[0]}, rotary=ROTARY)
    with pytest.raises(TypeError, match="cache must be a KVCache or a cache of a PagePool, got dict"):
        layer(x, cache={})
    with pytest.raises(ValueError, match=r"positions must have shape \(7,\)"):
        layer(x, positions=range(6))
