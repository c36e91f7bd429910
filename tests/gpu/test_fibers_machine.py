"""The emulated operations against formulas written here from the PTX manual, and the faults that the machine names."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from compiler import needs_compiler
from sdpa_cupy.launch.fibers import SCHEDULES, BuildError, Fault, Fibers, build
from sdpa_cupy.plan import Launch

pytestmark = needs_compiler

MICRO = Path(__file__).parent / "micro"
LANES = np.arange(32)
G, T = LANES // 4, LANES % 4  # "groupID" and "threadID_in_group" of the manual


def call(launcher, kernel, *arrays, source="operations.cu", threads=32, blocks=1, shared=0, turing=False, more=()):
    """Run a kernel whose parameters are the addresses of these arrays and some integers."""
    parameters = np.array([*map(launcher.address, arrays), *more], np.int64)
    launcher.run(Launch(kernel, source, (("TURING", turing),), (blocks, 1, 1), threads, shared), parameters)


def words_of(pairs, dtype):
    """Return registers of pairs of 16-bit numbers, the first in the lower half."""
    return np.ascontiguousarray(pairs.astype(dtype)).view(np.uint16).view(np.uint32)[..., 0]


def fragments(tiles, row, column, dtype=None):
    """Return what lanes hold of tiles: `row(i)` and `column(i)` of the number i of a lane, two a register or one."""
    count = tiles[0].size // 32
    numbers = np.stack([tiles[:, row(i), column(i)] for i in range(count)], -1)
    return numbers.view(np.uint32) if dtype is None else words_of(numbers.reshape(*numbers.shape[:-1], -1, 2), dtype)


def units_and_numbers(K):
    """Return all 16 x K matrices with a single 1, and as many K x 8 matrices of small integers."""
    A = np.eye(16 * K, dtype=np.float32).reshape(-1, 16, K)
    B = np.random.default_rng(K).integers(-8, 8, (len(A), K, 8)).astype(np.float32)
    return A, B


def multiplied(kernel, a, b, **options):
    """Return the products that a kernel makes of these registers, beside 1, 2, 3, 4 in each lane."""
    c = np.broadcast_to(np.float32([1, 2, 3, 4]).view(np.uint32), (*a.shape[:-1], 4))
    launcher = Fibers(folder=MICRO)
    out = launcher.empty((len(a), 32, 4), np.float32)
    registers = np.concatenate([a, b, c], -1).copy(order="C")
    call(launcher, kernel, registers, out, out, blocks=len(a), **options)
    d = np.full((len(a), 16, 8), np.nan, np.float32)
    for i in range(4):
        d[:, G + 8 * (i >= 2), 2 * T + i % 2] = out[..., i] - (i + 1)
    return d


@pytest.mark.parametrize(("kernel", "dtype"), [("multiply_half", np.float16), ("multiply_bfloat", "bfloat16")])
def test_products_of_16_bit_tiles(kernel, dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    A, B = units_and_numbers(16)
    a = fragments(A, lambda i: G + 8 * (i // 2 % 2), lambda i: 2 * T + i % 2 + 8 * (i >= 4), dtype)
    b = fragments(B, lambda i: 2 * T + i % 2 + 8 * (i >= 2), lambda i: G, dtype)
    np.testing.assert_array_equal(multiplied(kernel, a, b), A @ B)


def test_products_of_half_tiles_on_turing():
    A, B = units_and_numbers(8)
    a = fragments(A, lambda i: G + 8 * (i >= 2), lambda i: 2 * T + i % 2, np.float16)
    b = fragments(B, lambda i: 2 * T + i, lambda i: G, np.float16)
    np.testing.assert_array_equal(multiplied("multiply_half_8", a, b, turing=True), A @ B)


def test_products_of_tf32_tiles_ignore_the_lower_13_bits():
    A, B = units_and_numbers(8)
    below = (B.view(np.uint32) | (1 << 13) - 1).view(np.float32)
    a = fragments(A, lambda i: G + 8 * (i % 2), lambda i: T + 4 * (i >= 2))
    b = fragments(below, lambda i: T + 4 * i, lambda i: G)
    np.testing.assert_array_equal(multiplied("multiply_tf32", a, b), A @ B)


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_loaded(transposed):
    memory = np.arange(512, dtype=np.uint16)
    rows = np.random.default_rng(0).permutation(64)[:32].astype(np.uint32)
    launcher = Fibers(folder=MICRO)
    out = launcher.empty((32, 4), np.uint32)
    call(launcher, "load_transposed" if transposed else "load", rows * 16, out, memory, shared=1024)
    matrices = memory.reshape(64, 8)[rows].reshape(4, 8, 8)
    if transposed:
        matrices = matrices.swapaxes(1, 2)
    pairs = np.stack([matrices[:, G, 2 * T], matrices[:, G, 2 * T + 1]], -1)
    np.testing.assert_array_equal(out.T, words_of(pairs, np.uint16))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shuffles_and_votes(schedule):
    order, late = schedule
    launcher = Fibers(folder=MICRO, order=order, late=late)
    given, out = np.arange(64, dtype=np.uint32), launcher.empty((64, 5), np.uint32)
    call(launcher, "shuffle", given, out, out, threads=64)
    expected = np.stack([given ^ 1, given ^ 6, given ^ 16, given >= 32, given * 0 + 1], -1)
    np.testing.assert_array_equal(out, expected)


def test_conversions():
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    rng = np.random.default_rng(0)
    numbers = np.concatenate([
        rng.integers(0, 2**32, 2**16, dtype=np.uint32).view(np.float32),
        (rng.standard_normal(2**16) * 2.0 ** rng.integers(-30, 20, 2**16)).astype(np.float32),
        np.float32([0.0, -0.0, 65504, 65519.99, 65520, -1e9, 2**-24, 2**-25, 3 * 2**-26, np.inf, -np.inf, np.nan] * 8),
    ])  # fmt: skip
    numbers = numbers[: len(numbers) // 64 * 64].reshape(-1, 2)
    launcher = Fibers(folder=MICRO)
    out = launcher.empty((len(numbers), 6), np.uint32)
    call(launcher, "convert", numbers, out, out, blocks=len(numbers) // 32)
    low, high = numbers.T
    with np.errstate(all="ignore"):
        for got, given, dtype in (
            (out[:, 0] & 0xFFFF, low, np.float16), (out[:, 0] >> 16, low, bfloat16),
            (out[:, 1] & 0xFFFF, low, np.float16), (out[:, 1] >> 16, high, np.float16),
            (out[:, 2] & 0xFFFF, low, bfloat16), (out[:, 2] >> 16, high, bfloat16),
        ):  # fmt: skip
            same_numbers(got.astype(np.uint16).view(dtype), given.astype(dtype))
        codes = np.arange(len(out)).astype(np.uint16)
        same_numbers(out[:, 3].view(np.float32), codes.view(np.float16).astype(np.float32))
        same_numbers(out[:, 4].view(np.float32), codes.view(bfloat16).astype(np.float32))
        powers = np.exp2(low.astype(np.float64))
    powers[powers < 2.0**-126] = 0
    got = out[:, 5].view(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(powers))
    with np.errstate(over="ignore"):
        assert (abs(got.view(np.int32) - powers.astype(np.float32).view(np.int32))[~np.isnan(got)] <= 2).all()


def same_numbers(got, expected):
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got[~nan].view(f"u{got.itemsize}"), expected[~nan].view(f"u{got.itemsize}"))


def test_tf32_rounds_to_eleven_bits_and_ties_away_from_zero():
    numbers = np.random.default_rng(0).standard_normal(320).astype(np.float32)
    numbers[:4] = 1 + 2.0**-11, -1 - 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-12
    launcher = Fibers(folder=MICRO)
    out = launcher.empty(320, np.float32)
    call(launcher, "round_tf32", numbers, out, out, blocks=10)
    mantissa, exponent = np.frexp(numbers.astype(np.float64))
    scaled = mantissa * 2**11
    np.testing.assert_array_equal(out, np.ldexp(np.trunc(scaled + np.copysign(0.5, scaled)), exponent - 11))


@pytest.mark.parametrize("late", [False, True])
def test_copies_land_in_the_order_of_their_groups(late):
    data = np.arange(32 * 12, dtype=np.uint32).reshape(32, 3, 4)
    launcher = Fibers(folder=MICRO, late=late)
    out = launcher.empty((32, 2, 4), np.uint32)
    call(launcher, "copy", out, out, data, shared=32 * 48)
    np.testing.assert_array_equal(out, data[:, :2])


RACE = r"race: (reads|writes) byte \d+ of shared memory, which (thread \d+|several threads) (read|wrote), with no bar"
FAULTS = {
    1: "comes to (mma_16816|warp_any), others of its warp wait at (mma_16816|warp_any)",
    2: "deadlock: 0 threads wait at a barrier, 2 have ended; 31 lanes of warp 0 at warp_any; 31 lanes of warp 1",
    3: "deadlock: 32 threads wait at a barrier, 32 have ended",
    4: "deadlock: 63 threads wait at a barrier, 0 have ended; 1 lanes of warp 0 at warp_any",
    5: r"reads 1 bytes of global memory outside every array, at \+64 of the 64 bytes of an array uint8 \(64,\)",
    6: "writes 1 bytes of global memory outside every writable array, at -1 of the 64 bytes of an array int8",
    7: r"reads 1 bytes of global memory outside every array, at [+-]\d+(,\d{3}){4} of the 64 bytes",
    8: "reads 4 bytes at an address that is no multiple",
    9: "ldmatrix: the address in shared memory is no multiple of 16",
    10: r"ldmatrix: byte 1\d\d\d is outside the 1024 bytes of shared memory",
    11: "an asynchronous copy: the address in shared memory is no multiple of 16",
    12: "an asynchronous copy of 16 bytes at an address that is no multiple",
    13: "copies 16 bytes of global memory outside every array",
    14: "the thread ends before it waited for this asynchronous copy",
    15: r"writes byte \d+ of shared memory, where an asynchronous copy of thread \d+ is under way",
    16: RACE,
    17: RACE,
    18: RACE,
    19: RACE,
    20: "writes byte 1024, outside the 1024 bytes of shared memory",
    21: "reads 16 bytes of global memory outside every array",
    23: "copies 16 bytes of global memory outside every array",
    22: "thread 63: reads byte 1020 of shared memory, which nobody wrote",
}


def misbehave(number, **options):
    """Return the output of faults.cu."""
    launcher = Fibers(folder=MICRO, **options)
    given, out = np.arange(64, dtype=np.uint8), launcher.empty(64, np.int8)
    call(launcher, "misbehave", given, out, source="faults.cu", threads=64, shared=1024, more=[number])
    return out


@pytest.mark.parametrize("number", FAULTS)
def test_faults_are_named_in_every_schedule(number):
    lines = (MICRO / "faults.cu").read_text().splitlines()
    (line,) = [n for n, text in enumerate(lines, 1) if f"case {number}:" in text]
    for order, late in SCHEDULES:
        with pytest.raises(Fault, match=FAULTS[number]) as fault:
            misbehave(number, order=order, late=late)
        assert re.search(rf"\(faults.cu:({line}|{line + 1}|{line + 2})\)$", str(fault.value))


def test_after_a_fault_the_machine_works_as_before():
    for number in FAULTS:
        with pytest.raises(Fault):
            misbehave(number)
        np.testing.assert_array_equal(misbehave(0), np.arange(64))


def test_an_array_that_is_read_only():
    launcher = Fibers(folder=MICRO)
    given = np.arange(64, dtype=np.uint8)
    given.flags.writeable = False
    with pytest.raises(Fault, match=r"writes 1 bytes of global memory outside every writable array, at \+\d+ of"):
        call(launcher, "misbehave", given, given, source="faults.cu", threads=64, shared=1024, more=[0])


def test_a_block_that_no_device_has():
    for threads, shared in ((33, 0), (64, 1 << 20)):
        with pytest.raises(Fault, match=f"no block can have {threads} threads and {shared} bytes of shared memory"):
            call(Fibers(folder=MICRO), "shuffle", threads=threads, shared=shared)
    with pytest.raises(Fault, match="shuffle is built for 64 threads a block, and launched with 96"):
        call(Fibers(folder=MICRO), "shuffle", threads=96)


def test_bank_conflicts_are_counted_by_line():
    launcher = Fibers(folder=MICRO)
    memory, out = np.zeros(512, np.uint16), launcher.empty((32, 4), np.uint32)
    for step, factor in ((1, 1.0), (2, 2.0), (4, 4.0), (8, 8.0), (0, 1.0)):  # rows of 16 bytes, so many apart
        rows = (np.arange(32) % 8 * step).astype(np.uint32)
        call(launcher, "load", rows * 16, out, memory, shared=1024)
        assert max(launcher.reports[-1].conflicts.values(), default=1.0) == factor
    assert all("operations.cu" in line for report in launcher.reports for line in report.conflicts)


# ---- building


def test_a_compiler_is_asked_for_where_there_is_none(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.unavailable() == (
        "it needs a C++ compiler and there is no 'no-such-compiler'; try: apt install g++ (or set CXX)"
    )


def test_what_the_compiler_says_of_a_wrong_source(tmp_path):
    (tmp_path / "wrong.cu").write_text('#include "hardware.h"\nint f() { return nonsense; }\n')
    with pytest.raises(BuildError, match=r"wrong\.cu:2:.*nonsense"):
        build.library("wrong.cu", (), 80, tmp_path)
    assert list(build.cache_directory(build.RUNTIME, build.KERNELS, tmp_path).iterdir()) == []


def test_processes_may_build_at_the_same_time(tmp_path):
    code = (
        "import sys; from pathlib import Path; from sdpa_cupy.launch.fibers.build import library;"
        f"print(library('faults.cu', (), 80, Path({str(MICRO)!r})).read_bytes()[:4])"
    )
    machine = build.runtime().parent  # which takes longest, and is built
    shutil.copytree(machine, tmp_path / "fibers" / machine.name)
    environment = os.environ | {"SDPA_REF_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    assert [process.communicate()[0] for process in running] == ["b'\\x7fELF'\n"] * 2
    assert sorted(file.suffix for file in tmp_path.rglob("*") if file.is_file()) == [".o", ".o", ".so"]
