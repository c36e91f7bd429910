"""The thread pool of the Numba backend: every task once, whoever calls, forks, raises or interrupts."""

import ctypes
import gc
import os
import re
import sys
import threading
import time

import numpy as np
import pytest

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

import llvmlite.binding as llvm
import numba
from sdpa_numba.runtime.pool import ASLEEP, BOX
from sdpa_numba.runtime.tasks import next_task
from sdpa_numba.runtime.threads import POOL, get_num_threads, set_num_threads
from sdpa_numba.vector.atomic import add, look
from sdpa_numba.vector.simd import allocate, release
from thread_work import helper_joins, kernel, number, numbers, python, run

import sdpa_ref


@kernel
def fail(worker, n_tasks, bad):
    while True:
        task = next_task(worker)
        if task >= n_tasks:
            break
        if task >= bad:
            release(allocate(1 << 60))


@kernel
def hold(worker, arrived, gate):
    add(arrived, 1)
    while look(gate) == 0:
        pass


@pytest.fixture(autouse=True)
def two_threads():
    before = get_num_threads()
    set_num_threads(2)
    yield
    set_num_threads(before)


@pytest.mark.parametrize("n", [1, 2, 7])
@pytest.mark.parametrize("n_tasks", [0, 1, 2, 3, 1000])
def test_every_task_is_done_once_by_any_number_of_threads(n, n_tasks):
    set_num_threads(n)
    for _ in range(20):
        numbers(n_tasks, 50)


@pytest.mark.parametrize("triple", ["x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", "aarch64-apple-darwin"])
def test_the_next_task_is_taken_without_a_call(triple):
    take = numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)(lambda counter: add(counter, 1))
    take.compile((numba.int64,))
    (code,) = take.inspect_llvm().values()
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(re.sub(r"target (triple|datalayout) = .*", "", code))
    assembly = llvm.Target.from_triple(triple).create_target_machine(opt=3).emit_assembly(module)
    assert re.search(r"lock\s+(xaddq|incq)|ldaxr|ldadd", assembly)
    assert not re.search(r"\t(callq?|bl)\t", assembly)


def test_a_helper_works_at_the_same_time():
    helper_joins()
    time.sleep(0.05)  # by now it sleeps
    helper_joins()


def test_a_small_call_wakes_no_helper_unless_calls_follow_closely():
    helper_joins()
    helper = (ctypes.c_int64 * 1).from_address(POOL.address + BOX)  # its state
    x = np.ones((1, 8, 16, 64), np.float32)
    for _ in range(1000):
        if helper[0] == ASLEEP:
            break
        time.sleep(0.01)
    sdpa_ref.sdpa(x, x, x, backend="numba")
    assert helper[0] == ASLEEP
    assert any(sdpa_ref.sdpa(x, x, x, backend="numba") is not None and helper[0] != ASLEEP for _ in range(100_000))


def test_a_caller_does_not_wait_for_a_busy_helper():
    arrived, gate = np.zeros(1, np.int64), np.zeros(1, np.int64)
    held = threading.Thread(target=run, args=(hold, (arrived.ctypes.data, gate.ctypes.data), 2))
    held.start()
    while arrived[0] < 2:
        time.sleep(0.01)
    other = threading.Thread(target=numbers)
    other.start()
    other.join(600)
    waits = other.is_alive()
    gate[0] = 1
    held.join()
    assert not waits


def test_helpers_sleep_soon_whatever_they_were_late_for():
    script = """
import time
set_num_threads(12)
for effort in (0, 1000, 100_000, 300_000, 1_000_000):
    for trial in range(5):
        numbers(12, effort)
        time.sleep(0.003)  # some of them sleep

def idle():
    before = time.process_time()
    time.sleep(0.5)
    return time.process_time() - before < 0.1

assert any(idle() for _ in range(20))  # on a loaded machine they come to it later
helper_joins()
"""
    python(script)


def test_eight_python_threads_at_once():
    threads_before, failures = threading.active_count(), []

    def work(seed):
        try:
            for repeat in range(50):
                numbers(n_tasks=1 + (seed * 13 + repeat) % 40, effort=200 * seed)
        except BaseException as error:
            failures.append(error)

    set_num_threads(3)
    callers = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(600)
    assert not failures
    assert threading.active_count() <= threads_before + 2


@pytest.mark.parametrize("bad", [0, 3, 99])
def test_errors_come_through_from_any_thread(bad):
    for _ in range(50):
        with pytest.raises(MemoryError):
            run(fail, (100, bad), 100)
    numbers()


def test_nothing_accumulates():
    out, threads = np.zeros(4), threading.active_count()
    gc.collect()
    references, objects = sys.getrefcount(out), len(gc.get_objects())
    for _ in range(2000):
        run(number, (out.ctypes.data, 4, 10), 4)
    assert (out == 2000 * np.arange(4)).all()
    assert sys.getrefcount(out) == references
    assert threading.active_count() <= threads + 1
    gc.collect()
    assert len(gc.get_objects()) < objects + 100


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_children_of_a_process_that_used_threads(method):
    script = f"""
import multiprocessing, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads
if "{method}" in multiprocessing.get_all_start_methods():
    set_num_threads(3)
    numbers(); helper_joins()
    context = multiprocessing.get_context("{method}")
    for target in (numbers, helper_joins):
        child = context.Process(target=target)
        child.start(); child.join(600)
        assert child.exitcode == 0, child.exitcode
    numbers(); helper_joins()
"""
    python(script, SDPA_REF_NUM_THREADS="2")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork_while_other_threads_run_and_compile():
    script = """
import os, threading, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)

@kernel
def slow_to_compile(worker):
    np.sort(np.zeros(3))

set_num_threads(2)
numbers()
busy = [threading.Thread(target=numbers, args=(4, 100_000_000)),
        threading.Thread(target=run, args=(slow_to_compile, (), 2))]
for thread in busy:
    thread.start()
time.sleep(0.02)
child = os.fork()
if child == 0:
    try:
        assert get_num_threads() == 2
        helper_joins()
        numbers(3)
        run(slow_to_compile, (), 2)
        os._exit(0)
    finally:
        os._exit(1)
for thread in busy:
    thread.join()
assert os.waitpid(child, 0)[1] == 0
helper_joins()
"""
    python(script)


def test_the_interpreter_exits_at_once_and_runs_even_then():
    script = """
import atexit, threading, time
atexit.register(numbers)
atexit.register(set_num_threads, 5)
set_num_threads(2)
numbers()
threading.Thread(target=numbers, args=(2, 10**12), daemon=True).start()
time.sleep(0.1)
"""
    python(script)
