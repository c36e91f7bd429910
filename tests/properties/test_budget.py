"""The error budget holds for independent implementations, is not much wider than their errors, and explains itself."""

import numpy as np
import pytest

import sdpa_ref as sr
from sdpa_ref.testing import assert_close, assert_same_bits, assert_within, error_budget
from sdpa_ref.testing.cases import case
from sdpa_ref.testing.strategies import DTYPES


def straight(query, key, value):
    """Return the textbook formula, weights rounded to the type of the values."""
    wide = np.result_type(query.dtype, np.float32).type if query.dtype.kind == "f" else np.float32
    scores = query.astype(wide) @ key.astype(wide).swapaxes(-1, -2) / wide(np.sqrt(query.shape[-1]))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = (weights / weights.sum(-1, keepdims=True)).astype(value.dtype)
    return (weights.astype(wide) @ value.astype(wide)).astype(value.dtype)


def online(query, key, value):
    """Return attention by blocks of 16 keys, one term after the other, with a running maximum."""
    wide = np.result_type(query.dtype, np.float32).type if query.dtype.kind == "f" else np.float32
    q, k, v = (array.astype(wide) for array in (query, key, value))
    m, z, o = np.full((*q.shape[:-1], 1), -np.inf, wide), wide(0), np.zeros((*q.shape[:-1], v.shape[-1]), wide)
    for start in range(0, k.shape[-2], 16):
        block = slice(start, start + 16)
        s = sum(q[..., e, None] * k[..., None, block, e] for e in range(q.shape[-1])) / wide(np.sqrt(q.shape[-1]))
        new = np.maximum(m, s.max(-1, keepdims=True))
        p, rescale, m = np.exp(s - new), np.exp(m - new), new
        rounded = p.astype(value.dtype).astype(wide)
        z = z * rescale + sum(p[..., t, None] for t in range(p.shape[-1]))
        o = o * rescale + sum(rounded[..., t, None] * v[..., None, start + t, :] for t in range(p.shape[-1]))
    return (o / z).astype(value.dtype)


def problems(dtype, numbers, n):
    """Return n random problems of all sizes."""
    rng = np.random.default_rng(17)
    for seed in range(n):
        L, S, E, Ev = rng.integers(1, [17, 200, 65, 33])
        yield case(seed, heads=(2, 2), L=L, S=S, E=E, Ev=Ev, dtype=dtype, numbers=numbers).arrays


@pytest.mark.parametrize("numbers", ["normal", "needles", "huge", "ties", "low", "one key", "tiny"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("implementation", [straight, online])
def test_rule_17_the_bound_holds_for_independent_implementations(implementation, dtype, numbers):
    for arrays in problems(dtype, numbers, 20):
        assert_close(implementation(*arrays), *arrays)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bound_is_not_much_wider_than_real_errors(dtype):
    """The worst case of every sum costs some bits; with 16 bits, one rounding outweighs all that."""
    used = []
    for arrays in problems(dtype, "normal", 60):
        budget = error_budget(*arrays)
        used.append((abs(online(*arrays).astype(np.longdouble) - budget.expected) / budget.bound).max())
    assert np.median(used) > (1 / 4 if arrays[0].dtype.itemsize == 2 else 1 / 128)


def test_the_empirical_figure_sees_what_the_bound_cannot():
    """At this length a worst case over all sums is wide: an error in the last key's weight hides in it."""
    query, key, value = case(3, L=8, S=2000, E=32, Ev=64, dtype="float32", numbers="normal").arrays
    budget = error_budget(query, key, value)
    assert budget.modest
    assert budget.empirical < budget.bound.max() / 16


def test_the_budget_of_an_exact_result_is_close_to_the_rounding_of_its_type():
    """One key: the output is its value, and only the sums of one term are in the way."""
    query, key, value = case(1, L=2, S=1, E=4, Ev=3, numbers="integers").arrays
    budget = error_budget(query, key, value)
    np.testing.assert_array_equal(budget.expected, np.repeat(value, 2, -2))
    assert (budget.bound <= 64 * np.finfo(np.float32).eps * abs(budget.expected) + np.finfo(np.float32).tiny * 8).all()


def test_budget_takes_all_options_in_both_layouts():
    sizes = {"batch": (2,), "heads": (4, 2), "L": 5, "S": 7, "E": 4, "Ev": 3}
    words = {"mask": ("causal",), "offset": "end", "bias": ("alibi", "row"), "sink": "heads", "layout": "LHE"}
    one = case(5, **sizes, **words, softcap=2.0, dropout=0.3, score_mod=True)
    for what, shape in (("output", (2, 5, 4, 3)), ("lse", (2, 5, 4)), ("weights", (2, 4, 5, 7))):
        budget = error_budget(*one.arrays, what=what, **one.options)
        assert budget.expected.shape == budget.bound.shape == shape
        assert np.isfinite(budget.bound).all()


X = np.random.default_rng(0).standard_normal((3, 2, 5, 4)).astype(np.float32)


def right():
    """Return a result to change; no kernel, which would be compiled when tests are collected."""
    return sr.sdpa(*X, backend="reference")


def changed(function):
    output = right()
    function(output)
    return output


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([1.0], r"^output must be a numpy.ndarray, got list"),
        (right().astype(np.float64), r"^output must have dtype float32, got float64"),
        (right()[0], r"^output must have shape \(2, 5, 4\), got \(5, 4\)"),
        (
            changed(lambda o: o.__setitem__((1, 2, 3), np.nan)),
            r"1 of 40 numbers .*\n  first at \(1, 2, 3\): .*got .*nan",
        ),
        (changed(lambda o: o.__setitem__((1, 2, 3), np.inf)), r"first at \(1, 2, 3\): .*got .*inf"),
        (changed(lambda o: o.__iadd__(np.float32(1e-2))), r"40 of 40 numbers are outside the a-priori bound\n"),
    ],
    ids=["kind", "dtype", "shape", "nan", "inf", "values"],
)
def test_messages_say_what_is_wrong_and_where_first(wrong, message):
    with pytest.raises(AssertionError, match=message):
        assert_close(wrong, *X)


