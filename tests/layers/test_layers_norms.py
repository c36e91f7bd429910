"""LayerNorm and RMSNorm: the formulas, types, and what they refuse."""

import math

import ml_dtypes
import numpy as np
import pytest
from naive import agree

from sdpa_ref import LayerNorm, RMSNorm
from sdpa_ref.testing import assert_same_bits

NORMS = [LayerNorm, RMSNorm]


def normal(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def made(norm, width=6, dtype=np.float64, **eps):
    """Return a norm whose weights are not ones."""
    names = norm(width).state_dict()
    return norm.from_state_dict({name: normal(width, dtype=dtype, seed=9) for name in names}, **eps)


def test_by_hand():
    x = np.array([[3.0, 5.0, 3.0, 5.0], [0, 0, 0, 0]])
    assert LayerNorm(4, eps=0.25, dtype=np.float64)(x[1:]).tolist() == [[0, 0, 0, 0]]
    assert LayerNorm(4, eps=3.0, dtype=np.float64)(x[:1]).tolist() == [[-0.5, 0.5, -0.5, 0.5]]
    agree(RMSNorm(4, eps=8.0, dtype=np.float64)(x[:1]), x[:1] / 5)


@pytest.mark.parametrize("norm", NORMS)
def test_the_formula_one_number_at_a_time(norm):
    layer, x = made(norm, eps=0.01), normal(3, 2, 6)
    expected = np.empty_like(x)
    for at in np.ndindex(3, 2):
        row = x[at].tolist()
        mean = math.fsum(row) / 6 if norm is LayerNorm else 0.0
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in row) / 6 + 0.01)
        bias = layer.bias if norm is LayerNorm else np.zeros(6)
        expected[at] = [(v - mean) / spread * w + b for v, w, b in zip(row, layer.weight, bias, strict=True)]
    agree(layer(x), expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("norm", NORMS)
def test_types(norm, dtype):
    layer, x = made(norm, dtype=dtype), normal(5, 6).astype(dtype) * np.asarray(100, dtype)
    exact = norm.from_state_dict({name: array.astype(float) for name, array in layer.state_dict().items()})
    value, vjp = layer.value_and_vjp(x)
    assert value.dtype == x.dtype
    assert_same_bits(value, layer(x))
    agree(value, exact(x.astype(float)))
    gradients = vjp(np.ones_like(value))
    assert {gradients.x.dtype, *(each.dtype for each in gradients.weights.values())} == {x.dtype}
    assert layer(x.astype(">f8")).dtype == np.float64


@pytest.mark.parametrize("norm", NORMS)
def test_squares_of_16_bits_do_not_overflow(norm):
    x = np.array([300.0, -300, 300, -300], np.float16)
    agree(norm(4, dtype=np.float16)(x), np.sign(x))


@pytest.mark.parametrize("norm", NORMS)
def test_rule_24_tokens_without_gradient_have_no_influence(norm):
    layer, x, grad = made(norm), normal(4, 6), normal(4, 6, seed=1)
    grad[2] = 0
    clean = layer.value_and_vjp(x)[1](grad)
    x[2] = np.nan
    dirty = layer.value_and_vjp(x)[1](grad)
    np.testing.assert_array_equal(dirty.x, clean.x)
    assert not dirty.x[2].any()
    for name, gradient in clean.weights.items():
        np.testing.assert_array_equal(dirty.weights[name], gradient)


@pytest.mark.parametrize("norm", NORMS)
def test_rule_30_loading(norm, tmp_path):
    layer = made(norm, eps=0.5)
    layer.save(tmp_path / "x")
    again = norm.load(tmp_path / "x", eps=0.5)
    assert repr(again) == repr(layer) == f"{norm.__name__}(width=6, eps=0.5)"
    assert_same_bits(again(normal(2, 6)), layer(normal(2, 6)))
    assert norm.load(tmp_path / "x").eps == norm(6).eps
    assert list(layer.state_dict()) == (["weight", "bias"] if norm is LayerNorm else ["weight"])
    assert LayerNorm(6, bias=False).bias is None


@pytest.mark.parametrize("norm", NORMS)
def test_empty_inputs(norm):
    layer = made(norm)
    value, vjp = layer.value_and_vjp(np.empty((0, 6)))
    assert value.shape == vjp(value).x.shape == (0, 6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda norm: norm(0), ValueError, "width must be at least 1, got 0"),
        (lambda norm: norm(6, eps=-1.0), ValueError, r"eps must be at least 0, got -1\.0"),
        (lambda norm: norm(6, eps="small"), TypeError, "eps must be a real number, got str"),
        (lambda norm: norm(6, dtype=int), TypeError, r"dtype must be float16, .*, got int64"),
        (lambda norm: norm(6)(np.zeros((2, 5))), ValueError, r"x must have shape \(..., width\) = \(..., 6\)"),
        (lambda norm: norm(6)(np.zeros((2, 6), int)), TypeError, r"x must be float16, .*, got int64"),
        (lambda norm: norm.from_state_dict({"weight": np.ones((2, 3))}), ValueError, "weight must have shape"),
        (lambda norm: norm.from_state_dict({"weight": np.ones(3)}, eps=np.nan), ValueError, "eps must be finite"),
        (lambda norm: norm.from_state_dict({"gamma": np.ones(3)}), ValueError, "missing: weight"),
        (lambda norm: norm.from_state_dict({"weight": np.ones(3)}, epsilon=1), TypeError, "takes eps= beside"),
        (lambda norm: norm(6).value_and_vjp(np.zeros(6))[1](np.zeros(5)), ValueError, "grad_value must have shape"),
    ],
)
@pytest.mark.parametrize("norm", NORMS)
def test_errors(norm, call, error, message):
    with pytest.raises(error, match=message):
        call(norm)
