"""Which kernel does a call, and what it leaves undone: memory that is not allocated, scores that are not touched."""

import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import settings

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

import llvmlite.binding as llvm
import numba
import tilted
from sdpa_numba import calls
from sdpa_numba.compile.parts import KernelCompiler, native
from sdpa_numba.kernels import scores
from sdpa_numba.kernels.record import FORWARD, INTERVALS, settle_few_rows, settle_many_rows
from sdpa_numba.kernels.rows import rows_at
from sdpa_numba.plan import sizes_for
from sdpa_numba.runtime.call import ARGUMENTS, SETTLE
from sdpa_numba.runtime.threads import POOL, run, team

import sdpa_ref
from sdpa_ref import ALiBi, Causal, Dropout, Int8, KVCache, Window

NIGHTLY = settings.default.max_examples >= 1000


OPTIONS = {
    "bias": lambda rng, L: {"bias": np.where(rng.random((2, 4, L, 1100)) < 0.3, -np.inf, 0.5)},
    "array": lambda rng, L: {"mask": rng.random((2, 4, L, 1100)) < 0.5},
    "alibi": lambda rng, L: {"bias": ALiBi(np.arange(4.0)), "query_offset": 9},
    "softcap": lambda rng, L: {"softcap": 3.0},
    "sink": lambda rng, L: {"sink": 0.5},
    "dropout": lambda rng, L: {"dropout": Dropout(0.3, 2**40 + 7)},
    "score_mod": lambda rng, L: {"score_mod": tilted.compiled},
    "all": lambda rng, L: {
        "bias": np.where(rng.random((2, 4, L, 1100)) < 0.3, -np.inf, 0.5).astype(np.float16),
        "mask": rng.random((2, 1, L, 1100)) < 0.5,
        "softcap": 3.0,
        "sink": 0.5,
        "dropout": Dropout(0.3, 2**40 + 7),
        "score_mod": tilted.compiled,
    },
}

# Scores of 8 rows and 3 pages of keys, of which nobody may touch those of the page between: all rows see them.
UNTOUCHED = """
import ctypes, mmap
import numba, numpy as np
from sdpa_numba.compile.parts import KernelCompiler
from sdpa_numba.kernels import scores
from sdpa_numba.kernels.record import INTERVALS
from sdpa_numba.kernels.rows import FIELDS, rows_at
from sdpa_numba.plan import sizes_for

lanes, page = 8, mmap.PAGESIZE
keys = page // (4 * lanes)  # of a page
mask = scores.masker(sizes_for("float32", 4 * lanes, 16))

@numba.njit(error_model="numpy", pipeline_class=KernelCompiler)
def apply(rows, t, count, limits):
    mask(INTERVALS, rows_at(rows, 8), 1, t, 0, count, limits)

prefix, start, stop = np.zeros(lanes), np.arange(lanes), np.arange(2 * keys, 2 * keys + lanes)
table = np.zeros((FIELDS, lanes), np.int64)
table[2:5] = prefix, start, stop
limits = np.zeros(3 * lanes, np.int32)
area = mmap.mmap(-1, 3 * page)
t = np.frombuffer(area, np.float32).reshape(3 * keys, lanes)
t[...] = 1
at, libc = ctypes.addressof(ctypes.c_char.from_buffer(area)), ctypes.CDLL(None)
assert libc.mprotect(ctypes.c_void_p(at + page), ctypes.c_size_t(page), 0) == 0
apply(table.ctypes.data, at, 3 * keys, limits.ctypes.data)
assert libc.mprotect(ctypes.c_void_p(at + page), ctypes.c_size_t(page), 3) == 0
j = np.arange(3 * keys)[:, None]
assert (t == np.where((start <= j) & (j < stop), 1, -np.inf)).all()
print("untouched")
"""


@pytest.mark.parametrize(
    ("option", "dtype"),
    [
        (option, dtype)
        for option in OPTIONS
        for dtype in ("float16", "float32", "float64")
        if NIGHTLY or dtype == "float32" or option not in ("score_mod", "all")  # whose kernels are compiled for them
    ],
)
def test_few_rows_have_every_option_in_their_kernel(monkeypatch, option, dtype):
    """Four of nine rows, which the other kernel computes, have the same bits alone."""
    rng, settlers = np.random.default_rng(0), []
    options = OPTIONS[option](rng, 9)
    few = {name: x[:, :, :4] if isinstance(x, np.ndarray) else x for name, x in options.items()}
    q, k, v = (rng.standard_normal((2, heads, n, 20)).astype(dtype) for heads, n in ((4, 9), (2, 1100), (2, 1100)))

    def noting(call):
        settlers.append(np.frombuffer(call, np.int64, ARGUMENTS // 8)[SETTLE // 8])
        run(call)

    monkeypatch.setattr(calls, "run", noting)
    whole = sdpa_ref.sdpa(q, k, v, **options, backend="numba")
    part = sdpa_ref.sdpa(q[:, :, :4], k, v, **few, backend="numba")
    assert settlers == [native(settle_many_rows), native(settle_few_rows)]
    assert part.tobytes() == whole[:, :, :4].tobytes()
    whole = sdpa_ref.sdpa_weights(q, k, **options, backend="numba")
    part = sdpa_ref.sdpa_weights(q[:, :, :4], k, **few, backend="numba")
    assert settlers[2:] == settlers[:2]
    assert part.tobytes() == whole[:, :, :4].tobytes()


def test_weights_of_few_rows_are_those_of_many_where_a_row_is_nan():
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 9, 16), np.float32), rng.standard_normal((2, 300, 16), np.float32)
    keep = rng.random((9, 300)) < 0.5
    k[1, 7], keep[0, 7], keep[3] = np.nan, True, False
    whole = sdpa_ref.sdpa_weights(q, k, mask=keep, backend="numba")
    assert np.isnan(whole[1, 0]).sum() == keep[0].sum()
    assert not whole[:, 3].any()
    for i in range(0, 9, 2):
        part = sdpa_ref.sdpa_weights(q[:, i : i + 2], k, mask=keep[i : i + 2], backend="numba")
        assert part.tobytes() == whole[:, i : i + 2].tobytes()


