"""A walk through the museum: the suite on every exhibit, until it sees what is wrong."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sdpa_ref.testing.museum.catalogue import FAULTS, ROOMS
from sdpa_ref.testing.museum.exhibit import Fault
from sdpa_ref.testing.runner import SECONDS, check


@dataclass(frozen=True)
class Sighting:
    """How the suite saw a fault.

    Attributes
    ----------
    fault : Fault
    property : str
        The first law that did not hold; "" where all did.
    case : str
        The shrunk counterexample, as a recipe.
    message : str
        Its first line.
    seconds : float
        Until it was found and shrunk.
    """

    fault: Fault
    property: str
    case: str
    message: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """Return the sighting as JSON writes it."""
        names = {"fault": self.fault.name, "wrong": self.fault.wrong, "address": self.fault.address}
        found = {"property": self.property, "case": self.case, "message": self.message}
        return names | found | {"seconds": round(self.seconds, 2)}


def see(fault: Fault, *, seed: int = 0, seconds: float = SECONDS) -> Sighting:
    """Return how the suite sees one fault within a limit of time.

    Examples
    --------
    >>> see(FAULTS["scale twice"]).property
    'needles'
    """
    begun = time.process_time()
    run = check(fault.target, seed=seed, seconds=seconds, stop_at_first=True)
    spent = time.process_time() - begun
    for outcome in run.failures:
        if outcome.failure is not None:
            first_line = outcome.failure.message.splitlines()[0]
            return Sighting(fault, outcome.law.name, outcome.failure.case.recipe, first_line, spent)
    return Sighting(fault, "", "", "", spent)


def tour(
    faults: Sequence[Fault] = tuple(FAULTS.values()),
    *,
    seed: int = 0,
    seconds: float = SECONDS,
    progress: Callable[[Fault, int], None] = lambda fault, seen: None,
) -> Iterator[Sighting]:
    """Yield how the suite sees each fault; `progress` is called before each, with how many have been seen."""
    for seen, fault in enumerate(faults):
        progress(fault, seen)
        yield see(fault, seed=seed, seconds=seconds)


def markdown(sightings: Sequence[Sighting]) -> str:
    """Return the page of the documentation: every exhibit, its address, and how it was seen."""
    killed = sum(bool(sighting.property) for sighting in sightings)
    lines = [_INTRODUCTION.format(exhibits=len(sightings), killed=killed, seconds=SECONDS)]
    by_fault = {sighting.fault.name: sighting for sighting in sightings}
    for room, faults in ROOMS.items():
        rows = [by_fault[fault.name] for fault in faults if fault.name in by_fault]
        if rows:
            lines.append(
                f"## {room.capitalize()}\n\n| fault | first seen by | counterexample | seconds |\n|---|---|---|---:|"
            )
            lines += [_row(sighting) for sighting in rows]
            lines.append("")
    return "\n".join(lines)


def _row(sighting: Sighting) -> str:
    fault = sighting.fault
    case = f"`{sighting.case}`".replace("|", "\\|") if sighting.case else ""
    name = f"[{fault.name}]({fault.address})" if fault.address else fault.name
    exhibit, law = f"{name}: {fault.wrong}", sighting.property or "nobody"
    return f"| {exhibit} | {law} | {case} | {sighting.seconds:.1f} |"


_INTRODUCTION = """# The bug museum

A suite is as good as the bugs that it finds. The museum holds {exhibits} small kernels, each wrong in one step: most in
the way of a public bug, whose address they carry; those of *sizes* and *calls* in a way that was made up, at a size
where kernels take another path, or by what one call leaves to the next. They share a tiled online-softmax kernel in
NumPy that is right, passes the suite itself, and shares nothing with the reference; an exhibit differs from it in
nothing but that step.

The suite, with its default settings and its default limit of {seconds:.0f} s of processor time each, saw {killed} of
{exhibits}. This page is written by

```
sdpa-ref museum --markdown docs/museum.md
```

"First seen by" is the first property that did not hold (`sdpa-ref check TARGET --list` explains them), and the
counterexample is what was left after shrinking; `sdpa_ref.testing.cases` makes its arrays again.
`sdpa-ref museum --fault "scale twice"` looks at one exhibit. The code is in `sdpa_ref/testing/museum/faults/`.
"""
