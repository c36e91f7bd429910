"""Compiled kernels over dynamically taken tasks, on the calling thread and a small pool of helpers.

A kernel takes task numbers from a counter until none is left. Whoever joins in helps and whoever is late finds nothing
to do, so a caller never depends on a helper: while all of them are busy with somebody else's tasks, it works alone.
"""

import ctypes
import os
import struct
import threading
from array import array
from typing import Any

from numba.core.compiler_lock import global_compiler_lock

from sdpa_numba.compile.parts import native

from .call import ARGUMENTS, KERNEL, MEMORY, NO_MEMORY, ORPHANED
from .limits import get_num_threads, look_again, set_num_threads
from .pool import BOX, FORKED, MAIN, MOST, POLLS, SERVE, enter, poll, serve

__all__ = ["get_num_threads", "run", "set_num_threads"]


class _Pool:
    """Where the helpers of this process look for jobs."""

    address = 0  # not made yet

    def make(self) -> int:
        """Return the address of a new pool, whose memory is never given back: helpers look at it to the end."""
        with global_compiler_lock:
            if not self.address:
                pool = _zeros(MOST + 2, BOX)  # not touched, and so not there, before it is used
                pool += -pool % BOX
                words = (ctypes.c_int64 * 4).from_address(pool)
                words[SERVE // 8], words[POLLS // 8] = native(serve, c=True), native(poll)
                words[MAIN // 8] = threading.main_thread().ident or 0
                self.address = pool
        return self.address

    def forget(self) -> None:
        """Say that the helpers are not there, and let the next call make a pool."""
        if self.address:
            ctypes.c_int64.from_address(self.address + FORKED).value = 1
        self.address = 0


_POOL = _Pool()
_HEADER = struct.Struct(f"={KERNEL}x4q{ARGUMENTS - MEMORY}x")
_zeros = ctypes.pythonapi.PyMem_RawCalloc
_zeros.restype, _zeros.argtypes = ctypes.c_ssize_t, (ctypes.c_size_t, ctypes.c_size_t)


def run(kernel: Any, record: bytes, settle: int = 0, most: int | None = None) -> None:
    """Return when all tasks of a kernel are done, by this thread and up to ``get_num_threads() - 1`` helpers.

    No helper can see what the arguments point to before this function enters compiled code, nor after it has left it,
    in whatever way. In between the main thread handles signals every few milliseconds.

    Parameters
    ----------
    kernel : Kernel
        What `compilation.kernel` returns for a function ``kernel(worker, record)``, which does the task
        ``next_task(worker)`` until none is left, and asks ``proceed(worker, work)`` now and then.
    record : bytes
        What the kernel reads. Whatever it holds addresses of lives as long as the caller's variables.
    settle : int
        Address of the compiled function that decides how the work is cut up and who shares it; 0 for none.
    most : int, optional
        How many helpers to invite at most.

    Raises
    ------
    MemoryError
        A kernel could not allocate its memory.
    RuntimeError
        A handler of a signal has forked, this is the child, and helpers that were at work are not there.
    BaseException
        Whatever a handler of a signal raises. As after any error, some of the tasks are done.
    """
    pool = _POOL.address or _POOL.make()
    helpers = get_num_threads() - 1 if most is None else min(get_num_threads() - 1, most)
    call = array("q", _HEADER.pack(kernel.address, settle, pool, helpers) + record)
    stop = enter(call.buffer_info()[0])
    if stop == NO_MEMORY:
        raise MemoryError("a kernel could not allocate its memory")
    if stop == ORPHANED:
        raise RuntimeError("a fork while this call was at work has left the child without the threads that helped")


def _after_fork_in_child() -> None:
    """Let the child of a fork compile, and forget its parent's threads and limits."""
    global_compiler_lock.release()
    _POOL.forget()
    look_again()


if hasattr(os, "register_at_fork"):  # the lock, or a child would wait for ever for what another thread was compiling
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=_after_fork_in_child,
    )
