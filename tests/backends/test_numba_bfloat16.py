"""Products of pairs of bfloat16 numbers: the operation, the choice of its instruction, and the code around it."""

import os
import re
from fractions import Fraction

import numpy as np
import pytest

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

import ml_dtypes
import numba
from machine_code import assembly_of, loops
from numba.core.registry import cpu_target
from sdpa_numba.compile import products as choice
from sdpa_numba.compile.cache import jit
from sdpa_numba.kernels import few_rows_products, pairs, tiles
from sdpa_numba.plan import sizes_for
from sdpa_numba.vector.pairs import one_dot
from sdpa_numba.vector.simd import loader, storer

import sdpa_ref

BF16 = np.dtype(ml_dtypes.bfloat16)
MODELS = ["vdpbf16ps model", "bfdot model"]
HERE = choice.instruction(*cpu_target.target_context.codegen().magic_tuple())
TINY = Fraction(2) ** -126


def rounded(x, to_odd=False):
    """Return the float32 that the definition of an instruction makes of an exact number: none is subnormal."""
    if abs(x) < TINY / 2:
        return 0.0
    size = abs(x)
    power = size.numerator.bit_length() - size.denominator.bit_length()
    power -= Fraction(2) ** power > size
    step = Fraction(2) ** (power - 23)
    whole = size // step
    if to_odd:
        whole |= whole * step != size
    else:
        whole = round(size / step)  # to even
    result = float(whole * step)
    if result < TINY:
        return 0.0
    if result >= 2.0**128:
        result = np.inf
    return result if x > 0 else -result


def exact(number):
    return Fraction(0) if abs(number) < TINY else Fraction(float(number))


def defined(product, total, x, y):
    """Return what an instruction is defined to return for finite numbers: a total, and two pairs."""
    (a, b), (c, d) = (map(exact, pair) for pair in (x, y))
    if product.startswith("vdpbf16ps"):
        return rounded(a * c + exact(rounded(b * d + exact(total))))
    first, second = rounded(a * c, True), rounded(b * d, True)
    return rounded(exact(total) + exact(rounded(exact(first) + exact(second), True)), True)


def dots_of(product, lanes, totals, x, y):
    """Return the operation for arrays of float32 and of pairs of bfloat16, compiled."""
    dot, load, store = one_dot(product, lanes), loader("float32", "float32"), storer("float32")
    word = loader("int32", "int32")

    @jit
    def run(totals, x, y, count):
        for i in range(count):
            store(totals + 4 * i, dot(load(totals + 4 * i), word(x + 4 * i), word(y + 4 * i)))

    results = totals.copy()
    run(results.ctypes.data, x.ctypes.data, y.ctypes.data, len(totals))
    return results


def numbers(rng, count):
    """Return numbers of all sizes, and of sizes whose products cancel, or are about as small as the smallest."""
    powers = np.choose(
        rng.integers(0, 4, (count, 1)),
        [rng.integers(-3, 4, (count, 5)), rng.integers(-20, 21, (count, 5)), rng.integers(-66, -60, (count, 5)),
         rng.integers(-133, -120, (count, 5))],
    )  # fmt: skip
    values = rng.standard_normal((count, 5)) * 2.0**powers
    values[:, 0] *= 2.0 ** np.where(powers[:, 0] < -100, 0, powers[:, 0])  # as large as the products
    totals, x, y = values[:, 0].astype(np.float32), values[:, 1:3].astype(BF16), values[:, 3:].astype(BF16)
    cancels = rng.random(count) < 0.2
    totals[cancels] = -(x[:, 0].astype(np.float32) * y[:, 0].astype(np.float32))[cancels]
    return totals, np.ascontiguousarray(x), np.ascontiguousarray(y)


@pytest.mark.parametrize("lanes", [4, 16])
@pytest.mark.parametrize("product", [*MODELS, *([HERE] if HERE else [])])
def test_the_operation_is_what_its_instruction_is_defined_to_be(product, lanes):
    totals, x, y = numbers(np.random.default_rng(3), 4000)
    got = dots_of(product, lanes, totals, x, y)
    expected = [defined(product, *row) for row in zip(totals, x, y, strict=True)]
    np.testing.assert_array_equal(got, np.array(expected, np.float32))
    assert np.count_nonzero(got == 0) > 100  # what is too small for a normal number


@pytest.mark.parametrize("product", [*MODELS, *([HERE] if HERE else [])])
def test_the_operation_knows_infinity_and_nan(product):
    inf, nan = np.inf, np.nan
    rows = [  # total, pair, pair, result
        (0, (1, inf), (1, 2), inf), (inf, (1, 1), (1, 1), inf), (-inf, (inf, 1), (1, 1), nan),
        (0, (inf, 1), (0, 1), nan), (0, (inf, 1), (2.0**-130, 1), nan), (nan, (1, 1), (1, 1), nan),
        (0, (1, nan), (1, 0), nan), (0, (3e38, 1), (3e38, 1), inf), (1, (-3e38, 0), (3e38, 1), -inf),
    ]  # fmt: skip
    totals, x, y, expected = (np.array(column, np.float32) for column in zip(*rows, strict=True))
    np.testing.assert_array_equal(dots_of(product, 8, totals, x.astype(BF16), y.astype(BF16)), expected)


# Which one is chosen

