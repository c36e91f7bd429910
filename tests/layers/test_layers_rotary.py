"""Rotary positions: both orders of pairs, a part of the width, positions of their own for each entry, and scalings."""

import cmath
import math
import pickle

import ml_dtypes
import numpy as np
import pytest
from naive import agree

import sdpa_ref as sr
from sdpa_ref import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling, rotary, rotary_vjp
from sdpa_ref.testing import assert_same_bits, slope

SCALINGS = {
    "none": None,
    "linear": LinearScaling(2.5),
    "dynamic": DynamicScaling(2, 4),
    "yarn": YarnScaling(4, 32),
    "llama3": Llama3Scaling(8, 64),
}


def normal(*shape, dtype=np.float64, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def turned(head, position, width, interleaved, base=10000.0):
    """Return one head of one token, turned pair by pair as complex numbers."""
    result = [float(number) for number in head]
    for n in range(width // 2):
        i, j = (2 * n, 2 * n + 1) if interleaved else (n, n + width // 2)
        pair = complex(head[i], head[j]) * cmath.exp(1j * position * base ** (-2 * n / width))
        result[i], result[j] = pair.real, pair.imag
    return result


@pytest.mark.parametrize("width", [2, 6, 10])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["HLE", "LHE"])
def test_each_pair_is_a_complex_number(width, interleaved, layout):
    x, positions = normal(2, 3, 4, 10), np.array([[0, 1, 2, 7], [100, 5, -3, 4]])
    expected = np.empty_like(x)
    for b, h, i in np.ndindex(2, 3, 4):
        expected[b, h, i] = turned(x[b, h, i], positions[b, i], width, interleaved, base=500.0)
    options = {"base": 500.0, "width": width, "interleaved": interleaved}
    if layout == "LHE":
        x, expected = x.swapaxes(1, 2), expected.swapaxes(1, 2)
    agree(rotary(x, positions, layout=layout, **options), expected)
    agree(rotary(x[1], positions[1], layout=layout, **options), expected[1])
    assert_same_bits(x[..., width:], rotary(x, positions, layout=layout, **options)[..., width:])


def test_by_hand():
    x = np.array([[1.0, 2.0, 3.0, 4.0]])
    quarter = [math.pi / 2]
    np.testing.assert_allclose(rotary(x, quarter, base=1.0), [[-3, -4, 1, 2]], atol=1e-15)
    np.testing.assert_allclose(rotary(x, quarter, base=1.0, interleaved=True), [[-2, 1, -4, 3]], atol=1e-15)
    np.testing.assert_allclose(rotary(x, quarter, base=1.0, width=2), [[-2, 1, 3, 4]], atol=1e-15)


def test_scores_depend_on_the_distance_alone():
    q, k, v = normal(3, 2, 5, 8)
    plain = sr.sdpa(rotary(q, np.arange(5)), rotary(k, np.arange(5)), v)
    moved = sr.sdpa(rotary(q, np.arange(70, 75)), rotary(k, np.arange(70, 75)), v)
    agree(moved, plain, error=1e-12)


def test_positions_for_each_entry_are_those_of_the_entry_alone():
    x, positions = normal(2, 3, 1, 4, 6), np.array([[[3, 1, 0, 9]], [[0, 1, 2, 30]]])  # (2, 1, L) for (2, 3) entries
    for scaling in SCALINGS.values():
        together = rotary(x, positions, scaling=scaling)
        for b, c in np.ndindex(2, 3):
            assert_same_bits(together[b, c], rotary(x[b, c], positions[b, 0], scaling=scaling))


def test_no_axis_of_heads():
    x = normal(4, 6)
    for layout in ("HLE", "LHE"):
        assert_same_bits(rotary(x, range(4), layout=layout), rotary(x[None], range(4))[0])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, ">f4"])
