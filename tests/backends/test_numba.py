"""What only the Numba backend promises: its bits, its memory accesses, and machine code without surprises."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

import dropped
import llvmlite.binding as llvm
import numba
from machine_code import loops
from sdpa_numba.compile.parts import KernelCompiler
from sdpa_numba.kernels import softmax, tiles
from sdpa_numba.plan import sizes_for

import sdpa_ref
from sdpa_ref import Causal, KeyLengths

TARGETS = {
    "aarch64": ("aarch64-unknown-linux-gnu", "generic", (16, 32), r"fmla\s+v\d+\.{lanes}"),
    "x86-64-v4": ("x86_64-unknown-linux-gnu", "x86-64-v4", (64, 32), r"vfmadd\w+p{letter}\s.*%zmm"),
    "x86-64-v3": ("x86_64-unknown-linux-gnu", "x86-64-v3", (32, 16), r"vfmadd\w+p{letter}\s.*%ymm"),
}

GUARDED = """
import ctypes, mmap, sys
import ml_dtypes, numpy as np
import sdpa_ref

libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
dtype = np.dtype(getattr(ml_dtypes, sys.argv[1], sys.argv[1]))
rng = np.random.default_rng(0)

def guarded(shape, at_end):
    "Return random numbers that end, or begin, at a page that must not be touched."
    count = int(np.prod(shape)) * dtype.itemsize
    pages = -(-count // page)
    area = mmap.mmap(-1, (pages + 2) * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for guard in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(start + guard * page), page, 0) == 0
    offset = page + (pages * page - count if at_end else 0)
    array = np.frombuffer(area, dtype, int(np.prod(shape)), offset).reshape(shape)
    array[...] = rng.standard_normal(shape)
    return array

views = {
    "plain": lambda x: x,
    "reversed": lambda x: x[..., ::-1, ::-1],
    "strided": lambda x: x[..., ::2],
    "transposed": lambda x: x.swapaxes(-1, -2),
}
for length in range(1, 101):
    L, S, E, Ev = [(3, length, 16, 16), (length, 5, 7, 16), (length, 33, length, 3), (2, 40, 16, length)][length % 4]
    for name, view in views.items():
        for at_end in (False, True):
            arrays = []
            for rows, width in ((L, E), (S, E), (S, Ev)):
                width *= 1 + (name == "strided")
                rows, width = (width, rows) if name == "transposed" else (rows, width)
                arrays.append(view(guarded((2, rows, width), at_end)))
            sdpa_ref.sdpa(*arrays, backend="numba", out=view(guarded((2, Ev, L) if name == "transposed" else
                          (2, L, 2 * Ev if name == "strided" else Ev), at_end)))
print("no fault")
"""


def draw(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32)


def bits(state):
    return state.output.tobytes(), state.lse.tobytes()


@pytest.mark.skipif(sys.platform == "win32", reason="guard pages are made with mprotect")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_nothing_outside_of_the_arrays_is_touched(dtype):
    done = subprocess.run([sys.executable, "-c", GUARDED, dtype], capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == "no fault", done.stderr


@pytest.mark.parametrize("L", [1, 2, 9, 32, 48, 150])
@pytest.mark.parametrize("S", [7, 130, 1025, 2500])
@pytest.mark.parametrize("Ev", [33, 32])  # a value is read where it lies only if it fills tiles
def test_a_row_has_the_same_bits_however_many_rows_there_are(L, S, Ev):
    rng = np.random.default_rng(S)
    q, k, v = draw(rng, 2, 4, L, 20), draw(rng, 2, 2, S, 20), draw(rng, 2, 2, S, Ev)
    whole = sdpa_ref.sdpa_state(q, k, v, mask=Causal(), query_offset="end", backend="numba")
    for b, h, i in {(0, 0, 0), (1, 3, L - 1), (1, 1, L // 2)}:
        alone = sdpa_ref.sdpa_state(
            q[b, h, i : i + 1], k[b, h // 2], v[b, h // 2], mask=Causal(), query_offset=S - L + i, backend="numba"
        )
        assert bits(alone) == (whole.output[b, h, i].tobytes(), whole.lse[b, h, i].tobytes())


def test_a_decode_step_is_the_last_row_of_a_prefill():
    rng = np.random.default_rng(1)
    q, k, v = draw(rng, 4, 1100, 64), draw(rng, 2, 1100, 64), draw(rng, 2, 1100, 64)
    prefill = sdpa_ref.sdpa(q, k, v, mask=Causal(), backend="numba")
    for n in (1, 2, 64, 1024, 1100):
        step = sdpa_ref.sdpa(q[:, n - 1 : n], k[:, :n], v[:, :n], backend="numba")
        assert step.tobytes() == prefill[:, n - 1 : n].tobytes()


@pytest.mark.parametrize("L", [2, 70])
@pytest.mark.parametrize("kind", dropped.KINDS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("Ev", [12, 16])  # few rows read values where they lie if they fill vectors
def test_a_dropped_key_does_not_change_a_bit(L, kind, poison, Ev):
    (q, k, v), seen, options = dropped.problem(kind, L, Ev=Ev)
    clean = sdpa_ref.sdpa_state(q, k, v, **options, backend="numba")
    for key in (0, 101, 120, 299):
        dirty_k, dirty_v = k.copy(), v.copy()
        dirty_k[:, :, key], dirty_v[:, :, key] = poison, poison
        dirty = sdpa_ref.sdpa_state(q, dirty_k, dirty_v, **options, backend="numba")
        unaware = np.broadcast_to(~seen[:, None, :, key], clean.lse.shape)
        assert clean.lse[unaware].tobytes() == dirty.lse[unaware].tobytes()
        assert clean.output[unaware].tobytes() == dirty.output[unaware].tobytes()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("acc", ["float32", "float64"])
def test_inner_loops_are_vector_instructions_without_calls_or_spills(target, acc):
    triple, cpu, registers, pattern = TARGETS[target]
    sizes = sizes_for(acc, *registers)
    scores, values = tiles.multiplier(sizes, False), tiles.multiplier(sizes, True)
    update = softmax.softmax(sizes)[0]

    @numba.njit(error_model="numpy", pipeline_class=KernelCompiler)
    def all_loops(vectors, a, row, step, b, c, steps, factor):
        scores(vectors, a, row, step, b, c, steps, factor)
        update(vectors, a, step, b, c, steps)
        values(vectors, a, row, step, b, c, steps, factor)

    all_loops.compile((*[numba.int64] * 7, getattr(numba, acc)))
    code = all_loops.inspect_llvm(all_loops.signatures[0])
    for flag in ("fast", "nnan", "ninf", "reassoc"):
        assert not re.search(rf"\bf(add|sub|mul|div|cmp) ({flag}|\w+ {flag})\b", code)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    module = llvm.parse_assembly(code)
    module.triple, module.data_layout = triple, str(machine.target_data)
    multiply_add = re.compile(
        pattern.format(lanes="4s" if acc == "float32" else "2d", letter="s" if acc == "float32" else "d")
    )
    assembly = machine.emit_assembly(module)
    stack = re.compile(r"\(%r[sb]p|\[(sp|x29)" if "%rsp, %rbp" in assembly else r"\(%rsp|\[(sp|x29)")
    found = [body for body in loops(assembly) if any(multiply_add.match(line) for line in body)]
    counts = [sum(bool(multiply_add.match(line)) for line in body) for body in found]
    tile = sizes.tile_rows * sizes.tile_vectors  # LLVM may unroll it
    whole_tiles = [body for n, body in zip(counts, found, strict=True) if n % tile == 0 and len(body) <= 2 * n]
    assert len(whole_tiles) >= 2  # K @ Q.T and V.T @ P
    for body in whole_tiles:
        assert not any(re.match(r"(call|bl)\b", line) or stack.search(line) for line in body), body
    exponentials = [body for body in found if any(re.match(r"v?f?sub", line) for line in body)]
    assert exponentials
    assert not any(re.match(r"(call|bl)\b", line) for body in exponentials for line in body)


def test_a_boolean_mask_that_drops_whole_blocks_gives_the_bits_of_the_lengths_it_says():
    rng = np.random.default_rng(5)
    query, key, value = (rng.standard_normal((3, 4, 300, 24), np.float32) for _ in range(3))
    lengths = np.array([300, 129, 0])
    keep = np.arange(300) < lengths[:, None, None, None]
    expected = sdpa_ref.sdpa(query, key, value, mask=KeyLengths(lengths), backend="numba")
    for mask in (keep, np.broadcast_to(keep, (3, 4, 300, 300)).copy(), np.repeat(keep, 2, -1)[..., ::2]):
        np.testing.assert_array_equal(sdpa_ref.sdpa(query, key, value, mask=mask, backend="numba"), expected)
