"""Recipes: exact rounding, bounds of the error of a number and of attention, hard numbers, bad input."""

import copy
import pickle
import sys
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import strict_cupy
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from sdpa_ref import BackendUnavailable, Float8, Int4, Int8, KVCache, Quantized, load, sdpa_stages
from sdpa_ref.stored import recipe as recipes

KEYS = load_file(Path(__file__).with_name("data") / "smollm2.safetensors")
RNG = np.random.default_rng(0)
RECIPES = [Int8(), Int8(4), Int4(8), Int4(None), Float8(), Float8("e5m2", 8), Float8(group=2)]
SPANS = {Int8: 127, Int4: -8, Float8: 448}
each = pytest.mark.parametrize("recipe", RECIPES, ids=str)


@pytest.fixture(params=["numba", "NumPy"], scope="module", autouse=True)
def encoder(request):
    """Encode with the compiled kernels and without them."""
    if request.param == "numba":
        pytest.importorskip("numba")
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes, "_encoder", lambda: None)
        yield


def span(recipe):
    return 57344 if getattr(recipe, "format", "") == "e5m2" else SPANS[type(recipe)]


def groups(recipe, x):
    """Return a view with an axis of groups."""
    return x.reshape(*x.shape[:-1], -1, recipe.group or x.shape[-1])


