"""The kernels of gradients in both emulations: all schedules give the same bits, and planted faults are found.

Planted faults run on the fibers; the interpreter of PTX runs what NVRTC makes of the source.
"""

import re

import numpy as np
import pytest
from compiler import needs_compiler
from hypothesis import settings

pytest.importorskip("ml_dtypes", reason="plans know bfloat16 by ml_dtypes")
pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

import ml_dtypes
from sdpa_cupy import nvrtc
from sdpa_cupy.compile import KERNELS, compilation, resources
from sdpa_cupy.gradients import differentiate
from sdpa_cupy.launch.fibers import SCHEDULES, Fault, Fibers
from sdpa_cupy.launch.ptx import Interpreter
from sdpa_cupy.pulls import pulls_for
from sdpa_cupy.variants import Options

import sdpa_ref as sr
from sdpa_ref._problem import pose
from sdpa_ref.testing import assert_same_bits, assert_within, gradient_budget, problem_of
from sdpa_ref.testing.cases import case

NIGHTLY = settings.default.max_examples >= 1000
needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
TYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float64": np.float64}
CAUSAL = {"L": 70, "S": 70, "heads": (2, 1), "mask": ("causal",)}


def drawn(words):
    """Return a case and gradients of its output and lse."""
    loud, words = words.get("loud", 1), {name: word for name, word in words.items() if name != "loud"}
    given = case(11, **{"L": 40, "S": 70, "E": 16, "Ev": 16, "dtype": "float16"} | words)
    output = sr.sdpa(*given.arrays, backend="reference", **given.options)
    rng = np.random.default_rng(0)
    grad = rng.standard_normal(output.shape).astype(output.dtype)
    grad *= grad.dtype.type(loud)
    return given, grad, rng.standard_normal(output.shape[:-1])


def pulled(given, grad, grad_lse, launcher, arch):
    """Return the gradients that a launcher's kernels compute."""
    arrays, options = [array.view() for array in (*given.arrays, grad)], given.options
    for array in arrays:
        array.flags.writeable = False
    *arrays, grad = arrays
    problem, caller = pose(*arrays, **options)
    incoming = caller.incoming(problem, grad, grad_lse)
    gradients = differentiate(problem, *incoming, None, arch, launcher, np)
    return caller.gradients(gradients, *arrays, options.get("bias"), options.get("sink"))


def assert_right(gradients, given, grad, grad_lse):
    budgets = gradient_budget(*given.arrays, grad, grad_lse=grad_lse, **given.options)
    for name, gradient, budget in zip(budgets._fields, gradients, budgets, strict=True):
        if budget is not None:
            assert_within(gradient, budget, what=f"gradient of {name}")


@needs_compiler
@pytest.mark.parametrize(
    "words",
    [
        dict(L=70, S=140, mask=("causal",), offset="end", batch=(2,), heads=(4, 2)),
        dict(dtype="float32", bias=("holes",), dropout=0.3, poison=True),
        dict(dtype="float64", mask=("array",), softcap=2.0, sink="heads", poison=True),
    ],
    ids=str,
)
def test_all_schedules_give_the_same_bits(words):
    given, grad, grad_lse = drawn(words)
    first, *others = (pulled(given, grad, grad_lse, Fibers(80, *schedule), 80) for schedule in SCHEDULES)
    assert_right(first, given, grad, grad_lse)
    for other in others:
        for own, expected in zip(other, first, strict=True):
            if expected is not None:
                assert_same_bits(own, expected)


PTX = [
    dict(mask=("causal",), offset="end", heads=(4, 2)),
    dict(dtype="float32", mask=("window",), offset="number", E=24),
    dict(dtype="bfloat16", bias=("array",), mask=("key lengths",), batch=(2,), poison=True),
    dict(dtype="float64", L=20, S=30, E=5, Ev=3, softcap=1.5, dropout=0.3, sink="heads"),
    dict(L=30, S=20, mask=("causal",), offset="end", poison=True),  # the first rows see nothing
]  # fmt: skip


@needs_nvrtc
@pytest.mark.parametrize("n", range(len(PTX)))
def test_what_nvrtc_makes_of_them(n):
    for arch in (75, 80, 90, 120) if NIGHTLY else ((80, 90, 75)[n % 3],):
        given, grad, grad_lse = drawn(PTX[n])
        assert_right(pulled(given, grad, grad_lse, Interpreter(arch), arch), given, grad, grad_lse)


