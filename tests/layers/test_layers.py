"""Rules 25 to 29 of the semantics: what the layers compute, and what they refuse."""

import inspect
import math

import ml_dtypes
import numpy as np
import pytest
from naive import agree, attention

from sdpa_ref import (
    AttentionHead,
    Causal,
    Dropout,
    Embedding,
    KeyLengths,
    Linear,
    MultiHeadAttention,
    Segments,
    SpatialAttention,
    Window,
    patchify,
    reference,
    sdpa,
    sdpa_weights,
    sinusoidal_positions,
    unpatchify,
)
from sdpa_ref.testing import assert_same_bits

TYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


def normal(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def tiles(weights, rows, columns):
    """Return spatial weights (..., h * w, h * w) by the place of query and key."""
    return weights.reshape(*weights.shape[:-2], rows, columns, rows, columns)


# Rule 25


def test_rule_25_linear():
    weight, bias = np.array([[1.0, 2, 3], [0, -1, 0]]), np.array([10.0, 20])
    layer = Linear.from_state_dict({"weight": weight, "bias": bias})
    np.testing.assert_array_equal(layer([[1.0, 0, 2], [0, 5, 0]]), [[17, 20], [20, 15]])
    assert Linear(3, 2, bias=False).bias is None


def test_rule_25_head_is_the_formula(backend):
    head, x = AttentionHead(6, 5, rng=1, dtype=np.float64), normal(2, 7, 6)
    q, k, v = (x @ part.weight.T + part.bias for part in (head.query, head.key, head.value))
    output, _, weights = attention(q[:, None], k[:, None], v[:, None], scale=1 / math.sqrt(5))
    attention_output, attention_probs = head(x, backend=backend)
    agree(attention_output, output[:, 0])
    agree(attention_probs, weights[:, 0])


def test_rule_25_head_over_a_context(backend):
    head, x, context = AttentionHead(6, 5, rng=1, dtype=np.float64), normal(2, 3, 6), normal(2, 7, 6, seed=1)
    output, weights = head(x, context, mask=Causal(), query_offset="end", backend=backend)
    assert output.shape == (2, 3, 5)
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(np.tri(3, 7, 4) > 0, (2, 3, 7)))


# Rule 26


def test_rule_26_is_the_loop_over_heads(backend):
    layer, x = MultiHeadAttention(12, 3, rng=1, dtype=np.float64), normal(2, 7, 12)
    outputs, weights = [], []
    for h in range(3):
        rows = slice(4 * h, 4 * h + 4)
        entries = {name: array[rows] for name, array in layer.state_dict().items() if not name.startswith("output")}
        output, probs = AttentionHead.from_state_dict(entries)(x, mask=Causal(), backend=backend)
        outputs.append(output)
        weights.append(probs)
    actual, actual_weights = layer.with_weights(x, mask=Causal(), backend=backend)
    agree(actual, np.concatenate(outputs, -1) @ layer.output.weight.T + layer.output.bias)
    agree(actual_weights, np.stack(weights, 1))


def test_rule_26_is_one_batched_call(backend):
    layer, x, context = MultiHeadAttention(12, 3, rng=1, dtype=np.float64), normal(2, 5, 12), normal(2, 7, 12, seed=1)
    q = layer.query(x).reshape(2, 5, 3, 4)
    k, v = (part(context).reshape(2, 7, 3, 4) for part in (layer.key, layer.value))
    expected = layer.output(sdpa(q, k, v, layout="LHE", backend=backend).reshape(2, 5, 12))
    agree(layer(x, context, backend=backend), expected)


def test_rule_26_asking_for_weights_changes_no_bit(backend):
    """With one head blocked entirely: it adds 0 and its weights are 0 (a defect seen elsewhere is NaN)."""
    keep = np.ones((3, 5, 5), bool)
    keep[1] = False
    for layer, shape in ((MultiHeadAttention(6, 3, rng=1), (5, 6)), (SpatialAttention(6, 3, 4, rng=1), (6, 1, 5))):
        x = normal(*shape, dtype=np.float32)
        output, weights = layer.with_weights(x, mask=keep, backend=backend)
        assert_same_bits(output, layer(x, mask=keep, backend=backend))
        assert np.isfinite(output).all()
        assert (weights[1] == 0).all()
        agree(weights.sum(-1), keep.any(-1).astype(np.float32))


