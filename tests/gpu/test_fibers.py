"""The GPU kernels, built by g++ and run on fibers: they keep every law, in every schedule, within memory.

By default the laws see narrow heads, as every width is another build; ``pytest --hypothesis-profile nightly`` runs all.
"""

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from compiler import needs_compiler
from hypothesis import settings
from sdpa_cupy import launch
from sdpa_cupy.launch.fibers import SCHEDULES, Fibers
from sdpa_cupy.plan import bound, make_plan

import sdpa_ref as sr
from sdpa_ref._problem import pose
from sdpa_ref.backend import Result
from sdpa_ref.testing import assert_close, assert_same_bits, problem_of
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.cases import case
from sdpa_ref.testing.properties import BY_NAME, PROPERTIES
from sdpa_ref.testing.runner import check
from sdpa_ref.testing.target import Target, resolve

pytestmark = needs_compiler

NIGHTLY = settings.default.max_examples >= 1000
FOREVER = float("inf")
RNG = np.random.default_rng(9)
DTYPES = ("float16", "bfloat16", "float32", "float64")
ALL = frozenset(Result._fields)


def narrowed(target, **claims):
    return replace(target, capabilities=replace(target.capabilities, **claims))


def failures(run):
    return [f"{outcome.law.name}: {outcome.found.case}\n{outcome.failure.message}" for outcome in run.failures]


def solved(given, arch=80, **options):
    """Return the results of a case, and the reports of the launches."""
    launcher = Fibers(arch, **options)
    result = launch.forward(problem_of(*given.arrays, **given.options), ALL, arch, launcher)
    return result, launcher.reports


def public(results):
    """Return the results that have a budget, by name, once the lse is seen to be made of the other two."""
    with np.errstate(divide="ignore"):
        lse = results.m + np.log(results.z)
    np.testing.assert_allclose(lse, results.lse, rtol=1e-6, atol=1e-6)
    return [(what, getattr(results, what)) for what in ("output", "lse", "weights")]


def of_architecture(arch, *laws, rounds=1, **claims):
    """Return the failures of the kernels as they are planned for another architecture."""

    def forward(query, key, value, **options):
        problem, caller = pose(query, key, value, **options)
        return caller.output(launch.forward(problem, frozenset({"output"}), arch, Fibers(arch)).output)

    claims = Capabilities.everything(lse=False, weights=False, gradients=False, lse_gradients=False, **claims)
    target = Target(f"kernels for {arch}", forward, claims)
    return failures(check(target, rounds=rounds, seconds=FOREVER, laws=[BY_NAME[name] for name in laws] or PROPERTIES))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_law_holds(dtype):
    target = narrowed(resolve("fibers"), dtypes=(dtype,), **({} if NIGHTLY else {"max_width": 16}))
    rounds, laws = (20, PROPERTIES) if NIGHTLY else (1, PROPERTIES[DTYPES.index(dtype) :: len(DTYPES)])
    run = check(target, rounds=rounds, seconds=FOREVER, laws=laws)
    assert failures(run) == []
    assert run.rounds == rounds
    assert {outcome.status for outcome in run.outcomes} == {"passed"}


WIDTHS = [
    dict(E=64, Ev=64, dtype="float16", heads=(4, 2), mask=("causal",)),
    dict(E=128, Ev=128, dtype="bfloat16", L=129),
    dict(E=256, Ev=256, dtype="float16", bias=("array",), L=33),
    dict(E=40, Ev=72, dtype="float32", mask=("window",), offset="end"),
    dict(E=255, Ev=1, dtype="bfloat16", memory="sliced", L=17),
    dict(E=5, Ev=130, dtype="float32", sink="heads", L=40),
]


@pytest.mark.parametrize("words", WIDTHS, ids=str)
def test_widths(words):
    given = case(1, **{"L": 70, "S": 77, "batch": (2,), "heads": (2, 1)} | words)
    assert BY_NAME["plain"].check(resolve("fibers"), given) is None


ALL_WIDTHS = [*range(1, 34), 48, 63, 64, 65, 95, 96, 97, 127, 128, 160, 191, 192, 193, 255, 256]


