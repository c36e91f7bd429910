"""The backend as an object: which backend computes the blocks is decided here, on the client, and sent by name."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sdpa_ref import registry
from sdpa_ref.arrays import kind, module_of
from sdpa_ref.backend import Gradients, Problem, Result
from sdpa_ref.backflow import uncompiled
from sdpa_ref.blocks import computing
from sdpa_ref.masks import BooleanArray, leaves

from . import gradients, graph
from .cuts import Cuts


@dataclass(frozen=True)
class Over:
    """The Dask backend with blocks that a named backend computes, None for the default of the chunks' kind."""

    name: str | None
    ARRAYS = "dask"
    TASKS = frozenset({"vjp", "details"})

    def unavailable(self) -> str | None:
        """Return why it cannot run here: it can."""
        return None

    def unsupported(self, problem: Problem) -> str | None:
        """Return why the blocks cannot be computed; None where they can, or an error of the named backend."""
        self.kernel(problem)
        return None

    def kernel(self, problem: Problem, task: str = "forward") -> str:
        """Return the name of the backend that computes the blocks."""
        problem = of_chunks(problem)
        arrays = {n: _stand_in(getattr(problem, n), problem) for n in ("query", "key", "value")}
        nothing: dict[str, Any] = {"keep": None, "bias": None, "biases": (), "rules": (), "blockwise": False}
        block = problem._replace(**arrays, **nothing)
        return registry.name_of(computing(block, self.name, task))

    def forward(self, problem: Problem, want: frozenset[str]) -> Result:
        """Return what is wanted, as Dask arrays."""
        return graph.forward(Cuts.of(of_chunks(problem), self.kernel(problem)), want)

    def vjp(self, problem: Problem, grad_output: Any, grad_lse: Any, result: Result | None = None) -> Gradients:
        """Return the gradients; the forward pass has the names that it has elsewhere, and so is computed once."""
        kernel, problem = self.kernel(problem, "vjp"), uncompiled(of_chunks(problem))
        return gradients.vjp(Cuts.of(problem, kernel, pieces_at_once=False), grad_output, grad_lse)


def of_chunks(problem: Problem) -> Problem:
    """Return the problem with the kind of its chunks, or raise the error of chunks of none or of several kinds."""
    arrays = {name: getattr(problem, name) for name in ("query", "key", "value")}
    arrays |= {"mask": problem.keep} | {f"bias {n}": bias for n, bias in enumerate(problem.biases)}
    inner = [part.array for rule in problem.rules for part in leaves(rule) if isinstance(part, BooleanArray)]
    arrays |= {f"mask {n}": array for n, array in enumerate(inner)}
    kinds = {name: _kind(name, array) for name, array in arrays.items() if array is not None}
    if len({*kinds.values()}) > 1:
        got = ", ".join(f"{name} of {kind}" for name, kind in kinds.items())
        raise TypeError(f"all chunks must be of one kind, nothing is moved between host and device: got {got}")
    if kind(problem.sink) != "numpy":
        raise TypeError("sink must be a NumPy array beside Dask arrays, got a cupy array: pass sink.get()")
    return problem._replace(form=problem.form._replace(kind=kinds["query"]))


def _kind(name: str, array: Any) -> str:
    """Return whose memory chunks lie in; a store is read into the host's."""
    if kind(array) != "dask":
        return kind(array)
    meta = array._meta
    if type(meta) is not np.ndarray and kind(meta) != "cupy":
        raise TypeError(f"{name} must have chunks that are NumPy or CuPy arrays, got {type(meta).__name__}")
    return kind(meta)


def _stand_in(array: Any, problem: Problem) -> Any:
    """Return an array of this shape that takes no memory."""
    module = module_of(problem.kind)
    return None if array is None else module.broadcast_to(module.zeros((), problem.dtype), array.shape)
