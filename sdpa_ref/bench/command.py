"""``sdpa-ref bench``: the backends against other libraries, on this machine."""

import argparse
import io
import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import sdpa_ref
from sdpa_ref.cli.errors import Failure, UsageError
from sdpa_ref.cli.info import collect, unusable
from sdpa_ref.cli.output import write
from sdpa_ref.extras import install

HELP = "time attention against PyTorch, ONNX Runtime, OpenVINO and JAX"
EXAMPLES = """examples:
  sdpa-ref bench
  sdpa-ref bench --peers torch,onnxruntime --cases "prefill-*,decode*" --out ratios.png
  sdpa-ref bench --peers "" --cases tiny --seconds 0.2 --json
  sdpa-ref bench --cases "calls-*" --peers torch
  sdpa-ref bench --cases "caches-*" --peers torch
  sdpa-ref bench --cases "" --memory

The documentation says under "Performance" what the cases are and how they are measured."""
_PEERS = "torch,onnxruntime,openvino,jax"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--peers",
        type=_names,
        default=_PEERS,
        metavar="NAME,...",
        help='libraries to compare with, "" for none (default: %(default)s)',
    )
    parser.add_argument(
        "--backend",
        nargs="+",
        metavar="NAME",
        help="backends to measure; the first is compared with the libraries (default: numba, else reference)",
    )
    parser.add_argument(
        "--cases",
        type=_names,
        default="all",
        metavar="NAME,...",
        help='names or patterns such as "decode*" (default: all)',
    )
    parser.add_argument("--threads", type=_count, metavar="N", help="of each library (default: one for each processor)")
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=2.0,
        metavar="T",
        help="seconds for each library in each case (default: %(default)s)",
    )
    parser.add_argument(
        "--memory",
        type=_count,
        nargs="?",
        const=32768,
        metavar="L",
        help="measure memory at so many queries and keys (default: %(const)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--out", type=Path, metavar="FILE.png", help="draw a chart of the ratios")


