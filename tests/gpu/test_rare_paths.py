"""Paths of the kernels that few calls take, each of which a planted fault survived until it had a test here."""

import re

import numpy as np
import pytest
from compiler import needs_compiler

pytest.importorskip("ml_dtypes", reason="kernels for bfloat16 are planned for ml_dtypes.bfloat16")
pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

from sdpa_cupy import nvrtc
from sdpa_cupy.compile import compiled
from sdpa_cupy.launch import forward
from sdpa_cupy.launch.fibers import Fibers
from sdpa_cupy.plan import make_plan

import sdpa_ref as sr
from sdpa_ref.masks import Intervals
from sdpa_ref.testing import assert_close, problem_of

OUTPUT = frozenset({"output"})


def arrays(L, S, E=16, Ev=16, dtype="float16", heads=1):
    rng = np.random.default_rng(L)
    shapes = (heads, L, E), (heads, S, E), (heads, S, Ev)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def attended(given, arch=80, **options):
    """Return the output of the kernels for an architecture."""
    return forward(problem_of(*given, **options), OUTPUT, arch, Fibers(arch)).output


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_output_takes_more_room_than_the_tiles_of_narrow_keys(dtype):
    given = arrays(70, 70, E=16, Ev=256, dtype=dtype)
    assert_close(attended(given, 86), *given)


@needs_compiler
@pytest.mark.parametrize("first", [1, 4, 8])
def test_an_output_that_lies_beside_chunks_is_written_number_by_number(first):
    given = arrays(20, 30)
    out = np.empty(20 * 16 + 8, np.float16)[first : first + 20 * 16].reshape(1, 20, 16)
    sr.sdpa(*given, out=out, backend="fibers")
    assert_close(out, *given)


@needs_compiler
@pytest.mark.parametrize("start", [64, 100, 120])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_all_threads_repair_what_one_has_found(dtype, start):
    """The thread that loads a number, and the one that goes over its column again, are of different warps."""
    given = arrays(70, 140, dtype=dtype)
    given[2][..., start + 1, 3] = np.inf
    mask = sr.Window(40, None) & sr.KeyStarts(start)
    assert_close(attended(given, mask=mask, query_offset="end"), *given, mask=mask, query_offset="end")


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_bias_of_minus_infinity_hides_infinite_values_from_some_rows(dtype):
    given, bias = arrays(20, 70, dtype=dtype), np.zeros((20, 70), dtype)
    bias[::2, 65] = -np.inf
    given[2][..., 65, 3] = np.inf
    output = attended(given, bias=bias)
    assert_close(output, *given, bias=bias)
    assert np.isfinite(output[:, ::2]).all()
    assert np.isinf(output[:, 1::2, 3]).all()


@needs_compiler
def test_copies_by_threads_leave_out_keys_that_are_not_there():
    for S in (5, 33, 70):
        given = arrays(20, S)
        assert_close(attended(given, 75), *given)


@needs_compiler
@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_more_blocks_than_16_bits_count(dtype):
    given, launcher = arrays(1, 1, heads=65_600, dtype=dtype), Fibers(80, first=65_590)
    out = np.full_like(given[2], np.nan)
    forward(problem_of(*given)._replace(out=out), OUTPUT, 80, launcher)
    np.testing.assert_array_equal(out[65_590:], given[2][65_590:])


@needs_compiler
@pytest.mark.parametrize("empty", [(0, 0), (64, 64)])
def test_an_empty_interval_beside_a_prefix_makes_no_row_read_more(empty):
    """Half of the rows see a prefix alone, the others the last keys too: the tiles between them are passed over."""
    given = arrays(16, 640)
    prefix, start, stop = (np.full(16, n) for n in (1, 576, 640))
    start[::2], stop[::2] = empty
    problem = problem_of(*given)._replace(visible=Intervals(prefix, start, stop), plain=False)
    launcher = Fibers(80)
    output = forward(problem, OUTPUT, 80, launcher).output
    j = np.arange(640)
    mask = (j < prefix[:, None]) | (start[:, None] <= j) & (j < stop[:, None])
    assert_close(output, *given, mask=mask)
    full = Fibers(80)
    forward(problem_of(*given), OUTPUT, 80, full)
    assert sum(report.products for report in launcher.reports) <= sum(report.products for report in full.reports) // 4


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_compiler_makes_nothing_less_accurate(dtype):
    """`--use_fast_math` would divide by an approximation and take subnormal numbers for 0."""
    E = 16 if dtype == "float16" else 8  # of float32, the kernel without matrix units
    (launch,) = make_plan(problem_of(*arrays(70, 70, E=E, dtype=dtype)), OUTPUT, 80).launches
    ptx = compiled(launch.source, launch.defines, 80, "ptx").decode()
    assert set(re.findall(r"\b\w+(?:\.\w+)*\.(?:approx|ftz)\b[.\w]*", ptx)) == {"ex2.approx.ftz.f32"}
    assert "div.rn.f32" in ptx
