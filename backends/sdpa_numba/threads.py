"""Compiled kernels over dynamically taken tasks, on the calling thread and a small pool of helpers.

A kernel takes task numbers from a counter until none is left. Whoever joins in helps and whoever is late finds nothing
to do, so a caller never depends on a helper: while all of them are busy with somebody else's tasks, it works alone.

A helper waits in compiled code, without the GIL, for a job in its box: taking it over costs less than a microsecond.
Only after a while without any it sleeps, and then waking it costs 30 to 60.
"""

import ctypes
import os
import struct
import threading
import time
from array import array
from contextlib import suppress
from functools import cache
from math import ceil, inf
from pathlib import Path
from typing import Any

import numpy as np
from numba.core.compiler_lock import global_compiler_lock

from .atomic import invoke, look, next_task, publish, replace
from .cache import jit
from .simd import load_int64, storer

__all__ = ["get_num_threads", "next_task", "run", "set_num_threads"]

VARIABLE = "SDPA_REF_NUM_THREADS"
PATIENCE = 500_000  # looks at a box before a helper sleeps: about 0.2 ms
MOST = 1024  # helpers
IDLE, ASLEEP, CLAIMED, READY, RUNNING, DONE = range(6)  # states of a box; from CLAIMED to DONE a job lies in it
KERNEL, CALL, RING = 8, 16, 24  # what a box holds besides its state; RING: whether its helper has to be woken
BOX = 128  # bytes, so that no two helpers share a cache line
FAILED = 8  # where a call notes that memory was lacking, behind the counter of its tasks; arguments follow

_store = storer("int64")
_processor = getattr(ctypes.CDLL(None), "sched_getcpu", None) if hasattr(os, "sched_setaffinity") else None


@jit
def _serve(box: int) -> None:
    """Do the jobs that come, and return when none has come for a while: then the helper is to sleep."""
    patience = PATIENCE
    while True:
        if look(box) == READY and replace(box, READY, RUNNING):
            call = load_int64(box + CALL)
            if invoke(load_int64(box + KERNEL), call):
                publish(call + FAILED, 1)
            publish(box, DONE)
            patience = PATIENCE
        elif patience > 0:
            patience -= 1
        elif replace(box, IDLE, ASLEEP) or look(box) == ASLEEP:
            return


@jit
def _offer(boxes: int, n: int, helpers: int, kernel: int, call: int) -> bool:
    """Put a job into the boxes of so many helpers who have none, and return whether any of them has to be woken."""
    ring = False
    for box in range(boxes, boxes + n * BOX, BOX):
        state = look(box)
        if helpers > 0 and state <= ASLEEP and replace(box, state, CLAIMED):
            _store(box + KERNEL, kernel)
            _store(box + CALL, call)
            _store(box + RING, np.int64(state == ASLEEP))
            publish(box, READY)
            ring |= state == ASLEEP
            helpers -= 1
    return ring


@jit
def _work(kernel: int, call: int) -> None:
    """Do a job's tasks on this thread."""
    if invoke(kernel, call):
        publish(call + FAILED, 1)


@jit
def _withdraw(boxes: int, n: int, call: int) -> bool:
    """Take a job out of all boxes and return whether that is done: a helper may be at work still."""
    done, patience = True, PATIENCE
    for box in range(boxes, boxes + n * BOX, BOX):
        if load_int64(box + CALL) != call:
            continue
        while look(box) != DONE and not replace(box, READY, DONE) and patience > 0:
            patience -= 1
        if look(box) != DONE:
            done = False
            continue
        _store(box + CALL, np.int64(0))
        publish(box, ASLEEP if load_int64(box + RING) else IDLE)
    return done


class _Helper:
    """A thread that does the jobs in its box, and sleeps until its bell rings when none has come for a while."""

    def __init__(self, box: int) -> None:
        self.box, self.bell = box, threading.Lock()
        self.bell.acquire()
        self.processors = os.sched_getaffinity(0) if _processor else set()
        self.thread = threading.Thread(target=self.work, name="sdpa_numba", daemon=True)
        self.thread.start()

    def work(self) -> None:
        """Never return: a daemon thread ends with the process."""
        while True:
            _serve(self.box)
            self.bell.acquire()
            self._may_run_on(self.processors, 0)

    def ring(self) -> None:
        """Wake the helper, away from this thread's processor, where some schedulers would let it wait for us."""
        if _processor:
            self._may_run_on(self.processors - {_processor()}, self.thread.native_id or 0)
        with suppress(RuntimeError):  # it was rung before and has not come yet
            self.bell.release()

    def _may_run_on(self, processors: set[int], thread: int) -> None:
        if len(self.processors) > 1:
            with suppress(OSError):  # it may not run there any more
                os.sched_setaffinity(thread, processors)


