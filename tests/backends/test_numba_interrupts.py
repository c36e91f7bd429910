"""Exceptions at any point of a call: no helper is left at work, none is lost, and a long call stops."""

import os
import signal

import pytest
from hypothesis import settings

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

from thread_work import python

NIGHTLY = settings.default.max_examples >= 1000
TRIALS = 5000 if NIGHTLY else 100
THREADS = [1, 2, 7]
posix = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer")

VICTIM = """
import gc, os, random, signal, sys, threading, time
from contextlib import suppress

class Stop(BaseException):
    pass

memory, efforts, armed = Guarded(40), np.zeros(40, np.int64), False

def call():
    run(touch, (memory.address, 40, efforts.ctypes.data), 40)

def attempt(action, *expected):
    "Do it, close the memory at once, and return whether it has raised."
    efforts[:] = random.choice([0, 100, 3000])
    efforts[random.randrange(40)] = random.choice([100, 30_000, 300_000])  # somebody is late
    global armed
    armed = True
    try:
        try:
            action()
        finally:
            armed = False
    except expected:
        raised = True
    else:
        raised = False
    memory.close()
    at_rest()
    memory.close(False)
    return raised

def healthy(n):
    at_rest()
    numbers()
    if n > 1:
        helper_joins()
        assert len(helpers()) == n - 1

random.seed(0)
"""


@pytest.mark.parametrize("n", THREADS)
def test_an_exception_at_any_bytecode_of_a_call(n):
    script = f"""
set_num_threads({n})
call()
healthy({n})

def raise_at(nth):
    count = 0
    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            count += 1
            if count == nth:
                raise Stop
        return trace
    def action():
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(None)
    return action

for repeat in range({30 if NIGHTLY else 3}):
    nth = 1
    while attempt(raise_at(nth), Stop):
        nth += 1
    assert nth > 40
healthy({n})
"""
    python(VICTIM + script)


@pytest.mark.parametrize("n", THREADS)
def test_exceptions_raised_into_a_thread_at_any_time(n):
    script = f"""
import ctypes
set_num_threads({n})
call()
raise_into = ctypes.pythonapi.PyThreadState_SetAsyncExc
raise_into.argtypes = ctypes.c_ulong, ctypes.py_object
trials, victim, begun, ended = {TRIALS}, threading.get_ident(), 0, False

def repeat():
    global begun
    begun += 1
    while True:
        call()

def hunt():
    for trial in range(1, trials + 1):
        while begun < trial:
            time.sleep(0)
        for _ in range(random.randrange(300)):
            time.sleep(0)
        raise_into(victim, Stop)

healthy({n})
gc.collect()
gc.freeze()  # finalizers of compilers' objects that are raised into may free something twice
hunter = threading.Thread(target=hunt)
hunter.start()
for trial in range(trials):
    assert attempt(repeat, Stop)
    if trial % 50 == 0:
        healthy({n})
hunter.join()
healthy({n})
"""
    python(VICTIM + script)


@posix
@pytest.mark.parametrize("n", THREADS)
def test_signals_whose_handlers_raise_work_and_are_interrupted_themselves(n):
    script = f"""
set_num_threads({n})
call()

def late(number, frame):
    kind = random.randrange(6) if armed else None
    if kind == 0:
        raise TimeoutError
    if kind == 1:
        sys.exit(3)
    if kind == 2:
        numbers(7, 300)  # and goes on
    if kind == 3:
        os.kill(os.getpid(), signal.SIGTERM)  # while this one is handled
        numbers(7, 300)
        raise TimeoutError
    if kind == 4:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 2e-4))  # soon after this one
        with suppress(TimeoutError, SystemExit):
            for _ in range(20):
                numbers(7, 300)
    if kind == 5:
        try:
            raise TimeoutError
        finally:
            numbers(7, 300)

def twice(number, frame):
    if armed:
        numbers(3, 10)
        raise TimeoutError

signal.signal(signal.SIGALRM, late)
signal.signal(signal.SIGTERM, twice)

def repeat():
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 2e-3))
    for _ in range(20):
        call()

for trial in range({TRIALS}):
    attempt(repeat, TimeoutError, SystemExit)
    if trial % 50 == 0:
        healthy({n})
healthy({n})
for number in (signal.SIGALRM, signal.SIGTERM):  # one may come when the interpreter has put its handlers away
    signal.signal(number, signal.SIG_IGN)
"""
    python(VICTIM + script)