def test_few_rows_of_stored_keys_have_dropout_and_functions():
    rng = np.random.default_rng(1)
    cache = KVCache(2, 2, 32, capacity=1200, store=Int8())
    cache.append(*rng.standard_normal((2, 2, 2, 1100, 32), np.float32))
    query, options = (
        rng.standard_normal((2, 4, 2, 32), np.float32),
        {"dropout": Dropout(0.3, 7)} | ({"score_mod": tilted.compiled} if NIGHTLY else {}),  # a kernel of its own
    )
    ours, exact = (cache.attend(query, **options, backend=name) for name in ("numba", "reference"))
    np.testing.assert_allclose(ours, exact, atol=1e-5)


def planned(monkeypatch, threads, *shape, mask=None):
    """Return how a call of the kernel for many rows is cut up, for arrays of this shape."""
    settled = []

    def settle(call):
        settle_many_rows(id(call) + bytes.__basicsize__ - 1)
        settled.append(np.frombuffer(call, FORWARD, 1, ARGUMENTS)[0].copy())

    team()
    x = np.empty(shape, np.float32)
    with monkeypatch.context() as patched:
        patched.setattr(calls, "run", settle)
        patched.setattr(calls, "team", lambda: (POOL.address, threads - 1))
        sdpa_ref.sdpa(x, x, x, mask=mask, backend="numba")
    return settled[0]


@pytest.mark.parametrize("shape", [(64, 8, 256, 32), (8, 12, 197, 64)])
def test_heads_that_are_many_need_no_memory_for_packed_keys(monkeypatch, shape):
    for threads in (1, 2, 4):
        plan = planned(monkeypatch, threads, *shape)
        assert (plan["packed"], plan["memory"], plan["strips"]) == (0, 0, 1)
    plan = planned(monkeypatch, 2, 1, *shape[2:])
    assert plan["packed"]
    assert plan["strips"] >= 2  # all threads have work


def test_keys_that_few_rows_see_need_no_memory(monkeypatch):
    """Each strip of a window packs its keys itself: it has few in common with others."""
    near, far, shape = Causal() & Window(255, 0), Causal() & Window(2047, 0), (2, 8192, 64)
    plan = planned(monkeypatch, 2, *shape, mask=near)
    assert (plan["packed"], plan["memory"]) == (0, 0)
    assert plan["strips"] >= 8
    assert planned(monkeypatch, 2, *shape, mask=far)["packed"]


@pytest.mark.parametrize("mask", [Window(99, 0), Window(40, 20) & Causal()])
def test_a_window_has_the_bits_of_the_same_keys_in_an_array(mask):
    x = np.random.default_rng(0).standard_normal((2, 2100, 20), np.float32)
    dense = mask.dense(2100, 2100)
    ours, same = (sdpa_ref.sdpa(x, x, x, mask=m, backend="numba") for m in (mask, dense))
    assert ours.tobytes() == same.tobytes()


@pytest.mark.parametrize("mask", [None, Causal()])
def test_one_strip_of_a_head_has_the_bits_of_many(mask):
    x = np.random.default_rng(0).standard_normal((40, 300, 20), np.float32)
    whole = sdpa_ref.sdpa(x, x, x, mask=mask, backend="numba")
    assert whole[7].tobytes() == sdpa_ref.sdpa(x[7], x[7], x[7], mask=mask, backend="numba").tobytes()


@pytest.mark.skipif(sys.platform == "win32", reason="pages are protected with mprotect")
@pytest.mark.skipif(mmap.PAGESIZE > 16384, reason="a page holds more keys than a mask counts")
def test_scores_that_all_rows_see_are_not_touched():
    done = subprocess.run([sys.executable, "-c", UNTOUCHED], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout.strip() == "untouched", done.stderr


def test_dropping_keys_makes_no_masked_stores():
    sizes = sizes_for("float32", 32, 16)
    mask = scores.masker(sizes)

    @numba.njit(error_model="numpy", pipeline_class=KernelCompiler)
    def apply(rows, vectors, t, low, high, limits):
        mask(INTERVALS, rows_at(rows, 24), vectors, t, low, high, limits)

    apply.compile((numba.int64,) * 6)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "x86_64-unknown-linux-gnu"
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu="x86-64-v3", opt=3)
    module = llvm.parse_assembly(apply.inspect_llvm(apply.signatures[0]))
    module.triple, module.data_layout = triple, str(machine.target_data)
    assembly = machine.emit_assembly(module)
    assert "vblendv" in assembly
    assert "maskmov" not in assembly
