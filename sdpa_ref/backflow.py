"""Gradients of a problem that is cut into blocks: what the blocks share, and what is left beside them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sdpa_ref.arrays import Array, kind, module_of
from sdpa_ref.backend import Backend, Problem, Result, Sums
from sdpa_ref.blocks import divided_by
from sdpa_ref.floating_point import ieee


@ieee
def flow_of(backend: Backend, problem: Problem, sums: Sums) -> Result:
    """Return what a backend's `vjp` is given with each block: output, m and z of all keys, in the type of the sums.

    Its lse is that of the keys alone, -inf for a row that sees none, whatever a sink makes of it.
    """
    found = divided_by(backend, problem, sums, sums.z.dtype)
    return found._replace(lse=np.where(sums.z == 0, found.lse.dtype.type(-np.inf), found.lse))


@ieee
def sink_gradient(sink: Array, flow: Result, grad: Array, grad_lse: Array | None) -> Array:
    """Return the gradient by the sink, float64 ``(Hq,)``, summed over rows: ``(*batch, Hq)``."""
    with np.errstate(all="ignore"):
        logits = module_of(kind(flow.m)).asarray(sink.astype(flow.m.dtype))[:, None]
        inner = np.where(flow.lse == -np.inf, 0, (grad.astype(flow.m.dtype) * flow.output).sum(-1))
        share = np.where(flow.z == 0, 0, np.exp(logits - flow.m) / flow.z)
        change = share * ((0 if grad_lse is None else grad_lse) - inner)
        total: Array = np.where(share == 0, 0, change).sum(-1)
    return total


@dataclass(frozen=True)
class Uncompiled:
    """A function of scores and its derivative as Python has them: a kernel with the compiled one makes other scores."""

    function: Any
    derivative: Any

    def __call__(self, *arguments: Any) -> Any:
        """Return the scores."""
        return self.function(*arguments)


def uncompiled(problem: Problem) -> Problem:
    """Return the problem with a function of scores that is not compiled, as the backward pass has it."""
    f: Any = problem.score_mod
    if f is None or not hasattr(f, "py_func"):
        return problem
    return problem._replace(score_mod=Uncompiled(f.py_func, getattr(f.derivative, "py_func", f.derivative)))
