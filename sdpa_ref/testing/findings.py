"""What a run found, failure by failure: the smallest case, its diagnosis, how often it fails, how to see it again."""

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sdpa_ref.testing import patterns, recipes, runner
from sdpa_ref.testing.diagnose import Diagnosis, diagnosed
from sdpa_ref.testing.judge import Failure
from sdpa_ref.testing.properties import PROPERTIES, Property
from sdpa_ref.testing.runner import TIMES, Outcome, Run
from sdpa_ref.testing.target import Target

_TRIED = 12  # failures whose command is run in a process of its own
_PROBED = 6  # causes whose sizes are probed
_PROBING = 10.0  # seconds of processor time for that; a target that compiles each shape may take a second a call
_LONGEST = 120.0  # seconds after which such a process is not waited for; it only says that nothing is known


@dataclass(frozen=True)
class Finding:
    """A failure with its diagnosis, and the command that runs its case again.

    Attributes
    ----------
    law : Property
    failure : Failure
    diagnosis : Diagnosis
    command : str
        What shows the failure again.
    found : Failure, optional
        Before it was shrunk.
    at_first : Diagnosis, optional
        Of that.
    pattern : str
        What the cases and the places that fail have in common, "" where nothing simple.
    stability : str
        How often it fails: "fails every time", "fails 3 of 10 times", "only after another call", ...
    """

    law: Property
    failure: Failure
    diagnosis: Diagnosis
    command: str
    found: Failure | None = None
    at_first: Diagnosis | None = None
    pattern: str = ""
    stability: str = ""


def finding(target: Target, law: Property, failure: Failure, word: str, *options: str) -> Finding:
    """Return the finding of a failure of the law.

    Parameters
    ----------
    target : Target
    law : Property
    failure : Failure
    word : str
        That names the target on the command line.
    *options : str
        Of the command line, which a replay needs again.
    """
    command = _command(word, options, "--property", law.name)
    again = f'{command} --case "{failure.case.recipe}"'  # a recipe has no double quotes
    return Finding(law, failure, diagnosed(target, failure), again)


def findings(run: Run, word: str, *options: str, tried: bool = False) -> tuple[Finding, ...]:
    """Return the failures of a run, as `finding` does, and what they were before they were shrunk.

    Parameters
    ----------
    run : Run
    word : str
    *options : str
    tried : bool
        Whether the commands are run, in processes of their own, to see whether they show the failure.
    """
    found: list[Finding] = []
    causes: set[Any] = set()
    end = time.process_time() + _PROBING
    for o in run.failures:
        if o.failure is None or o.found is None:
            continue
        shrunk = finding(run.target, o.law, o.failure, word, *options)
        cause = patterns.signature(recipes.parse(o.failure.case.recipe)[0])
        probed = cause not in causes and len(causes) < _PROBED
        causes.add(cause)
        found.append(
            replace(
                shrunk,
                found=o.found,
                at_first=diagnosed(run.target, o.found),
                pattern=_pattern(run.target, o, shrunk.diagnosis, end if probed else 0.0),
                stability=_stability(o.again),
            )
        )
    return _tried(run, found, word, options) if tried else tuple(found)


def groups(found: Sequence[Finding]) -> list[tuple[str, list[Finding]]]:
    """Return the findings by cause, each with its pattern: those with the same pattern, message, or kind of case."""
    by_cause: dict[Any, list[Finding]] = {}
    known: dict[Any, Any] = {}  # causes by what tells that it is one of them
    for one in found:
        signs: list[Any] = [("kind", patterns.signature(recipes.parse(one.failure.case.recipe)[0]), one.stability)]
        signs += [("pattern", one.pattern.partition(";")[0])] if one.pattern else []
        signs += [("message", one.failure.message)]
        cause = next((known[sign] for sign in signs if sign in known), one.law.name)
        known |= dict.fromkeys(signs, cause)
        by_cause.setdefault(cause, []).append(one)
    return [(next((one.pattern for one in some if one.pattern), ""), some) for some in by_cause.values()]


def claims_options(manifest: Path | None, strict: bool) -> list[str]:
    """Return the options of the command line that say what the target claims."""
    return [*(["--manifest", str(manifest)] if manifest else []), *(["--strict"] if strict else [])]


def _pattern(target: Target, o: Outcome, diagnosis: Diagnosis, end: float) -> str:
    """Return what the failing cases have in common, in one line; sizes are probed until `end`, in processor time."""
    if o.failure is None or o.again < TIMES:
        return ""
    parts = []
    if time.process_time() < end:
        fails: Callable[[recipes.Words, int], bool] = partial(runner.fails, target, o.law)
        parts.append(patterns.sizes_told(o.failure, fails, target.capabilities, end))
    parts.append(patterns.weights_told(diagnosis, o.failure.case))
    parts.append(patterns.place_told(o.found or o.failure))
    return "; ".join(filter(None, parts))


def _stability(failed: int) -> str:
    """Return in words how often a case failed when it was repeated."""
    if failed == TIMES:
        return "fails every time"
    if failed:
        return f"fails {failed} of {TIMES} times"
    return f"only after another call: alone the case passes {TIMES} of {TIMES} times"


def _tried(run: Run, found: list[Finding], word: str, options: Sequence[str]) -> tuple[Finding, ...]:
    """Return the findings with commands that were seen to show them, or what is known of why none does.

    What does not fail alone is looked for in a run of the same cases, one for all of them.
    """
    with ThreadPoolExecutor(2) as pool:
        codes = dict(
            zip((one.law.name for one in found), pool.map(_code, (one.command for one in found[:_TRIED])), strict=False)
        )
    outcomes = {o.law.name: o for o in run.failures}
    quiet = [outcomes[name] for name, code in codes.items() if code == 0]
    laws = [outcome.law for outcome in run.outcomes]
    some = [] if laws == list(PROPERTIES) else [word for law in laws for word in ("--property", law.name)]
    rounds = max((o.round for o in quiet), default=0) + 1
    limits = "--seed", str(run.seed), "--rounds", str(rounds), "--seconds", f"{max(run.limit, 1.0):g}"
    whole = _command(word, options, *limits, *some)
    shows = bool(quiet) and _code(whole) == 1

    def told(one: Finding) -> Finding:
        code = codes.get(one.law.name, 1)
        if code == 1:
            return one
        if code != 0:
            return replace(one, stability=f"{one.stability}; the command was not tried to its end")
        alone = "only after another call: in a process of its own the case passes"
        alone = alone if outcomes[one.law.name].again == TIMES else one.stability
        if shows:
            return replace(one, command=whole, stability=f"{alone}; the command repeats the calls before it")
        return replace(one, stability=f"{alone}; no command shows it: a run of the same cases passes, too")

    return tuple(map(told, found))


def _command(word: str, options: Sequence[str], *more: str) -> str:
    return shlex.join(["sdpa-ref", "check", word, *options, *more])


def _code(command: str) -> int | None:
    """Return the exit code of a command of this project in a new process, None where it takes too long."""
    arguments = [sys.executable, "-m", *shlex.split(command), "--untried"]
    arguments[2] = "sdpa_ref"
    try:
        return subprocess.run(arguments, capture_output=True, timeout=_LONGEST, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):
        return None
