"""The launcher for a device on the stand-in for CuPy: what it launches, moves and keeps, and the kernels by fibers."""

import gc
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import sdpa_cupy
import strict_cupy
import strict_device
from sdpa_cupy.parameters import PARAMETERS, bound
from sdpa_cupy.plan import make_plan
from sdpa_cupy.variants import kernels_for
from strict_cupy import plain, qkv

import sdpa_ref as sr
from sdpa_ref.backend import Result
from sdpa_ref.testing import assert_close, check, device, problem_of, resolve


def test_the_parameter_block_is_one_number_by_value(machine, launches):
    machine(arch=90)
    q, k, v = device.moved(qkv(L=300, S=200, dtype=np.float16))
    out = strict_cupy.asarray(np.zeros((2, 4, 300, 24), np.float16))
    sr.sdpa(q, k, v, mask=sr.Causal(), query_offset=0, out=out)
    ((name, source, defines, grid, block, parameters, shared),) = launches
    assert (name, source, block) == ("attend", "attend.cu", (128,))
    assert (parameters.shape, parameters.dtype) == ((1,), PARAMETERS)
    assert [parameters[0][array]["data"] for array in ("query", "key", "value", "out")] == [
        array.data.ptr for array in (q, k, v, out)
    ]
    assert parameters[0]["banded"]  # what the mask became are numbers of the block itself
    assert parameters[0]["band_right"] == parameters[0]["stop"]["data"] == 0
    assert len(grid) == 3
    assert shared > 0
    assert dict(defines)["ELEMENT"] == 0


def test_a_failed_launch_is_raised_with_what_was_launched(machine, monkeypatch):
    machine()

    def fail(kernel, *launch):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE: invalid argument")

    monkeypatch.setattr(strict_device.Kernel, "launch", fail, raising=False)
    with pytest.raises(RuntimeError, match="INVALID_VALUE") as raised:
        sr.sdpa(*device.moved(qkv()))
    assert re.search(r"kernel='attend.* on device 0 of compute capability 8.0", raised.value.__notes__[0])


def test_small_numbers_are_moved_once_for_a_stream(machine, launches):
    cupy = machine()
    arrays, moves = device.moved(qkv()), []
    cupy.asarray = lambda numbers: moves.append(numbers) or strict_cupy.asarray(numbers)
    for _ in range(3):
        sr.sdpa(*arrays, mask=sr.KeyLengths([3, 7]), sink=0.5)
    once = len(moves)
    assert 0 < once <= 4
    sr.sdpa(*arrays, mask=sr.KeyLengths([2, 7]), sink=0.5)
    assert len(moves) == once + 1
    cupy.stream.ptr = 99
    sr.sdpa(*arrays, mask=sr.KeyLengths([2, 7]), sink=0.5)
    assert len(moves) == 2 * once + 1


def test_kernels_are_remembered_by_all_that_they_depend_on_and_never_by_a_length():
    def planned(arch=80, want=frozenset({"output"}), L=300, S=700, dtype=np.float16, **options):
        return make_plan(problem_of(*qkv(L=L, S=S, dtype=dtype), **options), want, arch)

    every = [
        planned(), planned(arch=75), planned(want=frozenset({"output", "weights"})), planned(softcap=2.0),
        planned(L=1, S=400), planned(L=1), planned(dtype=np.float64),
    ]  # fmt: skip
    assert len({tuple(each._replace(grid=()) for each in plan.launches) for plan in every}) == len(every)
    known = kernels_for.cache_info()
    for n in range(100, 400):  # lengths and numbers of the call
        planned(L=n, S=n, mask=sr.Causal())
        planned(L=n, S=2 * n, scale=1 / n)
        planned(L=1, S=600 + n)
    assert kernels_for.cache_info().misses == known.misses
    assert known.maxsize is not None


def test_a_call_in_a_loop_does_little_in_python(machine, launches):
    """What plan and parameter block cost, counted as calls of functions: about ten microseconds."""
    machine(arch=90)
    arrays = qkv(L=1, S=4096, E=128, Ev=128, dtype=np.float16)
    out, want = np.zeros((2, 4, 1, 128), np.float16), frozenset({"output"})
    problem, calls = problem_of(*arrays)._replace(out=out, plain=False), []

    def planned():
        bound(make_plan(problem, want, 90), lambda array: array.ctypes.data, problem, Result(out), 16)

    planned()
    sys.setprofile(lambda frame, event, what: calls.append(event) if event == "call" else None)
    try:
        planned()
    finally:
        sys.setprofile(None)
    assert len(calls) < 90


