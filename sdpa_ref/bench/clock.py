"""Timing: several callables by turns, in random order, each alone on the processor."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from math import ceil
from typing import Any

import numpy as np

Run = Callable[[], Any]
_SAMPLE = 0.005  # seconds that a sample takes at least
_WARM = 0.03  # seconds of calls before one: so long some systems leave a thread they wake on its caller's processor
_LEAST = 5  # samples of each
_SIDE = 2048
_BEYOND_CACHES = 1 << 30


def by_turns(runs: Mapping[str, Run], seconds: float) -> dict[str, list[float]]:
    """Return for each of the runs what a call took in every sample, in seconds.

    Parameters
    ----------
    runs : mapping of str to callable
        They were called before: whatever they compile or allocate once is done.
    seconds : float
        How long to measure, times the number of runs; each gets at least 5 samples.
    """
    calls = {name: max(1, ceil(_SAMPLE / _sample(run, 3))) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    rng = np.random.default_rng(0)
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end or any(len(taken) < _LEAST for taken in samples.values()):
        for name in rng.permutation(list(runs)):
            _settle()
            samples[name].append(_sample(runs[name], calls[name]))
    return samples


def quick(run: Run) -> float:
    """Return roughly what a call takes, in seconds."""
    _settle()
    return min(_sample(run, 1) for _ in range(3))


def matrix_product() -> tuple[Run, int]:
    """Return a product of float32 matrices by NumPy's BLAS, and its operations."""
    a, b = np.random.default_rng(0).standard_normal((2, _SIDE, _SIDE), np.float32)
    product = np.empty_like(a)
    return lambda: np.matmul(a, b, out=product), 2 * _SIDE**3


def reading(arrays: tuple[np.ndarray[Any, Any], ...], threads: int) -> tuple[Run, int]:
    """Return a pass over arrays of at least 8 bytes a thread that only reads them, and the bytes that it reads."""
    words = [array.reshape(-1).view(np.int64) for array in arrays]
    shares = [[part[i] for part in (np.array_split(word, threads) for word in words)] for i in range(threads)]
    pool = ThreadPoolExecutor(threads)

    def largest(share: list[np.ndarray[Any, Any]]) -> None:
        for part in share:
            part.max()  # of NumPy's reductions the one that keeps up with the memory

    def run() -> None:
        others = [pool.submit(largest, share) for share in shares[1:]]
        largest(shares[0])
        for other in others:
            other.result()

    return run, sum(array.nbytes for array in arrays)


def memory_rate(threads: int) -> float:
    """Return the bytes a second that so many threads read from an array of 1 GiB."""
    run, size = reading((np.ones(_BEYOND_CACHES // 8, np.int64),), threads)
    return size / float(np.median(by_turns({"reading": run}, 0.0)["reading"]))


def _sample(run: Run, calls: int) -> float:
    """Return what a call takes, after some that are not timed: they wake the threads and fill the caches."""
    begin = start = time.perf_counter()
    while start - begin < _WARM:
        run()
        start = time.perf_counter()
    for _ in repeat(None, calls):
        run()
    return (time.perf_counter() - start) / calls


def _settle() -> None:
    """Return when no thread of this process is busy: those of some libraries spin for a while after a call."""
    for _ in repeat(None, 100):
        before = time.process_time()
        time.sleep(0.01)  # several ticks: some kernels note the time of other threads at every tick only
        if time.process_time() - before < 0.002:
            return
