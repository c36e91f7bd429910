"""GELU and SiLU against Python's own functions of one number, in every type and at the ends of the line."""

import math

import ml_dtypes
import numpy as np
import pytest

import sdpa_ref
from sdpa_ref import gelu, gelu_derivative, silu, silu_derivative
from sdpa_ref.testing import slope

LINE = np.concatenate([np.linspace(-37, 9, 4999), np.linspace(-1.5, 1.5, 999), [0.0, 1e-300, -1e-300, 50, -50, 1e300]])
FUNCTIONS = {
    "gelu": (gelu, gelu_derivative, lambda x: x * math.erfc(-x / math.sqrt(2)) / 2),
    "gelu of tanh": (
        lambda x: gelu(x, "tanh"),
        lambda x: gelu_derivative(x, approximate="tanh"),
        lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) if abs(x) < 1e99 else x,
    ),
    "silu": (silu, silu_derivative, lambda x: x / (1 + math.exp(-x))),
}


@pytest.fixture(params=["reference", "numba"])
def gelu_backend(request):
    try:
        sdpa_ref.load(request.param)
    except sdpa_ref.BackendUnavailable as reason:
        pytest.skip(str(reason))
    return request.param


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_in_float64(name):
    function, _, formula = FUNCTIONS[name]
    np.testing.assert_allclose(function(LINE), [formula(float(x)) for x in LINE], rtol=1e-14, atol=1e-15)


def test_the_far_side_of_gelu_keeps_its_digits():
    """Where ``1 + erf`` would leave none; what is left of them is what the square of x costs in the exponential."""
    x = np.linspace(-37, -1, 999)
    np.testing.assert_allclose(gelu(x), [v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.tolist()], rtol=2e-13)
    x = np.linspace(-12, -1, 999, dtype=np.float32)
    np.testing.assert_allclose(gelu(x), [v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.tolist()], rtol=4e-5)


def test_values_by_hand():
    """At 0, and where the distribution functions are known: Phi(1) is 0.8413447460685429."""
    assert gelu(np.array([0.0, 1.0, -1.0])).tolist() == pytest.approx([0, 0.8413447460685429, -0.15865525393145707])
    assert silu(np.array([0.0, math.log(3)])).tolist() == pytest.approx([0, 0.75 * math.log(3)])
    assert gelu_derivative(np.zeros(1)).tolist() == silu_derivative(np.zeros(1)).tolist() == [0.5]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives_are_slopes(name):
    function, derivative, _ = FUNCTIONS[name]
    rng = np.random.default_rng(0)
    x, way = rng.standard_normal((2, 40)) * 3
    along, error = slope(lambda t: float(function(x + t * way).sum()))
    assert abs((derivative(x) * way).sum() - along) <= error


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, ">f4"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_shapes_and_ends(name, dtype):
    function, derivative, formula = FUNCTIONS[name]
    x = np.linspace(-8, 8, 60).astype(dtype).reshape(3, 4, 5).swapaxes(0, 2)
    exact = np.vectorize(lambda v: formula(float(v)))(x.astype(np.float64))
    y, unit = function(x), float(ml_dtypes.finfo(x.dtype.newbyteorder("=")).eps)
    assert (y.shape, y.dtype) == (x.shape, x.dtype.newbyteorder("="))
    np.testing.assert_allclose(y.astype(np.float64), exact, rtol=2 * unit, atol=4 * unit)
    ends = np.array([-np.inf, np.inf, np.nan, -3e4, 3e4]).astype(dtype)
    np.testing.assert_array_equal(function(ends).astype(np.float64)[[0, 1, 2, 3]], [0, np.inf, np.nan, 0])
    assert function(ends)[4] == ends[4]
    np.testing.assert_array_equal(derivative(ends).astype(np.float64), [0, 1, np.nan, 0, 1])
    assert function(np.empty((0, 3), dtype)).shape == derivative(np.empty((0, 3), dtype)).shape == (0, 3)


def test_a_number_does_not_depend_on_those_beside_it():
    x = np.random.default_rng(0).standard_normal(20000)
    for function, derivative, _ in FUNCTIONS.values():
        for each in (function, derivative):
            np.testing.assert_array_equal(each(x)[777:], each(x[777:].copy()))


def test_errors():
    with pytest.raises(ValueError, match='approximate must be "none" or "tanh", got \'fast\''):
        gelu(np.ones(2), "fast")
    with pytest.raises(ValueError, match=r"approximate must be .*, got True"):
        gelu_derivative(np.ones(2), approximate=True)
    for function in (gelu, silu, gelu_derivative, silu_derivative):
        with pytest.raises(TypeError, match=r"x must be float16, .*, got int64"):
            function(np.ones(2, np.int64))


def test_gelu_of_each_backend(gelu_backend):
    """Within a few units of float32 wherever the result is an ordinary number; below all of these it may be 0."""
    x = np.concatenate([np.linspace(-12.5, 13, 20001), np.linspace(-1e-3, 1e-3, 77), [0.0, 1e-30]]).astype(np.float32)
    exact = np.array([v * math.erfc(-v / math.sqrt(2)) / 2 for v in x.tolist()])
    far = 3e-5 if gelu_backend == "reference" else 2e-6
    y = gelu(x, backend=gelu_backend)
    np.testing.assert_allclose(y, exact, rtol=far)
    np.testing.assert_allclose(y[x > -3], exact[x > -3], rtol=1e-6)
    assert (abs(gelu(np.float32([-14, -1e30, -np.inf]), backend=gelu_backend)) <= [1e-39, 0, 0]).all()
    assert gelu(np.float32(3), backend=gelu_backend).shape == ()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_gelu_does_not_depend_on_neighbours_threads_or_memory(gelu_backend, dtype):
    x = (3 * np.random.default_rng(0).standard_normal((40, 1001))).astype(dtype)
    whole = gelu(x, backend=gelu_backend)
    for part in (np.s_[:1, :1], np.s_[7, 3:20], np.s_[::3, ::-2], np.s_[5:, 4]):
        np.testing.assert_array_equal(gelu(x[part], backend=gelu_backend), whole[part])
    np.testing.assert_array_equal(gelu(np.asfortranarray(x), backend=gelu_backend), whole)
    if gelu_backend == "numba":
        threads = sdpa_ref.get_num_threads()
        try:
            for n in (1, 2, 3):
                sdpa_ref.set_num_threads(n)
                np.testing.assert_array_equal(gelu(x, backend=gelu_backend), whole)
        finally:
            sdpa_ref.set_num_threads(threads)


def test_gelu_names_its_backend():
    x = np.ones(3, np.float32)
    with pytest.raises(ValueError, match="unknown backend 'numpy'"):
        gelu(x, backend="numpy")
    with pytest.raises(NotImplementedError, match="backend 'loopback' has no GELU"):
        gelu(x, backend="loopback")
    np.testing.assert_array_equal(gelu(np.ones(3), backend="reference"), gelu(np.ones(3)))
