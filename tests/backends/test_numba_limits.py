"""How many threads a call may use: what was asked for, and the limits that a process lives under."""

import math
import os

import numpy as np
import pytest

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

from sdpa_numba.runtime import limits
from sdpa_numba.runtime.limits import cpu_quota
from sdpa_numba.runtime.threads import get_num_threads, set_num_threads
from thread_work import python

UNSET = dict.fromkeys((limits.VARIABLE, *limits.OTHERS))
affinity = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs to choose from"
)


@pytest.fixture
def unasked(monkeypatch):
    """Let nobody have asked for a number of threads, nor set a limit."""
    for name in UNSET:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(limits._Limits, "asked", None)
    limits._environment.cache_clear()
    limits.look_again()
    yield
    limits._environment.cache_clear()
    limits.look_again()


def test_the_environment_variable():
    assert python("print(get_num_threads())", SDPA_REF_NUM_THREADS="5") == "5\n"
    script = """
try:
    numbers()
except ValueError as error:
    print(error)
set_num_threads(2)
numbers()
"""
    for text in ("0", "2.5"):
        assert python(script, SDPA_REF_NUM_THREADS=text) == (
            f"the environment variable SDPA_REF_NUM_THREADS must be a positive integer, got {text!r}\n"
        )


def test_by_default_there_are_no_more_threads_than_cpus():
    assert 1 <= int(python("print(get_num_threads())", SDPA_REF_NUM_THREADS="")) <= os.cpu_count()


@pytest.mark.parametrize("n", [2.0, "2", None, True])
def test_the_number_of_threads_must_be_an_int(n):
    with pytest.raises(TypeError, match="n must be an int, got"):
        set_num_threads(n)


@pytest.mark.parametrize("n", [0, -3])
def test_the_number_of_threads_must_be_positive(n):
    with pytest.raises(ValueError, match=f"n must be at least 1, got {n}"):
        set_num_threads(n)


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        (
            "3:cpuset:/\n2:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "50000", "cpu/x/cpu.cfs_period_us": "20000"},
            2.5,
        ),
        ("2:cpu,cpuacct:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, math.inf),
        ("0::/of/the/host\n", {}, math.inf),
        (None, {}, math.inf),
    ],
)
def test_the_quota_of_control_groups(tmp_path, membership, files, quota):
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    if membership is not None:
        files["proc/self/cgroup"] = membership
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu_quota(tmp_path) == quota


@pytest.mark.parametrize("n", [np.int64(2), np.uint8(2), np.array(2)])
def test_the_number_of_threads_may_be_any_integer(n, unasked):
    set_num_threads(n)
    assert get_num_threads() == 2
    assert type(get_num_threads()) is int


@pytest.mark.parametrize(
    ("environment", "n"),
    [
        ({"OMP_NUM_THREADS": "1"}, 1),
        ({"NUMBA_NUM_THREADS": "1"}, 1),
        ({"OMP_NUM_THREADS": "3", "NUMBA_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "2,4"}, 2),
        ({"OMP_NUM_THREADS": "64", "NUMBA_NUM_THREADS": ""}, 8),
        ({"OMP_NUM_THREADS": "many"}, 8),
        ({"OMP_NUM_THREADS": "0"}, 8),
        ({"SDPA_REF_NUM_THREADS": "3", "OMP_NUM_THREADS": "1"}, 3),
        ({}, 8),
    ],
)
def test_the_usual_variables_are_limits(environment, n, unasked, monkeypatch):
    monkeypatch.setattr(limits, "_cpus", lambda: 8)
    monkeypatch.setattr(limits, "cpu_quota", lambda: math.inf)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    assert get_num_threads() == n


def test_a_quota_that_changes_is_heard(unasked, monkeypatch):
    monkeypatch.setattr(limits, "SOON", 0)
    monkeypatch.setattr(limits, "LATER", 0)
    monkeypatch.setattr(limits, "_cpus", lambda: 8)
    for quota, n in ((math.inf, 8), (2.5, 3), (0.1, 1), (math.inf, 8)):
        monkeypatch.setattr(limits, "cpu_quota", lambda quota=quota: quota)
        assert get_num_threads() == n


@affinity
def test_pinning_is_heard_after_the_first_call_and_in_a_fork():
    script = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
import time
before = os.sched_getaffinity(0)
assert get_num_threads() >= 2
numbers()
child = os.fork()
if child == 0:
    os.sched_setaffinity(0, {min(before)})
    os._exit(get_num_threads())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
os.sched_setaffinity(0, {min(before)})
time.sleep(0.01)
assert get_num_threads() == 1
os.sched_setaffinity(0, before)
time.sleep(0.01)
assert get_num_threads() >= 2
"""
    python(script, **UNSET)


@affinity
def test_no_thread_is_ever_moved():
    script = """
import time
set_num_threads(2)
helper_joins()
threads = [int(name) for name in os.listdir("/proc/self/task")]
first = {min(os.sched_getaffinity(0))}
for thread in threads:
    os.sched_setaffinity(thread, first)
for pause in (0, 0.001, 0.05):
    numbers()
    time.sleep(pause)
numbers(effort=100_000)
assert all(os.sched_getaffinity(int(name)) == first for name in os.listdir("/proc/self/task"))
"""
    python(script, **UNSET)


def test_helpers_are_threads_of_the_system_where_threads_are_patched():
    before = """
import _thread, threading

def patched(*arguments, **keywords):
    raise AssertionError("a green thread")

_thread.start_new_thread = threading._start_new_thread = threading.Thread.start = patched
"""
    python("set_num_threads(2); numbers(); helper_joins()", before)


def test_helpers_are_no_threads_of_python():
    script = """
import threading
set_num_threads(3)
numbers(); helper_joins()
assert threading.active_count() == 1
assert len(sys._current_frames()) == 1
"""
    python(script)
