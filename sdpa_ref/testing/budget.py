"""How far a result may lie from the reference: a bound with a derivation, and a tight empirical figure beside it."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from sdpa_ref import reference
from sdpa_ref._problem import NO_VALUE, pose
from sdpa_ref.backend import Problem
from sdpa_ref.testing import bounds
from sdpa_ref.testing.straight import straight

Array = np.ndarray[Any, np.dtype[Any]]
What = Literal["output", "lse", "weights"]
_FEW = 0.1
_MODEST, _MANY = 8.0, 256  # measured: beyond these the straight formula's error is now and then small by luck


@dataclass(frozen=True)
class Budget:
    """The reference's result, and how far another one may lie from it.

    Attributes
    ----------
    expected : float64 array
        What the reference computes, before it is rounded.
    dtype : numpy.dtype
        The type that the result must have.
    bound : float64 array
        A-priori bound for each number, as `sdpa_ref.testing.bounds` derives it. It holds for any input.
    empirical : float
        ``4 * (error of the straight formula in the same type + eps * max|expected|)``, a limit for the largest error;
        for more than 64 keys eps is multiplied by the root of S / 64.
    modest : bool
        Whether the empirical figure is required too: when no score exceeds 8, there are 256 numbers or more, and few
        scores of a row or values of a column are equal, so that the straight formula's error is not small by luck.
    """

    expected: Array
    dtype: np.dtype[Any]
    bound: Array
    empirical: float
    modest: bool

    def __getitem__(self, index: Any) -> "Budget":
        """Return the budget of some of the numbers, by the bound alone."""
        return replace(self, expected=self.expected[index], bound=self.bound[index], modest=False)

    @property
    def limit(self) -> Array:
        """The largest error that each number may have."""
        return np.minimum(self.bound, self.empirical) if self.modest else self.bound


def error_budget(
    query: Any,
    key: Any,
    value: Any,
    *,
    what: What = "output",
    precision: Any = None,
    exp_error: float = 0.0,
    merges: int = 0,
    **options: Any,
) -> Budget:
    """Return the error budget of attention for these arguments.

    Parameters
    ----------
    query, key, value : array
        As in `sdpa`; `value` may be None except for the output.
    what : {"output", "lse", "weights"}
        Which result the budget is for.
    precision : str or data type, optional
        How the implementation computes, one of `Capabilities.precision`, or the type in which it accumulates: float16,
        float32 or float64. By default what this library requires of a backend, float32, or float64 for float64.
    exp_error : float
        The largest relative error of its exponential.
    merges : int
        How many times states were merged on the way to it.
    **options
        The keywords of `sdpa` that state the problem.

    Returns
    -------
    Budget
        In the shapes and the layout of the result.

    Raises
    ------
    TypeError, ValueError
        For what `sdpa` refuses.

    Examples
    --------
    >>> x = np.eye(2, dtype=np.float32)
    >>> budget = error_budget(x, x, x)
    >>> budget.expected.round(2), bool((budget.bound < 1e-5).all())
    (array([[0.67, 0.33],
           [0.33, 0.67]]), True)
    """
    value = NO_VALUE if value is None and what != "output" else value
    problem, caller = pose(query, key, value, **options)
    p = problem.rows(0, problem.L)
    exact = reference.stages(p)
    expected: Array = getattr(exact, what)
    dtype = p.acc_dtype if what == "lse" else p.dtype
    p, by = with_precision(p, precision, exp_error)
    with np.errstate(all="ignore"):
        bound = rounded(_bound(p, exact, what, merges, by), expected, dtype, p.acc_dtype)
        truth, own = expected, getattr(straight(p, exact.keep, p.acc_dtype), what)
        if p.acc_dtype == np.float64:
            truth = getattr(straight(p, exact.keep, np.dtype(np.longdouble)), what)
        score = np.max(abs(exact.biased), where=exact.keep & np.isfinite(exact.biased), initial=0)
        small = empirical(own, truth, expected, dtype, terms=p.S)
    modest = bool(score <= _MODEST) and expected.size >= _MANY and not merges
    modest = modest and by == bounds.PLAIN
    modest = modest and not _alike(exact.biased, -1) and not (p.value is not None and _alike(p.value, -2))
    shaped = {"output": caller.turned, "lse": caller.lse, "weights": caller.weights}[what]
    return Budget(shaped(expected), dtype, shaped(bound), small, modest)


def with_precision(p: Problem, precision: Any, exp_error: float) -> tuple[Problem, bounds.Arithmetic]:
    """Return the problem in the accumulation type that is claimed, and the rest of the claim."""
    named = precision is None or (isinstance(precision, str) and precision in bounds.ARITHMETIC)
    by = bounds.ARITHMETIC[precision or "float32"] if named else bounds.PLAIN
    by = bounds.PLAIN if by.only and by.only != p.dtype.name else by
    try:
        dtype = np.dtype((by.acc or p.acc_dtype) if named else precision)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind != "f" or dtype.itemsize > 8:
        names = ", ".join(bounds.ARITHMETIC)
        raise ValueError(f"precision must be float16, float32 or float64, or one of {names}; got {precision!r}")
    return p._replace(form=p.form._replace(acc_dtype=dtype)), by._replace(exponential=exp_error)


def rounded(bound: Array, expected: Array, dtype: np.dtype[Any], acc_dtype: np.dtype[Any]) -> Array:
    """Return the bound with the last rounding, and for float64 with the reference's own error."""
    bound = bound * 2 if acc_dtype == np.float64 else bound
    limits, hopeless = bounds.finfo(dtype), np.isposinf(bound) & ~np.isnan(expected) | (bound == bounds.ANYTHING)
    bound = bound + bounds.unit(dtype) * (abs(expected) + bound) + float(limits.smallest_subnormal) / 2
    return np.where(hopeless, np.inf, np.where(np.isfinite(expected), bound, 0))


def empirical(own: Array, truth: Array, expected: Array, dtype: np.dtype[Any], *, terms: int = 1) -> float:
    """Return 4 * (error of the straight formula `own` + eps * max|expected|), over all that is finite.

    Sums of many terms, one after the other, err by the root of their number where NumPy's, in pairs and by the matrix
    unit, hardly do: beyond 64 terms eps grows by that.
    Where nothing is wider than float64, `truth` and `own` are the same, and 64 eps stands for four times the error.
    """
    finite = np.isfinite(expected)
    eps, largest = float(bounds.finfo(dtype).eps), float(np.max(abs(expected), where=finite, initial=0))
    eps *= max(1.0, math.sqrt(terms / 64))
    if dtype == np.float64 and truth.dtype.itemsize == own.dtype.itemsize:
        return 64 * eps * largest
    error = abs(own.astype(dtype).astype(truth.dtype) - truth)
    return 4 * (float(np.max(error, where=finite, initial=0)) + eps * largest)


def _alike(array: Array, axis: int) -> bool:
    """Return whether many finite numbers along the axis are equal, so that their roundings add up instead of cancel."""
    with np.errstate(invalid="ignore"):
        equal = np.diff(np.sort(bounds.wide(array), axis), axis=axis) == 0
    return bool(np.count_nonzero(equal) > _FEW * equal.size)


def _bound(p: Problem, exact: reference.Stages, what: What, merges: int, by: bounds.Arithmetic) -> Array:
    s = bounds.softmax(p, exact, by)
    if what == "weights":
        return bounds.weights_bound(p, exact, s)
    return bounds.lse_bound(p, exact, s, merges) if what == "lse" else bounds.output_bound(p, exact, s, merges, by)
