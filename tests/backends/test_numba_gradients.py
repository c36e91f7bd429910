"""What only the Numba backend promises of gradients: their bits, their memory, and what they must not touch."""

import os
import subprocess
import sys

import numpy as np
import pytest

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

from sdpa_numba import gradients
from sdpa_numba.compile.products import products

import sdpa_ref
from sdpa_ref import ALiBi, Causal, Dropout, KeyLengths, MaskFunction, Window, sdpa_vjp
from sdpa_ref.testing import assert_same_bits

GUARDED = """
import ctypes, mmap, sys
import numpy as np
import sdpa_ref

libc, page, dtype = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE, np.dtype(sys.argv[1])
rng = np.random.default_rng(0)

def guarded(shape, at_end):
    "Return random numbers that end, or begin, at a page that must not be touched."
    count = int(np.prod(shape)) * dtype.itemsize
    pages = -(-count // page)
    area = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for guard in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(start + guard * page), page, 0) == 0
    array = np.frombuffer(area, dtype, int(np.prod(shape)), page + (pages * page - count if at_end else 0))
    array = array.reshape(shape)
    array[...] = rng.standard_normal(shape)
    return array

views = {
    "plain": lambda x: x,
    "reversed": lambda x: x[..., ::-1, ::-1],
    "transposed": lambda x: x.swapaxes(-1, -2),
}
for length in range(1, 51):
    L, S, E, Ev = [(3, length, 16, 16), (length, 5, 7, 16), (length, 33, length, 3), (2, 40, 16, length)][length % 4]
    for name, view in views.items():
        for at_end in (False, True):
            arrays = []
            for rows, width in ((L, E), (S, E), (S, Ev), (L, Ev)):
                rows, width = (width, rows) if name == "transposed" else (rows, width)
                arrays.append(view(guarded((2, rows, width), at_end)))
            options = {}
            if length % 3 == 0:
                options["bias"] = view(guarded((2, S, L) if name == "transposed" else (2, L, S), at_end))
            sdpa_ref.sdpa_vjp(*arrays, **options, backend="numba")
print("no fault")
"""

CALLS = {
    "full": ((2, 4, 300, 24), (2, 4, 700, 24), (2, 4, 700, 40), {}),
    "one head": ((450, 16), (1000, 16), (1000, 16), {"mask": Window(600, 300), "query_offset": 200}),
    "causal": ((3, 300, 65), (3, 300, 65), (3, 300, 12), {"mask": Causal()}),
    "grouped": ((2, 6, 70, 20), (2, 2, 600, 20), (2, 2, 600, 33), {"bias": ALiBi(0.1), "query_offset": "end"}),
    "folded": ((2, 6, 5, 20), (2, 2, 600, 20), (2, 2, 600, 33), {"sink": 0.3, "dropout": Dropout(0.2, 1)}),
    "strips": ((2, 4, 130, 8), (2, 2, 3000, 8), (2, 2, 3000, 8), {"mask": MaskFunction(lambda b, h, i, j: j % 9 > 0)}),
}


@pytest.fixture(autouse=True)
def threads():
    before = sdpa_ref.get_num_threads()
    yield
    sdpa_ref.set_num_threads(before)


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]


def problem(call):
    """Return query, key, value, a gradient of the output, and the options."""
    query, key, value, options = CALLS[call]
    return *draw(0, query, key, value, (*query[:-1], value[-1])), options


def assert_all_same(gradients, expected):
    for gradient, other in zip(gradients, expected, strict=True):
        assert (gradient is None) == (other is None)
        if gradient is not None:
            assert_same_bits(gradient, other)


def python(script, *arguments):
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("call", CALLS)
def test_any_number_of_threads_gives_the_same_bits(call):
    *arrays, options = problem(call)
    found = []
    for n in (1, 2, 7):
        sdpa_ref.set_num_threads(n)
        found += [sdpa_vjp(*arrays, **options, backend="numba") for _ in range(2)]
    for others in found[1:]:
        assert_all_same(others, found[0])


@pytest.mark.parametrize("call", ["full", "grouped", "folded", "strips"])
def test_a_key_head_alone_has_the_bits_that_it_has_in_a_batch(call):
    query, key, value, grad, options = problem(call)
    options = {name: option for name, option in options.items() if name != "dropout"}  # it differs from head to head
    group = query.shape[1] // key.shape[1]
    together = sdpa_vjp(query, key, value, grad, **options, backend="numba")
    for b, h in ((0, 0), (1, 1)):
        heads = slice(h * group, (h + 1) * group)
        part = query[b, heads], key[b, h : h + 1], value[b, h : h + 1], grad[b, heads]
        alone = sdpa_vjp(*part, **options, backend="numba")
        assert_same_bits(alone.query, together.query[b, heads])
        assert_same_bits(alone.key, together.key[b, h : h + 1])
        assert_same_bits(alone.value, together.value[b, h : h + 1])