def test_types(dtype):
    """The rotation is rounded once: far out too, as angles are float64."""
    x, positions = normal(3, 4, 8).astype(dtype), [0, 1, 1000, 10**6]
    y = rotary(x, positions)
    assert y.dtype == x.dtype.newbyteorder("=")
    agree(y, rotary(x.astype(np.float64), positions), error=float(ml_dtypes.finfo(y.dtype).eps) * 2)
    assert rotary(x[:, :0], []).shape == (3, 0, 8)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_gradient_turns_back(name, interleaved):
    x, way, grad = normal(3, 2, 3, 5, 10)
    options = {"width": 8, "interleaved": interleaved, "scaling": SCALINGS[name]}
    positions = np.array([[4, 1, 0, 2, 7], [9, 10, 11, 12, 13]])
    along, error = slope(lambda t: float((rotary(x + t * way, positions, **options) * grad).sum()))
    assert abs((rotary_vjp(grad, positions, **options) * way).sum() - along) <= error


def test_angles_that_are_kept_are_those_of_the_call():
    """Calls that differ in one thing each, all of them twice: none gets the angles of another."""
    x, few = normal(2, 2, 2, 8), np.array([[0, 3], [5, 1]])
    calls = [
        (x, few, {}), (x, few[::-1], {}), (x, few[0], {}), (x, few, {"base": 50.0}), (x, few, {"width": 4}),
        (x, few, {"interleaved": True}), (x, few, {"layout": "LHE"}), (x.astype(np.float32), few, {}),
        (x, few, {"scaling": LinearScaling(2)}), (x, few, {"scaling": LinearScaling(3)}), (x[0, 0], few[0], {}),
    ]  # fmt: skip
    once = [rotary(*args, **options) for *args, options in calls]
    for (each, places, options), first in zip(calls, once, strict=True):
        assert_same_bits(rotary(each, places, **options), first)
        moved = rotary(each, places + 1 - 1.0, **options)  # the same places as other numbers
        assert_same_bits(moved, first)
    assert len({y.tobytes() for y in once}) == len(once)


def test_linear_scaling_divides_positions():
    x = normal(3, 4, 8)
    agree(rotary(x, [0, 5, 10, 20], scaling=LinearScaling(2.5)), rotary(x, [0, 2, 4, 8]))


def test_dynamic_scaling_changes_the_base_of_long_texts_alone():
    x = normal(3, 4, 8)
    scaling = DynamicScaling(2, original_length=8)
    assert_same_bits(rotary(x, range(4, 8), scaling=scaling), rotary(x, range(4, 8)))
    base = 10000 * (2 * 12 / 8 - 1) ** (8 / 6)
    agree(rotary(x, range(8, 12), scaling=scaling), rotary(x, range(8, 12), base=base))
    agree(rotary(x, range(4), scaling=DynamicScaling(2, 8, length=12)), rotary(x, range(4), base=base))


def test_llama3_scaling_by_turns():
    """Written with wavelengths, as it was published, where the code counts turns."""
    got, factor = Llama3Scaling().frequencies(128, 500000.0, np.arange(1))
    assert factor == 1
    for n, frequency in enumerate(got):
        plain = 500000.0 ** (-2 * n / 128)
        wavelength = 2 * math.pi / plain
        if wavelength < 8192 / 4:
            expected = plain
        elif wavelength > 8192 / 1:
            expected = plain / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * plain / 8 + smooth * plain
        assert frequency == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("length", [4096, 100, 10**40])
@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_scaling_by_dimensions(truncate, length):
    """Also where the ramp would begin before the first pair, or end beyond the width."""
    got, factor = YarnScaling(32, length, truncate=truncate).frequencies(64, 150000.0, np.arange(1))
    assert factor == pytest.approx(0.1 * math.log(32) + 1)
    ends = [64 * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(150000)) for turns in (32, 1)]
    low, high = (math.floor(ends[0]), math.ceil(ends[1])) if truncate else ends
    low, high = max(low, 0), min(high, 63)
    for n, frequency in enumerate(got):
        slow = min(max((n - low) / (high - low), 0), 1)
        expected = 150000.0 ** (-2 * n / 64) * (1 - slow + slow / 32)
        assert frequency == pytest.approx(expected, rel=1e-13)


def test_yarn_multiplies_what_is_turned():
    x = normal(3, 4, 8)
    y = rotary(x, range(4), width=4, scaling=YarnScaling(4, 32, attention_factor=2.0))
    agree(np.linalg.norm(y[..., :4], axis=-1), 2 * np.linalg.norm(x[..., :4], axis=-1))
    assert_same_bits(y[..., 4:], x[..., 4:])


