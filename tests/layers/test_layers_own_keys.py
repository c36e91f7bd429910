"""Keys and values that a layer has of its own: as if they stood behind those of the tokens, where no mask reaches."""

import numpy as np
import pytest

from sdpa_ref import ALiBi, Causal, Dropout, KeyLengths, KVCache, MultiHeadAttention, Rotary, sdpa
from sdpa_ref.testing import slope

RNG = np.random.default_rng(0)
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_size": 6}


def made(dtype=np.float64, **options):
    return MultiHeadAttention(12, rng=1, dtype=dtype, **SIZES, **{"add_bias_kv": True, "add_zero_attn": True} | options)


def by_hand(layer, x, context, keep, bias=0.0, **options):
    """Return the output by one call over all keys."""

    def heads(y):
        return y.reshape(*y.shape[:-1], -1, 6).swapaxes(-2, -3)

    def with_own(y, own):
        rows = ([] if own is None else [own.reshape(1, 12)]) + [np.zeros((1, 12))] * layer.add_zero_attn
        rows = [np.broadcast_to(row, (*y.shape[:-2], 1, 12)) for row in rows]
        return heads(np.concatenate([y, *rows], -2))

    key, value = with_own(layer.key(context), layer.bias_k), with_own(layer.value(context), layer.bias_v)
    own = key.shape[-2] - context.shape[-2]
    keep = np.concatenate([keep, np.ones((*keep.shape[:-1], own), bool)], -1)
    bias = np.broadcast_to(bias, (*keep.shape[:-3], 4, x.shape[-2], context.shape[-2]))
    bias = np.concatenate([bias, np.zeros((*bias.shape[:-1], own))], -1)
    output = sdpa(heads(layer.query(x)), key, value, mask=keep, bias=bias, backend="reference", **options)
    return layer.output(output.swapaxes(-2, -3).reshape(*x.shape[:-1], -1))


@pytest.mark.parametrize("own", [(True, True), (True, False), (False, True)])
def test_options(own, backend):
    layer, x = made(add_bias_kv=own[0], add_zero_attn=own[1]), RNG.standard_normal((2, 5, 12))
    words, causal = RNG.standard_normal((2, 3, 12)), np.tri(5, dtype=bool)
    sink = RNG.standard_normal(4)

    def check(got, expected):
        np.testing.assert_allclose(got, expected, atol=1e-12)

    check(layer(x, mask=Causal(), backend=backend), by_hand(layer, x, x, causal[None]))
    keep = np.arange(3) < np.array([[[[0]]], [[[2]]]])
    check(
        layer(x, words, mask=KeyLengths([0, 2]), backend=backend),
        by_hand(layer, x, words, np.broadcast_to(keep, (2, 1, 5, 3))),
    )
    options = {"scale": 0.3, "softcap": 2.0, "sink": sink}
    check(layer(x, mask=Causal(), backend=backend, **options), by_hand(layer, x, x, causal[None], **options))
    distance = -np.abs(np.arange(5)[:, None] - np.arange(5)) * np.arange(1, 5)[:, None, None] / 8
    everything = np.ones((1, 5, 5), bool)
    check(layer(x, bias=ALiBi(np.arange(1, 5) / 8), backend=backend), by_hand(layer, x, x, everything, distance))
    check(layer(x[0], words), by_hand(layer, np.stack([x[0], x[0]]), words, np.ones((2, 1, 5, 3), bool)))


def test_weights(backend):
    layer, x = made(), RNG.standard_normal((2, 5, 12))
    output, weights = layer.with_weights(x, mask=Causal(), backend=backend)
    assert weights.shape == (2, 4, 5, 7)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-12)
    assert (weights[..., :5][..., ~np.tri(5, dtype=bool)] == 0).all()
    np.testing.assert_array_equal(layer(x, mask=Causal(), backend=backend), output)
    words = RNG.standard_normal((2, 3, 12))
    cached = layer.with_weights(x, layer.cached(words, lengths=[1, 3]), backend=backend)
    plain = layer.with_weights(x, words, mask=KeyLengths([1, 3]), backend=backend)
    for got, expected in zip(cached, plain, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)
    np.testing.assert_array_equal(layer(x, layer.cached(words, lengths=[1, 3]), backend=backend), cached[0])


