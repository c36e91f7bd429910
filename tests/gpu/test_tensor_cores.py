"""The sums of tensor cores: both emulations against what was published of the hardware, and what that asks of kernels.

Fasi, Higham, Mikaitis and Pranesh (2021) found by such numbers what V100, T4 and A100 do, Khattak and Mikaitis (2025)
and Xie and others (2025) what later ones do; `sdpa_cupy.launch.ptx.tensor` names the papers.
"""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from compiler import needs_compiler
from days import crossed

pytest.importorskip("ml_dtypes", reason="the interpreter of PTX rounds to bfloat16 with ml_dtypes")
pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

import ml_dtypes
from sdpa_cupy import nvrtc
from sdpa_cupy.launch import forward
from sdpa_cupy.launch.fibers import Fibers
from sdpa_cupy.launch.ptx import Interpreter
from sdpa_cupy.launch.ptx.tensor import product
from sdpa_cupy.plan import Launch

from sdpa_ref.testing import assert_close, error_budget, problem_of

MICRO = Path(__file__).parent / "micro"
LANES = np.arange(32)
G, T = LANES // 4, LANES % 4  # "groupID" and "threadID_in_group" of the PTX manual
KINDS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32}
LAST = 2.0**-23  # of float32 beside 1


def summed(terms, c, kind="f16", target=80):
    """Return c plus the sum of terms, each a product with 1, as a tensor core adds them up."""
    k = 8 if kind == "tf32" else 16
    a = np.zeros((1, k))
    a[0, : len(terms)] = terms
    with np.errstate(all="ignore"):
        return product(a, np.ones((k, 1)), np.full((1, 1), c, np.float32), kind, target)[0, 0]


# ---- published behaviour


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_exact(kind):
    a = 1 + 2.0 ** (-7 if kind == "bf16" else -10)
    got = product(np.full((1, 8), a), np.eye(8) * a, np.zeros((1, 8), np.float32), kind, 80)
    assert set(got.ravel()) == {a * a}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("target", [75, 80, 86, 89, 90, 100, 120])
def test_sums_are_cut_off_towards_zero(sign, target):
    assert summed([sign * LAST * 0.75], sign * 1.0, target=target) == sign * 1.0
    assert summed([sign * LAST * 1.75], sign * 1.0, target=target) == sign * (1 + LAST)
    assert summed([-sign * LAST / 8], sign * 1.0, target=target) == sign * 1.0  # aligned, it is cut off to 0


@pytest.mark.parametrize(("target", "extra"), [(75, 1), (80, 1), (86, 1), (89, 1), (90, 2), (100, 2), (120, 2)])
def test_terms_keep_some_bits_behind_the_last_one(target, extra):
    smallest = LAST / 2**extra
    assert summed([smallest] * 2**extra, 1.0, target=target) == 1 + LAST
    assert summed([smallest / 2] * 8, 1.0, target=target) == 1  # which are 2 last places


@pytest.mark.parametrize("place", range(4))
def test_a_sum_starts_at_the_largest_term_wherever_it_stands(place):
    terms = np.full(4, LAST / 2)
    terms[place] = 1
    assert summed(terms, LAST / 2) == 1 + 2 * LAST


def test_no_sum_of_a_group_is_normalised_before_the_last():
    assert summed([1.0, LAST / 4, -1.0], 0.0) == 0
    assert summed([1.0, LAST / 2, -1.0], 0.0) == LAST / 2


@pytest.mark.parametrize(
    ("kind", "target", "group"),
    [("f16", 75, 8), ("bf16", 80, 8), ("tf32", 80, 4), ("f16", 89, 8), ("f16", 90, 16), ("tf32", 90, 8)],
)
def test_terms_are_added_group_by_group(kind, target, group):
    few, many = np.zeros(16 if kind != "tf32" else 8), LAST / 2
    few[0], few[group - 1] = many, many
    assert summed(few, 1.0, kind, target) == 1 + LAST
    if group < few.size:
        few[group - 1], few[group] = 0, many
        assert summed(few, 1.0, kind, target) == 1


def test_subnormal_numbers_count_and_numbers_beyond_the_range_are_infinite():
    assert summed([2.0**-24], 0.0) == 2.0**-24  # of float16
    assert summed([2.0**-149], 0.0, "tf32") == 2.0**-149
    largest = float(np.finfo(np.float32).max)
    assert summed([2.0**100], largest, "tf32") == largest
    assert summed([2.0**127], largest, "tf32") == np.inf
    assert np.isnan(summed([np.inf, -np.inf], 0.0))
    assert summed([-np.inf], 1.0) == -np.inf


