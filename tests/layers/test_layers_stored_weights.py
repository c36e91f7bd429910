"""Weights in 16 bits and as codes: read where they lie, or widened, they give the product with what they mean."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

import sdpa_ref
from sdpa_ref import AttentionHead, Embedding, Linear, MultiHeadAttention, Quantized
from sdpa_ref.layers.coded import dense, in_place

RNG = np.random.default_rng(0)
OUT, WIDTH = 29, 96


def factors(*shape, dtype=np.float16):
    return RNG.standard_normal(shape).astype(dtype)


def codes(dtype, *shape):
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max, shape, dtype, endpoint=True)


halves = codes(np.uint8, OUT, WIDTH // 2)
normal = RNG.standard_normal((OUT, WIDTH), np.float32)
IN_PLACE = {
    "float16": normal.astype(np.float16),
    "bfloat16": normal.astype(ml_dtypes.bfloat16),
    "float32": normal,
    "rows of a larger array": np.repeat(normal, 2, 0)[::2].astype(np.float16),
    "rows the other way round": normal[::-1],
    "Q4_0": Quantized(halves, factors(OUT, WIDTH // 32), zero=8, bits=4),
    "Q4_1": Quantized(halves, factors(OUT, WIDTH // 32), factors(OUT, WIDTH // 32), bits=4),
    "Q8_0": Quantized(codes(np.int8, OUT, WIDTH), factors(OUT, WIDTH // 32)),
    "a scale a row": Quantized(codes(np.int8, OUT, WIDTH), factors(OUT, 1, dtype=np.float32)),
    "a minimum a row": Quantized(
        codes(np.uint8, OUT, WIDTH), *factors(2, OUT, 1, dtype=ml_dtypes.bfloat16), zero=200
    ),
}  # fmt: skip
WIDENED = {
    "float64": normal.astype(np.float64),
    "turned": np.asfortranarray(normal).astype(np.float16, order="F"),
    "other bytes": normal.astype(">f2"),
    "width": np.ascontiguousarray(normal[:, :40]).astype(np.float16),
    "groups of 16": Quantized(halves, factors(OUT, WIDTH // 16), bits=4),
    "a scale a column": Quantized(codes(np.int8, OUT, WIDTH), factors(1, WIDTH)),
    "scales of float64": Quantized(codes(np.int8, OUT, WIDTH), factors(OUT, 3, dtype=np.float64)),
    "float8": Quantized(normal.astype(ml_dtypes.float8_e4m3fn), factors(OUT, 3)),
}
ALL = IN_PLACE | WIDENED


@pytest.fixture(params=["reference", "numba"])
def reader(request):
    try:
        sdpa_ref.load(request.param)
    except sdpa_ref.BackendUnavailable as reason:
        pytest.skip(str(reason))
    return request.param


def meant(weight):
    return weight.dense() if isinstance(weight, Quantized) else weight.astype(np.float64)


def close(y, x, weight, bias=0.0, unit=2.0**-24):
    """Check a product by the bound of its rounding errors."""
    wide, exact = x.astype(np.float64), meant(weight)
    size = abs(wide) @ abs(exact).T + abs(bias)
    assert (abs(y - (wide @ exact.T + bias)) <= (x.shape[-1] + 4) * unit * size).all()


@pytest.mark.parametrize("name", ALL)
def test_products(name, reader):
    assert in_place(ALL[name]) == (name in IN_PLACE)
    weight, width = ALL[name], ALL[name].shape[1]
    bias = RNG.standard_normal(OUT).astype(np.float32)
    for state in ({"weight": weight, "bias": bias}, {"weight": weight}):
        layer = Linear.from_state_dict(state)
        for shape in ((1,), (2,), (3,), (4,), (9,), (40,), (2, 5), ()):
            x = RNG.standard_normal((*shape, width)).astype(np.float32)
            y = layer(x, backend=reader)
            assert y.shape == (*shape, OUT)
            assert y.dtype == (np.float64 if name == "float64" else np.float32)
            close(y, x, weight, state.get("bias", 0.0))
        assert layer(np.empty((0, width), np.float32), backend=reader).shape == (0, OUT)


@pytest.mark.parametrize("name", IN_PLACE)
def test_rows_of_weights_of_any_number(name, reader):
    """Also fewer than a tile has, and so many that several threads share them."""
    weight, x = IN_PLACE[name], RNG.standard_normal((5, WIDTH)).astype(np.float32)
    for n in (1, 2, 3, 5, 13):
        part = weight[:n] if not isinstance(weight, Quantized) else weight._map(lambda array, n=n: array[:n])
        close(Linear.from_state_dict({"weight": part})(x, backend=reader), x, part)


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "bfloat16", "float32"])
def test_bits_do_not_depend_on_other_rows_threads_or_memory(name):
    pytest.importorskip("numba", reason="the kernels are Numba's")
    rows = RNG.integers(0, OUT, 3000)
    weight = IN_PLACE[name]
    weight = weight._map(lambda array: array[rows]) if isinstance(weight, Quantized) else weight[rows]
    layer = Linear.from_state_dict({"weight": weight, "bias": normal[:1].repeat(3000)[:3000]})
    x = RNG.standard_normal((7, WIDTH)).astype(np.float32)
    whole = layer(x)
    for part in (slice(0, 1), slice(1, 6), slice(6, 7)):
        np.testing.assert_array_equal(layer(x[part]), whole[part])
    np.testing.assert_array_equal(layer(np.asfortranarray(x)), whole)
    np.testing.assert_array_equal(layer(x.reshape(7, 1, WIDTH))[:, 0], whole)
    threads = sdpa_ref.get_num_threads()
    try:
        for n in (1, 2, 3):
            sdpa_ref.set_num_threads(n)
            np.testing.assert_array_equal(layer(x), whole)
    finally:
        sdpa_ref.set_num_threads(threads)


def test_what_is_not_finite_stays_in_its_row(reader):
    layer, x = Linear.from_state_dict({"weight": IN_PLACE["Q4_1"]}), RNG.standard_normal((6, WIDTH)).astype(np.float32)
    clean = layer(x, backend=reader)
    x[1, 5], x[3, 0] = np.nan, np.inf
    y = layer(x, backend=reader)
    assert np.isnan(y[1]).all()
    assert not np.isfinite(y[3]).any()
    np.testing.assert_array_equal(y[[0, 2, 4, 5]], clean[[0, 2, 4, 5]])


@pytest.mark.parametrize("name", ["Q4_1", "float16", "bfloat16"])
def test_types_of_results(name, reader):
    """Codes have none; sums are at least float32."""
    layer, x = Linear.from_state_dict({"weight": IN_PLACE[name]}), RNG.standard_normal((3, WIDTH))
    for dtype in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16):
        if {np.dtype(dtype).name, name} == {"float16", "bfloat16"}:
            continue
        y = layer(x.astype(dtype), backend=reader)
        assert y.dtype == (dtype if name == "Q4_1" else np.result_type(dtype, IN_PLACE[name].dtype))
        close(y.astype(np.float64), x.astype(dtype), IN_PLACE[name], unit=float(ml_dtypes.finfo(y.dtype).eps))


@pytest.mark.parametrize("name", ALL)
def test_codes_are_rounded_once(name):
    np.testing.assert_array_equal(dense(ALL[name], np.float32), meant(ALL[name]).astype(np.float32))


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0", "a minimum a row", "a scale a column", "groups of 16"])
def test_embedding(name):
    layer, ids = Embedding.from_state_dict({"weight": ALL[name]}), RNG.integers(0, OUT, (2, 3))
    vectors, vjp = layer.value_and_vjp(ids)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, meant(ALL[name]).astype(np.float32)[ids])
    assert layer(3).shape == (WIDTH,)
    assert vjp(vectors).weights == {}


def test_gradients_lead_through_codes():
    bias, weight = np.zeros(OUT, np.float32), IN_PLACE["Q4_1"]
    coded = Linear.from_state_dict({"weight": weight, "bias": bias})
    plain = Linear.from_state_dict({"weight": weight.dense().astype(np.float32), "bias": bias})
    x, grad = RNG.standard_normal((3, WIDTH)).astype(np.float32), RNG.standard_normal((3, OUT)).astype(np.float32)
    got, expected = (layer.value_and_vjp(x)[1](grad) for layer in (coded, plain))
    np.testing.assert_allclose(got.x, expected.x, rtol=1e-5, atol=1e-5)
    assert got.weights.keys() == {"bias"}
    np.testing.assert_array_equal(got.weights["bias"], expected.weights["bias"])


def test_attention_of_codes_is_that_of_what_they_mean():
    x = RNG.standard_normal((2, 5, 64)).astype(np.float32)
    parts = ("query", "key", "value", "output")
    entries = {f"{part}.weight": Quantized(codes(np.int8, 64, 64), factors(64, 2) / 400) for part in parts}
    plain = {name: weight.dense().astype(np.float32) for name, weight in entries.items()}
    attention = [MultiHeadAttention.from_state_dict(state, num_heads=4) for state in (entries, plain)]
    np.testing.assert_allclose(attention[0](x), attention[1](x), rtol=1e-4, atol=1e-4)
    fused = {"in_proj_weight": _stacked([entries[f"{part}.weight"] for part in parts[:3]])}
    fused |= {"output.weight": entries["output.weight"]}
    np.testing.assert_array_equal(
        MultiHeadAttention.from_state_dict(fused, num_heads=4)(x), attention[0](x)
    )  # fmt: skip
    del entries["output.weight"], plain["output.weight"]
    heads = [AttentionHead.from_state_dict(state)(x)[0] for state in (entries, plain)]
    np.testing.assert_allclose(*heads, rtol=1e-4, atol=1e-4)


def _stacked(weights):
    return Quantized(*(np.concatenate([getattr(w, part) for w in weights]) for part in ("codes", "scale")))


def test_what_a_layer_of_codes_keeps(tmp_path):
    weight = IN_PLACE["Q8_0"]
    layer, x = Linear.from_state_dict({"weight": weight}), RNG.standard_normal((2, WIDTH)).astype(np.float32)
    y = layer(x)
    assert layer.state_dict() == {"weight": weight}
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        np.testing.assert_array_equal(copied(x), y)
    with pytest.raises(TypeError, match="weight is Quantized, which the format does not have"):
        layer.save(tmp_path / "x.safetensors")


def test_what_is_written_to_weights_counts():
    layer = Linear.from_state_dict({"weight": normal.astype(np.float16), "bias": np.zeros(OUT, np.float16)})
    x = np.ones((1, WIDTH), np.float32)
    layer(x)
    for weight in layer.state_dict().values():
        weight[...] = 1
    np.testing.assert_array_equal(layer(x), np.full((1, OUT), WIDTH + 1))


def test_errors():
    weight = IN_PLACE["Q8_0"]
    layer = Linear.from_state_dict({"weight": weight})
    with pytest.raises(ValueError, match=r"x must have shape \(..., in_features\) = \(..., 96\), got \(3, 95\)"):
        layer(np.zeros((3, 95), np.float32))
    with pytest.raises(ValueError, match="unknown backend 'numpy'"):
        layer(np.zeros((3, 96), np.float32), backend="numpy")
    with pytest.raises(NotImplementedError, match="backend 'loopback' has no product with stored weights"):
        layer(np.zeros((3, 96), np.float32), backend="loopback")
    with pytest.raises(ValueError, match=r"bias must have shape \(out_features\) = \(29,\), got \(30,\)"):
        Linear.from_state_dict({"weight": weight, "bias": np.zeros(30)})
    with pytest.raises(ValueError, match="bias must be an array of numbers, got Quantized"):
        Linear.from_state_dict({"weight": weight, "bias": weight})
