"""The verdict on one result: within the error budget, with the meaning that the target claims."""

import traceback
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sdpa_ref import reference
from sdpa_ref._problem import pose
from sdpa_ref.testing.budget import Budget, What, error_budget
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.cases import Case
from sdpa_ref.testing.compare import assert_form, assert_within
from sdpa_ref.testing.target import Target

_LN2 = float(np.log(2))
_TUPLES = {
    "state": ("output", "lse"),
    "merge": ("output", "lse"),
    "vjp": ("d_query", "d_key", "d_value", "d_bias", "d_sink"),
}


@dataclass(frozen=True)
class Failure:
    """A case in which a target does not do what it claims.

    Attributes
    ----------
    case : Case
        The arguments, as they were passed.
    message : str
    what : str
        Which result is wrong.
    expected, got, limit : float64 array or None
        What should have come, what came, and how far they may be apart; None where nothing comparable came.
    """

    case: Case
    message: str
    what: str = "output"
    expected: Array | None = None
    got: Array | None = None
    limit: Array | None = None


class Declined(Exception):
    """The target said that it does not solve this problem."""


def called(target: Target, name: str, case: Case, *arrays: Any, **options: Any) -> Any:
    """Return what the function of the target of this name returns, or the Failure that it raised or did not return.

    A target that claims one layout only gets no argument for it.

    Raises
    ------
    Declined
        For a NotImplementedError.
    """
    if len(target.capabilities.layouts) == 1:
        options.pop("layout", None)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            got = getattr(target, name)(*arrays, **options)
    except NotImplementedError as error:
        raise Declined(str(error)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever a kernel may raise on legal arguments is a finding, SystemExit too
        return Failure(case, f"raised {type(error).__name__}: {error}{_place(error)}")
    try:
        _assert_returned(name, got, arrays)
    except AssertionError as error:
        return Failure(case, str(error))
    return got


def _place(error: BaseException) -> str:
    """Return where an exception was raised, after where the target's own file led to it; "" for a refused call."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    places = dict.fromkeys(f"\n  at {f.filename}, line {f.lineno}, in {f.name}" for f in (*own[-1:], *frames[-1:]))
    return "".join(places)


def _assert_returned(name: str, got: Any, arrays: tuple[Any, ...]) -> None:
    """Raise an AssertionError unless a function of a target returned an output, or the tuple that it must return."""
    more = name in ("state", "merge")  # behind output and lse a state may have what its own merge needs
    if name in _TUPLES and not (
        isinstance(got, tuple | list) and (len(got) == len(_TUPLES[name]) or (more and len(got) > len(_TUPLES[name])))
    ):
        number = f" of {len(got)}" if isinstance(got, tuple | list) else ""
        raise AssertionError(f"{name} must return ({', '.join(_TUPLES[name])}), got {type(got).__name__}{number}")
    if name != "forward":
        return
    query, _, value = arrays
    lead = np.broadcast_shapes(*(array.shape[:-3] for array in arrays))
    try:
        assert_form(got, query.dtype.newbyteorder("="), (*lead, *query.shape[-3:-1], value.shape[-1]))
    except AssertionError as error:
        hint = "; to return (output, lse), give a Target with state=" if isinstance(got, tuple) else ""
        raise AssertionError(f"{error}{hint}") from None


def judged(got: Any, case: Case, claims: Capabilities, what: What = "output", merges: int = 0) -> Failure | None:
    """Return the failure of a result, or None where it is right."""
    if isinstance(got, Failure):
        return got
    value = case.value
    budget = error_budget(case.query, case.key, value, what=what, merges=merges, **claims.arithmetic, **case.options)
    budget = _with_claims(budget, case, claims, what)
    if what == "lse" and claims.lse_base == "2" and isinstance(got, np.ndarray):
        got = (got * _LN2).astype(got.dtype)
    return against(got, budget, case, what)


def against(got: Any, budget: Budget, case: Case, what: str) -> Failure | None:
    """Return the failure of a result against a budget, or None."""
    try:
        assert_within(got, budget, what=what)
    except AssertionError as error:
        comparable = isinstance(got, np.ndarray) and got.shape == budget.expected.shape
        wide = got.astype(np.float64) if comparable and got.dtype != bool else None
        return Failure(
            case, str(error), what, budget.expected, wide, np.broadcast_to(budget.limit, budget.expected.shape)
        )
    return None


def empty_rows(case: Case, what: str = "output") -> tuple[Array, Array]:
    """Return, over the rows of the result, which see no key, and which of them for the mask alone."""
    problem, caller = pose(*case.arrays, **case.options)
    whole = problem.rows(0, problem.L)
    scores = reference.stages(whole).biased  # -inf where a key is dropped
    empty, masked = ~(scores > -np.inf).any(-1), ~whole._replace(bias=None).kept().any(-1)
    pair = np.asarray(empty), np.asarray(masked)
    if what == "weights":
        return caller.weights(pair[0]), caller.weights(pair[1])
    return caller.lse(pair[0]), caller.lse(pair[1])


def incoming(claims: Capabilities, case: Case, gradient: Array) -> Array | None:
    """Return the incoming gradient with what a target must ignore in rows that see no key.

    That is NaN where poison is claimed, 0 where such rows have the mean of all values, and nothing where they are NaN
    or not looked at: None then, as their gradients are not known.
    """
    empty = empty_rows(case)[0]
    if not empty.any():
        return gradient
    if claims.empty_row in ("nan", "any") and "sink" not in case.options:
        return None
    gradient = gradient.copy()
    if claims.poison:
        gradient[empty] = np.nan
    elif claims.empty_row != "zero":
        gradient[empty] = 0
    return gradient


def excuse(failure: Failure, claims: Capabilities) -> str:
    """Return the other claim of `empty_row` under which a wrong output would be right, or ""."""
    if failure.got is None or failure.limit is None or failure.what != "output" or not failure.limit.any():
        return ""
    got = failure.got.astype(failure.case.query.dtype.newbyteorder("="))
    rules = (rule for rule in ("zero", "nan", "mean", "any") if rule != claims.empty_row)
    return next((rule for rule in rules if not judged(got, failure.case, replace(claims, empty_row=rule))), "")


def _with_claims(budget: Budget, case: Case, claims: Capabilities, what: What) -> Budget:
    """Return the budget with the factor and the rule for empty rows that the target claims."""
    factor = claims.error_factor
    budget = replace(budget, bound=factor * budget.bound, empirical=factor * budget.empirical)
    if claims.lse_base == "2" and what == "lse":
        extra = 2 * float(np.finfo(budget.dtype).eps) * abs(np.nan_to_num(budget.expected, neginf=0))
        budget = replace(budget, bound=budget.bound + extra, modest=False)
    if claims.empty_row == "zero" or "sink" in case.options:  # with a sink the rows are 0 by any rule
        return budget
    empty, masked = empty_rows(case, what)
    if not empty.any():
        return budget
    expected, bound = budget.expected.copy(), budget.bound.copy()
    bound[empty] = np.inf
    if claims.empty_row == "nan" and what != "lse":
        expected[empty], bound[empty] = np.nan, 0
    if claims.empty_row == "mean" and what == "output":
        layout = {name: case.options[name] for name in ("layout",) if name in case.options}
        mean = error_budget(*case.arrays, scale=0.0, **claims.arithmetic, **layout)
        expected[masked], bound[masked] = mean.expected[masked], factor * mean.bound[masked]
    return replace(budget, expected=expected, bound=bound, modest=False)