def test_rule_26_options_never_change_what_is_visible(backend):
    layer, x = MultiHeadAttention(6, 3, rng=1), normal(2, 5, 6, dtype=np.float32)
    plain = layer(x, mask=Causal(), backend=backend)
    with_weights, weights = layer.with_weights(x, mask=Causal(), backend=backend)
    assert_same_bits(plain, with_weights)
    assert_same_bits(plain, layer(x, mask=Causal(), dropout=Dropout(0, 7), backend=backend))
    assert_same_bits(plain, layer(x[:, None], mask=Causal(), backend=backend)[:, 0])
    assert_same_bits(plain[1], layer(x[1], mask=Causal(), backend=backend))
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(np.tri(5) > 0, (2, 3, 5, 5)))
    dropped = layer.with_weights(x, mask=Causal(), dropout=Dropout(0.5, 7), backend=backend)[1]
    kept = Dropout(0.5, 7).keep(dropped.shape) & np.tri(5, dtype=bool)
    np.testing.assert_array_equal(dropped > 0, kept)


def test_rule_26_without_dropout_a_layer_is_deterministic(backend):
    x = normal(2, 6, 6)
    for layer in (AttentionHead(6, 5), MultiHeadAttention(6, 3), SpatialAttention(6)):
        shaped = x.reshape(2, 6, 3, 2) if isinstance(layer, SpatialAttention) else x
        for first, second in zip(layer(shaped, backend=backend), layer(shaped, backend=backend), strict=True):
            assert_same_bits(first, second)


def test_rule_26_padding_has_no_influence(backend):
    """Whatever the tokens past a length hold, NaN included, not a bit changes; one entry's length is 0."""
    layer, x = MultiHeadAttention(6, 3, rng=1), normal(3, 5, 6, dtype=np.float32)
    poisoned = x.copy()
    lengths = [2, 5, 0]
    for b, n in enumerate(lengths):
        poisoned[b, n:] = np.nan
    clean, dirty = (layer(x, each, mask=KeyLengths(lengths), backend=backend) for each in (x, poisoned))
    assert_same_bits(clean, dirty)
    agree(clean[2], np.broadcast_to(layer.output.bias, (5, 6)))


def test_rule_26_a_mask_for_each_of_two_leading_axes(backend):
    layer, x = MultiHeadAttention(6, 3, rng=1, dtype=np.float64), normal(2, 4, 5, 6)
    lengths = np.array([[1, 2, 3, 5], [5, 4, 0, 1]])
    together = layer(x, mask=KeyLengths(lengths), backend=backend)
    for b, f in np.ndindex(2, 4):
        assert_same_bits(together[b, f], layer(x[b, f], mask=KeyLengths(lengths[b, f]), backend=backend))


def test_rule_10_true_means_visible_in_layers(backend):
    keep = np.array([[True, False, True], [False, False, True], [True, True, True]])
    _, probs = AttentionHead(6, 5, rng=1)(normal(3, 6), mask=keep, backend=backend)
    np.testing.assert_array_equal(probs > 0, keep)
    _, weights = MultiHeadAttention(6, 3, rng=1).with_weights(normal(3, 6), mask=keep, backend=backend)
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(keep, (3, 3, 3)))
    _, weights = SpatialAttention(6, 2, 5, rng=1).with_weights(normal(6, 3, 1), mask=keep, backend=backend)
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(keep, (2, 3, 3)))


def test_rule_10_a_mask_for_each_batch_entry_needs_a_head_axis(backend):
    x = normal(4, 5, 6, dtype=np.float32)
    for layer in (MultiHeadAttention(6, 3), AttentionHead(6, 5)):
        with pytest.raises(ValueError, match=r"axis -3 counts query heads: .* pass mask\[:, None\]"):
            layer(x, mask=np.ones((4, 5, 5), bool), backend=backend)
        layer(x, mask=np.ones((4, 1, 5, 5), bool), backend=backend)


