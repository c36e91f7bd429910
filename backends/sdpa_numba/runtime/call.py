"""How a call lies in memory: records of words of 8 bytes, by the distance of each word from the first.

A worker is a thread that works on a call. The kernel gets the address of its worker; all workers share the call.
"""

# A worker: its call, how much work it may do before it polls, how it polls (0: never); and for the calling thread, how
# much work lies between two polls, and when the last one ended.
CALL, CREDIT, POLL, INTERVAL, LAST, WORKER = 0, 8, 16, 24, 32, 40

# A call: how many tasks are taken, why it stops, how many helpers may read it. Then what Python has written: the
# kernel, what settles how the work is cut up (0: Python did), the pool, how many helpers to invite at most. Then memory
# to give back, how the caller computes, its worker, and the record that the kernel reads.
TAKEN, STOP, BUSY, KERNEL, SETTLE, POOL, HELPERS, MEMORY, STATE, OWN = range(0, 80, 8)
ARGUMENTS = OWN + WORKER

HEADER = f"={KERNEL}x4q{ARGUMENTS - MEMORY}x"  # as `struct` writes what stands before the record

GOES_ON, RAISED, NO_MEMORY, ORPHANED = range(4)  # why a call stops
