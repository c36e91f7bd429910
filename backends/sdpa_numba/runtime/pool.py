"""The compiled side of a call: inviting helpers, working, polling for signals, and waiting until no thread works on it.

All of a call is one compiled function, `enter`. No exception can come in between. Only the calling thread ever runs
Python there: it polls for signals, and what a handler raises stops the call before it leaves.

A helper is a thread of the operating system, and never runs Python: nothing can be raised in it. It polls for a job
for a while, in which a job starts within a microsecond, and then waits for a lock.
"""

import os
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from sdpa_numba.compile.cache import jit
from sdpa_numba.vector.atomic import add, invoke, look, publish, replace
from sdpa_numba.vector.simd import load_int64, release, storer

from .call import (
    BUSY,
    CALL,
    CREDIT,
    GOES_ON,
    HELPERS,
    INTERVAL,
    KERNEL,
    LAST,
    MEMORY,
    NO_MEMORY,
    ORPHANED,
    OWN,
    POLL,
    POOL,
    RAISED,
    SETTLE,
    STATE,
    STOP,
)
from .processor import IEEE, float_state, moment, set_float_state, ticks
from .tasks import WORK, proceed

MOST = 1024  # helpers
PATIENCE = 500_000  # reads of a box before a helper waits for its lock: about 0.2 ms
SPIN = 500_000  # reads of a call that helpers have not left, before the caller yields to other threads
SHARE = 8  # of the time, polls take at most one part in so many, however long other threads keep the GIL

# The pool, in words of 8 bytes: how to serve, how to poll, which thread gets signals, whether a fork has left this
# memory without helpers, and when the last call has ended. Then the boxes: a helper's state or the call that it is
# invited to, its bell, and its worker.
SERVE, POLLS, MAIN, FORKED, ENDED = 0, 8, 16, 24, 32
BELL, WORKER = 8, 16
BOX = 128  # bytes, so that no two helpers share a cache line
NOBODY, IDLE, ASLEEP, RUNNING = range(4)  # states; an address is more

_address, _identity = types.int64, types.uint32 if os.name == "nt" else types.uint64


def _function(name: str, result: Any, *parameters: Any) -> Any:
    """Return a C function of the interpreter or the system; none of them needs the GIL."""
    return types.ExternalFunction(name, result(*parameters))


_allocate_lock = _function("PyThread_allocate_lock", _address)
_acquire_lock = _function("PyThread_acquire_lock", types.int32, _address, types.int32)
_release_lock = _function("PyThread_release_lock", types.void, _address)
_start_thread = _function("PyThread_start_new_thread", _identity, _address, _address)
_this_thread = _function("PyThread_get_thread_ident", _identity)
_give_way = _function("SwitchToThread" if os.name == "nt" else "sched_yield", types.int32)
_take_gil = _function("PyGILState_Ensure", types.int32)
_leave_gil = _function("PyGILState_Release", types.void, types.int32)
_handle_signals = _function("PyErr_CheckSignals", types.int32)
_store = storer("int64")


@intrinsic
def _leave_if(_, raised):
    """Return from the compiled function, if an exception is set, as a function does that has raised it."""

    def generate(context, builder, signature, arguments):
        with builder.if_then(arguments[0]):
            context.call_conv.return_exc(builder)
        return context.get_dummy_value()

    return types.void(types.boolean), generate


@jit
def serve(box: int) -> None:
    """Do the jobs that come, for ever; the thread ends with the process."""
    set_float_state(IEEE)
    worker, patience = box + WORKER, PATIENCE
    while True:
        call = look(box)
        if call > RUNNING and replace(box, call, RUNNING):
            _store(worker + CALL, call)
            if invoke(load_int64(call + KERNEL), worker):
                replace(call + STOP, GOES_ON, NO_MEMORY)
            publish(box, IDLE)  # first of all: the next call finds it free
            add(call + BUSY, -1)  # last of all: then the call may be gone
            patience = PATIENCE
        elif patience > 0:
            patience -= 1
        elif replace(box, IDLE, ASLEEP):
            _acquire_lock(load_int64(box + BELL), 1)  # released once, by the thread that takes the box from here
            patience = PATIENCE