def test_empty_inputs(backend):
    layer = MultiHeadAttention(6, 3, rng=1)
    assert layer(np.empty((0, 5, 6), np.float32), backend=backend).shape == (0, 5, 6)
    assert layer(np.empty((2, 0, 6), np.float32), backend=backend).shape == (2, 0, 6)
    none = layer(normal(2, 5, 6, dtype=np.float32), np.empty((2, 0, 6), np.float32), backend=backend)
    agree(none, np.broadcast_to(layer.output.bias, (2, 5, 6)))
    assert SpatialAttention(6, rng=1)(np.empty((0, 6, 2, 3), np.float32), backend=backend).shape == (0, 6, 2, 3)


# Rule 27


@pytest.mark.parametrize(("dim", "heads", "dim_head"), [(320, 8, 40), (640, 8, 80), (1280, 8, 160), (6, 3, 5)])
def test_rule_27_is_attention_over_the_flattened_map(dim, heads, dim_head, backend):
    layer, x = SpatialAttention(dim, heads, dim_head, rng=1), normal(2, dim, 4, 3, dtype=np.float32)
    tokens = x.reshape(2, dim, 12).swapaxes(-1, -2)
    qkv = (tokens @ layer.to_qkv.weight[:, :, 0, 0].T).reshape(2, 12, 3, heads, dim_head)
    q, k, v = (qkv[:, :, n] for n in range(3))
    output = sdpa(q, k, v, scale=dim_head**-0.5, layout="LHE", backend=backend).reshape(2, 12, heads * dim_head)
    expected = output @ layer.to_out.weight[:, :, 0, 0].T + layer.to_out.bias
    agree(layer(x, backend=backend), expected.swapaxes(-1, -2).reshape(2, dim, 4, 3))


def test_rule_27_sizes_say_what_they_are():
    assert SpatialAttention(64).state_dict()["to_qkv.weight"].shape == (384, 64, 1, 1)
    one, other = SpatialAttention(320, heads=8, dim_head=40, rng=1), SpatialAttention(320, heads=40, dim_head=8, rng=1)
    assert repr(one) == "SpatialAttention(dim=320, heads=8, dim_head=40)"
    x = normal(320, 2, 2, dtype=np.float32)
    assert_same_bits(one.to_qkv.weight, other.to_qkv.weight)
    assert not np.array_equal(one(x, backend="reference"), other(x, backend="reference"))


def test_rule_27_leading_axes_and_weights(backend):
    layer, x = SpatialAttention(6, 2, 5, rng=1, dtype=np.float64), normal(3, 2, 6, 3, 4)
    output, weights = layer.with_weights(x, backend=backend)
    assert weights.shape == (3, 2, 2, 12, 12)
    for at in np.ndindex(3, 2):
        one, its_weights = layer.with_weights(x[at], backend=backend)
        assert_same_bits(one, output[at])
        assert_same_bits(its_weights, weights[at])


@pytest.mark.parametrize("dtype", TYPES)
def test_rule_27_windows_in_every_type(dtype, backend):
    """Windows of unequal size as segments are the windows one by one, in the type of the input."""
    x = normal(6, 3, 5).astype(dtype)
    layer = SpatialAttention(6, 2, 5, rng=1, dtype=dtype)
    window = np.repeat([0, 1], [3, 2])  # columns 0 to 2, and the narrower window at the edge
    ids = np.broadcast_to(window, (3, 5)).ravel()
    output, weights = layer.with_weights(x, mask=Segments(ids), backend=backend)
    assert output.dtype == weights.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(tiles(weights, 3, 5)[:, 0, 0, 0, :] > 0, [window == 0] * 2)
    for columns in (slice(0, 3), slice(3, 5)):
        agree(output[..., columns], layer(x[..., columns], backend=backend))


@pytest.mark.parametrize("dtype", TYPES)
def test_rule_15_types_of_layers(dtype, backend):
    x = normal(2, 4, 6).astype(dtype)
    head, layer = AttentionHead(6, 5, rng=1, dtype=dtype), MultiHeadAttention(6, 3, rng=1, dtype=dtype)
    assert {y.dtype for y in head(x, mask=Window(1, 0), backend=backend)} == {np.dtype(dtype)}
    assert {y.dtype for y in layer.with_weights(x, mask=Window(1, 0), backend=backend)} == {np.dtype(dtype)}
    if dtype != np.float64:
        assert layer(x.astype(np.float64), backend=backend).dtype == np.float64