@needs_compiler
def test_keys_at_the_edges_of_tiles_have_gradients():
    """A row alone, whose last or first visible key is the first or last of a tile."""
    rng = np.random.default_rng(0)
    ends = [(0, 1), (0, 33), (0, 64), (0, 65), (0, 129), (15, 16), (31, 32), (31, 33), (63, 64), (63, 65), (128, 129)]
    start, stop = np.array(ends).T
    q, k, v, grad = (rng.standard_normal((len(ends), 1, n, 16)).astype(np.float16) for n in (1, 140, 140, 1))
    options = {"mask": sr.KeyStarts(start) & sr.KeyLengths(stop)}
    problem, caller = pose(q, k, v, **options)
    found = caller.gradients(differentiate(problem, grad, None, None, 80, Fibers(80), np), q, k, v, None, None)
    for name, gradient, budget in zip("qkv", found, gradient_budget(q, k, v, grad, **options), strict=False):
        assert_within(gradient, budget, what=f"gradient of {name}")


@needs_compiler
@pytest.mark.parametrize("where", ["query", "grad"])
@pytest.mark.parametrize("kind", ["array", "bias"])
def test_a_row_that_is_not_finite_reaches_the_keys_that_it_keeps_and_no_others(where, kind):
    rng, L = np.random.default_rng(0), 64  # whole tiles of rows
    q, k, v, grad = (rng.standard_normal((1, n, 16)).astype(np.float16) for n in (L, 70, 70, L))
    (q if where == "query" else grad)[0, 7, 3] = np.nan
    keep = rng.random((L, 70)) < 0.5
    keep[7, 1::2] = False
    options = {"mask": keep} if kind == "array" else {"bias": np.where(keep, 0, -np.inf).astype(np.float16)}
    problem, caller = pose(q, k, v, **options)
    found = caller.gradients(differentiate(problem, grad, None, None, 80, Fibers(80), np), q, k, v, None, None)
    assert np.isnan(found.value).any()
    for gradient in (found.key, found.value):
        assert np.isfinite(gradient[0, ~keep[7]]).all()


FAULTS = {  # the file, what stands there, what is put in its place, and a case that must show it
    "the row sum left out": ("gradients.h", " - flow.inner)", ")", {}),
    "dropout in one pass only": ("gradients.h", "s = kept ? weight : 0;", "s = weight;", {"dropout": 0.4}),
    "the slope of the soft cap": ("gradients.h", "slope -= t * t;", "", {"softcap": 1.0}),
    "sums beyond half": ("gradients.h", "warp_any(top * unit > 32768)", "false", {"loud": 14000, "L": 4, "S": 2,
                                                                                 "Ev": 256, "scale": 0.05}),
    "rows that fill up a tile": ("gradients.h", "flow.factor == 0 || score", "score", {"numbers": "low"}),
    "gradients of other rows": ("flow.h", "* p.L + i]", "* p.L]", {}),
    "the gradient by the lse": ("flow.cu", "if (p.grad_lse.data) inner -=", "if (p.grad_lse.data) inner +=", {}),
    "keys of the tile after": ("pull_query.cu", "j + KEYS)) {", "j + KEYS + 1)) {", {}),
    "no barrier before keys are cleaned": ("pull_query.cu", "barrier();  // no warp reads the keys", "//",
                                           CAUSAL | {"S": 140, "poison": True}),
    "no barrier after the products": ("pull_query.cu", "barrier();  // no warp reads the tiles", "//", {"S": 140}),
    "copies not waited for": ("pull_key.cu", "wait_copies<0>();\n            bool clean", "bool clean", {}),
    "no barrier before the rows": ("pull_key.cu", "barrier();  // no warp reads the tiles", "//", {"L": 140}),
    "one head of the group": ("pull_key.cu", "head < (kv + 1) * (int)p.group;", "head < kv * (int)p.group + 1;",
                          CAUSAL),
    "a tile that rows do see": ("pull_key.cu", "row.start < j + ROWS", "row.start < j", {"mask": ("window",),
                                                                                      "offset": "number"}),
    "NaN of dropped rows": ("pull_key.cu", "if (clean) {", "if (false) {", CAUSAL | {"S": 40, "offset": "end",
                                                                                  "poison": True}),
    "the scale left out": ("pull_query.cu", "sees ? sum * factor : 0", "sum", {"scale": 0.3}),
    "another order of sums": ("products.h", "if (turned) mma_1688_tf32", "if (false) mma_1688_tf32",
                              {"dtype": "float32"}),
    "plain: another row of P": ("plain_products.h", "(lane ^ mask) % 4 * 2", "lane % 4 * 2", {"dtype": "float64"}),
}  # fmt: skip


