"""What a worker provides to a kernel: the next task, and whether to go on."""

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.atomic import add, invoke, look
from sdpa_numba.vector.simd import load_int64, storer

from .call import CALL, CREDIT, GOES_ON, OWN, POLL, STOP, TAKEN

NO_TASK = 2**62
WORK = 2**27  # multiplications between two polls: some milliseconds
OVERHEAD = 32  # multiplications in whose time a score becomes a weight
MOVE = 16  # multiplications in whose time a number moves, from or to memory that is in no cache

BACK = 2**32  # the counter of tasks from the end lies in the upper half of that from the front

_store = storer("int64")


@part
def next_task(worker):
    """Return the number of the task to do now, beyond all numbers when the call stops."""
    call = load_int64(worker + CALL)
    return add(call + TAKEN, 1) if look(call + STOP) == GOES_ON else NO_TASK


@part
def next_at_ends(worker, tasks):
    """Return the number of the task to do now: the caller's come from the front, those of helpers from the end.

    So a thread takes about the same tasks in every call, and finds in its own cache what it read and wrote before.
    """
    call = load_int64(worker + CALL)
    if look(call + STOP) != GOES_ON:
        return NO_TASK
    own = worker == call + OWN
    taken = add(call + TAKEN, 1 if own else BACK)
    front, back = taken % BACK, taken // BACK
    if front + back >= tasks:
        return NO_TASK
    return front if own else tasks - 1 - back


@part
def proceed(worker, work):
    """Return whether the call goes on; `work` is about how many multiplications come next."""
    credit = load_int64(worker + CREDIT) - work
    _store(worker + CREDIT, credit)
    if credit < 0 and load_int64(worker + POLL) != 0:
        invoke(load_int64(worker + POLL), worker)
    return look(load_int64(worker + CALL) + STOP) == GOES_ON