def test_rule_16_linear_sums_16_bits_in_32():
    """2048 + 1 is 2048 in float16, where a running sum would stay."""
    layer = Linear.from_state_dict({"weight": np.ones((1, 4096), np.float16)})
    assert layer(np.ones(4096, np.float16)).tolist() == [4096.0]


# Rules 28 and 29


def test_rule_28_patches(backend):
    image = normal(32, 32, 3)
    tokens = patchify(image, 4)
    assert tokens.shape == (64, 48)
    np.testing.assert_array_equal(tokens[9], image[4:8, 4:8].ravel())  # second row of patches, second column
    np.testing.assert_array_equal(unpatchify(tokens, (32, 32, 3), 4), image)
    heads = tokens.reshape(64, 4, 12)
    assert sdpa(heads, heads, heads, layout="LHE", backend=backend).shape == (64, 4, 12)


def test_rule_28_any_leading_axes_and_type():
    images = np.arange(2 * 5 * 6 * 4 * 3, dtype=np.uint8).reshape(2, 5, 6, 4, 3)
    tokens = patchify(images, 2)
    assert tokens.shape == (2, 5, 6, 12)
    assert tokens.dtype == np.uint8
    for shape in ((6, 4, 3), images.shape):
        np.testing.assert_array_equal(unpatchify(tokens, shape, 2), images)


def test_rule_29_a_sentence_becomes_tokens(backend):
    words = "Wie geht es dir".split()
    embedding = Embedding(len(words), 8, rng=0)
    x = embedding(np.arange(4)) + sinusoidal_positions(4, 8)
    assert (x.shape, x.dtype) == ((4, 8), np.float32)
    assert MultiHeadAttention(8, 2, rng=1)(x, backend=backend).shape == (4, 8)
    np.testing.assert_array_equal(embedding([[3, 0]])[0], embedding.weight[[3, 0]])


@pytest.mark.parametrize("width", [1, 5, 6])
def test_rule_29_positions(width):
    positions = sinusoidal_positions(7, width, dtype=np.float64)
    assert positions.shape == (7, width)
    for p, c in np.ndindex(positions.shape):
        angle = p / 10000 ** ((c - c % 2) / width)
        assert positions[p, c] == pytest.approx(math.cos(angle) if c % 2 else math.sin(angle), abs=1e-15)


# Errors of arguments


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MultiHeadAttention(10, 3), ValueError, "hidden_size = 10 must be a multiple of num_heads = 3"),
        (lambda: MultiHeadAttention(10, 6, num_kv_heads=4, head_size=2), ValueError,
         "num_heads = 6 must be a multiple of num_kv_heads = 4"),
        (lambda: MultiHeadAttention(6, 3, num_kv_heads=0), ValueError, "num_kv_heads must be at least 1, got 0"),
        (lambda: MultiHeadAttention(6, 3, head_size=2.5), TypeError, "head_size must be an integer, got float"),
        (lambda: MultiHeadAttention(0, 3), ValueError, "hidden_size must be at least 1, got 0"),
        (lambda: MultiHeadAttention(6, -3), ValueError, "num_heads must be at least 1, got -3"),
        (lambda: MultiHeadAttention(6, 3.0), TypeError, "num_heads must be an integer, got float"),
        (lambda: SpatialAttention(6, heads=0), ValueError, "heads must be at least 1, got 0"),
        (lambda: SpatialAttention(6, dim_head=True), TypeError, "dim_head must be an integer, got bool"),
        (lambda: Linear(3, 2, dtype=int), TypeError, "dtype must be float16, .*, got int64"),
        (lambda: Embedding(0, 2), ValueError, "num_embeddings must be at least 1, got 0"),
        (lambda: Embedding(3, 2)([0.0]), TypeError, "ids must be integers, got float64"),
        (lambda: Embedding(3, 2)([0, 3]), ValueError, r"ids must be in \[0, 3\), got 3"),
        (lambda: Embedding(3, 2)([0, -1]), ValueError, r"ids must be in \[0, 3\), got -1"),
        (lambda: sinusoidal_positions(-1, 2), ValueError, "L must be at least 0, got -1"),
        (lambda: sinusoidal_positions(2, 0), ValueError, "width must be at least 1, got 0"),
        (lambda: patchify(np.zeros((6, 8, 3)), 4), ValueError, "multiples of patch = 4, got h = 6 and w = 8"),
        (lambda: patchify(np.zeros((8, 8)), 4), ValueError, r"image must have shape \(..., h, w, channels\)"),
        (lambda: patchify(np.zeros((8, 8, 3)), 0), ValueError, "patch must be at least 1, got 0"),
        (lambda: unpatchify(np.zeros((4, 48)), (8, 8), 4), ValueError, r"shape must be that .* got \(8, 8\)"),
        (lambda: Linear(3, 2, bias="no"), TypeError, "bias must be True or False, got str"),
        (lambda: MultiHeadAttention(6, 3, np.zeros(6)), TypeError, "bias must be True or False, got ndarray"),
        (lambda: unpatchify(np.zeros((4, 48)), (8.0, 8, 3), 4), TypeError, r"shape\[0\] must be an integer, got float"),
        (lambda: unpatchify(np.zeros((4, 48)), (8, 8, -3), 4), ValueError, r"shape\[2\] must be at least 0, got -3"),
        (lambda: unpatchify(np.zeros((4, 48)), "883", 4), TypeError, "shape must be a tuple of integers, got str"),
        (lambda: unpatchify(np.zeros((4, 48)), 8, 4), TypeError, "shape must be a tuple of integers, got int"),
        (lambda: unpatchify(np.zeros((4, 47)), (8, 8, 3), 4), ValueError, r"\(..., 4, 48\), got \(4, 47"),
        (lambda: unpatchify(np.zeros((2, 4, 48)), (3, 8, 8, 3), 4), ValueError, r"leading axes of tokens, \(2,\), got"),
    ],
)  # fmt: skip
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


