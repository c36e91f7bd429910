"""Rules 14 to 17 of the semantics: dropout bits, types, accumulation, errors of backends."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from naive import agree, attention, philox, qkv

from sdpa_ref import Causal, Dropout, sdpa, sdpa_state, sdpa_vjp, sdpa_weights
from sdpa_ref.testing import assert_close

BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = [np.dtype(np.float16), BF16, np.dtype(np.float32), np.dtype(np.float64)]


def test_rule_14_known_answers_of_philox():
    """The published vectors hold for the loop that the next test compares with, and the first for `Dropout` itself."""
    first = 0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8
    assert philox((0,) * 4, (0,) * 2) == first
    assert philox((2**32 - 1,) * 4, (2**32 - 1,) * 2) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)) == (
        0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)  # fmt: skip
    for j, word in enumerate(first):
        assert Dropout(word / 2**32, 0).keep((1, 4))[0, j]  # kept iff the word is at least the threshold
        assert not Dropout((word + 1) / 2**32, 0).keep((1, 4))[0, j]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 0xDEADBEEF12345678, 2**64 - 1])
@pytest.mark.parametrize("first_row", [0, 3, 2**32 - 2])
def test_rule_14_keep_bits_are_addressed_by_the_indices(seed, first_row):
    keep = Dropout(0.4, seed).keep((2, 3, 4, 5, 9), first_row=first_row)
    for index in np.ndindex(keep.shape):
        b, h, i, j = index[0] * 3 + index[1], index[2], (index[3] + first_row) % 2**32, index[4]
        word = philox((j // 4, i, h, b), (seed % 2**32, seed // 2**32))[j % 4]
        assert keep[index] == (word >= int(0.4 * 2**32))


def test_rule_14_weights_show_the_keep_bits(backend):
    dropout = Dropout(0.4, 2**40 + 3)
    q, k, v = qkv()
    keep = dropout.keep((2, 6, 5, 7))
    plain = sdpa_weights(q, k, backend=backend)
    agree(sdpa_weights(q, k, dropout=dropout, backend=backend), np.where(keep, plain / 0.6, 0))
    agree(sdpa(q, k, v, dropout=dropout, backend=backend), attention(q, k, v, dropout=(0.4, 2**40 + 3))[0])
    state = sdpa_state(q, k, v, dropout=dropout, backend=backend)
    np.testing.assert_array_equal(state.lse, sdpa_state(q, k, v, backend=backend).lse)
    np.testing.assert_array_equal(state.output, sdpa(q, k, v, dropout=dropout, backend=backend))


def test_rule_14_bits_depend_on_no_blocking(backend):
    """Long enough for several blocks of rows and keys; the batch index counts over all leading axes."""
    dropout, S = Dropout(0.25, 9), 150
    q, k, _ = qkv(np.float32, B=6, Hq=1, Hkv=1, L=130, S=S)
    identity = np.broadcast_to(np.eye(S, dtype=np.float32), (6, 1, S, S))
    shaped = [x.reshape(3, 2, *x.shape[1:]) for x in (q, k, identity)]
    kept = sdpa(*shaped, dropout=dropout, backend=backend) > 0
    np.testing.assert_array_equal(kept, dropout.keep((3, 2, 1, 130, S)))


def test_rule_14_is_dropout_only_in_distribution(backend):
    q, k, v = qkv(B=400, Hq=1, Hkv=1)
    q[:], k[:], v[:] = q[:1], k[:1], v[:1]  # 400 draws of one problem
    kept = Dropout(0.3, 5).keep((400, 1, 5, 7)).mean()
    assert abs(kept - 0.7) < 4 * np.sqrt(0.3 * 0.7 / (400 * 35))
    draws = sdpa(q, k, v, dropout=Dropout(0.3, 5), backend=backend)
    error = draws.std(0) / np.sqrt(400)
    assert (abs(draws.mean(0) - sdpa(q, k, v, backend=backend)[0]) < 5 * error).all()


def test_rule_14_probability_zero_is_no_dropout(backend):
    q, k, v = qkv()
    np.testing.assert_array_equal(sdpa(q, k, v, dropout=Dropout(0, 3), backend=backend), sdpa(q, k, v, backend=backend))


def names(types):
    return "-".join(dtype.name for dtype in types)


@pytest.mark.parametrize("given", [*itertools.product(TYPES, repeat=3)], ids=names)
def test_rule_15_result_type(backend, given):
    arrays = [x.astype(dtype) for x, dtype in zip(qkv(), given, strict=True)]
    if {np.dtype(np.float16), BF16} <= set(given):
        with pytest.raises(TypeError, match=r"no common type: query \S+, key \S+, value \S+; convert one of them"):
            sdpa(*arrays, backend=backend)
        return
    dtype = max(given, key=TYPES.index)
    state = sdpa_state(*arrays, bias=np.zeros((5, 7)), mask=np.ones((5, 7), bool), backend=backend)  # they have no say
    assert state.output.dtype == dtype
    assert state.lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
    assert sdpa_weights(*arrays[:2], backend=backend).dtype == max(given[:2], key=TYPES.index)
    agree(state.output, attention(*arrays)[0])


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_rule_15_any_byte_order(backend, dtype):
    expected = sdpa(*qkv(dtype), backend=backend)
    for orders in itertools.product("<>", repeat=3):
        arrays = [x.astype(order + dtype) for x, order in zip(qkv(dtype), orders, strict=True)]
        output = sdpa(*arrays, bias=np.zeros(7, ">f8"), backend=backend)
        assert output.dtype.isnative
        np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("given", [*itertools.product(TYPES, repeat=3)], ids=names)
def test_rule_15_gradients_have_the_types_of_the_arguments(gradient_backend, given):
    if {np.dtype(np.float16), BF16} <= set(given):
        return  # an error, as above
    arrays = [x.astype(dtype) for x, dtype in zip(qkv(), given, strict=True)]
    bias = np.zeros((5, 7), np.float16)
    gradients = sdpa_vjp(*arrays, np.ones((2, 6, 5, 8)), bias=bias, backend=gradient_backend)
    assert [gradient.dtype for gradient in gradients[:4]] == [*given, np.float16]


@pytest.mark.parametrize("dtype", ["?", "i1", "i8", "u4", "c8", "c16", "O", "g", "M8[s]", "S3"])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_rule_15_other_types_are_an_error(backend, dtype, name):
    arrays = dict(zip(("query", "key", "value"), qkv(), strict=True))
    arrays[name] = np.zeros(arrays[name].shape, dtype)
    with pytest.raises(TypeError, match=rf"{name} must be"):
        sdpa(**arrays, backend=backend)


@pytest.mark.parametrize(("dtype", "biased"), [*itertools.product(TYPES, repeat=2)], ids=str)
def test_rule_15_bias_is_taken_by_value_in_its_own_type(backend, dtype, biased):
    q, k, v = qkv(dtype)
    bias = (np.random.default_rng(1).standard_normal((6, 5, 7)) * 3).astype(biased)
    bias[:, :, 2] = -np.inf
    output = sdpa(q, k, v, bias=bias, backend=backend)
    assert output.dtype == dtype
    agree(output, attention(q, k, v, bias=np.broadcast_to(bias.astype(np.float64), (2, 6, 5, 7)))[0])


def test_rule_15_wide_bias_is_not_rounded_to_narrow_inputs(backend):
    q, k, _ = qkv(np.float16)
    bias = np.zeros((5, 7), np.float32)
    bias[:, 3] = 1e-3  # 1000.001 and 1000 are one number in float16
    weights = sdpa_weights(np.zeros_like(q), k, bias=bias + 1000, backend=backend).astype(np.float64)
    assert (weights[..., 3] >= weights[..., 2]).all()
    ratio = sdpa_state(np.zeros_like(q), k[..., :1, :], k[..., :1, :], bias=bias[:, 3:4] + 1000, backend=backend).lse
    np.testing.assert_array_equal(ratio, np.full((2, 6, 5), np.float32(1000.001)))


def test_rule_16_reference_rounds_once():
    for dtype in (np.float16, BF16, np.float32):
        q, k, v = qkv(dtype)
        exact, lse, weights = attention(q, k, v)
        np.testing.assert_array_equal(sdpa(q, k, v, backend="reference"), exact.astype(dtype))
        np.testing.assert_array_equal(sdpa_weights(q, k, backend="reference"), weights.astype(dtype))
        np.testing.assert_array_equal(sdpa_state(q, k, v, backend="reference").lse, lse.astype(np.float32))


@pytest.mark.parametrize("dtype", TYPES[:2], ids=str)
@pytest.mark.parametrize(("sign", "E"), [(1, 64), (-1, 64), (1, 512)])
def test_rule_16_products_do_not_overflow_in_narrow_types(backend, dtype, sign, E):
    q, k, v = qkv(dtype, E=E, B=1, Hq=1, Hkv=1)
    equal = sdpa(np.full_like(q, sign * 256), np.full_like(k, 256), v, backend=backend)  # scores of 524288 and more
    agree(equal, np.broadcast_to(v.astype(np.float64).mean(2, keepdims=True), equal.shape))
    q, k = (np.sign(x.astype(np.float32)).astype(dtype) * 60 for x in (q, k))
    output = sdpa(q, k, v, backend=backend)
    agree(output, attention(q, k, v)[0])


def test_rule_16_huge_equal_inputs(backend):
    x = np.full((1, 1, 1, 64), 133120, np.float32)
    np.testing.assert_array_equal(sdpa(x, x, x, backend=backend), x)
    three = np.repeat(x, 3, 2)
    agree(sdpa(x, three, three, backend=backend), x)
    assert np.isfinite(sdpa_state(x, three, three, backend=backend).lse).all()


@pytest.mark.parametrize("shift", [-1e6, -1e5, 0, 1e5, 1e6])
def test_rule_16_softmax_does_not_see_where_the_scores_lie(backend, shift):
    x = np.array([-3, -1.5, 0, 2, 3])
    q, k = np.array([[1000, 1, 0, 0]], np.float32), np.zeros((5, 4), np.float32)
    k[:, 0], k[:, 1] = shift / 1000, x
    weights = sdpa(q, k, np.eye(5, dtype=np.float32), scale=1.0, backend=backend)
    assert_close(weights, q, k, np.eye(5, dtype=np.float32), scale=1.0)
    step = np.spacing(np.float32(abs(shift) + 3))  # what float32 resolves of the scores
    agree(weights[0], np.exp(x) / np.exp(x).sum(), error=2 * float(step))
    agree(sdpa_state(q, k, k, scale=1.0, backend=backend).lse, [shift + np.log(np.exp(x).sum())])


def test_rule_16_wide_spread_of_scores(backend):
    q = np.array([[1.0]], np.float32)
    for top in (300.0, 1e4):
        k = np.linspace(-top, top, 33, dtype=np.float32)[:, None]
        weights = sdpa_weights(q, k, backend=backend)
        agree(weights, attention(q[None, None], k[None, None], k[None, None])[2][0, 0])
        assert weights[0, 0] == 0


@pytest.mark.parametrize("scale", [0.0, -0.0, 1e-8, -0.5, 30.0])
def test_rule_16_any_finite_scale(backend, scale):
    q, k, v = qkv()
    keep = np.broadcast_to(np.tri(5, 7, 2, dtype=bool), (2, 6, 5, 7))
    agree(
        sdpa(q, k, v, scale=scale, mask=Causal(), query_offset=2, backend=backend),
        attention(q, k, v, keep=keep, scale=scale)[0],
    )


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", [1, 10])
def test_rule_17_errors_stay_within_the_budget(backend, dtype, size):
    q, k, v = qkv(dtype, L=33, S=65, E=40, Ev=24)
    q = (q.astype(np.float64) * size).astype(dtype)  # soft to nearly hard attention
    bias = np.random.default_rng(1).standard_normal((6, 33, 65)).astype(dtype)
    for options in ({}, {"mask": Causal(), "query_offset": "end"}, {"softcap": 2.0}, {"bias": bias, "sink": 0.5}):
        assert_close(sdpa(q, k, v, backend=backend, **options), q, k, v, **options)
        assert_close(sdpa_weights(q, k, backend=backend, **options), q, k, None, what="weights", **options)
        options.pop("sink", None)
        assert_close(sdpa_state(q, k, v, backend=backend, **options).lse, q, k, v, what="lse", **options)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_rule_17_the_budget_is_tight(dtype):
    """What leaves out a rounding's worth of care is outside it."""
    q, k, v = qkv(dtype, L=33, S=65, E=40, Ev=24)
    eps = 2.0**-7 if dtype == BF16 else float(np.finfo(dtype).eps)
    for wrong in (
        {"scale": 40**-0.5 * (1 + 200 * eps)},
        {"sink": np.log(20_000 * eps)},
        {"softcap": (600 * eps) ** -0.5},
    ):
        with pytest.raises(AssertionError, match="output is wrong"):
            assert_close(sdpa(q, k, v, backend="reference", **wrong), q, k, v)
