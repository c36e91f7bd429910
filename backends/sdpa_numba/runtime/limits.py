"""How many threads a call may use: the number that was set, else the smallest of the limits of the process."""

import operator
import os
import time
from functools import cache
from math import ceil, inf
from pathlib import Path

from sdpa_ref.disk import harmless

VARIABLE = "SDPA_REF_NUM_THREADS"
OTHERS = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS")  # set by people and by the workers of joblib and Dask
SOON, LATER = 1e-3, 1.0  # seconds: until affinity and quota are looked up again, which takes 1 and 50 us


class _Limits:
    """The number of threads that was set, and what was found last."""

    asked: int | None = None
    threads, quota = 1, inf
    next_look = next_quota = -inf


def set_num_threads(n: int) -> None:
    """Set how many threads one call may use from now on, in this process and those that it forks.

    Parameters
    ----------
    n : int
        At least 1, the calling thread included. Results do not depend on it.

    Raises
    ------
    TypeError, ValueError
        `n` is not an integer, or less than 1.

    Examples
    --------
    >>> set_num_threads(2)
    >>> get_num_threads()
    2
    """
    try:
        number = operator.index(n)
    except TypeError:
        number = None
    if number is None or isinstance(n, bool):
        raise TypeError(f"n must be an int, got {n!r} of type {type(n).__name__}")
    if number < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    _Limits.asked = number


def get_num_threads() -> int:
    """Return how many threads one call may use, the calling thread included.

    Until `set_num_threads` is called it is what the environment variable ``SDPA_REF_NUM_THREADS`` says. Without it, it
    is the smallest of ``NUMBA_NUM_THREADS``, ``OMP_NUM_THREADS``, the number of CPUs that this thread may use (its
    affinity), and the quota of its control group rounded up. The last two are looked up again as time passes.

    Returns
    -------
    int
        At least 1.

    Raises
    ------
    ValueError
        ``SDPA_REF_NUM_THREADS`` is not a positive integer.
    """
    if _Limits.asked is not None:
        return _Limits.asked
    now = time.monotonic()
    if now >= _Limits.next_look:
        _Limits.threads = _look(now)
        _Limits.next_look = now + SOON
    return _Limits.threads


def look_again() -> None:
    """Forget what was found: a forked child may have other limits."""
    _Limits.next_look = _Limits.next_quota = -inf


def _look(now: float) -> int:
    """Return the number of threads where none was set."""
    demanded, limits = _environment()
    if demanded is not None:
        return demanded
    cpus = _cpus()
    if now >= _Limits.next_quota:
        _Limits.quota, _Limits.next_quota = cpu_quota(), now + LATER
    return min(cpus, ceil(min(_Limits.quota, cpus)), *limits)


@cache
def _environment() -> tuple[int | None, tuple[int, ...]]:
    """Return the number that our own variable demands, if any, and the limits of the others that make sense."""
    text = os.environ.get(VARIABLE, "").strip()
    if text and (not text.isdecimal() or int(text) < 1):
        raise ValueError(f"the environment variable {VARIABLE} must be a positive integer, got {text!r}")
    others = [os.environ.get(name, "").split(",")[0].strip() for name in OTHERS]  # OpenMP has a list, for each level
    return int(text) if text else None, tuple(int(other) for other in others if other.isdecimal() and int(other))


def _cpus() -> int:
    """Return how many CPUs this thread may use."""
    if hasattr(os, "process_cpu_count"):
        return os.process_cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many CPUs the control groups of this process (version 1 or 2) leave it, inf where they set no limit.

    `root` is the folder under which ``proc`` and ``sys`` are mounted.
    """
    quotas, lines = [inf], []
    with harmless():  # not Linux
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount, group = root / "sys/fs/cgroup" / ("cpu" if controllers else ""), Path(path.lstrip("/"))
        quotas += [_quota(mount / ancestor) for ancestor in (group, *group.parents)]
    return min(quotas)


def _quota(group: Path) -> float:
    """Return the limit that one control group sets."""
    with harmless(ValueError):  # no such file, or "max"
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with harmless(ValueError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else inf  # -1: no limit
    return inf
