"""Sums that a kernel goes on with: the bits of one call, where each piece but the last has a multiple of a chunk."""

from typing import Any

import numpy as np

from sdpa_ref.backend import Problem, Result, Sums
from sdpa_ref.floating_point import ieee

from .calls import solve
from .strips import compiled, row_strips, with_scores

NOTHING: frozenset[str] = frozenset()


@ieee
def add(problem: Problem, sums: Sums | None) -> Sums:
    """Return the sums with the keys of the problem added, in new arrays; the problem has no sink.

    They have the bits that a call over all keys has at this point, if every `add` before had a multiple of 1024 keys.
    """
    problem, sums = problem._replace(out=None, plain=False), _own(problem, sums)
    score_mod = compiled(problem.score_mod, problem.acc_dtype.name)
    if not problem.blockwise and (problem.score_mod is None or score_mod is not None):
        solve(problem, NOTHING, score_mod, sums=sums)
        return sums
    for here, product in row_strips(problem):
        strip = problem.rows(here.start, here.stop)
        part = Sums(*map(np.ascontiguousarray, (sums.m[..., here], sums.z[..., here], sums.total[..., here, :])))
        if problem.score_mod is not None and score_mod is None:
            solve(with_scores(strip, product), NOTHING, final=True, sums=part)
        else:
            solve(strip, NOTHING, score_mod, sums=part)
        sums.m[..., here], sums.z[..., here], sums.total[..., here, :] = part
    return sums


@ieee
def finish(problem: Problem, sums: Sums, want: frozenset[str]) -> Result:
    """Return what is wanted of output, lse, m and z, with the sink of a problem that has no keys left."""
    own = Sums(sums.m.copy(), sums.z.copy(), np.ascontiguousarray(sums.total))
    return solve(problem._replace(plain=False), want | {"output"}, sums=own)


def _own(problem: Problem, sums: Sums | None) -> Sums:
    """Return a copy of the sums, those of no keys for None."""
    if sums is not None:
        return Sums(*(np.array(array, order="C") for array in sums))
    rows, acc = problem.query.shape[:-1], problem.acc_dtype
    new: Any = np.full(rows, -np.inf, acc), np.zeros(rows, acc), np.zeros((*rows, problem.Ev), acc)
    return Sums(*new)