def test_the_formula_by_fractions():
    """A group of any numbers, by exact arithmetic."""
    rng = np.random.default_rng(0)
    for target, bits in ((80, 24), (90, 25)):
        for _ in range(200):
            numbers = rng.standard_normal(4) * 2.0 ** rng.integers(-14, 3, 4)
            terms = [float(x) for x in numbers.astype(np.float16)]
            c = float(np.float32(rng.standard_normal() * 2.0 ** rng.integers(-20, 3)))
            unit = Fraction(2) ** (max(int(np.frexp(x)[1]) - 1 for x in [*terms, c]) - bits)
            total = sum(int(Fraction(x) / unit) for x in [*terms, c]) * unit
            last = Fraction(2) ** (int(np.frexp(float(total))[1]) - 24)
            assert summed(terms, c, target=target) == float(int(total / last) * last)


# ---- the emulations agree


def tiles(kind, seed):
    """Return random a, b and c of 16 tiles, of many magnitudes."""
    rng, k = np.random.default_rng(seed), 8 if kind == "tf32" else 16

    def numbers(*shape):
        return rng.standard_normal(shape) * 2.0 ** rng.integers(-8, 9, shape)

    a, b = (numbers(16, *shape).astype(KINDS[kind]).astype(np.float32) for shape in ((16, k), (k, 8)))
    if kind == "tf32":
        a, b = ((x.view(np.uint32) & 0xFFFFE000).view(np.float32) for x in (a, b))
    return a, b, (numbers(16, 16, 8) * 2.0 ** rng.integers(-8, 9, (16, 16, 8))).astype(np.float32)


def words_of(pairs, dtype):
    """Return registers of pairs of 16-bit numbers, the first in the lower half."""
    return np.ascontiguousarray(pairs.astype(dtype)).view(np.uint16).view(np.uint32)[..., 0]


@needs_compiler
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("kind", KINDS)
def test_the_fibers_have_the_bits_of_the_interpreter(kind, arch):
    a, b, c = tiles(kind, arch)
    if kind == "tf32":
        registers = [a[:, G + 8 * (i % 2), T + 4 * (i // 2)] for i in range(4)], [b[:, T + 4 * i, G] for i in range(2)]
        a_words, b_words = (np.stack(each, -1).view(np.uint32) for each in registers)
        kernel = "multiply_tf32"
    else:
        pair = np.arange(2)
        a_words = np.stack(
            [words_of(a[:, (G + 8 * (i % 2))[:, None], 2 * T[:, None] + 8 * (i // 2) + pair], KINDS[kind])
             for i in range(4)], -1)  # fmt: skip
        b_words = np.stack(
            [words_of(b[:, 2 * T[:, None] + 8 * i + pair, G[:, None]], KINDS[kind]) for i in range(2)], -1
        )
        kernel = "multiply_half" if kind == "f16" else "multiply_bfloat"
    places = [(G + 8 * (i // 2), 2 * T + i % 2) for i in range(4)]
    c_words = np.stack([c[:, row, column] for row, column in places], -1).view(np.uint32)
    launcher = Fibers(arch, folder=MICRO)
    out = launcher.empty((16, 32, 4), np.float32)
    given = np.concatenate([a_words, b_words, c_words], -1).copy(order="C")
    addresses = np.array([launcher.address(array) for array in (given, out, out)], np.int64)
    launcher.run(Launch(kernel, "operations.cu", (("TURING", False),), (16, 1, 1), 32, 0), addresses)
    expected = product(a.astype(np.float64), b.astype(np.float64), c, kind, arch)
    for i, (row, column) in enumerate(places):
        np.testing.assert_array_equal(out[..., i], expected[:, row, column])


# ---- what kernels do about it


def long_problem(S, dtype, L=65):
    """Return a query, keys and values, all of whose sums grow, for more rows than are split by their keys."""
    rng = np.random.default_rng(S)
    q, k, v = (rng.standard_normal((1, n, 16)) for n in (L, S, S))
    return q.astype(dtype), k.astype(dtype), (v / 2 + 1).astype(dtype)


@needs_compiler
@pytest.mark.parametrize(
    ("S", "dtype", "arch"),
    [(1000, *each) for each in crossed(["float32", "float16"], [80, 90])]
    + [(4100, *each) for each in crossed(["float32", "float16"], [90, 80])]
    + [(16384, *each) for each in crossed(["float32", "float16"], [80, 90])],
)
def test_errors_do_not_grow_with_the_number_of_keys(dtype, S, arch):
    """Summed in the tensor core alone, float32 was off by 5, 16 and 30 times what the budget allows."""
    arrays = long_problem(S, dtype)
    result = forward(problem_of(*arrays), frozenset({"output"}), arch, Fibers(arch))
    assert_close(result.output, *arrays)


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
def test_errors_in_the_interpreter():
    arrays = long_problem(1000, "float32")
    result = forward(problem_of(*arrays), frozenset({"output"}), 80, Interpreter(80))
    assert_close(result.output, *arrays)


@needs_compiler
@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("E", [128, 256])
def test_errors_of_wide_heads(E, arch):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, n, E)).astype("float32") for n in (33, 100, 100))
    budget = error_budget(q, k, v)
    output = forward(problem_of(q, k, v), frozenset({"output"}), arch, Fibers(arch)).output
    assert abs(output - budget.expected).max() < budget.empirical / 4  # 0.3 and more where they stay in the tensor core