def hard_numbers(seed, dtype, kind, width=16):
    """Return tokens (2, 3, width) that are hard to code in one way."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2, 3, width))
    if kind == "outlier channel":
        x[..., 3] += 1000
    elif kind == "zeros":
        x[rng.random(x.shape) < 0.7] = 0
        x[0, 1] = 0
    elif kind == "constant":
        x[:] = rng.standard_normal((2, 3, 1))
    elif kind == "ties":  # half a step of a group whose scale is a power of 2
        x = rng.integers(-16, 17, x.shape) / 2.0
        x[..., ::8] = 8
    elif kind == "equal magnitudes":
        x = rng.choice([-3.0, 3.0], x.shape)
    elif kind == "subnormal":
        x *= float(ml_dtypes.finfo(dtype).smallest_subnormal) * 8
    elif kind == "small":
        x *= 1e-7
    elif kind == "wide":
        x *= 10.0 ** rng.integers(-6, 4, x.shape)
    return x.astype(dtype)


KINDS = ["normal", "outlier channel", "zeros", "constant", "ties", "equal magnitudes", "subnormal", "small", "wide"]


@each
@given(
    st.integers(0, 2**32),
    st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64]),
    st.sampled_from(KINDS),
)
def test_scales_and_codes_are_rounded_exactly(recipe, seed, dtype, kind):
    x = hard_numbers(seed, dtype, kind)
    coded = recipe.encode(x)
    assert coded.shape == x.shape
    scales = coded.scale.ravel()
    assert scales.dtype == (np.float32 if isinstance(recipe, Float8) else np.float16)
    parts = groups(recipe, x.astype(np.float64)).reshape(len(scales), -1)
    codes = groups(recipe, Quantized(coded.codes, 1.0, bits=coded.bits, zero=coded.zero).dense()).reshape(parts.shape)
    for part, scale, code in zip(parts, scales, codes, strict=True):
        peak = part[np.argmax(abs(part))] if isinstance(recipe, Int4) else abs(part).max()
        wanted = Fraction(float(peak)) / span(recipe)
        assert abs(Fraction(float(scale))) >= abs(wanted)  # away from 0, by less than a step
        below = np.nextafter(abs(scale), scale.dtype.type(0))
        assert scale == 0 == wanted or abs(Fraction(float(below))) < abs(wanted)
        assert (wanted >= 0) == (scale >= 0)
        assert not (scale == 0 and np.signbit(scale))
        for number, got in zip(part, code, strict=True):
            exact = Fraction(float(number)) / Fraction(float(scale)) if scale else 0
            assert got == nearest(recipe, exact)


def nearest(recipe, exact):
    """Return the code of a number in units of its scale, by arithmetic of fractions: half to even."""
    if isinstance(recipe, Int8):
        return round(exact)
    if isinstance(recipe, Int4):
        return min(round(exact), 7)
    most, mantissa, lowest = (57344, 2, -14) if recipe.format == "e5m2" else (448, 3, -6)
    exponent = lowest
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - mantissa)
    return min(max(round(exact / step) * step, -most), most)


@each
@given(st.integers(0, 2**32), st.sampled_from(KINDS), st.booleans())
def test_a_number_errs_by_what_is_promised(recipe, seed, kind, centered):
    x = hard_numbers(seed, np.float32, kind)[:, :, None]  # (2, heads 3, T 1, E)
    if centered:
        center = RNG.standard_normal((3, 16)).astype(np.float32)
        recipe = type(recipe)(**{**recipe.__getstate__(), "center": center})
    coded, shift = recipe.encode(x), np.float64(recipe.center[:, None] if centered else 0)
    y, error = groups(recipe, x - shift), groups(recipe, abs(coded.dense() - x))
    scale = abs(coded.scale.astype(np.float64))[..., None]
    if isinstance(recipe, Float8):
        relative, smallest = (2**-3, 2**-16) if recipe.format == "e5m2" else (2**-4, 2**-9)
        bound = np.maximum(relative * abs(y), smallest / 2 * scale)
    else:
        bound = np.broadcast_to(scale / 2, y.shape)
        if isinstance(recipe, Int4):  # on the other side of 0 the codes end at 7
            bound = np.where(y * coded.scale[..., None] > 0, scale, bound)
    rounding = 4 * 2.0**-53 * groups(recipe, abs(x) + abs(shift) + 0 * x)  # of float64, in which both sides compute
    assert (error <= bound + rounding).all()


@each
def test_the_largest_number_is_a_code_and_zeros_are_exact(recipe):
    x = RNG.standard_normal((5, 16)).astype(np.float32)
    x[:, ::3] = 0
    x[2] = 0
    coded = recipe.encode(x)
    dense = coded.dense()
    assert (dense[x == 0] == 0).all()
    assert np.isfinite(dense).all()
    largest = abs(groups(recipe, x)).argmax(-1)[..., None]
    codes = groups(recipe, Quantized(coded.codes, 1.0, bits=coded.bits, zero=coded.zero).dense())
    peaks = abs(np.take_along_axis(codes, largest, -1))[..., 0]
    assert set(peaks[abs(groups(recipe, x)).max(-1) > 0]) == {abs(span(recipe))}


@each
@given(
    st.integers(0, 2**32),
    st.lists(st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ">f4"]), min_size=2, max_size=2),
    st.sampled_from(KINDS),
    st.sampled_from([16, 24, 40, 136]),
    st.booleans(),
)
def test_keys_and_values_of_a_cache_have_the_bits_of_each_alone(recipe, seed, dtypes, kind, width, centered):
    """In both layouts, close or strided, in slots that lie apart."""
    if centered:
        recipe = type(recipe)(**recipe.__getstate__() | {"center": np.linspace(-1, 1, 3 * width).reshape(3, width)})
    parts = [hard_numbers(seed + i, np.float64, kind, width).astype(dtype) for i, dtype in enumerate(dtypes)]
    for layout in ("HLE", "LHE"):
        cache = KVCache(2, 3, width, store=recipe, layout=layout)
        for t in range(2):  # hard_numbers is (rows, heads, width), one token
            axis = -2 if layout == "HLE" else 1
            tokens = [np.expand_dims(np.repeat(part, 2, -1)[..., ::2] if t else part, axis) for part in parts]
            cache.append(*tokens)
            for token, stored in zip(tokens, (cache.key, cache.value), strict=True):
                alone = recipe.encode(np.ascontiguousarray(token), layout)
                some = (..., slice(t, t + 1), slice(None)) if layout == "HLE" else (slice(None), slice(t, t + 1))
                assert stored.codes[some].tobytes() == alone.codes.tobytes()
                assert stored.scale[some].tobytes() == alone.scale.tobytes()


@each
def test_an_encoder_without_a_compiler_has_the_same_bits(recipe, monkeypatch):
    if recipes._encoder() is None:
        pytest.skip("it compares both encoders, and runs where there are both")
    for kind in KINDS:
        for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
            x = np.concatenate([hard_numbers(seed, dtype, kind, 80) for seed in range(40)])  # more than one task
            coded = recipe.encode(x)
            with monkeypatch.context() as patch:
                patch.setattr(recipes, "_encoder", lambda: None)
                plain = recipe.encode(x)
            assert coded.codes.tobytes() == plain.codes.tobytes(), kind
            assert coded.scale.tobytes() == plain.scale.tobytes(), kind


def test_int4_takes_the_sign_of_the_first_of_equal_magnitudes():
    for first in (-1.0, 1.0):
        coded = Int4(4).encode(np.array([first, -first, first / 2, 0]))
        assert coded.scale == [first / -8]
        assert coded.codes.tolist() == [0 | 15 << 4, 4 | 8 << 4]
        assert coded.dense().tolist() == [first, -first * 7 / 8, first / 2, 0]


def test_float8_is_clipped_before_the_cast():
    x = np.array([[465.0, 1.0]])
    assert np.isnan(x.astype(ml_dtypes.float8_e4m3fn)[0, 0])
    for format, most in (("e4m3fn", 448), ("e5m2", 57344)):
        coded = Float8(format).encode(x)
        assert coded.codes[0, 0] == most
        assert abs(coded.dense() - x)[0, 0] <= 465 * 2.0**-22  # the scale's own rounding alone


@each
def test_tokens_are_coded_each_by_itself(recipe):
    x = RNG.standard_normal((2, 3, 5, 16)).astype(np.float32)
    whole = recipe.encode(x)
    for t in range(5):
        alone = recipe.encode(x[:, :, t : t + 1])
        assert (alone.codes == whole.codes[:, :, t : t + 1]).all()
        assert (alone.scale == whole.scale[:, :, t : t + 1]).all()


def test_a_center_takes_the_constant_part():
    x = RNG.standard_normal((2, 3, 5, 16)) + 100 * RNG.standard_normal((3, 1, 16))
    recipe = Int8(center=x.mean((0, 2)))
    assert abs(recipe.encode(x).dense() - x).max() < abs(Int8().encode(x).dense() - x).max() / 10
    turned = recipe.encode(x.swapaxes(1, 2), "LHE")
    assert (turned.dense().swapaxes(1, 2) == recipe.encode(x).dense()).all()
    constant = Int4(center=np.full((1, 32), 0.1)).encode(np.full((1, 4, 32), 0.1))
    assert (constant.scale == 0).all()
    assert (constant.dense() == 0.1).all()


@each
@given(st.integers(0, 2**32), st.sampled_from(["normal", "outlier channel", "zeros", "equal magnitudes"]))
def test_attention_errs_within_the_bound(recipe, seed, kind):
    """The bound is derived in docs/decisions/0013-stored-keys.md."""
    q = np.random.default_rng(seed).standard_normal((2, 4, 16))
    check_attention(recipe, q, hard_numbers(seed, np.float32, kind), hard_numbers(seed + 1, np.float32, kind))


@each
@pytest.mark.parametrize("layer", [0, 15, 29])
@pytest.mark.parametrize("centered", [False, True])
def test_keys_of_a_model_err_within_the_bounds(recipe, layer, centered):
    """Queries, keys and values of one key head of SmolLM2-135M-Instruct (Apache-2.0) over 26 tokens of text."""
    q, k, v = (KEYS[f"{layer}/{name}"].astype(np.float32) for name in ("query", "key", "value"))
    if centered:
        recipe = type(recipe)(**recipe.__getstate__() | {"center": k.mean(-2)})
    check_attention(recipe, q, k, v)
    exact = k.astype(np.float64) - (recipe.center[:, None] if centered else 0)
    coded = recipe.encode(k)
    step = np.repeat(abs(coded.scale.astype(np.float64)), exact.shape[-1] // coded.scale.shape[-1], -1)
    worst = {Int8: 0.5 * step, Int4: step, Float8: abs(exact) / (8 if span(recipe) == 57344 else 16) + step}[
        type(recipe)
    ]
    rounding = 2.0**-50 * abs(k).max()
    assert (abs(coded.dense() - k) <= worst + rounding).all()


def check_attention(recipe, q, k, v):
    k2, v2 = recipe.encode(k).dense(), recipe.encode(v).dense()
    exact, coded = sdpa_stages(q, k, v), sdpa_stages(q, k2, v2)
    d = coded.scaled - exact.scaled
    h = (d.max(-1) - d.min(-1))[..., None] / 2
    bound = np.tanh(h / 2) * (v.max(-2) - v.min(-2))[:, None] + coded.weights @ abs(v2 - v)
    rounding = 2.0**-44 * (1 + abs(exact.scaled).max()) * abs(v2).max()  # of float64, in which all of this computes
    assert (abs(coded.output - exact.output) <= bound + rounding).all()
    assert (abs(coded.lse - exact.lse) <= abs(d).max(-1) + 2.0**-44 * (1 + abs(exact.scaled).max())).all()


@each
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (16,), (3, 0)])
def test_numbers_that_are_few(recipe, shape):
    coded = recipe.encode(np.ones(shape, np.float32))
    assert coded.dense().shape == shape
    assert (abs(coded.dense() - 1) < 0.01).all()


def test_on_a_device(monkeypatch):
    cupy = strict_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    x = RNG.standard_normal((2, 3, 16)).astype(np.float32)
    for recipe in (Int8(4), Int4(8)):
        coded = recipe.encode(cupy.asarray(x))
        assert (coded.codes.get() == recipe.encode(x).codes).all()
        assert (coded.scale.get() == recipe.encode(x).scale).all()
    center = np.zeros((2, 16))
    with pytest.raises(TypeError, match="x and center must be of one kind, got cupy and numpy"):
        Int8(center=center).encode(cupy.asarray(x))
    assert (Int8(center=cupy.asarray(center)).encode(cupy.asarray(x)).codes.get() == Int8().encode(x).codes).all()


X = np.ones((3, 2, 80), np.float32)
WRONG = {
    "group": (
        lambda: Int4().encode(X),
        ValueError,
        "group must divide the width E = 80, got 32; .* 1, 2, 4, 5, 8, 10, 16, 20",
    ),
    "no group": (lambda: Int8(0), ValueError, "group must be at least 1, or None .* got 0"),
    "float group": (lambda: Int8(4.0), TypeError, "group must be an integer, got float"),
    "odd width": (lambda: Int4(None).encode(X[..., :79]), ValueError, "E must be even .* got E = 79"),
    "format": (lambda: Float8("e3m4"), ValueError, 'format must be "e4m3fn" or "e5m2"'),
    "integers": (lambda: Int8().encode(X.astype(int)), TypeError, "x must be float16.* got int64"),
    "a number": (lambda: Int8().encode(np.float32(1)), ValueError, "x must have at least one axis"),
    "layout": (lambda: Int8().encode(X, "NHD"), ValueError, "layout must be"),
    "center": (lambda: Int8(center=np.ones(80)), ValueError, r"center must have shape \(heads, E\), got \(80,\)"),
    "integer center": (lambda: Int8(center=np.ones((3, 80), int)), TypeError, "center must be float16"),
    "NaN in it": (lambda: Int8(center=np.full((3, 80), np.nan)), ValueError, "center must be finite"),
    "its heads": (
        lambda: Int8(center=np.ones((2, 80))).encode(X),
        ValueError,
        r"\(heads, E\) = \(3, 80\) .* got \(2, 80\)",
    ),
    "its heads, LHE": (lambda: Int8(center=np.ones((3, 80))).encode(X, "LHE"), ValueError, r"= \(2, 80\)"),
    "no heads": (lambda: Int8(center=np.ones((2, 80))).encode(X[0]), ValueError, "None, 80"),
}


@pytest.mark.parametrize("what", WRONG)
def test_errors(what):
    call, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        call()


@each
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_an_error(recipe, value):
    x = np.ones((2, 16))
    x[1, 5] = value
    with pytest.raises(ValueError, match="must be finite, got NaN or infinity"):
        recipe.encode(x)


@each
def test_scales_at_the_end_of_their_type(recipe):
    most = 65504.0 if not isinstance(recipe, Float8) else float(np.finfo(np.float32).max)
    x = np.zeros((1, 16))
    x[0, 3] = -most * abs(span(recipe))
    coded = recipe.encode(x)
    assert abs(coded.dense()[0, 3]) == abs(x[0, 3])
    x[0, 3] = np.nextafter(x[0, 3], -np.inf)
    with pytest.raises(ValueError, match=rf"a scale must be a {coded.scale.dtype}, at most .* got"):
        recipe.encode(x)


def test_recipes_are_values():
    center = np.ones((2, 4))
    assert Int8() == Int8(None) != Int8(4)
    assert Int8(center=center) == Int8(center=center.copy()) != Int8()
    assert len({Int8(4), Int4(4), Float8(group=4), Int8(4)}) == 3
    recipe = Int8(4, center)
    center[:] = 7
    assert (recipe.center == 1).all()
    for twin in (copy.deepcopy(recipe), pickle.loads(pickle.dumps(recipe))):
        assert twin == recipe
        assert not twin.center.flags.writeable
    assert repr(recipe) == "Int8(group=4, center=array(2, 4))"
    assert repr(Float8()) == "Float8(format='e4m3fn')"


@each
@pytest.mark.parametrize("layout", ["HLE", "LHE"])
def test_many_tokens_are_coded_as_few_are(recipe, layout):
    center = np.linspace(-1, 1, 48).reshape(3, 16)
    recipe = type(recipe)(**{**recipe.__getstate__(), "center": center})
    x = RNG.standard_normal((2, 3, 3000, 16) if layout == "HLE" else (2, 3000, 3, 16)).astype(np.float32)
    whole, axis = recipe.encode(x, layout), 2 if layout == "HLE" else 1
    for t in (0, 1, 1500, 2999):
        alone = recipe.encode(x.take([t], axis), layout)
        assert (alone.codes == whole.codes.take([t], axis)).all()
        assert (alone.scale == whole.scale.take([t], axis)).all()
    x[-1, -1, -1, -1] = np.inf
    with pytest.raises(ValueError, match="must be finite"):
        recipe.encode(x, layout)


def test_an_encoder_that_was_missing_once_is_used_when_it_is_there(monkeypatch):
    if recipes._encoder() is None:
        pytest.skip("it needs the compiled encoder")

    def missing(name):
        raise BackendUnavailable(f"{name} is missing")

    x, calls = np.ones((2, 4), np.float32), []
    numba = load("numba")
    encode = numba.encode
    monkeypatch.setattr(numba, "encode", lambda *args: (calls.append(1), encode(*args))[1])
    with monkeypatch.context() as patch:
        patch.setattr(recipes, "load", missing)
        plain = Int8().encode(x)
    assert not calls
    coded = Int8().encode(x)
    assert calls
    assert coded.codes.tobytes() == plain.codes.tobytes()
