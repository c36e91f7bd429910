"""Rule 24 for layers: `value_and_vjp` gives the value of the call, and gradients by inputs and all weights."""

import ml_dtypes
import numpy as np
import pytest
from naive import agree

from sdpa_ref import (
    AttentionHead,
    Causal,
    Dropout,
    Embedding,
    KeyLengths,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    QueryLengths,
    RMSNorm,
    Rotary,
    SpatialAttention,
    Window,
)
from sdpa_ref.layers import Conv1x1
from sdpa_ref.testing import assert_same_bits, slope

DOUBLE = {"rng": 1, "dtype": np.float64}
DROPOUT = Dropout(0.3, 7)
IDS = np.array([[3, 0, 3], [5, 3, 1]])
SIZES = {
    MultiHeadAttention: ("num_heads", "eps", "rotary"),
    SpatialAttention: ("heads",),
    LayerNorm: ("eps",),
    RMSNorm: ("eps",),
}


def normal(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def first(value):
    """Return the value of a call without the probabilities that an `AttentionHead` gives beside it."""
    return value[0] if isinstance(value, tuple) else value


# A layer, the shapes of x and context, and options.
ATTENTION = {
    "head": (AttentionHead(6, 5, **DOUBLE), [(2, 7, 6)], {"mask": Causal()}),
    "head, context": (AttentionHead(6, 5, **DOUBLE), [(2, 3, 6), (2, 7, 6)], {"mask": Window(2, 1), "query_offset": 3}),
    "head of one text": (AttentionHead(6, 5, bias=False, **DOUBLE), [(4, 6)], {"bias": normal(1, 4, 4)}),
    "heads": (MultiHeadAttention(6, 3, **DOUBLE), [(2, 5, 6)], {"mask": Causal(), "dropout": DROPOUT}),
    "heads, context": (MultiHeadAttention(6, 3, bias=False, **DOUBLE), [(2, 5, 6), (2, 7, 6)], {"bias": normal(5, 7)}),
    "heads, one context for all": (
        MultiHeadAttention(6, 2, **DOUBLE), [(2, 3, 5, 6), (3, 7, 6)], {"mask": KeyLengths([[3], [7]])}),
    "heads, one question": (MultiHeadAttention(6, 2, **DOUBLE), [(5, 6), (2, 7, 6)], {"bias": normal(2, 2, 1, 7)}),
    "heads, an empty entry": (MultiHeadAttention(6, 3, **DOUBLE), [(2, 5, 6)], {"mask": KeyLengths([5, 0])}),
    "heads, two biases": (MultiHeadAttention(6, 3, **DOUBLE), [(2, 5, 6)], {"bias": (normal(5, 5), normal(3, 1, 1))}),
    "grouped heads": (
        MultiHeadAttention(6, 4, ("query", "output"), num_kv_heads=2, head_size=3, **DOUBLE), [(2, 5, 6)],
        {"mask": Causal(), "scale": 0.7, "softcap": 2.0, "sink": normal(4)}),
    "grouped heads, context": (
        MultiHeadAttention(6, 4, num_kv_heads=1, head_size=2, **DOUBLE), [(2, 5, 6), (2, 7, 6)],
        {"bias": normal(5, 7)}),
    "norms": (
        MultiHeadAttention(6, 4, num_kv_heads=2, head_size=3, norm=True, eps=0.1, **DOUBLE), [(2, 5, 6)],
        {"mask": Causal()}),
    "norms, context": (MultiHeadAttention(6, 3, norm=True, **DOUBLE), [(2, 5, 6), (2, 7, 6)], {}),
    "rotary": (
        MultiHeadAttention(8, 2, rotary=Rotary(100.0), **DOUBLE), [(2, 5, 8)],
        {"positions": np.array([[0, 1, 2, 3, 4], [7, 8, 9, 2, 3]])}),
    "norms and rotary": (
        MultiHeadAttention(8, 2, num_kv_heads=1, norm=True, rotary=Rotary(width=2, interleaved=True), **DOUBLE),
        [(5, 8)], {"mask": Causal(), "sink": normal(2)}),
    "head, sink": (AttentionHead(6, 5, **DOUBLE), [(2, 7, 6)], {"sink": normal(1), "softcap": 1.5}),
    "map": (SpatialAttention(6, 2, 5, **DOUBLE), [(2, 6, 3, 4)], {"bias": normal(2, 1, 12), "dropout": DROPOUT}),
    "map alone": (SpatialAttention(4, 3, 2, **DOUBLE), [(4, 3, 2)], {"mask": np.tri(6, dtype=bool)}),
}  # fmt: skip
AFFINE = {
    "linear": (Linear(6, 5, **DOUBLE), [(2, 3, 6)], {}),
    "linear of one vector": (Linear(6, 5, bias=False, **DOUBLE), [(6,)], {}),
    "convolution": (Conv1x1(6, 5, **DOUBLE), [(2, 6, 3, 4)], {}),
    "convolution of one map": (Conv1x1(6, 5, bias=False, **DOUBLE), [(6, 3, 4)], {}),
    "embedding": (Embedding(6, 5, **DOUBLE), [], {}),
    "layer norm": (LayerNorm(6, dtype=np.float64), [(2, 3, 6)], {}),
    "layer norm of one token": (LayerNorm(6, bias=False, eps=0.1, dtype=np.float64), [(6,)], {}),
    "rms norm": (RMSNorm(6, dtype=np.float64), [(2, 3, 6)], {}),
}


def check(layer, shapes, options):
    """Hold the gradients against the slope of a loss along one direction through weights, inputs and bias at once."""
    inputs = [normal(*shape, seed=n) for n, shape in enumerate(shapes)]
    weights, biases = layer.state_dict(), options.get("bias", ())
    biases = biases if isinstance(biases, tuple) else (biases,)
    value, vjp = layer.value_and_vjp(*(inputs or [IDS]), **options)
    assert_same_bits(value, first(layer(*(inputs or [IDS]), **options)))

    grad = normal(*value.shape, seed=5)
    gradients = vjp(grad)
    assert set(gradients.weights) == set(weights)
    given = [*weights.values(), *inputs, *biases]
    found = [gradients.weights[name] for name in weights]
    found += [each for each in (gradients.x, gradients.context) if each is not None]
    found += gradients.bias if isinstance(gradients.bias, tuple) else [gradients.bias] if biases else []
    if "sink" in options:
        given, found = [*given, options["sink"]], [*found, gradients.sink]
    assert [(each.shape, each.dtype) for each in found] == [(each.shape, each.dtype) for each in given]

    sizes = {name: getattr(layer, name) for name in SIZES.get(type(layer), ())}
    ways = [normal(*each.shape, seed=9 + n) for n, each in enumerate(given)]

    def loss(t):
        moved = iter([each + t * way for each, way in zip(given, ways, strict=True)])
        other = type(layer).from_state_dict({name: next(moved) for name in weights}, **sizes)
        arrays = [next(moved) for _ in inputs] or [IDS]
        bias = {"bias": tuple(next(moved) for _ in biases)} if biases else {}
        sink = {"sink": next(moved)} if "sink" in options else {}
        return float((first(other(*arrays, **options | bias | sink)) * grad).sum())

    along, error = slope(loss)
    assert abs(sum((each * way).sum() for each, way in zip(found, ways, strict=True)) - along) <= error


@pytest.mark.parametrize("name", ATTENTION)
def test_rule_24_attention_against_finite_differences(name, gradient_backend):
    layer, shapes, options = ATTENTION[name]
    check(layer, shapes, {**options, "backend": gradient_backend})


@pytest.mark.parametrize("name", AFFINE)
def test_rule_24_affine_maps_against_finite_differences(name):
    check(*AFFINE[name])


def test_rule_24_linear_by_hand():
    layer = Linear.from_state_dict({"weight": np.array([[1.0, 2, 3], [0, -1, 0]]), "bias": np.array([10.0, 20])})
    value, vjp = layer.value_and_vjp([[1.0, 0, 2], [0, 5, 0]])
    assert value.tolist() == [[17, 20], [20, 15]]
    gradients = vjp([[1.0, 0], [2, 1]])
    assert gradients.x.tolist() == [[1, 2, 3], [2, 3, 6]]
    assert gradients.weights["weight"].tolist() == [[1, 10, 2], [0, 5, 0]]
    assert gradients.weights["bias"].tolist() == [3, 1]


def test_rule_24_embedding_sums_over_equal_entries():
    layer = Embedding(4, 2, rng=0, dtype=np.float16)
    value, vjp = layer.value_and_vjp([[3, 0, 3]])
    np.testing.assert_array_equal(value, layer.weight[[[3, 0, 3]]])
    gradients = vjp(np.array([[[1, 2], [3, 4], [5, 6]]], np.float16))
    assert gradients.weights["weight"].tolist() == [[3, 4], [0, 0], [0, 0], [6, 8]]
    many = layer.value_and_vjp(np.ones(4096, int))[1](np.ones((4096, 2), np.float16))
    assert many.weights["weight"][1].tolist() == [4096, 4096]  # where a sum in float16 would stay at 2048


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_rule_24_types_of_layers(dtype, gradient_backend):
    layer, x = MultiHeadAttention(6, 3, rng=1, dtype=dtype), normal(2, 5, 6).astype(dtype)
    value, vjp = layer.value_and_vjp(x, backend=gradient_backend)
    assert_same_bits(value, layer(x, backend=gradient_backend))
    gradients = vjp(np.ones_like(value))
    assert {array.dtype for array in (gradients.x, *gradients.weights.values())} == {np.dtype(dtype)}
    wide, vjp = layer.value_and_vjp(x.astype(">f8"), backend=gradient_backend)
    gradients = vjp(np.ones_like(wide))
    assert gradients.x.dtype == np.float64
    assert {array.dtype for array in gradients.weights.values()} == {np.dtype(dtype)}


def test_rule_24_every_call_of_vjp_is_alike(gradient_backend):
    layer, x = MultiHeadAttention(6, 3, rng=1), normal(2, 5, 6, dtype=np.float32)
    value, vjp = layer.value_and_vjp(x, mask=Causal(), backend=gradient_backend)
    one, _, again = vjp(value), vjp(np.ones_like(value)), vjp(value)
    assert_same_bits(one.x, again.x)
    for name, gradient in one.weights.items():
        assert_same_bits(gradient, again.weights[name])


def test_rule_24_what_nobody_sees_has_no_influence(gradient_backend):
    """Whatever the tokens past a length hold, NaN included, no gradient changes, and theirs are 0."""
    layer, x, context = MultiHeadAttention(6, 3, rng=1), normal(2, 5, 6), normal(2, 7, 6, seed=1)
    options = {"mask": KeyLengths([4, 7]) & QueryLengths([5, 3]), "backend": gradient_backend}
    value, vjp = layer.value_and_vjp(x, context, **options)
    clean = vjp(np.ones_like(value))
    x[1, 3:], context[0, 4:] = np.nan, np.inf
    poisoned, vjp = layer.value_and_vjp(x, context, **options)
    dirty = vjp(np.ones_like(value))
    assert_same_bits(poisoned, value)
    for name, gradient in clean.weights.items():
        np.testing.assert_array_equal(dirty.weights[name], gradient)
    np.testing.assert_array_equal(dirty.x, clean.x)
    np.testing.assert_array_equal(dirty.context, clean.context)
    assert not dirty.x[1, 3:].any()
    assert not dirty.context[0, 4:].any()


def test_rule_24_several_entries_are_the_sum_of_each(gradient_backend):
    layer, x = SpatialAttention(6, 2, 5, **DOUBLE), normal(3, 6, 2, 4)
    value, vjp = layer.value_and_vjp(x, backend=gradient_backend)
    together, grad = vjp(value), value
    alone = [layer.value_and_vjp(each, backend=gradient_backend)[1](of) for each, of in zip(x, grad, strict=True)]
    agree(together.x, np.stack([each.x for each in alone]))
    for name, gradient in together.weights.items():
        agree(gradient, sum(each.weights[name] for each in alone))


def test_rule_24_nothing_in_gives_nothing(gradient_backend):
    layer = MultiHeadAttention(6, 3, rng=1)
    for shape in ((0, 5, 6), (2, 0, 6)):
        value, vjp = layer.value_and_vjp(np.empty(shape, np.float32), backend=gradient_backend)
        gradients = vjp(value)
        assert gradients.x.shape == shape
        assert not any(gradient.any() for gradient in gradients.weights.values())


LAYERS = [MultiHeadAttention(6, 3), AttentionHead(6, 5), SpatialAttention(6, 2, 5), Linear(6, 4), Conv1x1(6, 4)]


@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_wrong_gradients(layer):
    x = normal(2, 6, 3, 6, dtype=np.float32)
    value, vjp = layer.value_and_vjp(x)
    with pytest.raises(ValueError, match=r"grad_value must have shape \(2, 6?4?, 3, \d\), got \(3,\)"):
        vjp(np.ones(3))
    with pytest.raises(TypeError, match=r"grad_value must be float16, .*, got int64"):
        vjp(np.ones(value.shape, int))


@pytest.mark.parametrize("layer", LAYERS[:3], ids=repr)
def test_wrong_options(layer):
    x = normal(2, 6, 3, 6, dtype=np.float32)
    hints = {"attn_mask": "here it is mask=", "layout": "does not apply", "masks": "did you mean mask="}
    for keyword, hint in hints.items():
        with pytest.raises(TypeError, match=f"keyword '{keyword}'.*{hint}"):
            layer.value_and_vjp(x, **{keyword: None})
    with pytest.raises(NotImplementedError, match="'picky' does not support this problem: it has no gradients"):
        layer.value_and_vjp(x, backend="picky")
