"""A model of how the tasks of one call spread over the threads of a machine that is not at hand.

The tasks are the real ones: each call is settled for so many threads, as it is before its kernel runs. Their times are
modelled: by the multiplications that the kernels themselves count before each step (``runtime/tasks.py``), at a rate a
thread. Threads take tasks in order, and wait for the packing of their head. ``python asv_benches/spread.py`` prints,
for each case and number of threads, the share of the time in which threads are busy, and the rate at which they read
keys and values then, which caches and memory have to serve.
"""

import argparse
import heapq
from typing import NamedTuple

import numpy as np
from sdpa_numba import calls
from sdpa_numba.kernels.record import FORWARD, settle_few_rows, settle_many_rows
from sdpa_numba.plan import host_registers, sizes_for
from sdpa_numba.runtime.call import ARGUMENTS, HELPERS, SETTLE
from sdpa_numba.runtime.tasks import MOVE, OVERHEAD
from sdpa_numba.runtime.threads import POOL, team

import sdpa_ref

RATE = 50e9  # multiplications of a thread in a second: 16 in each cycle of 3 GHz


class Case(NamedTuple):
    """Shapes, and how many keys before and behind its own position a query sees."""

    B: int
    Hq: int
    Hkv: int
    L: int
    S: int
    E: int
    left: int = 2**40
    right: int = 2**40


CASES = {
    "prefill, 1 head, 2048": Case(1, 1, 1, 2048, 2048, 64),
    "prefill, 1 head, 2048, causal": Case(1, 1, 1, 2048, 2048, 64, right=0),
    "prefill, 1 head, 16384, causal": Case(1, 1, 1, 16384, 16384, 64, right=0),
    "prefill, 8 heads, 2048, causal": Case(1, 8, 8, 2048, 2048, 64, right=0),
    "prefill, 32/8 heads, 2048, causal": Case(1, 32, 8, 2048, 2048, 128, right=0),
    "prefill, 32/8 heads, 16384, window 4096": Case(1, 32, 8, 16384, 16384, 128, left=4095, right=0),
    "encoder, 32 x 12 heads, 128": Case(32, 12, 12, 128, 128, 64),
    "decode, 32/8 heads, 4096": Case(1, 32, 8, 1, 4096, 128),
    "decode, 32/8 heads, 65536": Case(1, 32, 8, 1, 65536, 128),
    "decode, 16 x 32/8 heads, 4096": Case(16, 32, 8, 1, 4096, 128),
}


class Task(NamedTuple):
    """What a thread takes: its multiplications, the bytes it reads, a head to pack or whose packing it waits for."""

    work: float
    bytes: float
    packs: int | None = None
    waits: int | None = None


def tasks_of(case, threads):
    """Return the tasks of a call on so many threads, in the order in which they are taken."""
    query = np.empty((case.B, case.Hq, case.L, case.E), np.float32)
    key, value = np.empty((2, case.B, case.Hkv, case.S, case.E), np.float32)
    mask = None if case.right else sdpa_ref.Causal()
    settled = []

    def settle(call):
        words = np.frombuffer(call, np.int64, ARGUMENTS // 8)
        few = words[SETTLE // 8] == calls.plan_for(query.dtype, True, False, None).settle
        (settle_few_rows if few else settle_many_rows)(id(call) + bytes.__basicsize__ - 1)
        settled.extend([few, np.frombuffer(call, FORWARD, 1, ARGUMENTS)[0].copy(), int(abs(words[HELPERS // 8]))])

    kept = calls.run, calls.team
    team()
    calls.run, calls.team = settle, lambda: (POOL.address, threads - 1)
    try:
        sdpa_ref.sdpa(query, key, value, mask=mask, backend="numba")
    finally:
        calls.run, calls.team = kept
    few, record, helpers = settled
    return (of_few_rows if few else of_many_rows)(case, record), helpers + 1


def of_few_rows(case, record):
    """Return the chunks of all key heads."""
    sizes = sizes_for("float32", *host_registers())
    n, chunks = int(record["group"] * case.L), -(-case.S // sizes.chunk)
    keys = [min(sizes.chunk, case.S - i * sizes.chunk) for i in range(chunks)] * (case.B * case.Hkv)
    return [Task(k * ((n + MOVE) * 2 * case.E + n * OVERHEAD), k * 8 * case.E) for k in keys]


def of_many_rows(case, record):
    """Return the blocks that are packed, and the strips of all groups of heads."""
    sizes = sizes_for("float32", *host_registers())
    blocks, rows = -(-case.S // sizes.block), sizes.lanes * sizes.tile_vectors
    tasks = []
    if record["packed"]:
        moved = sizes.block * 2 * case.E
        tasks = [Task(moved * MOVE, 4 * moved, packs=kv) for kv in range(case.B * case.Hkv) for _ in range(blocks)]
    heads = case.Hq // int(record["fold"])
    for unit in range(int(record["units"])):
        kv = unit // heads * case.Hkv + unit % heads * int(record["fold"]) // int(record["group"])
        for strip in reversed(range(int(record["strips"]))):
            first = strip * int(record["strip"]) * rows
            last = min(first + int(record["strip"]) * rows, case.L * int(record["fold"]))
            low, high = max(first - case.left, 0), min(last + case.right, case.S)
            keys = -(-high // sizes.block) * sizes.block - low // sizes.block * sizes.block
            work = (last - first) * (keys * (2 * case.E + OVERHEAD) + 2 * case.E * MOVE)
            tasks.append(Task(work, keys * 8 * case.E, waits=kv if record["packed"] else None))
    return tasks


def spread(tasks, threads):
    """Return the share of time in which the threads are busy, and the bytes read in a second."""
    packed, free = {}, [0.0] * threads
    for task in tasks:
        start = max(heapq.heappop(free), packed.get(task.waits, 0.0))
        end = start + task.work / RATE
        if task.packs is not None:
            packed[task.packs] = max(packed.get(task.packs, 0.0), end)
        heapq.heappush(free, end)
    end = max(free)
    return sum(task.work for task in tasks) / RATE / end / threads, sum(task.bytes for task in tasks) / end


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", nargs="+", type=int, default=[2, 8, 64, 192])
    threads = parser.parse_args().threads
    print("| case | " + " | ".join(f"{n} threads" for n in threads) + " |")
    print("| --- | " + " | ".join("---:" for _ in threads) + " |")
    for name, case in CASES.items():
        cells = []
        for n in threads:
            tasks, used = tasks_of(case, n)
            busy, rate = spread(tasks, used)
            cells.append(f"{busy * used / n:.0%}, {rate / 1e9:.0f} GB/s")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
