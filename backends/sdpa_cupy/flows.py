"""What flows into each row of the backward pass, and what the forward pass made of it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.backend import Problem, Result

Array = Any


class Flow(NamedTuple):
    """What flows into each row, ``(*batch, Hq, L)`` or with a last axis Ev, and what the forward pass made of it."""

    grad: Array
    grad_lse: Array | None
    output: Array
    m: Array  # the largest score
    z: Array  # the sum of the exponentials beside it, 0 for a row that sees nothing

    def rows(self, here: slice) -> "Flow":
        """Return that of some rows."""
        grad_lse = None if self.grad_lse is None else self.grad_lse[..., here]
        return Flow(self.grad[..., here, :], grad_lse, self.output[..., here, :], self.m[..., here], self.z[..., here])


def flow_of(
    problem: Problem, grad: Array, grad_lse: Array | None, result: Result, forward: Callable[..., Result], xp: Any
) -> Flow:
    """Return what flows into the rows of a problem; `forward` computes results of problems."""
    empty = empty_rows(problem, result.lse, forward)
    z = xp.where(empty, 0, result.z).astype(problem.acc_dtype)
    grad_lse = None if grad_lse is None else grad_lse.astype(problem.acc_dtype)
    return Flow(grad, grad_lse, result.output, result.m, z)


def empty_rows(problem: Problem, lse: Array, forward: Callable[..., Result]) -> Array:
    """Return, ``(*batch, Hq, L)``, which rows see nothing; with a sink their lse is the sink, or -inf."""
    none = lse == -np.inf
    if problem.sink is None:
        return none
    alone = lse == problem.sink.astype(lse.dtype)[:, None]  # the sink, or what else there is vanishes beside it
    if not alone.any():
        return none
    return none | (forward(problem._replace(sink=None), frozenset({"lse"})).lse == -np.inf)
