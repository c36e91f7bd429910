"""Problems that nothing takes whole: a strip of query rows after the other, with their rules evaluated."""

from collections.abc import Callable
from typing import Any

from sdpa_ref.backend import Problem, Result

ROWS = 128  # whatever the batch: a row in a strip of another size may be summed in another order


def in_strips(
    problem: Problem, want: frozenset[str], empty: Callable[..., Any], solve: Callable[[Problem, Result], object]
) -> Result:
    """Return what is wanted, which `solve` fills in for each strip."""
    out = problem.out
    whole = new_result(problem._replace(out=None), want, empty)  # a rule of the caller's may fail in any strip
    for i in range(0, problem.L, ROWS):
        end = min(i + ROWS, problem.L)
        solve(problem.rows(i, end), rows_of(whole, slice(i, end)))
    if out is None or whole.output is None:
        return whole
    out[...] = whole.output
    return whole._replace(output=out)


def new_result(problem: Problem, want: frozenset[str], empty: Callable[..., Any]) -> Result:
    """Return arrays for what is wanted, not yet filled."""
    shape = problem.query.shape[:-1]
    return Result(
        problem.new_output() if "output" in want else None,
        empty(shape, problem.acc_dtype) if "lse" in want else None,
        empty((*shape, problem.S), problem.dtype) if "weights" in want else None,
        *(empty(shape, problem.acc_dtype) if name in want else None for name in ("m", "z")),
    )


def rows_of(result: Result, rows: slice) -> Result:
    """Return the views of these query rows."""
    wide = {"output": (rows, slice(None)), "weights": (rows, slice(None))}
    cut = ((array, wide.get(name, (rows,))) for name, array in result._asdict().items())
    return Result(*(None if array is None else array[(..., *index)] for array, index in cut))