@posix
def test_a_container_that_is_told_to_end_ends_with_its_own_code():
    script = """
set_num_threads(2)
numbers()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
call()
signal.setitimer(signal.ITIMER_REAL, 0.05)
efforts[:] = 10**12
call()
"""
    python(VICTIM + script)


@pytest.mark.skipif(not hasattr(os, "fork") or not hasattr(signal, "setitimer"), reason="needs fork and setitimer")
@pytest.mark.parametrize("n", THREADS)
def test_a_handler_that_forks_in_the_middle_of_a_call(n):
    script = f"""
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
set_num_threads({n})
numbers()
child = None

def fork(*_):
    global child
    if child is None:
        child = os.fork()

signal.signal(signal.SIGALRM, fork)
for delay in (0.01, 0.03):
    child = None
    signal.setitimer(signal.ITIMER_REAL, delay)
    try:
        while child is None:  # on a loaded machine the first call may end before the signal comes
            numbers(60, 300_000)
    except RuntimeError as error:
        assert child == 0 and {n} > 1 and "fork" in str(error)
    if child == 0:
        numbers()
        {"helper_joins()" if n > 1 else ""}
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    healthy({n})
"""
    python(VICTIM + script)


@pytest.mark.parametrize("n", THREADS)
def test_an_interrupt_stops_a_call_between_and_within_tasks(n):
    script = f"""
import _thread
set_num_threads({n})
numbers()
done = Guarded(40)
for n_tasks, effort in ((10**9, 2000), (40, 10**9)):
    counts = np.zeros(1, np.int64)

    @kernel
    def tally(worker, count, n_tasks, effort):
        task = next_task(worker)
        while task < n_tasks:
            for step in range(effort):
                if step % 1024 == 0:
                    add(count, 1)
                    if not proceed(worker, 2**20):
                        break
            task = next_task(worker)

    def interrupt():
        while counts[0] < 1000:
            time.sleep(0.001)
        at[0] = counts[0]
        _thread.interrupt_main()

    at = [0]
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        run(tally, (counts.ctypes.data, n_tasks, effort), n_tasks)
    except KeyboardInterrupt:
        pass
    else:
        raise AssertionError
    at_rest()
    thread.join()
    assert at[0] <= counts[0] < 10**8, counts  # of 10**9 and of 4 * 10**7 and more
healthy({n})
"""
    python(VICTIM + script)


LONG = {
    "prefill": ("q = k = numbers_of(1, 8, 1500, 64)", "sdpa(q, k, k)"),
    "one long head": ("q, k = numbers_of(1, 1, 300, 64), numbers_of(1, 1, 100_000, 64)", "sdpa(q, k, k)"),
    "decoding": ("q, k = numbers_of(1, 1, 8, 64), numbers_of(1, 2, 1_000_000, 32)[..., ::2, :].reshape(1, 1, -1, 64)",
                 "sdpa(q, k, k)"),
    "gradients": ("q = k = numbers_of(1, 2, 1500, 64)", "sdpa_vjp(q, k, k, q)"),
    "gradients of many keys": ("q, k = numbers_of(1, 1, 8, 64), numbers_of(1, 1, 400_000, 64)",
                               "sdpa_vjp(q, k, k, q)"),
    "rules in NumPy": ("q = k = numbers_of(1, 8, 1000, 64)", "sdpa(q, k, k, score_mod=lambda s, *_: s + 1)"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "n"), [(case, n) for i, case in enumerate(LONG) for n in (1, 2) if NIGHTLY or i % 2 == n % 2]
)
def test_an_interrupt_stops_a_long_call_of_any_kind(case, n):
    made, action = LONG[case]
    script = f"""
import _thread
from sdpa_ref import sdpa, sdpa_vjp
set_num_threads({n})
rng = np.random.default_rng(0)
numbers_of = lambda *shape: rng.standard_normal(shape, np.float32)
{made}

def work():
    {action}

work()  # compiles
start = time.process_time()
work()
whole = time.process_time() - start

def interrupt():
    while time.process_time() < start + 0.1 * whole:
        time.sleep(1e-4)
    at[0] = time.process_time()
    _thread.interrupt_main()

spent = []
for trial in range(5):
    at, start = [0], time.process_time()
    thread = threading.Thread(target=interrupt)
    try:
        thread.start()  # on a busy machine the interrupt may come before this returns
        work()
        thread.join()
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    spent.append(time.process_time() - at[0])
    at_rest()
    thread.join()
    if spent[-1] < 0.25 * whole + 0.02:
        break
else:
    raise AssertionError(spent, whole)
"""
    python(VICTIM + script)
