"""Whether the tolerance can see: seeded faults in the exact result, held against the budget of the run's own cases."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sdpa_ref import reference
from sdpa_ref._problem import pose
from sdpa_ref.backend import Problem
from sdpa_ref.reference import Stages
from sdpa_ref.testing.bounds import per_head, wide
from sdpa_ref.testing.budget import error_budget
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.cases import Case

Fault = Callable[
    [Problem, Stages], tuple[Array, Array] | None
]  # scores and keep of the faulty kernel, None where it has no effect
_EVERY = 7  # one of so many cases is looked at


@dataclass(frozen=True)
class Sight:
    """How often the tolerance would have seen one fault.

    Attributes
    ----------
    fault : str
    seen, cases : int
        Of the cases that the fault changes, those in which it leaves the budget.
    longest_seen, longest : int
        The largest number of keys at which it was seen, and at which it was looked for.
    """

    fault: str
    seen: int
    cases: int
    longest_seen: int
    longest: int


@dataclass
class Watch:
    """Samples the cases of a run, and counts."""

    met: int = 0
    counts: dict[str, list[int]] = field(default_factory=lambda: {name: [0, 0, 0, 0] for name in FAULTS})

    def look(self, case: Case) -> None:
        """Hold every fault against the budget of this case, or of none if it is not its turn."""
        self.met += 1
        if self.met % _EVERY != 1:
            return
        for name, seen in visible(case).items():
            count, S = self.counts[name], case.key.shape[-3 if case.options.get("layout") == "LHE" else -2]
            count[0] += seen
            count[1] += 1
            count[2] = max(count[2], S * seen)
            count[3] = max(count[3], S)

    def sights(self) -> tuple[Sight, ...]:
        """Return what was counted."""
        return tuple(Sight(name, *count) for name, count in self.counts.items())


def visible(case: Case) -> dict[str, bool]:
    """Return for each fault that changes the result of the case whether that leaves the budget.

    Examples
    --------
    >>> from sdpa_ref.testing.cases import case
    >>> visible(case(1, L=2, S=17, E=8, Ev=4, numbers="needles"))["last key dropped"]
    True
    """
    if case.query.size * case.key.size * case.value.size == 0 or "dropout" in case.options:
        return {}
    problem, caller = pose(*case.arrays, **case.options)
    whole = problem.rows(0, problem.L)
    exact = reference.stages(whole)
    limit = error_budget(*case.arrays, **case.options).limit
    found = {}
    for name, fault in FAULTS.items():
        with np.errstate(all="ignore"):
            changed = fault(whole, exact)
            if changed is None:
                continue
            output = _output(whole, *changed)
            error = caller.turned(abs(output - exact.output))
        if error.any():
            found[name] = bool((error > limit).any())
    return found


def _output(p: Problem, scores: Array, keep: Array) -> Array:
    """Return the output that scores and mask give."""
    score = np.where(keep, scores, -np.inf)
    sink = np.full((p.Hq, 1, 1), -np.inf) if p.sink is None else p.sink[:, None, None]
    m = np.maximum(score.max(-1, keepdims=True), sink)
    m = np.where(m == -np.inf, 0, m)
    e = np.exp(score - m)
    z = e.sum(-1, keepdims=True) + np.exp(sink - m)
    value = per_head(p.value, p)
    output: Array = (e / np.where(z == 0, 1, z)) @ np.where(np.isfinite(value), value, 0)
    return output


def _scaled(factor: float) -> Fault:
    """Return the fault of a wrong scale, where nothing else bends the scores."""

    def fault(p: Problem, exact: Stages) -> tuple[Array, Array] | None:
        plain = p.bias is None and p.slopes is None and p.softcap is None and p.score_mod is None
        return (exact.scaled * factor, exact.keep) if plain else None

    return fault


def _weighed(factor: float, at: Callable[[int], slice], least: int = 1) -> Fault:
    """Return the fault of keys whose weight is multiplied."""

    def fault(p: Problem, exact: Stages) -> tuple[Array, Array] | None:
        if p.S <= least:
            return None
        scores = exact.biased.copy()
        scores[..., at(p.S)] += np.log(factor) if factor else -np.inf
        return scores, exact.keep

    return fault


def _widened(p: Problem, exact: Stages) -> tuple[Array, Array] | None:
    """Return one more key after the last that each row sees, whose score is what it would be without a mask."""
    if p.bias is not None or p.slopes is not None or p.score_mod is not None:
        return None
    wider = exact.keep.copy()
    wider[..., 1:] |= exact.keep[..., :-1]
    return exact.capped, wider


def _rounded(p: Problem, exact: Stages) -> tuple[Array, Array] | None:
    """Return scores rounded to 11 bits, as a 16-bit product of Q and K leaves them, in a wider type."""
    if p.dtype.itemsize == 2:
        return None
    m, e = np.frexp(exact.biased)
    return np.ldexp(np.round(m * 2.0**11) / 2.0**11, e), exact.keep


def _tiled_heads(p: Problem, exact: Stages) -> tuple[Array, Array] | None:
    """Return the scores with heads h % Hkv for h // group."""
    if p.group == 1 or p.Hkv == 1 or p.softcap is not None or p.bias is not None or p.slopes is not None or p.score_mod:
        return None
    key = wide(p.key)[..., np.arange(p.Hq) % p.Hkv, :, :]
    return p.scale * (wide(p.query) @ key.swapaxes(-1, -2)), exact.keep


NEEDS: dict[str, tuple[str, ...]] = {
    "keys of the wrong group": ("grouped_heads",),
    "a key after the last that is seen": ("mask", "masks"),
}
"""Claims without any of which no case can show a fault."""

FAULTS: dict[str, Fault] = {
    "scale 1 % too large": _scaled(1.01),
    "scale halved": _scaled(0.5),
    "first key dropped": _weighed(0, lambda S: slice(0, 1)),
    "last key dropped": _weighed(0, lambda S: slice(S - 1, S)),
    "last key counted twice": _weighed(2, lambda S: slice(S - 1, S)),
    "16 keys in the middle dropped": _weighed(0, lambda S: slice(S // 2, S // 2 + 16), 32),
    "a key after the last that is seen": _widened,
    "scores rounded to 11 bits": _rounded,
    "keys of the wrong group": _tiled_heads,
}