@pytest.mark.parametrize("name", list(SCALINGS)[1:])
def test_scalings_are_values(name):
    scaling = SCALINGS[name]
    again = pickle.loads(pickle.dumps(scaling))
    assert (again, hash(again), repr(again)) == (scaling, hash(scaling), repr(scaling))
    assert scaling != LinearScaling(7)
    assert eval(repr(scaling)) == scaling
    with pytest.raises(AttributeError):
        scaling.factor = 3


X = np.zeros((2, 3, 4, 6))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: rotary(X.astype(int), range(4)), TypeError, "x must be float16, .*, got int64"),
        (lambda: rotary(X[0, 0, 0], range(4)), ValueError, r"x must have shape .*, got \(6,\)"),
        (lambda: rotary(X, range(3)), ValueError,
         r"positions must have shape \(4,\) = \(L,\) or \(2, 4\) = \(\*batch, L\) for x .*, got \(3,\)"),
        (lambda: rotary(X, range(4), layout="LHE"), ValueError, r'shape \(3,\) = .* in layout "LHE", got \(4,\)'),
        (lambda: rotary(X, np.zeros((3, 4))), ValueError, r"positions must have shape .*, got \(3, 4\)"),
        (lambda: rotary(X[0], np.zeros((3, 4))), ValueError, r"positions must have shape \(4,\) = \(L,\) for x"),
        (lambda: rotary(X, 3), ValueError, r"positions must have shape .*, got \(\)"),
        (lambda: rotary(X, ["a"] * 4), TypeError, "positions must be real numbers"),
        (lambda: rotary(X, [True] * 4), TypeError, "positions must be real numbers, got bool"),
        (lambda: rotary(X, [0, 1, 2, np.nan]), ValueError, "positions must be finite"),
        (lambda: rotary(X[..., :5], range(4)), ValueError, "width must be even, .* got E = 5; say how many"),
        (lambda: rotary(X, range(4), width=8), ValueError, "width must be even, at least 2 and at most E = 6, got 8"),
        (lambda: rotary(X, range(4), width=3), ValueError, "width must be even, .* got 3"),
        (lambda: rotary(X, range(4), width=0), ValueError, "width must be even, .* got 0"),
        (lambda: rotary(X, range(4), width=2.0), TypeError, "width must be an integer, got float"),
        (lambda: rotary(X, range(4), base=0), ValueError, "base must be above 0, got 0"),
        (lambda: rotary(X, range(4), interleaved="yes"), TypeError, "interleaved must be True or False, got str"),
        (lambda: rotary(X, range(4), layout="BHLE"), ValueError, 'layout must be "HLE" or "LHE", got \'BHLE\''),
        (lambda: rotary(X, range(4), scaling={"factor": 2}), TypeError, "scaling must be a Linear.*, got dict"),
        (lambda: rotary(X, range(4), width=2, scaling=DynamicScaling(2, 4)), ValueError, "width must be at least 4"),
        (lambda: rotary(X, range(4), base=1, scaling=YarnScaling(2, 4)), ValueError, "base must be above 1 for Yarn"),
        (lambda: rotary_vjp(X[..., 0].astype(int), range(3)), TypeError, "grad_value must be float16"),
        (lambda: LinearScaling(0.5), ValueError, "factor must be at least 1, got 0.5"),
        (lambda: LinearScaling("2"), TypeError, "factor must be a real number, got str"),
        (lambda: DynamicScaling(2, 0), ValueError, "original_length must be at least 1, got 0"),
        (lambda: DynamicScaling(2, 4, 0), ValueError, "length must be at least 1, got 0"),
        (lambda: YarnScaling(2, 4.5), TypeError, "original_length must be an integer, got float"),
        (lambda: YarnScaling(2, 4, 1, 1), ValueError, "beta_slow must be above 0 and below beta_fast, got beta_slow ="),
        (lambda: YarnScaling(2, 4, truncate=None), TypeError, "truncate must be True or False, got NoneType"),
        (lambda: Llama3Scaling(low_freq_factor=5), ValueError, "low_freq_factor must be above 0 and below high_freq"),
    ],
)  # fmt: skip
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
