"""Starts the measuring process, with the same threads for every library in it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_OWN = "SDPA_REF_NUM_THREADS"


def results(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return, one by one, what a new process measures, whose libraries all use ``order["threads"]`` threads.

    Raises
    ------
    RuntimeError
        When the process ends before it is done.
    """
    threads = str(order["threads"])
    environment = {**os.environ, **dict.fromkeys(_VARIABLES, threads), _OWN: threads, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "sdpa_ref.bench"]
    with _first_processors(order["threads"]):
        child = subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(order))
            child.stdin.close()
            yield from map(json.loads, child.stdout)
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise RuntimeError(f"the measuring process ended with {child.returncode}")


@contextmanager
def _first_processors(threads: int) -> Iterator[None]:
    """Let a child process use only so many processors: the one way in which XLA's threads can be limited."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:threads])
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
