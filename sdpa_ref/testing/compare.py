"""Assertions whose tolerance is the error budget, and whose messages say what is wrong where."""

from typing import Any

import numpy as np

from sdpa_ref.testing.bounds import finfo
from sdpa_ref.testing.budget import Budget, What, error_budget

Array = np.ndarray[Any, np.dtype[Any]]


def assert_close(actual: Any, query: Any, key: Any, value: Any, *, what: What = "output", **options: Any) -> None:
    """Raise an AssertionError unless `actual` is the attention of these arguments within the error budget.

    Parameters
    ----------
    actual : array
        What ``sdpa`` (or ``sdpa_state(...).lse``, or ``sdpa_weights``) returned, or any other implementation.
    query, key, value : array
        As in `sdpa`.
    what : {"output", "lse", "weights"}
        Which result it is.
    **options
        The keywords of `sdpa` that state the problem.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_ref import sdpa
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4)).astype(np.float32)
    >>> assert_close(sdpa(q, k, v), q, k, v)
    >>> assert_close(sdpa(q, k, v, scale=0.505), q, k, v)  # 1 % too much
    Traceback (most recent call last):
    AssertionError: output is wrong: ...
    """
    assert_within(actual, error_budget(query, key, value, what=what, **options), what=what)


def assert_within(actual: Any, budget: Budget, *, what: str = "output") -> None:
    """Raise an AssertionError unless `actual` has the budget's type and shape, and lies within it.

    NaN must stand exactly where the reference has NaN. Infinity must too, but for true numbers so close to the end of
    the type's range that they may round either way.

    Parameters
    ----------
    actual : array
    budget : Budget
    what : str
        The name that the message begins with.
    """
    expected, limit = budget.expected, budget.limit
    assert_form(actual, budget.dtype, expected.shape, what)
    with np.errstate(all="ignore"):
        got = actual.astype(np.float64)
        error = _error(got, expected, budget.dtype)
        wrong = ~(error <= limit) & ~np.isposinf(limit)
    if not wrong.any():
        return
    with np.errstate(all="ignore"):
        units = np.where(wrong, np.where(np.isnan(error), np.inf, error / limit), 0)
    first, worst = (tuple(map(int, np.unravel_index(n, wrong.shape))) for n in (wrong.argmax(), units.argmax()))
    by_bound = bool((wrong & ~(error <= budget.bound)).any())
    raise AssertionError(
        f"{what} is wrong: {wrong.sum()} of {wrong.size} numbers are outside the "
        f"{'a-priori bound' if by_bound else 'empirical budget'}\n"
        f"  first at {first}: expected {expected[first]}, got {got[first]}, allowed error {limit[first]:.3g}\n"
        f"  worst at {worst}: expected {expected[worst]}, got {got[worst]}, "
        f"{units[worst]:.3g} times what is allowed"
    )


def assert_form(actual: Any, dtype: np.dtype[Any], shape: tuple[int, ...], what: str = "output") -> None:
    """Raise an AssertionError unless `actual` is an array of this type and shape."""
    if not isinstance(actual, np.ndarray):
        raise AssertionError(f"{what} must be a numpy.ndarray, got {type(actual).__name__}")
    if actual.dtype != dtype:
        raise AssertionError(f"{what} must have dtype {dtype}, got {actual.dtype}")
    if actual.shape != shape:
        raise AssertionError(f"{what} must have shape {shape}, got {actual.shape}")


def _error(got: Array, expected: Array, dtype: np.dtype[Any]) -> Array:
    """Return the distance, 0 where both are the same infinity or NaN, and inf where only one is NaN."""
    limits = finfo(dtype)
    overflow = float(limits.max) * (1 + float(limits.eps) / 4)  # what rounds to infinity
    finite = np.isfinite(expected)
    near = np.where(finite, np.clip(got, -overflow, overflow), got) - np.where(
        finite, np.clip(expected, -overflow, overflow), expected
    )
    same = (got == expected) | (np.isnan(got) & np.isnan(expected))
    return np.where(same, 0, np.where(np.isnan(near), np.inf, abs(near)))


def assert_same_bits(actual: Array, expected: Array) -> None:
    """Raise an AssertionError unless both have the same type, shape and bits, NaN and the sign of 0 included.

    Parameters
    ----------
    actual, expected : array
    """
    if actual.dtype != expected.dtype:
        raise AssertionError(f"expected dtype {expected.dtype}, got {actual.dtype}")
    if actual.shape != expected.shape:
        raise AssertionError(f"expected shape {expected.shape}, got {actual.shape}")
    differ = _bits(actual) != _bits(expected)
    if differ.any():
        first = tuple(map(int, np.unravel_index(differ.argmax(), differ.shape)))
        raise AssertionError(
            f"{differ.sum()} of {differ.size} numbers differ in their bits\n"
            f"  first at {first}: expected {expected[first]}, got {actual[first]}"
        )


def _bits(array: Array) -> Array:
    return np.array(array, order="C").view(f"u{array.dtype.itemsize}")