@pytest.mark.skipif(not NIGHTLY, reason="every width is a build: in the profile nightly")
@pytest.mark.parametrize("width", ALL_WIDTHS if NIGHTLY else ALL_WIDTHS[:1])
@pytest.mark.parametrize("dtype", DTYPES if NIGHTLY else DTYPES[:1])
def test_every_width(dtype, width):
    for E, Ev in ((width, 16), (16, width), (width, width)):
        given = case(width, L=33, S=70, E=E, Ev=Ev, dtype=dtype, heads=(2, 1), mask=("window",), offset="end")
        assert BY_NAME["plain"].check(resolve("fibers"), given) is None


@pytest.mark.parametrize(
    "words",
    [
        dict(L=70, S=140, dtype="float16", mask=("causal",), offset="end", batch=(2,)),
        dict(L=70, S=65, dtype="bfloat16", bias=("holes",), dropout=0.3, heads=(6, 2)),
        dict(L=20, S=40, dtype="float32", mask=("packed",), softcap=2.0, sink="heads"),
        dict(L=20, S=70, dtype="float64", mask=("array",), bias=("alibi",), offset="number", poison=True),
        dict(L=2, S=1600, dtype="float16", heads=(6, 2), mask=("key lengths",), batch=(3,)),
    ],
    ids=str,
)
def test_all_schedules_give_the_same_bits(words):
    given = case(3, **{"E": 16, "Ev": 16} | words)
    first, *others = (solved(given, order=order, late=late)[0] for order, late in SCHEDULES)
    for other in others:
        for got, expected in zip(other, first, strict=True):
            assert_same_bits(got, expected)


def test_the_tiles_that_products_read_have_no_bank_conflicts():
    given = case(0, L=70, S=140, E=64, Ev=64, dtype="float16")
    report = solved(given)[1][0]
    assert report.kernel == "attend"
    assert report.matrices > 0
    assert report.copies > 0
    assert [line for line in report.conflicts if "products.h" in line or "load_tile" in line] == []


def test_turing():
    laws = ("plain", "causal", "everything", "poison", "visible NaN", "grouped heads")
    assert of_architecture(75, *(() if NIGHTLY else laws), max_width=16, dtypes=("float16", "bfloat16")) == []


def test_the_sums_of_hopper():
    laws = ("plain", "needles", "long rows", "everything")
    assert of_architecture(90, *(() if NIGHTLY else laws), max_width=16, dtypes=("float16", "float32")) == []


@pytest.mark.parametrize("arch", [86, 90])
def test_tiles_fit_into_the_shared_memory_of(arch):
    for dtype, E, Ev in (("float16", 256, 256), ("float32", 128, 64)):
        given = case(2, L=40, S=70, E=E, Ev=Ev, dtype=dtype, mask=("causal",), offset="end")
        assert_close(solved(given, arch)[0].output, *given.arrays, **given.options)


# ---- edges of tiles, chunks and strips


def test_intervals_with_their_ends_at_those_of_tiles():
    rng = np.random.default_rng(0)
    ends = (0, 1, 63, 64, 65), (0, 1, 62, 63, 64, 65, 127, 128), (1, 63, 64, 65, 66, 127, 128, 129)
    prefix, start, stop = (axis.reshape(-1) for axis in np.meshgrid(*ends))
    query, key, value = (rng.standard_normal((len(start), 1, n, 16)).astype("float16") for n in (1, 130, 130))
    mask = sr.KeyStarts(start) & sr.KeyLengths(stop) | sr.KeyLengths(prefix)
    assert not problem_of(query, key, value, mask=mask).blockwise
    assert_close(sr.sdpa(query, key, value, mask=mask, backend="fibers"), query, key, value, mask=mask)


def test_windows_that_pass_the_edges_of_tiles_row_by_row():
    rng = np.random.default_rng(0)
    offset = np.arange(40, 132)
    query, key, value = (rng.standard_normal((len(offset), 1, n, 16)).astype("float16") for n in (17, 150, 150))
    for mask in (sr.Window(0, 0), sr.Window(2, 0) | sr.FirstTokens(1)):
        options = {"mask": mask, "query_offset": offset}
        assert_close(sr.sdpa(query, key, value, backend="fibers", **options), query, key, value, **options)


