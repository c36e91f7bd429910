"""A run of the laws on a target: seeded, in rounds over all laws, with failures shrunk.

It ends after so many rounds, or so many seconds of processor time; a loaded machine changes neither.
"""

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sdpa_ref.testing import power, recipes, shrinking
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.cases import Case
from sdpa_ref.testing.coverage import Drawn
from sdpa_ref.testing.judge import Declined, Failure
from sdpa_ref.testing.power import Sight
from sdpa_ref.testing.properties import BY_NAME, PROPERTIES, Property
from sdpa_ref.testing.target import Claims, Target, as_target

ROUNDS, SECONDS = 100, 40.0
DEEP = 10
"""How many times as many rounds, and as much time, a deep run takes."""
TIMES = 10
"""How often a failing case is run again."""
_SHRINK_CALLS, _SHRINK_SECONDS = 400, 5.0
Progress = Callable[[Property, int, int], None]  # the law, the round, the failures so far


@dataclass
class Outcome:
    """What became of one law.

    Attributes
    ----------
    law : Property
    cases : Counter of str
        How many cases held, by type.
    declined : Counter of str
        How many the target declined, by its reason.
    missing : str
        The capability that is not claimed and without which the law is not tested; "" where it is.
    failure : Failure, optional
        The shrunk one.
    found : Failure, optional
        The same before it was shrunk.
    round : int
        In which round it failed, counted from 0.
    again : int
        How many of `TIMES` repetitions of the shrunk case failed.
    seconds, shrinking : float
    """

    law: Property
    cases: Counter[str] = field(default_factory=Counter)
    declined: Counter[str] = field(default_factory=Counter)
    missing: str = ""
    failure: Failure | None = None
    found: Failure | None = None
    round: int = 0
    again: int = 0
    seconds: float = 0.0
    shrinking: float = 0.0

    @property
    def status(self) -> str:
        """One of "failed", "not claimed", "passed", "declined" (all cases were), "not run" (after a first failure)."""
        if self.failure:
            return "failed"
        if self.missing:
            return "not claimed"
        if self.cases:
            return "passed"
        return "declined" if self.declined else "not run"


