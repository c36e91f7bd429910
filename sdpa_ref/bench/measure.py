"""What one process measures: a case with all contenders, or the memory of a call."""

from pathlib import Path
from typing import Any

import numpy as np

from sdpa_ref.bench.cases import Case, Inputs, Truth, inputs, truth
from sdpa_ref.bench.clock import by_turns, matrix_product, quick, reading
from sdpa_ref.bench.contenders import Call, ways

_MANY = 5 * 10**8  # operations from which on a case is compared with a matrix product
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Found = dict[str, Any]


def measure(case: Case, names: list[str], threads: int, seconds: float) -> Found:
    """Return what each contender takes for a case, ready for JSON; one that cannot do it or is wrong is not timed.

    Parameters
    ----------
    case : Case
    names : list of str
        Backends and peers.
    threads : int
    seconds : float
        How long to measure, for each of them.
    """
    given = inputs(case)
    exact = truth(case, given)
    found: dict[str, Found] = {}
    calls: dict[str, Call] = {}  # as a whole, because some own the memory that their library writes to
    for name in names:
        found[name], call = _fastest(name, case, given, exact, threads)
        if call is not None:
            calls[name] = call
    runs = {name: call.run for name, call in calls.items()}
    yardstick: Found | None = None
    if runs and case.L == 1:
        runs[""], amount = reading((given.key, given.value), threads)
        yardstick = {"of": "reading", "amount": amount}
    elif runs and case.flops >= _MANY:
        runs[""], amount = matrix_product()
        yardstick = {"of": "matrix product", "amount": amount}
    for name, samples in by_turns(runs, seconds).items():
        low, median, high = np.quantile(samples, (0.25, 0.5, 0.75)).tolist()
        timing = {"median": median, "quartiles": [low, high], "samples": len(samples)}
        (found[name] if name else yardstick or {}).update(timing)
    return {"case": case.name, "budget": exact.budget, "contenders": found, "yardstick": yardstick}


def _fastest(name: str, case: Case, given: Inputs, exact: Truth, threads: int) -> tuple[Found, Call | None]:
    """Return which way of a contender is right and fastest, and its call; or why there is none."""
    reasons, wrong, right = [], False, []
    for way, prepare in ways(name).items():
        try:
            call = prepare(case, given, threads)
            entries, heads = exact.output.shape[:2]
            output = call.output(call.run())[:entries, :heads, exact.rows]
            error = float(np.abs(output.astype(np.float64) - exact.output).max())
            if error <= exact.budget:
                right.append((quick(call.run), way, error, call))
            else:
                wrong = True
                reasons.append(f"wrong by {error:.1e}, where {exact.budget:.1e} is allowed")
        except Exception as refusal:  # whatever other libraries raise for what they do not support
            reasons.append(" ".join(str(refusal).split())[:160])
    if not right:
        return {"reason": reasons[0], "wrong": wrong}, None
    _, way, error, call = min(right, key=lambda entry: entry[0])
    return {"way": way, "error": error}, call


def peak_memory(backend: str, L: int, threads: int) -> Found:
    """Return how much more memory a call takes than its inputs and its output, in bytes; or why that is not known."""
    if not _CLEAR.exists():
        return {"backend": backend, "L": L, "reason": "the peak of a process can be reset on Linux only"}
    (prepare,) = ways(backend).values()
    try:
        small, large = (Case("memory", 1, 2, 2, n, n, 64) for n in (min(L, 256), L))
        prepare(small, inputs(small), threads).run()  # what is compiled and loaded once does not count
        given = inputs(large)
        run = prepare(large, given, threads).run
        _limit_memory()
        _CLEAR.write_text("5")
        before = _kibibytes(_STATUS, "VmRSS")
        output = run()
        extra = 1024 * (_kibibytes(_STATUS, "VmHWM") - before) - output.nbytes
    except MemoryError:
        return {"backend": backend, "L": L, "reason": "it takes more memory than there is"}
    return {"backend": backend, "L": L, "extra": extra, "packed": given.key.nbytes + given.value.nbytes}


def _limit_memory() -> None:
    """Let a call that needs too much fail, rather than the machine."""
    import resource

    limit = 1024 * (_kibibytes(_STATUS, "VmSize") + _kibibytes(Path("/proc/meminfo"), "MemAvailable") * 3 // 4)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _kibibytes(file: Path, field: str) -> int:
    return next(int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith(field))
