"""Compiled kernels over dynamically taken tasks, on the calling thread and a small pool of helpers.

A kernel takes task numbers from a counter until none is left. Whoever joins in helps and whoever is late finds nothing
to do, so a caller never depends on a helper: while all of them are busy with somebody else's tasks, it works alone.
"""

import ctypes
import os
import threading
from typing import Any

from numba.core.compiler_lock import global_compiler_lock

from sdpa_numba.compile.parts import SIGNATURE, native

from .call import NO_MEMORY, ORPHANED
from .limits import get_num_threads, look_again, set_num_threads
from .pool import BOX, FORKED, MAIN, MOST, POLLS, SERVE, enter, poll, serve

__all__ = ["POOL", "get_num_threads", "run", "set_num_threads", "team"]


class Pool:
    """The memory in which the helpers of this process find jobs.

    Attributes
    ----------
    address : int
        0 before there is one.
    enter : callable
        The compiled `pool.enter`, without what Numba does first for functions of several types.
    """

    address = 0
    enter: Any

    def make(self) -> None:
        """Make the pool, whose memory is never released: helpers read it until the process ends."""
        with global_compiler_lock:
            if self.address:
                return
            pool = _zeros(MOST + 2, BOX)  # not touched, and so not there, before it is used
            pool += -pool % BOX
            words = (ctypes.c_int64 * 4).from_address(pool)
            words[SERVE // 8], words[POLLS // 8] = native(serve, c=True), native(poll)
            words[MAIN // 8] = threading.main_thread().ident or 0
            enter.compile(SIGNATURE)
            self.enter, self.address = enter.overloads[SIGNATURE].entry_point, pool

    def forget(self) -> None:
        """Mark the pool as without helpers; the next call makes another."""
        if self.address:
            ctypes.c_int64.from_address(self.address + FORKED).value = 1
        self.address = 0


POOL = Pool()
_FIRST = bytes.__basicsize__ - 1  # where the first byte lies, from the address of the object
_zeros = ctypes.pythonapi.PyMem_RawCalloc
_zeros.restype, _zeros.argtypes = ctypes.c_ssize_t, (ctypes.c_size_t, ctypes.c_size_t)


def team() -> tuple[int, int]:
    """Return the address of the pool, and how many helpers a call may invite."""
    if not POOL.address:
        POOL.make()
    return POOL.address, get_num_threads() - 1


def run(call: bytes) -> None:
    """Return when all tasks of a call are done, by this thread and helpers.

    No helper can see what the call points to before this function enters compiled code, nor after it has left it, in
    whatever way. In between the main thread handles signals every few milliseconds.

    Parameters
    ----------
    call : bytes
        As `call.HEADER` packs it, with what `team` returns, and then the record that the kernel reads, and may write
        to. It is a new object that nobody else knows. The caller keeps alive whatever it has addresses of.

    Raises
    ------
    MemoryError
        A kernel could not allocate its memory.
    RuntimeError
        A handler of a signal has forked, this is the child, and helpers that were at work are not there.
    BaseException
        Whatever a handler of a signal raises. As after any error, some of the tasks are done.
    """
    stop = POOL.enter(id(call) + _FIRST)  # no copy of it is made: that would take a fifth of the time of a small call
    if stop == NO_MEMORY:
        raise MemoryError("a kernel could not allocate its memory")
    if stop == ORPHANED:
        raise RuntimeError("a fork while this call was at work has left the child without the threads that helped")


def _after_fork_in_child() -> None:
    """Let the child of a fork compile, without its parent's threads and limits."""
    POOL.forget()
    look_again()
    global_compiler_lock.release()  # last of all: it raises where a signal kept the fork from taking the lock


if hasattr(os, "register_at_fork"):  # the lock, or a child would wait for ever for what another thread was compiling
    os.register_at_fork(
        before=global_compiler_lock.acquire,
        after_in_parent=global_compiler_lock.release,
        after_in_child=_after_fork_in_child,
    )