def test_infinity_may_stand_for_a_number_at_the_end_of_the_range():
    value = np.full((1, 1, 1), np.finfo(np.float16).max)
    budget = error_budget(np.zeros((1, 1, 1), np.float16), np.zeros((1, 1, 1), np.float16), value)
    assert_within(np.full((1, 1, 1), np.float16(np.inf)), budget)
    with pytest.raises(AssertionError, match="inf"):
        assert_within(np.full((1, 1, 1), np.float16(-np.inf)), budget)


def test_nan_must_stand_where_the_reference_has_it():
    key = X[1].copy()
    key[0, 1] = np.nan
    output = sr.sdpa(X[0], key, X[2])
    assert_close(output, X[0], key, X[2])
    with pytest.raises(AssertionError, match=r"20 of 40 .*\n.*first at \(0, 0, 0\): expected .*nan"):
        assert_close(np.nan_to_num(output), X[0], key, X[2])


def test_same_bits_tell_the_sign_of_0_and_see_equal_nans():
    assert_same_bits(np.array([np.nan, -0.0]), np.array([np.nan, -0.0]))
    with pytest.raises(AssertionError, match=r"1 of 2 numbers differ in their bits\n  first at \(1,\)"):
        assert_same_bits(np.array([np.nan, 0.0]), np.array([np.nan, -0.0]))
    with pytest.raises(AssertionError, match="expected dtype float64, got float32"):
        assert_same_bits(np.zeros(1, np.float32), np.zeros(1))


@pytest.mark.parametrize("what", ["output", "lse"])
def test_what_stands_in_free_slots_of_codes_does_not_count(what):
    codes = np.full((3, 1, 4, 2), 5, np.int8)
    budgets = []
    for free in (1.0, np.nan, np.inf):
        scale = np.ones((3, 1, 4, 1), np.float32)
        scale[2, :, 1:] = free
        keys = sr.Paged(sr.Quantized(codes, scale), np.array([0, 2, -1]), 5)
        budgets.append(error_budget(np.ones((1, 2, 2), np.float32), keys, keys, what=what).bound)
    assert np.isfinite(budgets[0]).all()
    for budget in budgets[1:]:
        np.testing.assert_array_equal(budget, budgets[0])


def test_a_budget_for_another_precision():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 40, 16)).astype(np.float16)
    s = np.zeros((2, 40, 40), np.float16)
    for e in range(16):  # every sum in float16
        s += q[..., None, e] * k[:, None, :, e]
    p = np.exp(s * np.float16(0.25) - (s * np.float16(0.25)).max(-1, keepdims=True))
    output, z = np.zeros((2, 40, 16), np.float16), np.zeros((2, 40, 1), np.float16)
    for j in range(40):
        output += p[..., j, None] * v[:, None, j]
        z += p[..., j, None]
    wide, strict = error_budget(q, k, v, precision=np.float16), error_budget(q, k, v)
    error = abs((output / z).astype(np.float64) - wide.expected)
    assert (error <= wide.bound).all()
    assert (error > strict.bound).any()
    with pytest.raises(ValueError, match="precision must be"):
        error_budget(q, k, v, precision=np.int32)


def test_a_budget_for_products_of_bfloat16_knows_what_they_lose():
    brain = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 9, 16)).astype(np.float32) for _ in range(3))
    for dtype in (np.float32, np.float16, brain):
        arrays = [x.astype(dtype) for x in (q, k, v)]
        plain, products = (error_budget(*arrays, precision=each).bound for each in ("float32", "bfloat16 products"))
        assert (products > plain).all() == (dtype == brain)
        assert (products >= plain).all()
        assert (products < 1.01 * plain).all()  # the rounding of weights and output counts most
    loud, small = np.full((2, 9, 16), 2.0**126, brain), np.zeros((2, 9, 16), brain)
    small[:, 3] = 2.0**-127
    plain, products = (
        error_budget(loud, small, v.astype(brain), precision=each).bound.max()
        for each in ("float32", "bfloat16 products")
    )
    assert products > 10 * plain


@pytest.mark.parametrize("S", [2031, 2032, 3000])
def test_more_roundings_than_a_bound_has_allow_no_error_of_zeros(S):
    query, key = np.ones((1, 1, 8), np.float16), np.zeros((1, S, 8), np.float16)
    value = np.zeros((1, S, 3), np.float16)
    value[..., 1] = 1
    budget = error_budget(query, key, value, precision="float16 accumulation")
    assert not np.isnan(budget.bound).any()
    assert (budget.bound[..., ::2] < 1).all()
    assert (budget.bound[..., 1] > 1).all()
