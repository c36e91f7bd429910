"""Compiled kernels over dynamically taken tasks, on the calling thread and a small pool of helpers.

A kernel is a function without the GIL that takes task numbers from a shared counter until none is left. Whoever joins
in helps and whoever is late finds nothing to do, so a caller never depends on a helper: while all of them are busy
with somebody else's tasks, it does its own alone.

Waking a thread costs 30 to 60 microseconds, as much as a small problem. So whoever has to wait, a helper for its next
job or a caller for its last helper, first looks at a flag for a while, without the GIL, and only then sleeps.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import ceil, inf
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import intrinsic

from .cache import jit

VARIABLE = "SDPA_REF_NUM_THREADS"
PATIENCE = 500_000  # looks at a flag before a thread sleeps: about 0.2 ms
COURTESY = 8_000  # looks after it is set: 3 us, in which whoever set it lets go of the GIL


def _atomic(build: Callable[[Any, Any], Any]) -> Any:
    """Return a function for kernels, of an int64 array: what `build` makes of its first element, in one atomic step."""

    @intrinsic
    def step(typing_context: Any, array: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return build(builder, context.make_array(signature.args[0])(context, builder, arguments[0]).data)

        return types.int64(array), generate

    return step


ONE = ir.Constant(ir.IntType(64), 1)
next_task = _atomic(lambda builder, first: builder.atomic_rmw("add", first, ONE, "monotonic"))  # the old value
_look = _atomic(lambda builder, first: builder.load_atomic(first, "acquire", 8))


@jit
def _watch(flag: Any, value: int, patience: int, courtesy: int) -> None:
    """Return a moment after ``flag[0]`` has reached `value`, or out of patience."""
    while patience > 0 and courtesy > 0:
        patience -= 1
        if _look(flag) >= value:
            courtesy -= 1


class _Job:
    """One call of `run`, and who has joined it and left it again. Lists, because appending to one is atomic."""

    def __init__(self, kernel: Callable[..., object], arguments: tuple[Any, ...], helpers: int, keep: object) -> None:
        self.kernel, self.arguments, self.helpers, self.keep = kernel, arguments, helpers, keep
        self.open = True
        self.joined: list[None] = []
        self.left: list[None] = []
        self.errors: list[BaseException] = []
        self.flag = np.zeros(1, np.int64)  # how many have left, for `_watch`
        self.signal: SimpleQueue[None] = SimpleQueue()

    def help(self) -> None:
        """Run the kernel, unless the caller has closed the job before it could see this helper join."""
        self.joined.append(None)
        try:
            if self.open:
                self.kernel(*self.arguments)
        except BaseException as error:
            self.errors.append(error.with_traceback(None))  # whose frames would keep this job alive
        self.left.append(None)
        self.signal.put(None)
        self.flag += 1

    def close(self, board: list["_Job"]) -> None:
        """Return when the job is off the board, no helper runs the kernel, and none will."""
        try:
            self.open = False
            with suppress(ValueError):
                board.remove(self)
            _watch(self.flag, len(self.joined), PATIENCE, COURTESY)
            while len(self.left) < len(self.joined):
                self.signal.get()
        except KeyboardInterrupt:  # which must wait for the helpers: they write to the caller's arrays
            self.close(board)
            raise
        self.arguments, self.keep = (), None  # which a helper that is still on its way out would keep alive


class _Worker:
    """A thread that helps with the jobs on a board and sleeps until its bell rings when it can help with none."""

    def __init__(self, board: list[_Job]) -> None:
        self.board, self.idle = board, False
        self.flag, self.bell = np.zeros(1, np.int64), threading.Lock()
        self.bell.acquire()
        threading.Thread(target=self.work, name="sdpa_numba", daemon=True).start()

    def work(self) -> None:
        """Never return: a daemon thread ends with the process."""
        while True:
            while job := self.find():
                job.help()
            self.idle = True
            _watch(self.flag, 1, PATIENCE, COURTESY)
            self.bell.acquire()
            self.idle = False
            self.flag[0] = 0

    def find(self) -> _Job | None:
        """Return a job that wants more helpers, None if there is none."""
        return next((job for job in tuple(self.board) if job.open and len(job.joined) < job.helpers), None)

    def ring(self) -> bool:
        """Return whether the worker had nothing to do; it looks at the board now."""
        if not (self.idle and self.bell.locked()):
            return False
        self.flag[0] = 1
        with suppress(RuntimeError):  # somebody else rang at the same time
            self.bell.release()
        return True


class _Pool:
    """The workers, the board with the jobs that are under way, and the number of threads that was asked for."""

    def __init__(self) -> None:
        self.threads: int | None = None
        self.reset()

    def reset(self) -> None:
        """Start afresh, as a forked child must, which has none of its parent's threads."""
        self.board: list[_Job] = []
        self.workers: list[_Worker] = []
        self.growing = threading.Lock()

    def call(self, helpers: int) -> None:
        """Wake up to so many workers; make them where there were never so many before."""
        if len(self.workers) < helpers:
            with self.growing, suppress(RuntimeError):  # no more threads here, or the interpreter is about to exit
                while len(self.workers) < helpers:
                    self.workers.append(_Worker(self.board))
        for worker in self.workers:
            helpers -= worker.ring()
            if helpers == 0:
                return


_POOL = _Pool()


def run(kernel: Callable[..., object], arguments: tuple[Any, ...], n_tasks: int, keep: object = None) -> None:
    """Return when all tasks of a kernel are done, by this thread and up to ``get_num_threads() - 1`` helpers.

    Parameters
    ----------
    kernel : callable
        Compiled with ``nogil=True``; ``kernel(counter, *arguments)`` does the task ``next_task(counter)`` until that is
        `n_tasks` or more. `counter` is an int64 array of shape (1,).
    arguments : tuple
        What the kernel takes besides, the number of tasks included.
    n_tasks : int
        How many tasks there are; a single one stays on the calling thread.
    keep : object, optional
        What `arguments` only hold by address; it lives as long as a helper may use it, even after an interrupt.

    Raises
    ------
    BaseException
        Whatever a kernel raised on any thread, or KeyboardInterrupt; in either case no helper works any more.
    """
    counter = np.zeros(1, np.int64)
    helpers = min(get_num_threads(), n_tasks) - 1
    if helpers < 1:
        kernel(counter, *arguments)
        return
    job = _Job(kernel, (counter, *arguments), helpers, keep)
    try:
        _POOL.board.append(job)
        _POOL.call(helpers)
        kernel(counter, *arguments)
    finally:
        counter[0] = n_tasks  # after an error nobody starts another task
        job.close(_POOL.board)
    if job.errors:
        raise job.errors.pop()


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