class _Pool:
    """The helpers, their boxes, and the number of threads that was asked for."""

    def __init__(self) -> None:
        self.threads: int | None = None
        self.reset()

    def reset(self) -> None:
        """Start afresh, as a forked child must, which has none of its parent's threads."""
        memory = np.zeros((MOST + 1) * BOX, np.uint8)  # not touched, and so not there, before it is used
        start = -memory.ctypes.data % BOX
        self.boxes = memory[start : start + MOST * BOX].view(np.int64).reshape(MOST, -1)
        self.address = self.boxes.ctypes.data
        self.helpers: list[_Helper] = []
        self.growing = threading.Lock()

    def grow(self, helpers: int) -> None:
        """Make helpers where there were never so many before."""
        with self.growing, suppress(RuntimeError):  # no more threads here, or the interpreter is about to exit
            while len(self.helpers) < min(helpers, MOST):
                self.helpers.append(_Helper(self.address + len(self.helpers) * BOX))

    def wake(self, call: int) -> None:
        """Wake who sleeps before a box with this call."""
        for helper, box in zip(self.helpers, self.boxes, strict=False):
            if box[CALL // 8] == call and box[RING // 8]:
                helper.ring()
                box[RING // 8] = 0


_POOL = _Pool()


def run(kernel: Any, arguments: tuple[int, ...], n_tasks: int, *, alone: bool = False) -> None:
    """Return when all tasks of a kernel are done, by this thread and up to ``get_num_threads() - 1`` helpers.

    Parameters
    ----------
    kernel : Dispatcher
        What `compilation.kernel` returns for a function ``kernel(counter, *arguments)``, which does the task
        ``next_task(counter)`` until that is `n_tasks` or more.
    arguments : tuple of int
        What the kernel takes besides. Whatever they are addresses of lives as long as the caller's variables.
    n_tasks : int
        How many tasks there are; a single one stays on the calling thread.
    alone : bool
        Whether all tasks stay there.

    Raises
    ------
    MemoryError
        A kernel could not allocate its memory.
    KeyboardInterrupt
        In this case, too, no helper works any more.
    """
    words = (0, 0) + arguments  # noqa: RUF005  # unpacking makes a list first
    call = array("q", _words(len(words)).pack(*words))  # in half the time that array takes for a tuple
    address = call.buffer_info()[0]
    helpers = 0 if alone else min(get_num_threads(), n_tasks) - 1
    if helpers < 1:
        kernel.dispatcher(address)
        return
    if len(_POOL.helpers) < helpers:
        _POOL.grow(helpers)
    code, boxes, n = kernel.address, _POOL.address, len(_POOL.helpers)
    try:
        if _offer(boxes, n, helpers, code, address):
            _POOL.wake(address)
        _work(code, address)
    finally:
        call[0] = n_tasks  # after an interrupt nobody starts another task
        _close(boxes, n, address)
    if call[FAILED // 8]:
        raise MemoryError("a kernel could not allocate its memory")


@cache
def _words(n: int) -> struct.Struct:
    return struct.Struct(f"={n}q")


def _close(boxes: int, n: int, call: int) -> None:
    """Return when no helper is at a call any more, even if interrupted: they write to the caller's arrays."""
    try:
        while not _withdraw(boxes, n, call):
            time.sleep(2e-5)
    except KeyboardInterrupt:
        _close(boxes, n, call)
        raise


def set_num_threads(n: int) -> None:
    """Set how many threads one call may use from now on, in this process and those that it forks.

    Parameters
    ----------
    n : int
        At least 1, the calling thread included. Results do not depend on it.

    Raises
    ------
    TypeError, ValueError
        `n` is not an int, or less than 1.

    Examples
    --------
    >>> set_num_threads(2)
    >>> get_num_threads()
    2
    """
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"n must be an int, got {n!r} of type {type(n).__name__}")
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    _POOL.threads = n


def get_num_threads() -> int:
    """Return how many threads one call may use, the calling thread included.

    Until `set_num_threads` is called it is what the environment variable ``SDPA_REF_NUM_THREADS`` says, else the
    number of CPUs that this process may use: its affinity, and the quota of its control group rounded up.

    Returns
    -------
    int
        At least 1.

    Raises
    ------
    ValueError
        ``SDPA_REF_NUM_THREADS`` is not a positive integer.
    """
    return _POOL.threads or _default_num_threads()


@cache
def _default_num_threads() -> int:
    """Return the number of threads before anybody asked for one."""
    text = os.environ.get(VARIABLE, "").strip()
    if text:
        if not text.isdecimal() or int(text) < 1:
            raise ValueError(f"the environment variable {VARIABLE} must be a positive integer, got {text!r}")
        return int(text)
    if hasattr(os, "process_cpu_count"):
        cpus = os.process_cpu_count() or 1
    elif hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    else:
        cpus = os.cpu_count() or 1
    return min(cpus, ceil(min(cpu_quota(), cpus)))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many CPUs the control groups of this process (version 1 or 2) leave it, inf where they set no limit.

    `root` is the folder under which ``proc`` and ``sys`` are mounted.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return inf
    quotas = [inf]
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount, group = root / "sys/fs/cgroup" / ("cpu" if controllers else ""), Path(path.lstrip("/"))
        quotas += [_quota(mount / ancestor) for ancestor in (group, *group.parents)]
    return min(quotas)


def _quota(group: Path) -> float:
    """Return the limit that one control group sets."""
    with suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else inf  # -1: no limit
    return inf


def _after_fork_in_child() -> None:
    """Let the child of a fork compile, and forget its parent's threads."""
    global_compiler_lock.release()
    _POOL.reset()


if hasattr(os, "register_at_fork"):  # the lock, or a child would wait for ever for what another thread was compiling
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=_after_fork_in_child,
    )
