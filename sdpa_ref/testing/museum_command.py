"""``sdpa-ref museum``: whether the conformance suite sees known bugs."""

import argparse
import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sdpa_ref.cli.errors import Failure, UsageError
from sdpa_ref.cli.output import write

HELP = "show that the suite finds bugs: kernels with real faults, and the test that found each"
EXAMPLES = """examples:
  sdpa-ref museum
  sdpa-ref museum --fault "top left for bottom right" --fault "scale twice"
  sdpa-ref museum --list
  sdpa-ref museum --seconds 60 --seed 7 --json

The exit code is 1 where a fault is not seen."""
_WIDTH = 140  # columns where there is no terminal


def arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--fault", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--list", action="store_true", help="list the faults and the bugs that they stand for")
    parser.add_argument(
        "--seconds", type=float, default=40.0, metavar="T", help="limit of processor time for each (default: 40)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all cases (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page of the documentation")


def run(options: argparse.Namespace) -> int:
    """Print which law saw which fault, and return 1 where one was not seen."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError as error:
        raise Failure(f'the museum needs {error.name}: pip install "sdpa-ref[test]"') from None
    from sdpa_ref.testing import museum

    faults = _chosen(options.fault, museum.FAULTS)
    if options.list:
        return _listed(faults, options.json)
    if options.seconds <= 0 or options.seed < 0:
        raise UsageError("--seconds must be above 0, and --seed at least 0")
    walk = museum.tour(faults, seed=options.seed, seconds=options.seconds)
    progress = Console(stderr=True)
    seen = list(track(walk, "Looking at faults", total=len(faults), console=progress, transient=True))
    if options.markdown:
        write(options.markdown, museum.markdown(seen))
    if options.json:
        print(json.dumps([sighting.as_dict() for sighting in seen], indent=2))
    else:
        _print(seen)
    return 0 if all(sighting.property for sighting in seen) else 1


def _chosen(names: Sequence[str] | None, faults: Any) -> list[Any]:
    for name in names or ():
        if name not in faults:
            near = get_close_matches(name, faults, 1)
            hint = f", did you mean {near[0]!r}?" if near else "; `sdpa-ref museum --list` shows them"
            raise UsageError(f"--fault: unknown fault {name!r}{hint}")
    return [faults[name] for name in names or faults]


def _listed(faults: Sequence[Any], as_json: bool) -> int:
    if as_json:
        print(json.dumps([{"fault": f.name, "wrong": f.wrong, "address": f.address} for f in faults], indent=2))
        return 0
    for fault in faults:
        print(f"{fault.name}\n  {fault.wrong}\n  {fault.address or 'made up'}")
    return 0


def _print(seen: Sequence[Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=_WIDTH)
    table = Table("fault", "first seen by", "counterexample", box=None, pad_edge=False)
    table.add_column("seconds", justify="right")
    for sighting in seen:
        first = sighting.property or Text("nobody", "bold red")
        table.add_row(sighting.fault.name, first, sighting.case, f"{sighting.seconds:.1f}")
    console.print(table)
    missed = [sighting.fault.name for sighting in seen if not sighting.property]
    console.print(
        f"{len(seen) - len(missed)} of {len(seen)} faults seen" + (f"; not seen: {', '.join(missed)}" * bool(missed))
    )