@pytest.mark.parametrize(
    ("words", "start"),
    [
        (dict(L=40, S=140, dtype="float16"), 70),
        (dict(L=40, S=140, dtype="float16", numbers="huge"), 138),
        (dict(L=40, S=140, dtype="bfloat16", dropout=0.5), 70),
        (dict(L=20, S=70, dtype="float32"), 0),
        (dict(L=20, S=70, dtype="float64", dropout=0.5), 3),
        (dict(L=2, S=600, dtype="float16", heads=(4, 2)), 300),
        (dict(L=2, S=600, dtype="float64", heads=(4, 2)), 300),
    ],
    ids=str,
)
def test_infinite_values_reach_every_row_that_sees_them(words, start):
    given = case(5, E=16, Ev=16, **words)
    value = given.value.copy()
    value[..., start + 1, 3], value[..., -2, 8], value[..., :start, 5] = np.inf, -np.inf, np.nan
    given = replace(given, value=value, options=given.options | {"mask": sr.KeyStarts(start)})
    for what, result in public(solved(given)[0]):
        assert_close(result, *given.arrays, what=what, **given.options)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("infinite", [300, 600])
def test_infinite_values_count_where_all_scores_of_a_chunk_are_minus_infinity(dtype, infinite):
    """Their weights are 0, and 0 times infinity is NaN, whether tiles are kept whole or not."""
    rng = np.random.default_rng(0)
    query, key, value = (abs(rng.standard_normal((2, n, 16))).astype(dtype) for n in (2, 600, 600))
    key[:, :infinite, 3], value[:, 10, 5], value[:, 290, 7] = -np.inf, np.inf, np.nan
    for mask in (None, sr.KeyStarts(1), sr.KeyStarts(11), sr.Causal()):
        options = {"mask": mask, "query_offset": "end"}
        output = sr.sdpa(query, key, value, backend="fibers", **options)
        expected = sr.sdpa(query, key, value, backend="reference", **options)
        assert np.array_equal(np.isnan(output), np.isnan(expected))
        assert np.isnan(expected).any() == (infinite < 600)
        assert_close(output, query, key, value, **options)


@pytest.mark.parametrize("mask", [sr.KeyLengths(100), sr.KeyStarts(590), sr.KeyLengths(0)], ids=repr)
def test_rows_whose_keys_lie_in_one_chunk_or_none(mask):
    given = case(5, L=2, S=600, E=16, Ev=16, dtype="float16", heads=(4, 2))
    given = replace(given, options={"mask": mask})
    for what, result in public(solved(given)[0]):
        assert_close(result, *given.arrays, what=what, **given.options)


def test_dropout_counts_rows_from_the_first_in_every_strip():
    given = case(0, L=130, S=9, E=16, Ev=16, dtype="float16", mask=("function",), dropout=0.5)
    assert_close(solved(given)[0].output, *given.arrays, **given.options)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize("by", ["kernels", "arrays"])
def test_dropout_and_functions_of_scores_count_from_the_first_of_a_block(dtype, by):
    """Weights of a block beside the same weights of the whole: entries, heads and keys are counted from its first."""
    rng = np.random.default_rng(0)
    query, key = (rng.standard_normal((3, 4, n, 16)).astype(dtype) for n in (9, 20))
    value = np.broadcast_to(np.eye(20, dtype=dtype), (3, 4, 20, 20))  # so that the output is the weights
    odd = {} if by == "kernels" else {"score_mod": lambda s, b, h, i, j: s + 0.1 * b - 0.2 * h + 0.01 * j * i}
    whole = problem_of(query, key, value, dropout=sr.Dropout(0.5, 7), **odd)
    at = (slice(1, 3), slice(2, 4), slice(None), slice(None))
    form = whole.form._replace(batch=(2,), Hq=2, Hkv=2)
    block = whole._replace(
        form=form, query=query[at], key=key[at][..., 8:, :], value=value[at][..., 8:, 8:], first_key=8, first_head=2,
        first_entry=1,
    )._replace(out=None)  # fmt: skip
    block = block._replace(form=form._replace(Ev=12))
    whole = whole._replace(out=None)
    found, expected = (launch.forward(problem, ALL, 80, Fibers(80)) for problem in (block, whole))
    scale = np.exp(expected.lse[at[:3]] - found.lse)[..., None]  # weights share what the block has, not the whole
    for name in ("weights", "output"):
        of_whole = getattr(expected, name)[at][..., 8:]
        np.testing.assert_allclose(getattr(found, name), of_whole * scale, rtol=4e-3 if dtype == "float16" else 1e-9)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_dropout_keeps_the_word_that_is_its_threshold(dtype):
    first = 0x6627E8D5  # of Philox, all of whose counters and keys are 0
    ones = np.ones((1, 1, 16), dtype)
    for threshold, kept in ((first, True), (first + 1, False)):
        given = case(0, E=16, Ev=16, dtype=dtype)
        given = replace(given, query=ones, key=ones, value=ones, options={"dropout": sr.Dropout(threshold / 2**32, 0)})
        results = solved(given)[0]
        assert (results.output.all(), results.weights.all()) == (kept, kept)


