"""The CPU backend: the whole forward specification in kernels that Numba compiles for the processor at hand."""

from typing import Any

import numpy as np

from sdpa_ref.gradients import Gradients
from sdpa_ref.problem import Problem, Result

from .ahead import details, warmup
from .plan import Plan, make_plan
from .strips import compiled, forward_in_strips
from .target import unusable
from .threads import run

__all__ = ["ARRAYS", "details", "forward", "unavailable", "unsupported", "vjp", "warmup"]

ARRAYS = "numpy"


def unavailable() -> str | None:
    """Return why the backend cannot run here, None where it can."""
    return unusable()


def unsupported(problem: Problem) -> str | None:
    """Return why the backend cannot solve the problem: it always can."""
    return None


def forward(problem: Problem, want: frozenset[str]) -> Result:
    """Return what is wanted of output, lse and weights."""
    if problem.blockwise or problem.score_mod is not None:
        score_mod = compiled(problem.score_mod, problem.acc_dtype.name)
        if problem.blockwise or score_mod is None:
            return forward_in_strips(problem, want, score_mod, attend)
        return attend(problem, want, score_mod)
    return attend(problem, want)


def vjp(problem: Problem, grad_output: Any, grad_lse: Any, result: Result | None = None) -> Gradients:
    """Return the gradients in canonical order, those of broadcast inputs not yet summed."""
    from .gradients import differentiate  # whoever does not train does not wait for it

    return differentiate(problem, grad_output, grad_lse, result, forward)


def attend(problem: Problem, want: frozenset[str], score_mod: Any = None, final: bool = False) -> Result:
    """Return what is wanted of a problem that the kernels take as it is; `final`: its bias holds the scores."""
    plan: Plan | None = problem.plans.get(("numba", want))
    if plan is None:
        plan = problem.plans["numba", want] = make_plan(problem, want, score_mod, final)
    query, key, value = problem.query, problem.key, problem.value
    output = problem.new_output() if "output" in want else None
    lse = np.empty(query.shape[:-1], problem.acc_dtype) if "lse" in want else None
    weights = None
    if "weights" in want:
        weights = np.zeros((*query.shape[:-1], problem.S), problem.dtype)
    start = 0
    if plan.memory:
        memory = np.empty(plan.memory + 64, np.uint8)
        start = memory.ctypes.data + -memory.ctypes.data % 64
        memory[: plan.counters + 64] = 0
    others = None
    if lse is not None or not plan.bare:
        intervals = problem.intervals or (None, None, None)
        options = (problem.dense, problem.bias, problem.slopes, problem.positions, problem.sink)
        arrays = (lse, weights, *intervals, *options)
        others = np.array([0 if array is None else id(array) for array in arrays], np.int64)
    out, more = 0 if output is None else id(output), 0 if others is None else id(others)
    arguments = (plan.address, start, id(query), id(key), 0 if value is None else id(value), out, more)
    run(plan.kernel, arguments, plan.tasks, alone=plan.alone)
    return Result(output, lse, weights)