@dataclass(frozen=True)
class Run:
    """What a run found.

    Attributes
    ----------
    target : Target
    seed : int
    rounds : int
        How many rounds over all laws were finished.
    limit, seconds : float
        How much processor time it might take, and took.
    outcomes : tuple of Outcome
    drawn : Drawn
        What the cases that were judged are like.
    sights : tuple of Sight
        Seeded faults, and at how many of the run's own cases the tolerance would have seen them.
    """

    target: Target
    seed: int
    rounds: int
    limit: float
    seconds: float
    outcomes: tuple[Outcome, ...]
    drawn: Drawn
    sights: tuple[Sight, ...]

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The outcomes that failed."""
        return tuple(outcome for outcome in self.outcomes if outcome.failure)

    @property
    def passed(self) -> bool:
        """Whether no law failed and at least one was tested."""
        return not self.failures and any(outcome.cases for outcome in self.outcomes)


def check(
    target: Any,
    *,
    capabilities: Claims = None,
    strict: bool = False,
    seed: int = 0,
    seconds: float | None = None,
    rounds: int | None = None,
    deep: bool = False,
    laws: Sequence[Property | str] = PROPERTIES,
    stop_at_first: bool = False,
    progress: Progress = lambda law, n, failures: None,
) -> Run:
    """Return what a run of the laws on the target found.

    Equal seeds draw equal cases in the same order; the limits only say how many of them.

    Parameters
    ----------
    target : Target, callable or str
        A function ``(query, key, value, **options)``, or what ``sdpa-ref check`` takes.
    capabilities : Capabilities or mapping, optional
        What it claims; a mapping adds to what it claims by itself.
    strict : bool
        Whether the claimed features are held to all rules of this project.
    seed : int
    seconds : float, optional
        Of processor time, in all threads of this process, by default 40. After the first round, which is always
        finished, no case is begun after that. Shrinking failures counts half.
    rounds : int, optional
        How many cases a law gets at most, by default 100.
    deep : bool
        Ten times as many rounds, and as many seconds, by default.
    laws : sequence of Property or str
    stop_at_first : bool
        Whether the first failure ends the run.
    progress : callable
        Called before each case.

    Examples
    --------
    >>> from sdpa_ref.testing import resolve
    >>> run = check(resolve("reference"), rounds=1)
    >>> run.passed, len(run.failures)
    (True, 0)
    """
    target = as_target(target, capabilities)
    target = replace(target, capabilities=target.capabilities.strict()) if strict else target
    seconds = SECONDS * (DEEP if deep else 1) if seconds is None else seconds
    rounds = ROUNDS * (DEEP if deep else 1) if rounds is None else rounds
    chosen = [BY_NAME[law] if isinstance(law, str) else law for law in laws]
    begun, end = time.process_time(), time.process_time() + seconds
    claims = target.capabilities
    outcomes = {law.name: Outcome(law, missing=law.needs(claims)) for law in chosen}
    watch, drawn = power.Watch(), Drawn()
    finished = 0
    for n in range(rounds):
        for law in chosen:
            outcome = outcomes[law.name]
            if outcome.missing or outcome.failure:
                continue
            if n and time.process_time() > end:
                break
            progress(law, n, sum(o.failure is not None for o in outcomes.values()))
            rng = np.random.default_rng([seed, zlib.crc32(law.name.encode()), n])
            _one(target, law, outcome, *law.draw(rng, claims, first=not n), watch, drawn)
            if outcome.failure:
                outcome.round = n
                end = min(end + outcome.shrinking / 2, begun + 1.3 * seconds)
                if stop_at_first:
                    break
        else:
            finished += 1
            continue
        break
    return Run(
        target, seed, finished, seconds, time.process_time() - begun, tuple(outcomes.values()), drawn, watch.sights()
    )


def replay(target: Target, law: Property, recipe: str) -> Failure | None:
    """Return the failure of one case of a law, or None.

    Raises
    ------
    ValueError
        For a text that is not a recipe.
    Declined
        If the target does not solve this problem.
    """
    words, seed = recipes.parse(recipe)
    missing = law.needs(target.capabilities)
    if missing:
        raise Declined(f"{missing} is not claimed")
    return law.check(target, _case(target, words, seed))


def _one(
    target: Target, law: Property, outcome: Outcome, words: recipes.Words, seed: int, watch: power.Watch, drawn: Drawn
) -> None:
    """Run one case of a law, and shrink it where it fails."""
    begun = time.process_time()
    case = _case(target, words, seed)
    try:
        failure = law.check(target, case)
    except Declined as declined:
        outcome.declined[str(declined)] += 1
        return
    finally:
        outcome.seconds += time.process_time() - begun
    drawn.add(words, law.name)
    if failure is None:
        outcome.cases[str(words["dtype"])] += 1
        watch.look(case)
        return
    outcome.found = failure
    begun = time.process_time()
    outcome.failure = _shrunk(target, law, words, seed, failure)
    outcome.again = sum(fails(target, law, *recipes.parse(outcome.failure.case.recipe)) for _ in range(TIMES))
    outcome.shrinking = time.process_time() - begun


def _shrunk(target: Target, law: Property, words: recipes.Words, seed: int, failure: Failure) -> Failure:
    """Return a failure of the same law in a case that no single step makes simpler, or that so many steps reach."""
    end, left = time.process_time() + _SHRINK_SECONDS, _SHRINK_CALLS
    smaller = True
    while smaller:
        smaller = False
        for fewer, other in _candidates(words, seed, target.capabilities):
            left -= 1
            if not left or time.process_time() > end:
                return failure
            found = _fails(target, law, fewer, other)
            if found and _alike(found, failure):
                words, seed, failure, smaller = fewer, other, found, True
                break
    return failure


def _candidates(words: recipes.Words, seed: int, claims: Capabilities) -> Iterable[tuple[recipes.Words, int]]:
    """Yield simpler words, each with the seed that failed and with the smallest seeds."""
    return ((fewer, other) for fewer in shrinking.simpler(words, claims) for other in dict.fromkeys((seed, 0, 1, 2)))


def fails(target: Target, law: Property, words: recipes.Words, seed: int) -> bool:
    """Return whether the law fails for these words."""
    return _fails(target, law, words, seed) is not None


def _fails(target: Target, law: Property, words: recipes.Words, seed: int) -> Failure | None:
    try:
        return law.check(target, _case(target, words, seed))
    except Exception:  # not a legal case, or one that the target declines
        return None


def _alike(a: Failure, b: Failure) -> bool:
    """Return whether both are wrong numbers of the same result, or both the same complaint."""
    if a.got is None or b.got is None:
        return a.got is b.got and a.message.partition(":")[0] == b.message.partition(":")[0]
    return a.what == b.what


def _case(target: Target, words: recipes.Words, seed: int) -> Case:
    return recipes.fitted(recipes.seeded(words, seed), target.capabilities)
