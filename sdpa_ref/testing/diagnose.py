"""What is wrong in a failure: where it begins, how large it is, and whether the weights or the values are to blame."""

from dataclasses import dataclass, replace

import numpy as np

from sdpa_ref.testing.bounds import wide
from sdpa_ref.testing.budget import error_budget
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.cases import Case
from sdpa_ref.testing.judge import Declined, Failure, called, judged
from sdpa_ref.testing.target import Target


@dataclass(frozen=True)
class Diagnosis:
    """Details of a failure.

    Attributes
    ----------
    first : tuple or None
        ``(b, h, i)`` of the first wrong row, b a tuple over the leading axes; None where no numbers can be compared.
    worst : float
        The largest error in units of what is allowed; inf where nothing is.
    units : float64 array (L, Ev) or None
        The errors of the first wrong head in these units.
    blame : str
        "weights" where one-hot values show that those are wrong, "values" where they are right, or why it is not known.
    weights, right_weights : float64 array (L, S) or None
        Those of the first wrong head, as one-hot values read them, and as they should be.
    """

    first: tuple[tuple[int, ...], int, int] | None = None
    worst: float = float("inf")
    units: Array | None = None
    blame: str = "no result that could be compared"
    weights: Array | None = None
    right_weights: Array | None = None


def diagnosed(target: Target, failure: Failure) -> Diagnosis:
    """Return the diagnosis of a failure, which takes a few more calls of the target."""
    if failure.got is None or failure.expected is None or failure.limit is None or failure.what != "output":
        return Diagnosis(blame=f"the {failure.what} is not an output" if failure.what != "output" else Diagnosis.blame)
    case = failure.case
    got, expected, limit = (heads_first(array, case) for array in (failure.got, failure.expected, failure.limit))
    units = units_of(got, expected, limit)
    wrong = (units > 1).any(-1)
    if not wrong.any():
        return Diagnosis(blame="only the signs of zeros differ")
    *b, h, i = map(int, np.argwhere(wrong)[0])
    found = Diagnosis((tuple(b), h, i), float(units.max()), units[(*b, h)])
    if not limit.any():  # bits were compared, not numbers
        return replace(found, blame="unknown: the law is about bits")
    right = error_budget(case.query, case.key, case.value, what="weights", **case.options).expected
    if not right.size:
        return replace(found, blame="unknown: there are no keys")
    try:
        weights = _read_weights(target, case)
    except Declined as reason:
        return replace(found, blame=f"unknown: {reason}")
    if isinstance(weights, Failure):
        return replace(found, blame=f"unknown, as with one-hot values it {weights.message}")
    verdict = judged(weights, case, target.capabilities, "weights")
    mine, theirs = (wide(array).reshape(got.shape[:-1] + array.shape[-1:])[(*b, h)] for array in (weights, right))
    return replace(found, blame="weights" if verdict else "values", weights=mine, right_weights=theirs)


def units_of(got: Array, expected: Array, limit: Array) -> Array:
    """Return the error in units of what is allowed, 0 where both are the same infinity or NaN."""
    with np.errstate(all="ignore"):
        error = np.where((got == expected) | (np.isnan(got) & np.isnan(expected)), 0, abs(got - expected))
        error = np.where(np.isnan(error), np.inf, error)
        return np.where(np.isposinf(limit), 0, np.where(error == 0, 0, error / limit))


def _read_weights(target: Target, case: Case) -> Array | Failure:
    """Return the weights as outputs for one-hot values, as many keys at a time as values are wide."""
    last = case.options.get("layout") == "LHE"
    S, Ev = case.value.shape[-3 if last else -2], case.value.shape[-1]
    parts = []
    for start in range(0, S, max(Ev, 1)):
        columns = np.eye(S, Ev, -start, dtype=case.query.dtype.newbyteorder("="))
        value = np.broadcast_to(columns[:, None] if last else columns, case.value.shape).copy()
        part = called(target, "forward", case, case.query, case.key, value, **case.options)
        if isinstance(part, Failure):
            return part
        parts.append(heads_first(part, case)[..., : S - start])
    return np.concatenate(parts, -1)


def heads_first(array: Array, case: Case) -> Array:
    """Return the array as (..., H, L, width), with a head axis where it has none."""
    if case.query.ndim == 2:
        return array[None]
    return array.swapaxes(-2, -3) if case.options.get("layout") == "LHE" else array