X = np.zeros((2, 5, 6), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda layer: layer(X[..., :5]), ValueError, r"x must have .*\(..., L, 6\), got \(2, 5, 5\)"),
        (lambda layer: layer(X, X[..., :5]), ValueError, r"context must have shape \(..., S, hidden_size\)"),
        (lambda layer: layer(X[0, 0]), ValueError, r"x must have shape .*, got \(6,\)"),
        (lambda layer: layer(X.astype(int)), TypeError, "x must be float16, .* got int64; convert it"),
        (lambda layer: layer(X, is_causal=True), TypeError, r"mask=Causal\(\)"),
        (lambda layer: layer(X, key_padding_mask=None), TypeError, "KeyLengths"),
        (lambda layer: layer(X, scale=np.inf), ValueError, "scale must be finite"),
        (lambda layer: layer(X, softcap=-1.0), ValueError, "softcap must be finite and above 0"),
        (lambda layer: layer(X, sink=np.zeros(2)), ValueError, r"sink must be a number or have shape \(Hq,\)"),
        (lambda layer: layer(X, masks=None), TypeError, "did you mean mask="),
        (lambda layer: layer(X, dropout=0.1), TypeError, r"dropout must be a Dropout\(p, seed\), got float"),
        (lambda layer: layer(X, X[:, :3], mask=Causal()), ValueError, "query_offset"),
        (lambda layer: layer(X, backend="nope"), ValueError, "unknown backend 'nope'"),
        (lambda layer: layer(X, bias=np.ones((5, 5), bool)), TypeError, "pass a boolean array as mask="),
    ],
)  # fmt: skip
@pytest.mark.parametrize("layer", [MultiHeadAttention(6, 3, rng=1), AttentionHead(6, 5, rng=1)], ids=repr)
def test_wrong_calls(layer, call, error, message):
    with pytest.raises(error, match=message):
        call(layer)


def test_wrong_calls_of_the_others():
    layer = MultiHeadAttention(6, 3)
    with pytest.raises(TypeError, match=r"unknown keyword 'need_weights'; .* layer.with_weights\(x, ...\)"):
        layer(X, need_weights=True)
    with pytest.raises(TypeError, match="keyword 'layout' does not apply"):
        layer.with_weights(X, layout="LHE")
    with pytest.raises(ValueError, match=r"x must have shape \(..., dim, h, w\) = \(..., 6, h, w\), got \(2, 5, 6\)"):
        SpatialAttention(6)(X)
    with pytest.raises(TypeError, match="keyword 'query_offset' does not apply"):
        SpatialAttention(6)(X.reshape(6, 2, 5), query_offset="end")
    with pytest.raises(ValueError, match=r"x must have shape \(..., in_features\) = \(..., 3\), got \(2, 5, 6\)"):
        Linear(3, 2)(X)
    with pytest.raises(TypeError, match="x and weight and bias have no common type"):
        Linear(6, 2, dtype=ml_dtypes.bfloat16)(X.astype(np.float16))