@jit
def _hire(pool: int, box: int) -> bool:
    """Start the helper of a box, and return whether the system has started it."""
    bell = load_int64(box + BELL)
    if bell == 0:
        bell = _allocate_lock()
        if bell == 0:
            return False
        _acquire_lock(bell, 1)
        _store(box + BELL, bell)
    hired: bool = _start_thread(load_int64(pool + SERVE), box) != _identity(-1)
    return hired


@jit
def _invite(pool: int, call: int) -> None:
    """Put a call into the boxes of helpers that have none.

    For a number below 0 none is woken, unless calls follow one another so closely that the next ones gain from it.
    """
    missing = load_int64(call + HELPERS)
    awake = missing < 0 and ticks() - load_int64(pool + ENDED) >= moment()
    missing = abs(missing)
    end = pool + BOX + min(missing, MOST) * BOX  # helpers are made up to here
    for box in range(pool + BOX, pool + BOX + MOST * BOX, BOX):
        state = look(box)
        if missing <= 0 or (state == NOBODY and box >= end):
            break
        if state > ASLEEP or (awake and state == ASLEEP):
            continue
        if awake and state == NOBODY:
            break
        add(call + BUSY, 1)
        if not replace(box, state, call):
            add(call + BUSY, -1)
            continue
        if state == ASLEEP:
            _release_lock(load_int64(box + BELL))
        if state == NOBODY and not _hire(pool, box):
            add(call + BUSY, -1)
            publish(box, NOBODY)
            break
        missing -= 1


@jit
def _withdraw(pool: int, call: int) -> None:
    """Take a call out of the boxes of helpers that have not taken it."""
    for box in range(pool + BOX, pool + BOX + MOST * BOX, BOX):
        state = look(box)
        if state == NOBODY or look(call + BUSY) == 0:
            break
        if state == call and replace(box, call, IDLE):
            add(call + BUSY, -1)


@jit
def poll(worker: int) -> None:
    """Let handlers of signals run, if this is the thread for them; what they raise stops the call."""
    call = load_int64(worker + CALL)
    pool, interval, start = load_int64(call + POOL), load_int64(worker + INTERVAL), ticks()
    if load_int64(pool + MAIN) != np.int64(_this_thread()):
        _store(worker + POLL, np.int64(0))
    elif look(call + STOP) == GOES_ON:
        set_float_state(load_int64(call + STATE))
        gil = _take_gil()
        if _handle_signals() != 0:
            publish(call + STOP, RAISED)
        _leave_gil(gil)
        _store(call + STATE, float_state())
        set_float_state(IEEE)
        if look(pool + FORKED) != 0:  # a handler has returned in a child
            _withdraw(pool, call)
            if look(call + BUSY) > 0:
                replace(call + STOP, GOES_ON, ORPHANED)
    now = ticks()
    worked, polled = start - load_int64(worker + LAST), now - start
    interval = 2 * interval if polled * (SHARE - 1) > worked else max(interval // 2, WORK)
    _store(worker + INTERVAL, interval)
    _store(worker + CREDIT, interval)
    _store(worker + LAST, now)


@jit
def enter(call: int) -> int:
    """Do a call and return why it has stopped: `GOES_ON` when everything is done."""
    pool, worker = load_int64(call + POOL), call + OWN
    _store(call + STATE, float_state())
    set_float_state(IEEE)
    _store(worker + CALL, call)
    _store(worker + POLL, load_int64(pool + POLLS))
    _store(worker + CREDIT, np.int64(WORK))
    _store(worker + INTERVAL, np.int64(WORK))
    _store(worker + LAST, ticks())
    settle = load_int64(call + SETTLE)
    if settle != 0 and invoke(settle, call):
        set_float_state(load_int64(call + STATE))
        return NO_MEMORY
    if load_int64(call + HELPERS) != 0:
        _invite(pool, call)
    if invoke(load_int64(call + KERNEL), worker):
        replace(call + STOP, GOES_ON, NO_MEMORY)
    if look(call + BUSY) > 0:
        _withdraw(pool, call)
    patience = SPIN
    while look(call + BUSY) > 0 and look(pool + FORKED) == 0:
        if patience > 0:
            patience -= 1
        else:
            _give_way()  # for a moment, or for as long as other threads use the processor
            proceed(worker, WORK // 4)
    if load_int64(call + MEMORY) != 0:
        release(load_int64(call + MEMORY))
    _store(pool + ENDED, ticks())
    set_float_state(load_int64(call + STATE))
    stop: int = look(call + STOP)
    _leave_if(stop == RAISED)
    return stop
