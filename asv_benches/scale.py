"""Sixty-four workers and 100 million keys, without either: what graphs cost, and what a scheduler makes of them.

``python asv_benches/scale.py`` prints the numbers of the plan in ``docs/scale.md``. The scheduler is a real one, in a
process of its own, whose processor time is counted. The workers are real too, all in this process, with one thread
each; their kernels only wait, and what they return says that it is as large as it would be. Time passes faster than in
the plan, and the network is faster by the same factor. Graphs are those of all keys; a quarter of these is run, as it
takes minutes. ``--quick`` has eight workers and fewer keys.
"""

import argparse
import asyncio
import itertools
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import dask
import dask.array as da
import distributed
import numpy as np
from dask.sizeof import sizeof
from sdpa_dask import tasks

from sdpa_ref import Causal, Packed, reading, sdpa

WIDTH, ROWS, HEADS = 128, 65536, 8
SECONDS, BANDWIDTH = 22.0, 1e9  # of a task of the plan, and of the network between two workers, in bytes a second
KEYS = 2**20  # of a task, which reads them in pieces
COLUMNS = "nodes", "graph, MB", "bytes a row", "built, s", "depth", "scheduler, ms a node", "moved, GB", "busy"


class Large:
    """What takes so many bytes on a worker."""

    def __init__(self, nbytes):
        self.nbytes = nbytes


@sizeof.register(Large)
def _(x):
    return x.nbytes


class Keys:
    """A store of keys that nobody reads."""

    def __init__(self, keys):
        self.shape, self.chunks, self.dtype = (HEADS, keys, WIDTH), (1, KEYS, WIDTH), np.dtype("float32")

    def __getitem__(self, index):
        raise AssertionError("a key was read")

    def __dask_tokenize__(self):
        return "keys", self.shape


def attention(keys, rows=ROWS, cuts=(1, 64), order="auto", mask=None):
    """Return the lazy output for queries that are cut into so many blocks of heads and rows, and the bytes of a sum."""
    block = HEADS // cuts[0], rows // cuts[1]
    chunks = (block[0],) * cuts[0], (block[1],) * cuts[1], (WIDTH,)
    query = da.map_blocks(Large, 4 * block[0] * block[1] * WIDTH, chunks=chunks, meta=np.empty((0, 0, 0), np.float32))
    store = Keys(keys)
    limit = 2 * KEYS * block[0] * WIDTH * (4 + 4)  # a task a piece: in truth a task reads smaller ones, one by one
    with dask.config.set({"sdpa-ref.order": order}), reading(limit=limit):
        return sdpa(query, store, store, mask=mask and mask(keys), query_offset="end" if mask else None)


def depth(graph):
    """Return how many states and sums lie one behind the other at most."""
    parents, found = {key: dask.core.get_dependencies(graph, key) for key in graph}, {}
    for key in dask.core.toposort(graph):
        own = isinstance(key, tuple) and key[0].startswith(("sdpa-state", "sdpa-sum-"))
        found[key] = own + max((found[parent] for parent in parents[key]), default=0)
    return max(found.values())


def fake(seconds, nbytes):
    """Let the kernels wait, and return what says that it has this size."""

    def state(*inputs):
        time.sleep(seconds)
        return Large(nbytes)

    def other(*inputs):
        return Large(nbytes)

    for name in ("state", "total", "result", "pick"):
        setattr(tasks, name, state if name == "state" else other)


async def run(lazy, workers, faster):
    """Return nodes, processor time of the scheduler, bytes that workers sent, and the share of the time they worked."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "scheduler.json")
        command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--no-dashboard", "--port", "0"]
        command += ["--host", "127.0.0.1"]
        scheduler = subprocess.Popen([*command, "--scheduler-file", str(file)], stderr=subprocess.DEVNULL)
        try:
            options = {"nthreads": 1, "memory_limit": 0, "dashboard": False, "host": "127.0.0.1", "silence_logs": 50}
            options["scheduler_file"] = str(file)
            crew = await asyncio.gather(*(distributed.Worker(name=n, **options) for n in range(workers)))
            async with distributed.Client(scheduler_file=str(file), asynchronous=True) as client:
                return await watched(client, crew, lazy, faster)
        finally:
            scheduler.terminate()
            scheduler.wait()


async def watched(client, crew, lazy, faster):
    """Return what `run` does, of workers that are there."""

    async def used():
        return await client.run_on_scheduler(time.process_time)

    before = await used()
    await asyncio.sleep(2)
    idle = (await used() - before) / 2  # heartbeats
    before, start = await used(), time.perf_counter()
    done = client.persist(lazy)
    await distributed.wait(done)
    wall = time.perf_counter() - start
    spent = await used() - before - idle * wall
    moved = sum(worker.transfer_outgoing_bytes_total for worker in crew)
    graph = dict(lazy.__dask_graph__())
    states = sum(isinstance(key, tuple) and key[0].startswith("sdpa-state") for key in graph)
    busy = states * SECONDS / faster / len(crew) / wall
    await asyncio.gather(*(worker.close() for worker in crew))
    return len(graph), spent, moved, busy


def measured(name, options, workers, faster, keys):
    """Print a line of the table."""
    size = options.get("rows", ROWS)
    start = time.perf_counter()
    real = attention(keys, **options)
    built = time.perf_counter() - start
    graph = dict(real.__dask_graph__())
    nbytes = len(pickle.dumps(graph, protocol=5))
    kept = {key: getattr(tasks, key) for key in ("state", "total", "result", "pick")}
    cuts = options.get("cuts", (1, 64))
    fake(SECONDS / faster, 4 * (HEADS // cuts[0]) * (size // cuts[1]) * (WIDTH + 2))
    try:
        count, spent, moved, busy = asyncio.run(run(attention(keys // 4, **options), workers, faster))
    finally:
        for key, function in kept.items():
            setattr(tasks, key, function)
    numbers = (
        f"{len(graph)}", f"{nbytes / 1e6:.2f}", f"{nbytes / size:.0f}", f"{built:.2f}", f"{depth(graph)}",
        f"{1e3 * spent / count:.2f}", f"{moved / 1e9:.2f}", f"{100 * busy:.0f} %",
    )  # fmt: skip
    print("|", " | ".join((name, *numbers)), "|", flush=True)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="eight workers, and fewer keys")
    quick = parser.parse_args().quick
    workers, keys, faster = (8, 16 * KEYS, 400) if quick else (64, 10**8, 100)
    calls = {
        "rows first, a chain": {},
        "rows first, a tree": {"order": "tree"},
        "heads first, a chain": {"cuts": (8, 8)},
        "causal": {"mask": lambda keys: Causal()},
        "16 documents": {"mask": lambda keys: Packed([ROWS // 16] * 16, [keys // 16] * 16)},
        "one block of rows, a tree": {"cuts": (1, 1), "order": "tree"},
        "a decode step": {"rows": 1, "cuts": (1, 1)},
    }
    if quick:
        calls = dict(itertools.islice(calls.items(), 2))
    config = {
        "distributed.scheduler.bandwidth": BANDWIDTH * faster,
        "distributed.admin.system-monitor.gil.enabled": False,
        "distributed.admin.system-monitor.interval": "10s",
        "distributed.worker.profile.enabled": False,  # 64 workers in one process would watch each other
    }
    print("| |", " | ".join(COLUMNS), "|")
    print("|", " | ".join(["---"] * (len(COLUMNS) + 1)), "|")
    with dask.config.set(config):
        for name, options in calls.items():
            measured(name, options, workers, faster, keys)


if __name__ == "__main__":
    main()