# ---- 64-bit offsets


def sparse(count, gib):
    """Return arrays of bytes in address space of so many GiB, of which memory is only what is written."""
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # its number on Linux
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    try:
        return [np.frombuffer(mmap.mmap(-1, gib << 30, flags=flags), np.uint8) for _ in range(count)]
    except OSError as error:
        pytest.skip(f"no address space for {gib} GiB: {error}")


def spread(memory, array, axis):
    """Return a copy of an array whose entries along one axis go on for 8 GiB."""
    strides = list(np.ascontiguousarray(array).strides)
    strides[axis] = (1 << 33) // (array.shape[axis] - 1) // 4096 * 4096 + 64
    view = np.ndarray(array.shape, array.dtype, memory, 0, strides)
    view[...] = array
    return view


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse mappings")
@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["batch", "head", "row", "column"])
@pytest.mark.parametrize(("dtype", "S"), [("float16", 70), ("float16", 520), ("float64", 70)])
def test_strides_beyond_32_bits(axis, dtype, S):
    rng = np.random.default_rng(axis)
    plain = [rng.standard_normal((2, 2, n, width)).astype(dtype) for n, width in ((2, 16), (S, 16), (S, 16), (2, S))]
    plain[2][..., S - 9, 11:] = np.inf  # visible to some rows
    plain.append(rng.random((2, 2, 2, S)) < 0.8)
    *spaces, room = sparse(6, 9)
    query, key, value, bias, mask = (spread(space, array, axis) for space, array in zip(spaces, plain, strict=True))
    out = spread(room, np.full((2, 2, 2, 16), np.nan, dtype), axis)
    problem = problem_of(query, key, value, bias=bias, mask=mask)._replace(out=out)
    results = launch.forward(problem, ALL, 80, Fibers(80))
    assert results.output is out
    for what, result in public(results):
        assert_close(result, *plain[:3], bias=plain[3], mask=plain[4], what=what)


@pytest.mark.skipif(sys.platform != "linux", reason="needs sparse mappings")
def test_a_workspace_beyond_32_bits():
    given = case(0, L=2, S=520, E=16, Ev=16, dtype="float16")
    problem, launcher, lse = problem_of(*given.arrays), Fibers(80), np.full((1, 2), np.nan, np.float32)
    plan = make_plan(problem, frozenset({"lse"}), 80)
    (workspace,) = sparse(1, 13)
    parameters = bound(plan, launcher.address, problem, Result(lse=lse), launcher.address(workspace))
    parameters["Ev"] = 1 << 29  # as far as the workspace goes: 12 GiB of sums that nobody asks for
    for each in plan.launches:
        launcher.run(each, parameters)
    assert_close(lse, *given.arrays, what="lse")


# ---- the compiler's sanitizers


def sanitized(code):
    """Return the finished process that ran code with the address and undefined-behaviour sanitizers."""
    compiler = os.environ.get("CXX", "g++")
    names = ("libasan.so", "libubsan.so", "libstdc++.so")
    found = [subprocess.check_output([compiler, f"-print-file-name={name}"], text=True).strip() for name in names]
    if not all(map(os.path.isabs, found)):
        pytest.skip(f"{compiler} comes without its sanitizers")
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "halt_on_error=1", "PYTHONMALLOC": "malloc"}
    environment = os.environ | options | {"LD_PRELOAD": " ".join(found)}
    path = f"import sys; sys.path[:0] = {[str(Path(__file__).parent)]!r}\n"
    command = [sys.executable, "-c", path + code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)


