"""The measuring process: an order as JSON comes in, results go out, a line each. `process.results` starts it."""

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from sdpa_ref.bench import calls, stored
from sdpa_ref.bench.cases import CASES
from sdpa_ref.bench.clock import memory_rate
from sdpa_ref.bench.loops import LOOPS
from sdpa_ref.bench.measure import measure, peak_memory


def _work(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    threads = order["threads"]
    if "memory" in order:
        yield peak_memory(order["backend"], order["memory"], threads)
        return
    cases = [case for case in CASES if case.name in order["cases"]]
    for case in cases:
        names = order["backends"] + (order["peers"] if case.peers else [])
        yield measure(case, names, threads, order["seconds"])
    for loop in LOOPS:
        if loop.name in order["calls"]:
            peers = [peer for peer in order["peers"] if peer in calls.PEERS]
            yield calls.measure(loop, order["backends"] + peers, threads, order["seconds"])
    for store in stored.STORES:
        if store.name in order["stored"]:
            yield stored.measure(store, order["backends"][0], order["peers"], threads, order["seconds"])
    if any(case.L == 1 for case in cases):
        yield {"memory_rate": memory_rate(threads)}


if __name__ == "__main__":
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not get between the results
    for result in _work(json.load(sys.stdin)):
        print(json.dumps(result), file=results, flush=True)
