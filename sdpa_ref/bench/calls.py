"""What a call costs in a loop of calls that are not alike, and in the same loop of one of them."""

from functools import partial
from statistics import geometric_mean
from typing import Any

import numpy as np

import sdpa_ref
from sdpa_ref.bench.clock import Run, by_turns
from sdpa_ref.bench.loops import Loop, Step, data
from sdpa_ref.testing import Budget, error_budget

PEERS = ("torch",)  # whose calls are functions of arrays, and not models that are compiled for a shape
_FEWEST = 200  # calls in a pass
Found = dict[str, Any]


def measure(loop: Loop, names: list[str], threads: int, seconds: float) -> Found:
    """Return the seconds a call that each contender takes for a loop, ready for JSON; a wrong one is not timed.

    Parameters
    ----------
    loop : Loop
    names : list of str
        Backends, and of the peers those in `PEERS`.
    threads : int
    seconds : float
        How long to measure, for each of them.
    """
    calls = loop.steps * -(-_FEWEST // loop.steps)
    found: dict[str, Found] = {}
    runs: dict[str, Run] = {}
    for name in names:
        try:
            step = _step(loop, name, threads)
            found[name] = _judged(loop, step)
        except Exception as refusal:  # whatever other libraries raise for what they do not support
            found[name] = {"reason": " ".join(str(refusal).split())[:160], "wrong": False}
        if "reason" in found[name]:
            continue
        runs[name] = partial(_make, step, [i % loop.steps for i in range(calls)])
        if loop.steps > 1:
            runs[f"{name} fixed"] = partial(_make, step, [loop.steps // 2] * calls)
    for run, samples in by_turns(runs, seconds).items():
        name, _, fixed = run.partition(" ")
        low, median, high = (np.quantile(samples, (0.25, 0.5, 0.75)) / calls).tolist()
        found[name] |= {"fixed": median} if fixed else {"median": median, "quartiles": [low, high]}
    return {"loop": loop.name, "contenders": found}


def compared(row: Found, ours: str) -> Found:
    """Return a loop's measurements with PyTorch's time by ours, and ours by that at one length, where known."""
    mine = row["contenders"].get(ours, {})
    more = {}
    for peer in PEERS:
        theirs = row["contenders"].get(peer, {})
        if "median" in mine and "median" in theirs:
            more["ratio"] = theirs["median"] / mine["median"]
    if "fixed" in mine:
        more["by_fixed"] = mine["median"] / mine["fixed"]
    return row | more


def mean(rows: list[Found]) -> float | None:
    """Return the geometric mean of the ratios."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    return geometric_mean(ratios) if ratios else None


def table(rows: list[Found], names: list[str]) -> Any:
    """Return the loops as a table of `rich`, in microseconds a call."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.MARKDOWN)
    shown.add_column("loop", no_wrap=True)
    for name in names:
        shown.add_column(f"{name} us", justify="right", no_wrap=True)
        shown.add_column("fixed", justify="right", no_wrap=True)
    for heading in ("torch / ours", "ours / fixed"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        times = [row["contenders"].get(name, {}).get(what) for name in names for what in ("median", "fixed")]
        ratios = [row.get("ratio"), row.get("by_fixed")]
        shown.add_row(
            row["loop"],
            *("-" if time is None else f"{1e6 * time:.1f}" for time in times),
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    return shown


def _step(loop: Loop, name: str, threads: int) -> Step:
    """Return the function that makes a step."""
    if name not in PEERS:
        sdpa_ref.load(name)
        return loop.ours(partial(sdpa_ref.sdpa, backend=name), data())
    import torch

    torch.set_num_threads(threads)
    with torch.inference_mode():
        return loop.torch(torch, data(torch.from_numpy))


def _judged(loop: Loop, step: Step) -> Found:
    """Return the largest error of the first, the middle and the last step, or that it is wrong."""

    def budget(*arrays: Any, out: Any = None, **options: Any) -> Budget:
        return error_budget(*arrays, **options)

    exact, worst = loop.ours(budget, data()), 0.0
    for i in (0, loop.steps // 2, loop.steps - 1):
        right = exact(i)
        error = float(abs(np.asarray(step(i), np.float64) - right.expected).max())
        if not error <= right.empirical:
            return {"reason": f"wrong by {error:.1e}, where {right.empirical:.1e} is allowed", "wrong": True}
        worst = max(worst, error)
    return {"error": worst}


def _make(step: Step, order: list[int]) -> None:
    for i in order:
        step(i)