def own_calls(step):
    """Return how many functions of the two packages a second step calls."""
    calls = []
    step()
    sys.setprofile(lambda frame, event, what: calls.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        step()
    finally:
        sys.setprofile(None)
    packages = tuple(str(Path(each.__file__).parent) for each in (sr, sdpa_cupy))
    return len([file for file in calls if file.startswith(packages)])


@pytest.mark.parametrize("S", [400, 4000])
@pytest.mark.parametrize(
    ("options", "given", "most"),
    [({}, True, 28), ({}, False, 25), ({"mask": sr.Causal()}, True, 36), ({"mask": sr.Causal()}, False, 31)],
)
def test_a_step_of_decoding_does_little_in_python(machine, launches, options, given, most, S):
    """What a whole call costs, whatever its length and offset, counted as calls of the two packages' functions."""
    machine(arch=90)
    q, k, v = device.moved(qkv(L=1, S=S, E=128, Ev=128, Hq=8, dtype=np.float16))
    given = {"out": strict_cupy.asarray(np.zeros((2, 8, 1, 128), np.float16))} if given else {}
    steps = iter([(n, {"query_offset": n} if options else {}) for n in (S - 3, S - 2)])

    def step():
        n, offset = next(steps)
        sr.sdpa(q, k[..., : n + 1, :], v[..., : n + 1, :], **given, **options, **offset)

    assert 0 < own_calls(step) <= most + 8 * (S > 512)  # a second kernel, and memory for both


def test_each_device_loads_its_own_kernels(machine, launches):
    cupy = machine()
    for number in (0, 1, 0):
        cupy.device.id = number
        sr.sdpa(*device.moved(qkv()))  # a kernel of another device would be refused
    assert len(launches) == 3


@pytest.mark.parametrize("arch", [80, 90])
def test_more_shared_memory_than_every_kernel_has_is_asked_for(machine, launches, arch):
    machine(arch=arch)
    sr.sdpa(*device.moved(qkv(L=300, S=300, E=128, Ev=128, dtype=np.float16)))
    assert launches[-1][-1] > 48 * 1024


# ---- graphs


def test_a_captured_call_moves_loads_and_waits_for_nothing(machine, launches):
    cupy = machine()
    cupy.stream.ptr = 77
    q, k, v = device.moved(qkv(L=1, S=4096))
    out = strict_cupy.asarray(np.zeros((2, 4, 1, 24), np.float32))
    options = {"mask": sr.KeyLengths([4000, 9]), "sink": 0.25, "out": out}
    cupy.stream.capturing = True
    with pytest.raises(RuntimeError, match="make this call once on this stream before it is captured"):
        sr.sdpa(q, k, v, **options)
    cupy.stream.capturing = False
    sr.sdpa(q, k, v, **options)
    cupy.stream.capturing = True
    warm = len(launches)
    for _ in range(2):
        sr.sdpa(q, k, v, **options)
    first, second = (launches[warm + n * warm][5][0]["workspace"] for n in range(2))
    assert len(launches) == 3 * warm
    assert first == second != 0
    cupy.stream.capturing = False
    sr.sdpa(q, k, v, **options)
    assert launches[-1][5][0]["workspace"] != first  # which the graph owns


def test_a_graph_keeps_the_memory_that_it_touches(machine, launches):
    cupy = machine()
    cupy.stream.ptr = 77

    def call():
        q, k, v = device.moved(qkv(L=1, S=4096))
        out = strict_cupy.asarray(np.zeros((2, 4, 1, 24), np.float32))
        options = {"mask": sr.KeyLengths([4000, 9]), "sink": 0.25, "out": out}
        sr.sdpa(q, k, v, **options)
        cupy.stream.begin_capture()
        sr.sdpa(q, k, v, **options)
        sr.sdpa(q, k, v, mask=sr.KeyLengths([4000, 9]))  # whose result is nobody's
        return cupy.stream.end_capture()

    graph = call()
    sr.sdpa(*device.moved(qkv(L=1, S=4096)))  # by which the next capture begins anew
    sys.modules["sdpa_cupy.launch.cuda"]._constant.cache_clear()  # as 256 other calls would
    gc.collect()
    before = len(launches)
    graph.launch()
    assert len(launches) == before + 4  # two calls, each of whose keys several blocks share


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"score_mod": plain}, "score_mod is a Python function"),
        ({"mask": sr.Segments(np.arange(5) % 2, np.arange(7) % 2)}, "rules only"),
        ({"sink": np.ones(4)}, "sink has to be made float64"),
    ],
)
def test_what_is_more_than_launches_cannot_be_captured(machine, options, reason):
    cupy = machine()
    cupy.stream.ptr, cupy.stream.capturing = 77, True
    options |= {"sink": device.moved(options["sink"])} if "sink" in options else {}
    with pytest.raises(RuntimeError, match=f"cannot be captured: .*{reason}"):
        sr.sdpa(*device.moved(qkv()), **options)