def assert_right_in_all_schedules(given, grad, grad_lse, folder):
    for schedule in SCHEDULES:
        assert_right(pulled(given, grad, grad_lse, Fibers(80, *schedule, folder=folder), 80), given, grad, grad_lse)


@needs_compiler
@pytest.mark.parametrize("name", list(FAULTS)[:: 1 if NIGHTLY else 3])
def test_a_planted_fault_is_found(name, copy):
    file, old, new, words = FAULTS[name]
    text = (copy / file).read_text()
    assert old in text, f"{file} has no {old!r} any more: plant this fault elsewhere"
    given, grad, grad_lse = drawn(words)
    assert_right(pulled(given, grad, grad_lse, Fibers(80), 80), given, grad, grad_lse)
    (copy / file).write_text(text.replace(old, new))
    with pytest.raises((AssertionError, Fault)):
        assert_right_in_all_schedules(given, grad, grad_lse, copy)


BARRIERS = [
    (file.name, match.start())
    for file in sorted(KERNELS.glob("pull_*.cu"))
    for match in re.finditer(r"\bbarrier\(\);", file.read_text())
]
WITH_BARRIERS = [  # several tiles, rows that see no key, keys that are cleaned for several warps
    dict(L=70, S=140, mask=("causal",), offset="start", poison=True),
    dict(L=70, S=5, mask=("causal",), offset="end", poison=True),
    dict(L=70, S=140, mask=("key lengths", "&query lengths"), batch=(2,), poison=True),
]  # fmt: skip


@needs_compiler
@pytest.mark.skipif(not NIGHTLY, reason="every barrier is a build: in the profile nightly")
@pytest.mark.parametrize(("file", "at"), BARRIERS)
def test_every_barrier_is_missed(file, at, copy):
    text = (copy / file).read_text()
    (copy / file).write_text(text[:at] + text[at:].replace("barrier();", ";", 1))
    with pytest.raises((AssertionError, Fault)):
        assert_all_right(WITH_BARRIERS, copy)


@needs_compiler
def test_there_is_no_fault_in_the_source_as_it_is():
    assert_all_right(WITH_BARRIERS, KERNELS)


def assert_all_right(problems, folder):
    for words in problems:
        assert_right_in_all_schedules(*drawn(words), folder)


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["float16", "float32"] if NIGHTLY else ["float16"])
@pytest.mark.parametrize("E", [64, 128, 256] if NIGHTLY else [128])  # each is four builds or more
def test_no_kernel_spills(dtype, E):
    for arch in (75, 80, 86, 90, 100, 120) if NIGHTLY else (80,):
        x = np.zeros((1, 64, E), TYPES[dtype])
        for options in (Options(), Options(True, 0, 2, 0)):
            found = pulls_for(problem_of(x, x, x).form, arch, options, True, dtype)
            for launch in (found.flow, found.query, *found.keys):
                _, *local = resources(compilation(launch.source, launch.defines, arch).log)[launch.kernel]
                assert sum(local) == 0, f"{launch.kernel} keeps numbers in memory for which it has no register"


def test_kernels_are_remembered_by_structure_and_never_by_a_length():
    def kernels(L, S, **options):
        x, y = np.zeros((2, L, 32), np.float16), np.zeros((2, S, 32), np.float16)
        p = problem_of(x, y, y, **options)
        return pulls_for(p.form, 80, Options(), True, "float16")

    kernels(5, 7)
    known = pulls_for.cache_info().misses
    for n in range(20, 60):
        kernels(n, 3 * n, scale=1 / n)
    assert pulls_for.cache_info().misses == known


@needs_compiler
def test_products_are_the_five_and_two_that_are_made_again():
    """What a problem of whole tiles costs, counted as products of the matrix unit: 5 for pull_key, 3 for pull_query."""
    given, grad, grad_lse = drawn({"L": 64, "S": 64})
    fibers = Fibers(80)
    pulled(given, grad, grad_lse, fibers, 80)
    counts = {report.kernel: report.products for report in fibers.reports}
    unit = (64 // 16) * (64 // 8)  # of one product of 64 rows, 64 columns and 16 numbers
    assert (counts["pull_query"], counts["pull_key"]) == (3 * unit, 4 * unit)
    assert not re.search("atomic", "".join(file.read_text() for file in KERNELS.iterdir()))
