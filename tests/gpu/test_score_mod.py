"""Functions of scores in the kernels: what is traced, what is not, and the kernels in both emulations."""

import math
import re
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from compiler import needs_compiler
from hypothesis import settings

pytest.importorskip("platformdirs", reason="the cache of compiled kernels lies where platformdirs says")

import strict_cupy
from sdpa_cupy import nvrtc
from sdpa_cupy.launch import forward
from sdpa_cupy.launch.fibers import Fibers
from sdpa_cupy.launch.ptx import Interpreter
from sdpa_cupy.tracing import CONSTANTS, MOST_LINES, trace
from sdpa_cupy.variants import kernels_for

import sdpa_ref as sr
from sdpa_ref.testing import assert_close, device, problem_of
from sdpa_ref.testing.cases import bent

RNG = np.random.default_rng(8)
NIGHTLY = settings.default.max_examples >= 1000
SINGLE = np.dtype(np.float32)
needs_nvrtc = pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))


def everything(s, b, h, i, j):
    """Return scores by all operations that kernels have."""
    seen = (j > 3) & (h < 2) | ~(i >= 1) ^ np.logical_not(b == 1) | (j != 4) & np.logical_or(i <= 2, h == 0)
    one = np.exp(np.minimum(s, 2.5)) - 0.5 * h + np.float32(0.1) * np.negative(s)
    other = np.tanh(s) * 3 + np.log(1 + np.sqrt(abs(s))) + s**2 - np.clip(s, -1, +s)
    other = other + (i - b) // 3 * 0.25 + (-j) % (h + 1) / 8
    return np.where(seen, one, np.maximum(other, -np.inf))


def relative(s, b, h, i, j):
    return s - np.float64(0.125) * abs(i - j) * 2.0**-4


def drops(s, b, h, i, j):
    return np.where((i - j) % 2 == 0, s, -np.inf)


@pytest.mark.parametrize("f", [everything, relative, drops, bent])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_written_down_is_what_numpy_computes(f, dtype):
    """The statements, read as Python with NumPy's types, give the bits that the function gives."""
    found = trace(f, np.dtype(dtype))
    s = RNG.standard_normal((1, 3, 7, 9)).astype(dtype)
    shapes = (1, 1, 1, 1), (1, 3, 1, 1), (1, 1, 7, 1), (1, 1, 1, 9)
    indices = [np.arange(max(shape)).reshape(shape) for shape in shapes]
    assert np.array_equal(np.asarray(read(found, s, *indices), dtype), np.asarray(f(s, *indices), dtype))


def read(found, s, b, h, i, j):
    """Return what the statements make of arrays."""
    names = dict(s=s, b=b, h=h, i=i, j=j)
    types = {"bool": np.bool_, "i64": np.int64, "float": np.float32, "double": np.float64}
    functions = dict(
        magnitude=abs, greater_of=np.maximum, lesser_of=np.minimum, quotient=np.floor_divide, modulo=np.remainder,
        exponential=np.exp, logarithm=np.log, square_root=np.sqrt, hyperbolic_tangent=np.tanh,
    )  # fmt: skip

    casts = {f"to_{name}": partial(np.asarray, dtype=own) for name, own in types.items()}
    block = SimpleNamespace(constants=found.constants)
    *lines, last = found.text.rstrip(";").split("; ")
    for line in lines:
        kind, name, _, expression = line.split(" ", 3)
        expression = re.sub(r"\((\w+)\)(\w+(\.constants\[\d+\])?)", r"to_\1(\2)", expression)
        expression = re.sub(r"!(?!=)", "~", expression).replace("ll)", ")")
        expression = re.sub(r"(.*) \? (.*) : (.*)", r"where(\1, \2, \3)", expression)
        with np.errstate(all="ignore"):
            names[name] = eval(expression, {"p": block, "where": np.where, **functions, **casts, **names})
        assert np.asarray(names[name]).dtype == types[kind], line
    return names[last.removeprefix("return (Number)")]


NUMBERS = np.arange(30.0)
UNTRACED = {
    "an array": lambda s, b, h, i, j: s + NUMBERS[:1],
    "an array by index": lambda s, b, h, i, j: s + NUMBERS[j],
    "a branch": lambda s, b, h, i, j: s if s > 0 else -s,
    "a method": lambda s, b, h, i, j: s.astype(s.dtype),
    "a reduction": lambda s, b, h, i, j: s - np.max(s),
    "a function of Python's": lambda s, b, h, i, j: s + math.sin(h),
    "another function": lambda s, b, h, i, j: np.sin(s),
    "where of numbers": lambda s, b, h, i, j: np.where(j, s, 0.0),
    "floats modulo": lambda s, b, h, i, j: s % 2,
    "no scores": lambda s, b, h, i, j: 0.5,
    "a truth": lambda s, b, h, i, j: s > 0,
    "an error": lambda s, b, h, i, j: 1 / 0,
    "a large integer": lambda s, b, h, i, j: s + j * (2**60 + 1),
    "other types": lambda s, b, h, i, j: s + np.longdouble(1) if np.longdouble(0).itemsize > 8 else s.copy(),
    "too many numbers": lambda s, b, h, i, j: sum((s * n for n in range(CONSTANTS + 1)), s),
    "too much": lambda s, b, h, i, j: sum((abs(s + j) for _ in range(MOST_LINES)), s),
    "half a keyword": lambda s, b, h, i, j: np.add(s, 1, dtype=np.float64),
}


