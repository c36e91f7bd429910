"""The CPU backend: the whole forward specification in kernels that Numba compiles for the processor at hand."""

from typing import Any

from sdpa_ref.backend import Gradients, Problem, Result

from .compile.target import unusable
from .forward import attend
from .runtime.threads import get_num_threads, set_num_threads
from .strips import compiled, forward_in_strips
from .warmup import details, warmup

__all__ = [
    "ARRAYS", "TASKS", "details", "forward", "get_num_threads", "set_num_threads", "unavailable", "unsupported", "vjp",
    "warmup",
]  # fmt: skip

ARRAYS, TASKS = "numpy", frozenset({"vjp", "details", "warmup", "threads"})


def unavailable() -> str | None:
    """Return why the backend cannot run here, None where it can."""
    return unusable()


def unsupported(problem: Problem) -> str | None:
    """Return why the backend cannot solve the problem: it always can."""
    return None


def forward(problem: Problem, want: frozenset[str]) -> Result:
    """Return what is wanted of output, lse (with m and z) and weights."""
    if problem.blockwise or problem.score_mod is not None:
        score_mod = compiled(problem.score_mod, problem.acc_dtype.name)
        if problem.blockwise or score_mod is None:
            return forward_in_strips(problem, want, score_mod, attend)
        return attend(problem, want, score_mod)
    return attend(problem, want)


def vjp(problem: Problem, grad_output: Any, grad_lse: Any, result: Result | None = None) -> Gradients:
    """Return the gradients in canonical order, those of broadcast inputs not yet summed."""
    from .gradients import differentiate  # whoever does not train does not wait for it

    return differentiate(problem, grad_output, grad_lse, result, forward, attend)
