"""``sdpa-ref check``: the conformance suite for any implementation of attention."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sdpa_ref.cli.errors import Failure, UsageError
from sdpa_ref.cli.output import write
from sdpa_ref.extras import install

HELP = "test an implementation of attention against the laws of this project"
EXAMPLES = """examples:
  sdpa-ref check numba
  sdpa-ref check torch --seconds 60 --html torch.html
  sdpa-ref check my_kernels.py:attention --manifest claims.toml --save failures
  sdpa-ref check my_package.kernels:attention --property causal --seed 7
  sdpa-ref check torch --list

targets: a backend of this project; module:name; file.py:name; in a checkout other libraries: torch, jax and more"""

_WIDTH = 110  # columns where there is no terminal


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("target", metavar="TARGET", help="what to check; see below")
    parser.add_argument("--manifest", type=Path, metavar="FILE", help="TOML file with what the target claims")
    parser.add_argument(
        "--strict", action="store_true", help="hold the claimed features to all of this project's rules"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all cases (default: 0)")
    parser.add_argument("--rounds", type=int, metavar="N", help="how many cases a property gets at most (default: 100)")
    parser.add_argument("--seconds", type=float, metavar="T", help="limit of processor time (default: 40)")
    parser.add_argument("--deep", action="store_true", help="ten times as many cases, and as much time")
    parser.add_argument("--property", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--case", metavar="RECIPE", help="run one case of one property again")
    parser.add_argument("--list", action="store_true", help="list the properties, and which of them would be tested")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page to be read in a browser")
    parser.add_argument(
        "--save", type=Path, metavar="DIR", help="write each failure as a script, numbers and an ONNX test"
    )
    parser.add_argument(
        "--untried", action="store_true", help="print the commands that show failures again without trying them first"
    )


def run(options: argparse.Namespace) -> int:
    """Run the suite, print and write what it finds, and return 1 where something fails."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise Failure(f"the suite needs {error.name}: {install('test')}") from None
    from sdpa_ref.testing import findings, report, runner

    target, laws = _target(options), _laws(options.property)
    if options.list:
        return _listed(target, laws, options.json)
    if options.case is not None:
        return _again(target, laws, options)
    limited = options.seconds is None or options.seconds > 0
    if not limited or options.seed < 0 or (options.rounds is not None and options.rounds < 1):
        raise UsageError("--seconds must be above 0, --rounds at least 1, and --seed at least 0")
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    with Console(stderr=True).status(target.name) as status:
        result = runner.check(
            target,
            seed=options.seed,
            seconds=options.seconds,
            rounds=options.rounds,
            deep=options.deep,
            laws=laws,
            progress=lambda law, n, failures: status.update(
                f"{target.name}: round {n + 1}, {law.name}, {failures} failed"
            ),
        )
        status.update(f"{target.name}: diagnosis")
        claims = findings.claims_options(options.manifest, options.strict)
        found = findings.findings(result, options.target, *claims, tried=not options.untried)
    if options.html:
        from sdpa_ref.testing.page import page

        write(options.html, page(result, found))
    saved = {finding.law.name: _save(finding, options.save) for finding in found if options.save}
    if options.json:
        data = report.as_data(result, found)
        for law in data["properties"]:
            if law["name"] in saved:
                law["failure"]["files"] = saved[law["name"]]
        print(json.dumps(data, indent=2))
    else:
        report.printed(result, found, console)
        for name, files in saved.items():
            print(f"{name}: {', '.join(files)}")
    return 0 if result.passed else 1


def _target(options: argparse.Namespace) -> Any:
    from sdpa_ref.testing.capabilities import stated
    from sdpa_ref.testing.target import TargetError, resolve

    try:
        claims = None if options.manifest is None else stated(options.manifest)
    except (OSError, ValueError) as error:
        raise UsageError(f"--manifest: {error}") from None
    try:
        target = resolve(options.target, claims)
    except TargetError as error:
        raise UsageError(str(error)) from None
    return replace(target, capabilities=target.capabilities.strict()) if options.strict else target


def _laws(names: list[str] | None) -> Any:
    from sdpa_ref.testing.properties import BY_NAME, PROPERTIES

    for name in names or ():
        if name not in BY_NAME:
            raise UsageError(f"unknown property {name!r}; there are {', '.join(BY_NAME)}")
    return tuple(BY_NAME[name] for name in names) if names else PROPERTIES


def _listed(target: Any, laws: Any, as_json: bool) -> int:
    missing = {law.name: law.needs(target.capabilities) for law in laws}
    if as_json:
        print(
            json.dumps([{"name": law.name, "about": law.about, "missing": missing[law.name]} for law in laws], indent=2)
        )
        return 0
    width = max(map(len, missing))
    for law in laws:
        note = f" (not claimed: {missing[law.name]})" if missing[law.name] else ""
        print(f"{law.name:<{width}}  {law.about}{note}")
    return 0


def _again(target: Any, laws: Any, options: argparse.Namespace) -> int:
    """Run one case again, print what comes out, and write it where that is asked for."""
    from sdpa_ref.testing import findings, runner
    from sdpa_ref.testing.counterexample import described
    from sdpa_ref.testing.judge import Declined

    if len(laws) != 1:
        raise UsageError("--case needs one --property NAME")
    try:
        repeated = (runner.replay(target, laws[0], options.case) for _ in range(runner.TIMES))
        failure = next(filter(None, repeated), None)  # some fail only now and then
    except ValueError as error:
        raise UsageError(f"--case: {error}") from None
    except Declined as reason:
        print(f"{laws[0].name}: {target.name} declines this case: {reason}")
        return 0
    if failure is None:
        print(f"{laws[0].name}: {target.name} passes {options.case}, {runner.TIMES} of {runner.TIMES} times")
        return 0
    claims = findings.claims_options(options.manifest, options.strict)
    finding = findings.finding(target, laws[0], failure, options.target, *claims)
    print(f"FAILED {laws[0].name}: {described(failure, finding.diagnosis)}")
    for path in _save(finding, options.save) if options.save else ():
        print(path)
    return 1


def _save(finding: Any, directory: Path) -> list[str]:
    from sdpa_ref.testing.counterexample import saved

    try:
        paths, reason = saved(directory, finding.law.name, finding.command, finding.failure, finding.diagnosis)
    except OSError as error:
        raise Failure(f"cannot write to {directory}: {error.strerror}") from None
    return [*map(str, paths), *([f"no ONNX test: {reason}"] if reason else [])]
