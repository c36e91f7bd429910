"""What is made of the measurements: ratios, means, a table, a chart."""

import platform
from collections.abc import Iterable
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import geometric_mean
from textwrap import wrap
from typing import Any, BinaryIO

from sdpa_ref.bench.cases import CASES

Row = dict[str, Any]
_CASES = {case.name: case for case in CASES}
_COLOURS = {"torch": "#d55e00", "onnxruntime": "#009e73", "openvino": "#0072b2", "jax": "#cc79a7"}


def judged(measured: Row, ours: str, peers: list[str]) -> Row:
    """Return a case's measurements with its sizes, and how `ours` compares with the peers and with the machine.

    Returns
    -------
    dict
        What `measure.measure` gives, and where it is known `ratios` (the time of each peer by ours), `best` (the
        fastest peer), `ratio` (its ratio), `gflops`, and `fraction` (of what the machine can do).
    """
    case = _CASES[measured["case"]]
    row = {**measured, "shape": [case.B, case.Hq, case.Hkv, case.L, case.S, case.E]}
    row |= {"dtype": case.dtype, "mask": case.mask, "backward": case.backward}
    taken = times(row)
    if ours not in taken:
        return row
    row["gflops"] = case.flops / taken[ours] / 1e9
    row["ratios"] = {peer: taken[peer] / taken[ours] for peer in peers if peer in taken}
    if row["ratios"]:
        row["ratio"], row["best"] = min((ratio, peer) for peer, ratio in row["ratios"].items())
    yard = row["yardstick"]
    if yard is not None:
        amount = yard["amount"] if yard["of"] == "reading" else case.flops
        row["fraction"] = amount / taken[ours] * yard["median"] / yard["amount"]
    return row


def times(row: Row) -> dict[str, float]:
    """Return the median seconds of everything that was timed."""
    return {name: found["median"] for name, found in row["contenders"].items() if "median" in found}


def summary(rows: list[Row], ours: str) -> dict[str, Any]:
    """Return the geometric means of the ratios, and how times of `ours` grow from case to case."""
    compared = [row for row in rows if "ratio" in row]
    taken = {row["case"]: times(row)[ours] for row in rows if ours in times(row)}
    pairs = [(name, f"{name}-causal") for name in taken if f"{name}-causal" in taken]
    lengths = {_CASES[name].L: taken[name] for name in taken if _CASES[name].mask == "window"}
    models = [row["ratio"] for row in compared if row["case"].startswith("models-")]
    return {
        "geometric_mean": {
            "all": _mean(row["ratio"] for row in compared),
            "float32": _mean(row["ratio"] for row in compared if row["dtype"] == "float32" and not row["backward"]),
            "half": _mean(row["ratio"] for row in compared if row["dtype"] != "float32"),
            "backward": _mean(row["ratio"] for row in compared if row["backward"]),
            "models": _mean(models),
        },
        "full_by_causal": {full: taken[full] / taken[causal] for full, causal in pairs},
        "window_by_linear": {
            L: time / (lengths[4096] * L / 4096) for L, time in lengths.items() if L != 4096 and 4096 in lengths
        },
    }


def machine(processor: str, threads: int, peers: Iterable[str]) -> dict[str, Any]:
    """Return on what is measured: processor, threads, versions, and the date."""
    versions = {"python": platform.python_version()}
    for name in ("sdpa_ref", "numpy", "numba", *peers):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {"processor": processor, "threads": threads, "versions": versions, "date": date.today().isoformat()}