# ---- the kernels, by fibers, and on a device


def test_kernels_on_the_stand_in(machine, by_fibers):
    machine()
    arrays, rule = qkv(L=3, S=600, batch=(), dtype=np.float16), sr.Segments(np.arange(3) % 2, np.arange(600) % 2)
    output = sr.sdpa(*device.moved(arrays), mask=rule).get()
    assert_close(output, *arrays, mask=rule)


def test_every_law_holds_on_a_device():
    reason = sdpa_cupy.unavailable()
    if reason and "cupy" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
        pytest.skip(reason)
    run = check(resolve("cupy"), rounds=10, seconds=120)
    assert [f"{o.law.name}: {o.found.case}\n{o.failure.message}" for o in run.failures] == []
    assert run.passed


@pytest.mark.parametrize(
    ("mask", "offset"),
    [
        (sr.Causal(), 700),
        (sr.Window(20, 3) & sr.KeyLengths(350), -5),
        (sr.Window(9, 0) | sr.FirstTokens(2), "end"),
        (sr.Chunked(37) & sr.KeyStarts(3), 301),
        (sr.Chunked(64), -70),
        (sr.Prefix(5) & sr.QueryLengths(2), 100),
        (sr.KeyLengths(0), 0),
    ],
    ids=repr,
)
@pytest.mark.parametrize("L", [3, 70])
def test_positional_masks_move_nothing_to_the_device(machine, by_fibers, mask, offset, L):
    cupy = machine()
    arrays = qkv(L=L, S=600, batch=(), dtype=np.float16)
    there = device.moved(arrays)
    options, moves = {"mask": mask, "query_offset": offset}, []
    cupy.asarray = lambda numbers: moves.append(numbers.shape) or strict_cupy.asarray(numbers)
    for more, moved in (({}, []), ({"bias": sr.ALiBi(0.125)}, [(4,)])):  # the slopes
        output = sr.sdpa(*there, **options, **more)
        assert moves == moved
        assert_close(output.get(), *arrays, **options, **more)


@pytest.mark.parametrize("mask", [sr.KeyLengths, lambda n: sr.Window(9, 0) & sr.KeyLengths(n)], ids=["all", "window"])
def test_other_lengths_of_each_entry_are_other_numbers_of_the_same_kernels(machine, by_fibers, mask):
    cupy = machine()
    arrays, moves = qkv(L=3, S=600, dtype=np.float16), []
    there, B = device.moved(arrays), 2
    cupy.asarray = lambda numbers: moves.append(numbers.nbytes) or strict_cupy.asarray(numbers)
    loaded = []
    for lengths in ([3, 600], [400, 0], [599, 64]):
        options = {"mask": mask(lengths), "query_offset": "end"}
        assert_close(sr.sdpa(*there, **options).get(), *arrays, **options)
        loaded.append(sys.modules["sdpa_cupy.launch.cuda"]._kernel.cache_info().misses)
    assert len(set(loaded)) == 1
    assert moves == [80 * B] * 3  # ten numbers an entry, none a row


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"mask": sr.Window(9, 0), "query_offset": "end"}, 28), ({"mask": sr.KeyLengths(300)}, 28),
        ({"mask": sr.KeyLengths([300, 200])}, 40), ({"bias": sr.ALiBi(0.5), "query_offset": 399}, 36),
        ({"softcap": 30.0}, 28), ({"sink": 0.5}, 38),
    ],
    ids=str,
)  # fmt: skip
def test_other_steps_of_decoding_do_little_in_python(machine, launches, options, most):
    machine(arch=90)
    arrays = device.moved(qkv(L=1, S=400, E=128, Ev=128, Hq=8, dtype=np.float16))
    assert 0 < own_calls(lambda: sr.sdpa(*arrays, **options)) <= most