def test_sanitizers_find_nothing():
    code = """
from sdpa_cupy import launch
from sdpa_cupy.launch.fibers import Fibers
from sdpa_ref._problem import pose
from sdpa_ref.testing import problem_of
from sdpa_ref.testing.cases import case
problems = [
    dict(dtype="float16", L=33, S=70, mask=("causal",), offset="end", heads=(4, 2)),
    dict(dtype="float16", L=3, S=900, heads=(4, 2), bias=("array",), memory="sliced", poison=True),
    dict(dtype="float32", L=17, S=33, mask=("array",), dropout=0.3, softcap=2.0, memory="negative", numbers="huge"),
    dict(dtype="float64", L=17, S=33, mask=("window",), offset="end", bias=("alibi",), sink="heads"),
]
for words in problems[1::2]:
    given = case(1, **{"E": 16, "Ev": 15} | words)
    problem = problem_of(*given.arrays, **given.options)
    want = {"output", "lse", "m", "z"} | ({"weights"} if problem.dtype == "float64" else set())
    launch.forward(problem, frozenset(want), 80, Fibers(80, sanitize=True))
print("done")
"""
    done = sanitized(code.replace("[1::2]", "") if NIGHTLY else code)
    assert done.stderr == ""
    assert done.stdout == "done\n"


def test_sanitizers_see_a_read_behind_an_array():
    code = """
import numpy as np
from pathlib import Path
from sdpa_cupy.launch.fibers import Fibers
from sdpa_cupy.plan import Launch
fibers = Fibers(folder=Path(FOLDER), sanitize=True)
given, out = np.zeros(4096, np.uint8)[-64:], np.zeros(64, np.int8)
parameters = np.array([fibers.address(given), fibers.address(out), 5])
fibers.run(Launch("misbehave", "faults.cu", (("TURING", 0),), (1, 1, 1), 64, 1024), parameters)
"""
    done = sanitized(code.replace("FOLDER", repr(str(Path(__file__).parent / "micro"))))
    assert "heap-buffer-overflow" in done.stderr
    assert "faults.cu" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        dict(E=512, Ev=300, dtype="float16", mask=("causal",), offset="end", poison=True),
        dict(E=300, Ev=512, dtype="float32", heads=(2, 1), dropout=0.3, sink="heads"),
        dict(E=400, Ev=16, dtype="float64"),
        dict(E=8, Ev=257, dtype="bfloat16", L=2, S=600, heads=(4, 2)),
        dict(E=260, Ev=260, dtype="float16", mask=("function",), bias=("array",)),
    ],
    ids=str,
)
def test_wide_heads_are_split_by_columns(words):
    given = case(4, **{"L": 33, "S": 70} | words)
    result, reports = solved(given)
    assert {report.kernel for report in reports} >= {"weigh"}  # none of it by whole arrays
    for what, found in public(result):
        assert_close(found, *given.arrays, what=what, **given.options)


@pytest.mark.parametrize(
    "options",
    [
        {
            "mask": sr.Causal() & sr.KeyLengths(np.arange(4, 12).reshape(1, 2, 1, 1, 2, 1, 1, 1, 2)),
            "query_offset": "end",
        },
        {"bias": RNG.standard_normal((2, 1, 1, 1, 2, 3, 1, 12)), "dropout": sr.Dropout(0.4, 1)},
        {"mask": RNG.random((2, 1, 1, 2, 1, 1, 1, 1, 3, 5, 12)) < 0.6, "bias": sr.ALiBi(0.25), "query_offset": 3},
    ],
)
def test_many_leading_axes_become_one(options):
    batch = (1, 2, 1, 1, 2, 1, 1, 1, 2)
    query = RNG.standard_normal((*batch, 3, 5, 16)).astype("float32")
    key, value = (RNG.standard_normal((2, 1, 1, 1, 2, 3, 12, 16)).astype("float32") for _ in range(2))
    given = replace(case(0), query=query, key=key, value=value, options=options)
    result, reports = solved(given)
    assert len(reports) == 2
    for what, found in public(result):
        assert_close(found, *given.arrays, what=what, **given.options)