def caption(report: dict[str, Any]) -> str:
    """Return one sentence about where the numbers come from."""
    where = report["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in where["versions"].items())
    return f"{where['processor']}, {where['threads']} threads, {versions}, {where['date']}"


def table(report: dict[str, Any]) -> Any:
    """Return the cases as a table of `rich`, whose text is also Markdown."""
    from rich import box
    from rich.table import Table

    names = [*report["backends"], *report["peers"]]
    shown = Table(box=box.MARKDOWN)
    for i, heading in enumerate(("case", "B, Hq, Hkv, L, S, E", *(f"{name} ms" for name in names))):
        shown.add_column(heading, justify="left" if i < 2 else "right", no_wrap=True)
    for heading in ("best peer / ours", "GFLOP/s", "of the machine"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in report["cases"]:
        taken = times(row)
        fraction = f"{row['fraction']:.0%} {row['yardstick']['of']}" if "fraction" in row else ""
        shown.add_row(
            row["case"],
            ", ".join(map(str, row["shape"])),
            *(f"{1e3 * taken[name]:.3g}" if name in taken else "-" for name in names),
            f"{row['ratio']:.2f}" if "ratio" in row else "-",
            f"{row['gflops']:.1f}" if "gflops" in row else "-",
            fraction,
        )
    return shown


def notes(report: dict[str, Any]) -> list[str]:
    """Return the lines under the table."""
    found, lines = report["summary"], []
    for name, mean in found["geometric_mean"].items():
        if mean is not None:
            lines.append(f"geometric mean of best peer / ours, {name}: {mean:.2f}")
    if found["calls"] is not None:
        lines.append(f"geometric mean of torch / ours, loops of calls: {found['calls']:.2f}")
    for case, ratio in found["full_by_causal"].items():
        lines.append(f"time of {case} / time of {case}-causal: {ratio:.2f}")
    for L, ratio in found["window_by_linear"].items():
        lines.append(f"time of window-{L} / time if it were linear from window-4096 on: {ratio:.2f}")
    if report["memory_rate"] is not None:
        lines.append(f"memory read beyond the caches: {report['memory_rate'] / 1e9:.1f} GB/s")
    for peak in report["memory"]:
        what = f"{peak['backend']}, extra memory at L = S = {peak['L']}"
        if "reason" in peak:
            lines.append(f"{what}: unknown, {peak['reason']}")
        else:
            extra, packed = (peak[name] / 2**20 for name in ("extra", "packed"))
            lines.append(f"{what}: {extra:.1f} MiB, where a copy of K and V is {packed:.1f} MiB")
    refused: dict[str, list[str]] = {}
    for row in (*report["cases"], *report["calls"]):
        for name, contender in row["contenders"].items():
            if "reason" in contender:
                refused.setdefault(f"{name}: {contender['reason']}", []).append(row.get("case") or row["loop"])
    return lines + [f"- {reason} ({', '.join(cases)})" for reason, cases in refused.items()]


def chart(report: dict[str, Any], file: Path | BinaryIO) -> None:
    """Save a picture of the ratios: a bar for the best peer, a dot for each."""
    from matplotlib.figure import Figure

    rows = [row for row in report["cases"] if "ratio" in row][::-1]
    figure = Figure(figsize=(8, 1.6 + 0.32 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    y = range(len(rows))
    best = [row["ratio"] for row in rows]
    axes.barh(y, [ratio - 1 for ratio in best], left=1, color="#bbbbbb", label="fastest peer")
    for peer, colour in _COLOURS.items():
        dots = [(row["ratios"][peer], i) for i, row in enumerate(rows) if peer in row["ratios"]]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=colour, markersize=5, label=peer)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(y, [f"{row['case']}  {ratio:.2f}" for row, ratio in zip(rows, best, strict=True)])
    ours = report["backends"][0]
    axes.set_xlabel(f"time of a peer / time of {ours}: right of 1, {ours} is faster")
    figure.legend(loc="outside upper center", ncols=5, frameon=False)
    figure.supxlabel("\n".join(wrap(caption(report), 130)), fontsize=6)
    figure.savefig(file, format="png", dpi=150)


def _mean(ratios: Iterable[float]) -> float | None:
    values = list(ratios)
    return geometric_mean(values) if values else None
