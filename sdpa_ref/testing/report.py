"""A run as data for JSON, and as a table for the terminal."""

import shlex
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import sdpa_ref
from sdpa_ref.testing.counterexample import described
from sdpa_ref.testing.diagnose import Diagnosis, diagnosed
from sdpa_ref.testing.judge import Failure
from sdpa_ref.testing.runner import Outcome, Run

MARKS = {"passed": "green", "failed": "bold red", "not claimed": "dim", "declined": "yellow", "not run": "yellow"}


@dataclass(frozen=True)
class Finding:
    """A failure with its diagnosis, and the command that runs its case again."""

    outcome: Outcome
    failure: Failure
    diagnosis: Diagnosis
    command: str


def findings(run: Run, word: str, *options: str) -> tuple[Finding, ...]:
    """Return the failures of a run.

    Parameters
    ----------
    run : Run
    word : str
        That names the target.
    *options : str
        Of the command line, which a replay needs again.
    """
    found = []
    for outcome in run.failures:
        assert outcome.failure is not None
        parts = ["sdpa-ref", "check", word, *options, "--property", outcome.property, "--case", outcome.failure.case.recipe]
        diagnosis = diagnosed(run.target, outcome.failure)
        found.append(Finding(outcome, outcome.failure, diagnosis, shlex.join(parts)))
    return tuple(found)


def as_data(run: Run, found: tuple[Finding, ...]) -> dict[str, Any]:
    """Return the run in types that JSON has."""
    failures = {finding.outcome.property: _failure(finding) for finding in found}
    return {
        "target": run.target.name,
        "about": run.target.about,
        "versions": {"sdpa_ref": sdpa_ref.__version__, "numpy": np.__version__},
        "passed": run.passed,
        "seed": run.seed,
        "rounds": run.rounds,
        "seconds": round(run.seconds, 2),
        "capabilities": run.target.capabilities.as_dict(),
        "properties": [
            {
                "name": outcome.property,
                "about": outcome.about,
                "status": outcome.status,
                "cases": dict(outcome.cases),
                "missing": outcome.missing,
                "declined": dict(outcome.declined),
                "failure": failures.get(outcome.property),
            }
            for outcome in run.outcomes
        ],
        "power": [asdict(sight) for sight in run.sights],
    }


def summary(run: Run) -> str:
    """Return the run in one line."""
    counts = {status: sum(o.status == status for o in run.outcomes) for status in MARKS}
    parts = [f"{counts[status]} {status}" for status in MARKS if counts[status] or status in ("passed", "failed")]
    cases = sum(sum(o.cases.values()) for o in run.outcomes)
    return f"{', '.join(parts)}; {cases} cases in {run.seconds:.1f} s, seed {run.seed}"


def unseen(run: Run) -> list[str]:
    """Return the seeded faults that the tolerance did not always see, a line for each."""
    lines = []
    for sight in run.sights:
        if not sight.cases:
            lines.append(f"{sight.fault}: no case of this run could show it")
        elif not sight.seen:
            lines.append(f"{sight.fault}: not seen in any of {sight.cases} cases")
        elif sight.longest_seen < sight.longest:
            lines.append(f"{sight.fault}: seen up to {sight.longest_seen} keys, not at {sight.longest}")
    return lines


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
            cases = str(sum(outcome.cases.values()))
            table.add_row(outcome.property, f"[{MARKS[outcome.status]}]{outcome.status}[/]", cases, _plain(note or outcome.about))
    console.print(f"{run.target.name}: {run.target.about}" if run.target.about else run.target.name, markup=False)
    console.print(table)
    for finding in found:
        console.print(f"FAILED {finding.outcome.property}: {finding.outcome.about}", style="bold red", markup=False)
        console.print(f"{described(finding.failure, finding.diagnosis)}\nagain: {finding.command}\n", markup=False, soft_wrap=True)
    missing = [o for o in run.outcomes if o.missing]
    if missing:
        listed = ", ".join(f"{o.property} ({o.missing})" for o in missing)
        console.print(f"not claimed, and so not tested: {listed}", markup=False)
    if blind := unseen(run):
        console.print("what this run's tolerance could not see at its shapes:", *blind, sep="\n  ", markup=False)
    console.print(summary(run), markup=False)


def _failure(finding: Finding) -> dict[str, Any]:
    diagnosis = finding.diagnosis
    return {
        "what": finding.failure.what,
        "message": finding.failure.message,
        "case": finding.failure.case.recipe,
        "found": finding.outcome.found,
        "again": finding.command,
        "first": None if diagnosis.first is None else dict(zip("bhi", diagnosis.first, strict=True)),
        "units": diagnosis.worst if np.isfinite(diagnosis.worst) else None,
        "blame": diagnosis.blame,
    }


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(text)