@pytest.mark.parametrize("name", UNTRACED)
def test_what_kernels_cannot_do_is_left_to_arrays(name):
    assert trace(UNTRACED[name], SINGLE) is None


def scaled(by, further):
    return lambda s, b, h, i, j: s * by + further * (j - i)


def test_other_numbers_take_the_same_kernel():
    first, second = (trace(scaled(*numbers), SINGLE) for numbers in ((0.5, 0.5), (-2.0, 0.0)))
    assert first.text == second.text
    assert (first.constants, second.constants) == ((0.5, 0.5), (-2.0, 0.0))


def test_a_function_that_brings_another_number_is_another_function(machine, by_fibers):
    machine()
    q, k, v = strict_cupy.qkv(L=3, S=9, batch=(), dtype=np.float16)
    number = [0.5]

    def f(s, b, h, i, j):
        return s * number[0] + number[0] * (j - i)

    known = None
    for number[0] in (0.5, -1.5, 0.0):
        assert_close(sr.sdpa(*device.moved((q, k, v)), score_mod=f).get(), q, k, v, score_mod=f)
        known = kernels_for.cache_info().misses if known is None else known
    assert kernels_for.cache_info().misses == known


def test_which_way_a_function_goes(machine, launches):
    machine()
    arrays = device.moved(strict_cupy.qkv())
    sr.sdpa(*arrays, score_mod=strict_cupy.plain)
    assert not launches
    sr.sdpa(*arrays, score_mod=bent)
    ((*_, defines, _, _, parameters, _),) = launches
    assert "modulo(" in dict(defines)["SCORE_MOD"]
    assert parameters[0]["constants"].tolist()[:5] == [64.0, 1.0, 1.0, 4.0, 0.0]


CASES = [
    (everything, dict(L=5, S=30, dtype=np.float16), {}),
    (everything, dict(L=5, S=30, dtype=np.float32), {"mask": sr.Causal(), "query_offset": "end", "sink": 0.5}),
    (drops, dict(L=3, S=700, dtype=np.float16), {"softcap": 2.0}),
    (bent, dict(L=9, S=30, dtype=np.float64), {"dropout": sr.Dropout(0.3, 1), "bias": RNG.standard_normal((4, 1, 30))}),
]  # fmt: skip


def assert_right(launcher, arch, n):
    f, sizes, options = CASES[n]
    arrays = strict_cupy.qkv(**sizes, E=16, Ev=16)
    found = forward(
        problem_of(*arrays, score_mod=f, **options), frozenset({"output", "lse", "weights"}), arch, launcher
    )
    assert_close(found.output, *arrays, score_mod=f, **options)
    assert_close(found.lse, *arrays, what="lse", score_mod=f, **options)
    assert_close(found.weights, *arrays[:2], None, what="weights", score_mod=f, **options)


@needs_compiler
@pytest.mark.parametrize("n", range(len(CASES)) if NIGHTLY else [0, 3])  # each is several builds
def test_kernels_by_fibers(n):
    fibers = Fibers(80)
    assert_right(fibers, 80, n)
    assert fibers.reports, "a kernel was launched"


@needs_nvrtc
@pytest.mark.parametrize(("n", "arch"), [(1, 80), (0, 75), (2, 90), (3, 90)][: 4 if NIGHTLY else 1])
def test_what_nvrtc_makes_of_them(n, arch):
    assert_right(Interpreter(arch), arch, n)


@pytest.mark.parametrize("signs", [(7, 3), (-7, 3), (7, -3), (-7, -3), (6, 3), (-6, 3), (5, -1), (0, 4)])
@needs_compiler
def test_integers_divide_as_numpy_does(signs):
    a, b = signs
    arrays = strict_cupy.qkv(L=2, S=4, E=16, Ev=16, batch=(), dtype=np.float16)

    def f(s, _, h, i, j):
        return s + (a + 0 * i) // (b + 0 * j) * 0.5 + (a + 0 * j) % (b + 0 * i) * j

    found = forward(problem_of(*arrays, score_mod=f), frozenset({"output"}), 80, Fibers(80))
    assert_close(found.output, *arrays, score_mod=f)
