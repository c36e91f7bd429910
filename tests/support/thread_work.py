"""Small kernels for tests of the thread pool, and scripts that run beside them in a process of their own."""

import ctypes
import mmap
import os
import struct
import sys  # noqa: F401  # for the scripts
from inspect import signature

import fresh
import numpy as np
from sdpa_numba.compile.parts import part
from sdpa_numba.runtime import pool, threads
from sdpa_numba.runtime.call import HEADER
from sdpa_numba.runtime.kernel import kernel as compiled
from sdpa_numba.runtime.tasks import next_task, proceed
from sdpa_numba.runtime.threads import get_num_threads, set_num_threads  # noqa: F401  # for the scripts
from sdpa_numba.vector.atomic import add, look
from sdpa_numba.vector.simd import load_int64, loader, storer

load, store = loader("float64", "float64"), storer("float64")


def kernel(function):
    """Return a kernel of a worker and up to three integers, which are all that lies in the record of a call."""
    inner, at = part(function), load_int64
    of_as_many = (
        lambda worker, record: inner(worker),
        lambda worker, record: inner(worker, at(record)),
        lambda worker, record: inner(worker, at(record), at(record + 8)),
        lambda worker, record: inner(worker, at(record), at(record + 8), at(record + 16)),
    )
    entry = of_as_many[len(signature(function).parameters) - 1]
    entry.__name__ = entry.__qualname__ = function.__name__
    return compiled(entry)


def run(kernel, arguments, n_tasks, *, alone=False):
    """Run a kernel with these integers, on as many threads as it has tasks for."""
    pool, helpers = threads.team()
    helpers = 0 if alone else min(helpers, n_tasks - 1)
    threads.run(struct.pack(f"{HEADER}{len(arguments)}q", kernel.address, 0, pool, helpers, *arguments))


@kernel
def number(worker, out, n_tasks, effort):
    """Add its number to each task's place."""
    task = next_task(worker)
    while task < n_tasks:
        value = 1.0 + min(task, 0)
        for step in range(effort):
            value = 0.5 * value + 0.5  # takes 3 ns and stays 1
            if step % 1024 == 0 and not proceed(worker, 2**20):
                break
        store(out + 8 * task, load(out + 8 * task) + task * value)
        task = next_task(worker)


@kernel
def touch(worker, out, n_tasks, efforts):
    """Read and write each task's place all the time, as often as its effort says."""
    task = next_task(worker)
    while task < n_tasks:
        for step in range(load_int64(efforts + 8 * task)):
            store(out + 8 * task, load(out + 8 * task) + 1.0)
            if step % 1024 == 0 and not proceed(worker, 2**20):
                break
        task = next_task(worker)


@kernel
def meet(worker, arrived):
    """Wait for a second thread."""
    add(arrived, 1)
    for _ in range(2_000_000_000):
        if look(arrived) >= 2:
            break


def numbers(n_tasks=100, effort=1000):
    """Do so many tasks and see that each was done once."""
    out = np.zeros(n_tasks)
    run(number, (out.ctypes.data, n_tasks, effort), n_tasks)
    assert (out == np.arange(n_tasks)).all()


def helper_joins():
    """See that a second thread takes part."""
    arrived = np.zeros(1, np.int64)
    run(meet, (arrived.ctypes.data,), 2)
    assert arrived[0] == 2


def helpers():
    """Return the states of all helpers there are."""
    first = threads.POOL.address + pool.BOX
    states = [ctypes.c_int64.from_address(first + i * pool.BOX).value for i in range(pool.MOST)]
    return [state for state in states if state != pool.NOBODY]


def at_rest():
    """See that no helper is at work and no call lies before one."""
    assert set(helpers()) <= {pool.IDLE, pool.ASLEEP}


class Guarded:
    """Numbers in a memory that may be closed: then whoever touches them ends the process."""

    def __init__(self, n):
        self.pages = mmap.mmap(-1, -(-8 * n // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.numbers = np.frombuffer(self.pages, np.float64, n)
        self.address = self.numbers.ctypes.data
        self.protect = getattr(ctypes.CDLL(None), "mprotect", None) if os.name == "posix" else None

    def close(self, closed=True):
        """Close the memory, or open it again."""
        if self.protect:
            size, access = ctypes.c_size_t(len(self.pages)), 0 if closed else mmap.PROT_READ | mmap.PROT_WRITE
            assert self.protect(ctypes.c_void_p(self.address), size, access) == 0


def python(script, before="", **environment):
    """Return what a script prints that finds all this imported; `before` runs first, and None unsets a variable."""
    variables = os.environ | {"PYTHONPATH": fresh.PATHS} | environment
    variables = {name: text for name, text in variables.items() if text is not None}
    script = f"{before}\nfrom thread_work import *\n{script}"
    done = fresh.start(script, variables, imported=not before)
    out, err = done.communicate(timeout=600)
    assert done.returncode == 0, f"{done.returncode}: {err}"
    assert err == ""
    return out