def run(options: argparse.Namespace) -> int:
    """Print what was measured; the exit code is 1 where a backend is wrong."""
    _needs("rich", "cli", not options.json)
    _needs("matplotlib", "plot", options.out is not None)
    if options.out is not None:
        _drawable(options)
    try:
        from sdpa_ref.bench import report
    except ImportError:
        raise Failure(
            "the benchmarks are no part of the wheel: run this in a checkout, after pip install -e ."
        ) from None

    result = _measure(options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)
    if options.out is not None:
        if not any("ratio" in row for row in result["cases"]):
            raise Failure("no peer was timed, so there is nothing to draw")
        chart = io.BytesIO()
        report.chart(result, chart)
        write(options.out, chart.getvalue())
    rows = (*result["cases"], *result["calls"])
    wrong = [name for name in result["backends"] for row in rows if row["contenders"][name].get("wrong")]
    return 1 if wrong else 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return everything that was asked for, ready for JSON; print the progress to the error stream."""
    from sdpa_ref.bench import calls, process, report, stored

    names, backends, peers = _cases(options.cases), _backends(options.backend), _peers(options.peers)
    processor = collect()["processor"]
    threads = options.threads or processor["logical processors"]
    if threads > processor["logical processors"]:
        raise UsageError(f"--threads {threads}: this process has {processor['logical processors']} processors")
    rows: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []
    memory_rate: float | None = None
    loops: list[dict[str, Any]] = []
    stores: list[dict[str, Any]] = []
    order = {
        "cases": [name for name in names if not name.startswith(("calls-", "caches-"))],
        "calls": [name for name in names if name.startswith("calls-")],
        "stored": [name for name in names if name.startswith("caches-")],
        "backends": backends, "peers": peers, "threads": threads, "seconds": options.seconds,
    }  # fmt: skip
    try:
        for found in process.results(order) if names else ():
            if "memory_rate" in found:
                memory_rate = found["memory_rate"]
                continue
            if "loop" in found:
                loops.append(calls.compared(found, backends[0]))
            elif "stored" in found:
                stores.append(stored.compared(found))
            else:
                rows.append(report.judged(found, backends[0], peers))
            times = ", ".join(f"{name} {1e3 * time:.3g} ms" for name, time in report.times(found).items())
            name = found.get("case") or found.get("loop") or found["stored"]
            print(f"{len(rows) + len(loops) + len(stores)}/{len(names)} {name}: {times or 'none'}", file=sys.stderr)
        for backend in backends if options.memory else ():
            memory += process.results({"memory": options.memory, "backend": backend, "threads": threads})
    except RuntimeError as error:
        raise Failure(str(error)) from None
    return {
        "machine": report.machine(processor["model"], threads, peers),
        "backends": backends,
        "peers": peers,
        "cases": rows,
        "calls": loops,
        "stored": stores,
        "summary": report.summary(rows, backends[0]) | {"calls": calls.mean(loops)},
        "memory_rate": memory_rate,
        "memory": memory,
    }


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console

    from sdpa_ref.bench import calls, report, stored

    # 200 columns, whatever the terminal has: a table that is cut off is of no use
    console = Console(width=200, markup=False, emoji=False, highlight=False)
    if result["cases"]:
        console.print(report.table(result))
    if result["calls"]:
        console.print(
            calls.table(
                result["calls"], [*result["backends"], *(peer for peer in result["peers"] if peer in calls.PEERS)]
            )
        )
    if result["stored"]:
        console.print(stored.table(result["stored"]))
    print(*report.notes(result), report.caption(result), sep="\n")


def _drawable(options: argparse.Namespace) -> None:
    """Raise the error of a chart that could not be drawn or written, before anything is measured."""
    if not options.out.parent.is_dir():
        raise UsageError(f"--out {options.out}: there is no such directory")
    if options.out.suffix.lower() != ".png":
        raise UsageError(f"--out {options.out}: the chart is a PNG, call it {options.out.with_suffix('.png').name}")
    if not (options.peers and options.cases):
        raise UsageError("--out draws the times of peers by ours, and needs --peers and --cases")


def _cases(patterns: Sequence[str]) -> list[str]:
    from sdpa_ref.bench.cases import CASES
    from sdpa_ref.bench.loops import LOOPS
    from sdpa_ref.bench.stored import STORES

    names = [case.name for case in CASES] + [loop.name for loop in LOOPS] + [store.name for store in STORES]
    for pattern in patterns:
        if pattern != "all" and not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(f"--cases: no case is called {pattern!r}; there are {', '.join(names)}")
    chosen = [name for name in names if any(pattern == "all" or fnmatchcase(name, pattern) for pattern in patterns)]
    possible = [name for name in chosen if not name.endswith("bfloat16") or find_spec("ml_dtypes") is not None]
    if len(possible) < len(chosen):
        print(f"the bfloat16 cases need ml_dtypes: {install('half')}", file=sys.stderr)
    return possible


def _backends(named: Sequence[str] | None) -> list[str]:
    if named is None:
        return ["reference" if "numba" not in sdpa_ref.names() or unusable("numba") else "numba"]
    for name in named:
        if name not in sdpa_ref.names():
            raise UsageError(f"unknown backend {name!r}; there are {', '.join(sdpa_ref.names())}")
        reason = unusable(name)
        if reason is not None:
            raise Failure(reason)
        if sdpa_ref.load(name).ARRAYS != "numpy":
            raise UsageError(f"backend {name!r} does not take NumPy arrays; this command measures processors")
    return list(dict.fromkeys(named))


def _peers(named: Sequence[str]) -> list[str]:
    known = _PEERS.split(",")
    for name in named:
        if name not in known:
            raise UsageError(f"unknown peer {name!r}; there are {', '.join(known)}")
    return list(dict.fromkeys(named))


def _needs(module: str, extra: str, wanted: bool) -> None:
    if wanted and find_spec(module) is None:
        raise Failure(f"this needs {module}: {install(extra)}")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return seconds