def test_gradients(gradient_backend):
    """Also by the sink, and of queries that several batch entries share."""
    layer, x, words = made(norm=True), RNG.standard_normal((5, 12)), RNG.standard_normal((2, 3, 12))
    entries, sink = layer.state_dict(), RNG.standard_normal(4)
    given = {"mask": KeyLengths([0, 2]), "backend": gradient_backend, "softcap": 3.0}
    value, vjp = layer.value_and_vjp(x, words, sink=sink, **given)
    grad = RNG.standard_normal(value.shape)
    gradients = vjp(grad)
    assert gradients.weights.keys() == entries.keys()
    parts = {"x": (x, gradients.x), "words": (words, gradients.context), "sink": (sink, gradients.sink)}
    parts |= {name: (entries[name], gradients.weights[name]) for name in entries}
    for name, (part, gradient) in parts.items():
        assert gradient.shape == part.shape
        way = RNG.standard_normal(part.shape)

        def along(t, name=name, part=part, way=way):
            moved = {"x": x, "words": words, "sink": sink} | entries | {name: part + t * way}
            tokens = [moved.pop(each) for each in ("x", "words")]
            own = moved.pop("sink")
            other = MultiHeadAttention.from_state_dict(moved, num_heads=4, add_zero_attn=True)
            return float((other(*tokens, sink=own, **given) * grad).sum())

        expected, error = slope(along)
        assert abs((gradient * way).sum() - expected) <= error + 1e-9, name


def test_a_layer_is_what_it_was_saved_as(tmp_path):
    layer, x = made(np.float32), RNG.standard_normal((2, 5, 12)).astype(np.float32)
    assert repr(layer).endswith("head_size=6, add_bias_kv=True, add_zero_attn=True)")
    assert layer.bias_k.shape == layer.bias_v.shape == (1, 1, 12)
    assert layer.bias_k.dtype == np.float32
    layer.save(tmp_path / "x.safetensors")
    same = MultiHeadAttention.load(tmp_path / "x.safetensors", num_heads=4, add_zero_attn=True)
    np.testing.assert_array_equal(same(x), layer(x))
    assert same(x).dtype == np.float32
    plain = MultiHeadAttention(12, rng=1, **SIZES)
    assert plain.bias_k is None
    assert not plain.add_zero_attn


def test_errors():
    layer, x = made(), np.zeros((1, 2, 12))
    with pytest.raises(TypeError, match="cache is not for a layer with bias_k or add_zero_attn"):
        layer(x, cache=KVCache(1, 2, 6, dtype=np.float64))
    with pytest.raises(NotImplementedError, match="dropout is not for a layer with bias_k or add_zero_attn"):
        layer(x, dropout=Dropout(0.5, 0))
    with pytest.raises(TypeError, match="add_bias_kv must be True or False, got str"):
        made(add_bias_kv="yes")
    with pytest.raises(TypeError, match="add_zero_attn must be True or False, got int"):
        made(add_zero_attn=2)
    entries = layer.state_dict()
    with pytest.raises(ValueError, match=r"bias_v must have shape \(1, 1, num_kv_heads\*head_size\) = \(1, 1, 12\)"):
        MultiHeadAttention.from_state_dict(entries | {"bias_v": np.zeros((1, 1, 11))}, num_heads=4)
    del entries["bias_k"]
    with pytest.raises(ValueError, match="bias_k and bias_v go together"):
        MultiHeadAttention.from_state_dict(entries, num_heads=4)


def test_rotary_positions_do_not_turn_them():
    layer, x = made(rotary=Rotary()), RNG.standard_normal((1, 3, 12))
    np.testing.assert_allclose(layer(x, positions=[0, 0, 0]), made()(x), atol=1e-12)
    assert abs(layer(x) - made()(x)).max() > 1e-3
