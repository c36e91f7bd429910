"""A run as data for JSON, and as a table for the terminal."""

from dataclasses import asdict
from typing import Any

import numpy as np

import sdpa_ref
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.counterexample import described
from sdpa_ref.testing.findings import Finding, groups
from sdpa_ref.testing.judge import excuse
from sdpa_ref.testing.power import NEEDS
from sdpa_ref.testing.runner import Run

_EMPTY_ROWS = {"zero": "0", "nan": "nan", "mean": "the mean of all values", "any": "other numbers"}
MARKS = {"passed": "green", "failed": "bold red", "not claimed": "dim", "declined": "yellow", "not run": "yellow"}


def as_data(run: Run, found: tuple[Finding, ...]) -> dict[str, Any]:
    """Return the run in types that JSON has."""
    failures = {one.law.name: _failure(one) for one in found}
    return {
        "target": run.target.name,
        "about": run.target.about,
        "versions": {"sdpa_ref": sdpa_ref.__version__, "numpy": np.__version__},
        "passed": run.passed,
        "common_cause": common_cause(found, run.target.capabilities)[0],
        "causes": [
            {"pattern": pattern, "properties": [one.law.name for one in some]} for pattern, some in groups(found)
        ],
        "seed": run.seed,
        "rounds": run.rounds,
        "seconds": round(run.seconds, 2),
        "capabilities": run.target.capabilities.as_dict(),
        "properties": [
            {
                "name": outcome.law.name,
                "about": outcome.law.about,
                "status": outcome.status,
                "cases": dict(outcome.cases),
                "missing": outcome.missing,
                "declined": dict(outcome.declined),
                "failure": failures.get(outcome.law.name),
            }
            for outcome in run.outcomes
        ],
        "drawn": dict(run.drawn.table()),
        "warnings": warnings(run),
        "power": [asdict(sight) for sight in run.sights],
    }


def summary(run: Run) -> str:
    """Return the run in one line."""
    counts = {status: sum(o.status == status for o in run.outcomes) for status in MARKS}
    parts = [f"{counts[status]} {status}" for status in MARKS if counts[status] or status in ("passed", "failed")]
    cases = sum(sum(o.cases.values()) for o in run.outcomes)
    return f"{', '.join(parts)}; {cases} cases in {run.seconds:.1f} s of processor time, seed {run.seed}"


def warnings(run: Run) -> list[str]:
    """Return what the run did not exercise, a line for each: claims, and sizes at which kernels change."""
    if not any(o.cases for o in run.outcomes):
        return []
    claims = run.target.capabilities
    unused = run.drawn.unexercised(claims)
    lines = [f"claimed, but no case of this run used it: {', '.join(unused)}"] if unused else []
    never = run.drawn.never(claims)
    return lines + ([f"never drawn: {'; '.join(never)}"] if never else [])


def unseen(run: Run) -> list[str]:
    """Return the seeded faults that the tolerance did not always see, a line for each."""
    lines: list[str] = []
    claims = run.target.capabilities
    for sight in run.sights if any(o.cases for o in run.outcomes) else ():
        if sight.fault in NEEDS and not any(getattr(claims, claim) for claim in NEEDS[sight.fault]):
            continue
        if not sight.cases:
            lines.append(f"{sight.fault}: no case of this run could show it")
        elif not sight.seen:
            lines.append(f"{sight.fault}: not seen in any of {sight.cases} cases")
        elif sight.longest_seen < sight.longest:
            lines.append(f"{sight.fault}: seen up to {sight.longest_seen} keys, not at {sight.longest}")
    return lines


def common_cause(found: tuple[Finding, ...], claims: Capabilities) -> tuple[str, tuple[str, ...]]:
    """Return what several laws fail for, and their names; "" and none where rows without keys are not to blame."""
    rules = {one.law.name: rule for one in found if (rule := excuse(one.failure, claims))}
    if len(rules) < 2:
        return "", ()
    rule = next(iter(rules.values()))
    cause = f"a row that sees no key gives {_EMPTY_ROWS[rule]}, expected {_EMPTY_ROWS[claims.empty_row]}"
    advice = f'fix it first, or claim empty_row="{rule}" if that is intended'
    return f"{len(rules)} laws fail for one cause: {cause}; {advice}", tuple(rules)


def printed(run: Run, found: tuple[Finding, ...], console: Any) -> None:
    """Print the table, the failures, and what the run could not show."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("property", "result", "cases", ""):
        table.add_column(heading, justify="right" if heading == "cases" else "left")
    for outcome in run.outcomes:
        if outcome.status != "not claimed":
            note = "; ".join(f"declined {n}: {reason}" for reason, n in outcome.declined.items())
            cases = f"{sum(outcome.cases.values())}{' passed before' if outcome.failure else ''}"
            table.add_row(
                outcome.law.name,
                f"[{MARKS[outcome.status]}]{outcome.status}[/]",
                cases,
                _plain(note or outcome.law.about),
            )
    console.print(f"{run.target.name}: {run.target.about}" if run.target.about else run.target.name, markup=False)
    console.print(table)
    cause, _ = common_cause(found, run.target.capabilities)
    if cause:
        console.print(f"{cause}\n", style="bold red", markup=False, soft_wrap=True)
    for number, (pattern, some) in enumerate(groups(found), 1):
        laws = ", ".join(one.law.name for one in some)
        console.print(
            f"CAUSE {number}: {pattern or 'see below'} (in {laws})", style="bold red", markup=False, soft_wrap=True
        )
        for n, one in enumerate(some):
            console.print(f"FAILED {one.law.name}: {one.law.about}", style="bold", markup=False)
            if not n:
                console.print(described(one.failure, one.diagnosis), markup=False, soft_wrap=True)
            console.print(f"{one.stability}\nagain: {one.command}\n", markup=False, soft_wrap=True)
    missing = [o for o in run.outcomes if o.missing]
    if missing:
        listed = ", ".join(f"{o.law.name} ({o.missing})" for o in missing)
        console.print(f"not claimed, and so not tested: {listed}", markup=False)
    if blind := unseen(run):
        console.print("what this run's tolerance could not see at its shapes:", *blind, sep="\n  ", markup=False)
    if any(o.cases for o in run.outcomes):
        rows = [f"{name}: {text}" for name, text in run.drawn.table()]
        console.print("drawn:", *rows, sep="\n  ", markup=False, soft_wrap=True)
    for line in warnings(run):
        console.print(f"warning: {line}", style="yellow", markup=False, soft_wrap=True)
    console.print(summary(run), markup=False)


def _failure(one: Finding) -> dict[str, Any]:
    diagnosis = one.diagnosis
    return {
        "what": one.failure.what,
        "message": one.failure.message,
        "case": one.failure.case.recipe,
        "found": one.found.case.recipe if one.found else None,
        "again": one.command,
        "pattern": one.pattern,
        "stability": one.stability,
        "first": None if diagnosis.first is None else dict(zip("bhi", diagnosis.first, strict=True)),
        "units": diagnosis.worst if np.isfinite(diagnosis.worst) else None,
        "blame": diagnosis.blame,
    }


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)