INTEL, AMD, ARM = "x86_64-unknown-linux-gnu", "x86_64-unknown-linux-gnu", "aarch64-apple-darwin"
CHOICES = [
    ("", AMD, "znver4", "", "vdpbf16ps"),
    ("", AMD, "znver5", "", "vdpbf16ps"),
    ("", AMD, "znver4", "-avx512bf16", ""),
    ("", AMD, "znver3", "", ""),
    ("", INTEL, "sapphirerapids", "", ""),  # not measured
    ("hardware", INTEL, "sapphirerapids", "", "vdpbf16ps"),
    ("hardware", INTEL, "x86-64-v4", "+avx512bf16", "vdpbf16ps"),
    ("widen", AMD, "znver4", "", ""),
    ("", ARM, "apple-m2", "", ""),
    ("hardware", ARM, "apple-m2", "", "bfdot"),
    ("bfdot model", AMD, "znver4", "", "bfdot model"),
]


@pytest.mark.parametrize(("setting", "triple", "name", "features", "expected"), CHOICES)
def test_the_processor_and_the_setting_choose_the_instruction(setting, triple, name, features, expected):
    choice.llvm.initialize_all_targets()
    choice.llvm.initialize_all_asmprinters()
    assert choice.chosen(setting, triple, name, features) == expected


def test_a_conversion_that_comes_without_products_is_not_taken_for_them():
    if not choice.llvm.get_process_triple().startswith("x86_64"):
        pytest.skip("names of x86")
    for name, features in (("sierraforest", ""), ("haswell", "+avxneconvert"), ("arrowlake", "")):
        assert choice.instruction(AMD, name, features) == ""
        with pytest.raises(ValueError, match=f"'hardware', but {name} has no products of bfloat16"):
            choice.chosen("hardware", AMD, name, features)


def test_the_backend_says_how_it_computes(monkeypatch):
    for setting, expected in (("bfdot model", "bfloat16 products"), ("widen", "float32")):
        monkeypatch.setenv(choice.VARIABLE, setting)
        choice.products.cache_clear()
        assert sdpa_ref.load("numba").precision() == expected
    choice.products.cache_clear()


@pytest.mark.parametrize("setting", ["on", "vdpbf16ps", "1"])
def test_other_settings_are_refused_by_name(monkeypatch, setting):
    with pytest.raises(ValueError, match=f"SDPA_REF_BFLOAT16 must be 'widen', 'hardware' .* got '{setting}'"):
        choice.chosen(setting, AMD, "znver4", "")


# What LLVM makes of it

CODE = {
    "Zen 4": (INTEL, "znver4", (64, 32), "vdpbf16ps", r"vdpbf16ps\s.*%zmm", r"vcvtneps2bf16\s"),
    "Sapphire Rapids": (INTEL, "sapphirerapids", (64, 32), "vdpbf16ps", r"vdpbf16ps\s.*%zmm", r"vcvtneps2bf16\s"),
    "Neoverse V1": ("aarch64-unknown-linux-gnu", "neoverse-v1", (16, 32), "bfdot", r"bfdot\s+v\d+\.4s", r"bfcvtn2?\s"),
}


@pytest.mark.parametrize("processor", CODE)
def test_inner_loops_are_products_of_pairs_without_calls_or_spills(processor):
    triple, cpu, registers, product, pattern, conversion = CODE[processor]
    sizes = sizes_for("float32", *registers)._replace(products=product)
    scores, values = tiles.multiplier(sizes, False), tiles.multiplier(sizes, True)
    join = pairs.weights(sizes).join
    few = few_rows_products.multiplier("float32", sizes.panel, False, "float32", product)
    in_place = few_rows_products.multiplier("float32", sizes.panel, True, "bfloat16", product)

    def many_loops(vectors, a, row, step, b, c, steps, factor):
        scores(vectors, a, row, step, b, c, steps, factor)
        join(vectors, c, steps)
        values(vectors, a, row, step, b, c, steps, factor)

    def few_loops(rows, vectors, a, row, step, b, c, steps, factor):
        few(rows, vectors, a, row, step, b, row, step, c, row, steps, factor)
        in_place(rows, vectors, a, row, step, b, row, step, c, row, steps, factor)

    tile = sizes.tile_rows * sizes.tile_vectors * (sizes.lanes * 4 // registers[0])
    for function, count, most in ((many_loops, 7, tile), (few_loops, 8, 12 * sizes.panel * 4 // registers[0])):
        assembly = assembly_of(function, (*[numba.int64] * count, numba.float32), triple, cpu)
        stack = re.compile(r"\(%r[sb]p|\[(sp|x29)" if "%rsp, %rbp" in assembly else r"\(%rsp|\[(sp|x29)")
        found = [body for body in loops(assembly) if any(re.match(pattern, line) for line in body)]
        dots = [sum(bool(re.match(pattern, line)) for line in body) for body in found]
        assert function is few_loops or re.search(rf"^\s*{conversion}", assembly, re.MULTILINE)
        whole = [body for n, body in zip(dots, found, strict=True) if n == most]
        assert len(whole) >= 2  # for scores and for values
        for body in whole:
            assert not any(re.match(r"(call|bl)\b", line) or stack.search(line) for line in body), body
            assert not any(re.match(r"v?f?m(add|la)", line) for line in body), body