def test_a_bias_that_is_summed_changes_no_bit_of_the_others():
    query, key, value, grad = draw(1, (2, 4, 200, 12), (2, 2, 3000, 12), (2, 2, 3000, 20), (2, 4, 200, 20))
    plain = sdpa_vjp(query, key, value, grad, backend="numba")
    whole = np.zeros((2, 4, 200, 3000), np.float32)
    for bias in (whole, whole[:1, :, :1], whole[:1, :1, :, :1], (whole[0, :1], whole[:, :1, :1])):
        gradients = sdpa_vjp(query, key, value, grad, bias=bias, backend="numba")
        assert_all_same(gradients[:3], plain[:3])


@pytest.mark.parametrize("kind", ["lengths", "window", "array", "bias"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_a_row_drops_does_not_change_a_bit(kind, poison):
    L, S = 70, 300
    query, key, value, grad = draw(2, (2, 2, L, 12), (2, 2, S, 12), (2, 2, S, 17), (2, 2, L, 17))
    i, j = np.arange(100, 100 + L)[:, None], np.arange(S)
    seen = np.broadcast_to(np.random.default_rng(3).random((2, 1, L, S)) < 0.05, (2, 2, L, S))
    options = {"mask": seen}
    if kind == "lengths":
        seen = np.broadcast_to(j < np.array([170, 103])[:, None, None, None], (2, 2, L, S))
        options = {"mask": KeyLengths([170, 103])}
    if kind == "window":
        seen = np.broadcast_to((i - 9 <= j) & (j <= i), (2, 2, L, S))
        options = {"mask": Window(9, 0), "query_offset": 100}
    if kind == "bias":
        options = {"bias": np.where(seen, 0.5, -np.inf)}
    clean = sdpa_vjp(query, key, value, grad, **options, backend="numba")
    for x in (0, 101, 120, S - 1):
        dirty_key, dirty_value = key.copy(), value.copy()
        dirty_key[:, :, x], dirty_value[:, :, x] = poison, poison
        dirty = sdpa_vjp(query, dirty_key, dirty_value, grad, **options, backend="numba")
        aware = seen[..., x]
        reached = (seen & aware[..., None]).any(-2)  # keys that share a row with the poison
        assert not reached.all()
        assert_same_bits(dirty.query[~aware], clean.query[~aware])
        assert_same_bits(dirty.key[~reached], clean.key[~reached])
        assert_same_bits(dirty.value[~reached], clean.value[~reached])
        if kind == "bias":
            assert_same_bits(dirty.bias[~aware], clean.bias[~aware])


def test_no_array_of_all_scores_is_made():
    script = """
import resource, sys
import numpy as np
import sdpa_ref
S = 6000
x, grid = np.ones((S, 8), np.float32), lambda b, h, i, j: i // 100 == j // 100
small = x[:600]
for options in ({}, {"bias": np.zeros(600, np.float32)}):
    sdpa_ref.sdpa_vjp(small, small, small, small, backend="numba", **options)
calls = {}, {"mask": sdpa_ref.Causal()}, {"bias": np.zeros(S, np.float32)}, {"mask": sdpa_ref.MaskFunction(grid)}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for options in calls:
    sdpa_ref.sdpa_vjp(x, x, x, x, backend="numba", **options)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // (1 if sys.platform == "darwin" else 1024))
"""
    assert int(python(script)) < 32  # MiB, where one float32 for each score would take 137


@pytest.mark.skipif(sys.platform == "win32", reason="guard pages are made with mprotect")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_nothing_outside_of_the_arrays_is_touched(dtype):
    assert python(GUARDED, dtype) == "no fault\n"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"mask": Causal(), "sink": 0.5}, {"softcap": 2.0, "scale": 1.0}])
def test_gradients_of_half_precision_need_one_forward_pass(monkeypatch, dtype, options):
    pytest.importorskip("ml_dtypes")
    if dtype == "bfloat16" and products():
        pytest.skip("the forward pass multiplies pairs, the backward pass does not")
    rng = np.random.default_rng(0)
    q, k, v, d = rng.standard_normal((4, 2, 3, 40, 16), np.float32).astype(dtype)
    wanted = sdpa_vjp(q, k, v, d, **options, backend="numba")
    output, vjp = sdpa_ref.sdpa_with_vjp(q, k, v, **options, backend="numba")
    assert output.dtype == dtype
    assert output.tobytes() == sdpa_ref.sdpa(q, k, v, **options, backend="numba").tobytes()
    monkeypatch.setattr(gradients, "forward", None)  # it would be called
    for got, right in zip(vjp(d)[:3], wanted[:3], strict=True):
        assert got.tobytes() == right.tobytes()