def test_layers_are_frozen():
    layer = MultiHeadAttention(6, 3)
    with pytest.raises(AttributeError):
        layer.query = layer.key
    with pytest.raises(AttributeError):
        layer.query.weight = np.zeros((6, 6))


def test_weights_of_a_layer_are_those_of_sdpa(backend):
    """The weights that a layer shows are those that its output is made of."""
    layer, x = MultiHeadAttention(6, 3, rng=1, dtype=np.float64), normal(2, 5, 6)
    output, weights = layer.with_weights(x, bias=normal(5, 5, seed=3), backend=backend)
    q, k = (part(x).reshape(2, 5, 3, 2) for part in (layer.query, layer.key))
    assert_same_bits(weights, sdpa_weights(q, k, bias=normal(5, 5, seed=3), layout="LHE", backend=backend))
    mixed = np.einsum("bhij,bjhe->bihe", weights, layer.value(x).reshape(2, 5, 3, 2)).reshape(2, 5, 6)
    agree(output, layer.output(mixed))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("L", [1, 3, 70])
def test_output_and_weights_of_one_call_are_those_of_two(L, dtype, backend):
    options = {"mask": Causal(), "dropout": Dropout(0.25, 3), "bias": normal(L, L, dtype=dtype), "backend": backend}
    x = normal(2, L, 6, dtype=dtype)
    layer = MultiHeadAttention(6, 3, rng=1, dtype=dtype)
    heads = [part(x).reshape(2, L, 3, 2) for part in (layer.query, layer.key, layer.value)]
    output, weights = layer.with_weights(x, **options)
    assert_same_bits(output, layer.output(sdpa(*heads, layout="LHE", **options).reshape(2, L, 6)))
    assert_same_bits(weights, sdpa_weights(*heads[:2], layout="LHE", **options))
    head = AttentionHead(6, 5, rng=1, dtype=dtype)
    query, key, value = (part(x)[:, None] for part in (head.query, head.key, head.value))
    output, weights = head(x, **options)
    assert_same_bits(output, sdpa(query, key, value, **options)[:, 0])
    assert_same_bits(weights, sdpa_weights(query, key, **options)[:, 0])


def test_a_layer_projects_and_asks_once(monkeypatch):
    asked, projected = [], []
    forward, project = reference.forward, Linear.__call__
    monkeypatch.setattr(reference, "forward", lambda problem, want: asked.append(want) or forward(problem, want))
    monkeypatch.setattr(Linear, "__call__", lambda layer, x: projected.append(layer) or project(layer, x))
    x, context = normal(2, 5, 6), normal(2, 4, 6)
    MultiHeadAttention(6, 3).with_weights(x, context, backend="reference")
    assert (asked, len(projected)) == ([{"output", "weights"}], 4)
    AttentionHead(6, 5)(x, context, backend="reference")
    assert (asked[1:], len(projected)) == ([{"output", "weights"}], 7)
    SpatialAttention(6, 3, 4).with_weights(normal(6, 2, 3), backend="reference")
    assert asked[2:] == [{"output", "weights"}]


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (MultiHeadAttention, "x context positions mask bias query_offset scale softcap sink dropout backend"),
        (AttentionHead, "x context mask bias query_offset scale softcap sink dropout backend"),
        (SpatialAttention, "x mask bias dropout backend"),
    ],
)
def test_signatures_of_layers_show_their_options(layer, names):
    for call in (
        layer.__call__,
        layer.value_and_vjp,
        *([layer.with_weights] if hasattr(layer, "with_weights") else []),
    ):
        parameters = list(inspect.signature(call).parameters.values())[1:]
        own = ["cache"] if call is MultiHeadAttention.__call__ else []
        assert sorted(each.name for each in parameters) == sorted(names.split() + own)
        assert all(each.default is None for each in parameters[1:])
