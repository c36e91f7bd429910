"""The backend as an object: which backend computes the blocks is decided here, on the client, and sent by name."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sdpa_ref import registry
from sdpa_ref.backend import Gradients, Problem, Result
from sdpa_ref.backflow import uncompiled
from sdpa_ref.blocks import computing
from sdpa_ref.sources import Source

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
        check_chunks(problem)
        arrays = {n: _stand_in(getattr(problem, n), problem.dtype) for n in ("query", "key", "value")}
        nothing: dict[str, Any] = {"keep": None, "bias": None, "biases": (), "rules": (), "blockwise": False}
        block = problem._replace(form=problem.form._replace(kind="numpy"), **arrays, **nothing)
        return registry.name_of(computing(block, self.name, task))

    def forward(self, problem: Problem, want: frozenset[str]) -> Result:
        """Return what is wanted, as Dask arrays."""
        return graph.forward(Cuts.of(problem, self.kernel(problem)), want)

    def vjp(self, problem: Problem, grad_output: Any, grad_lse: Any, result: Result | None = None) -> Gradients:
        """Return the gradients; the forward pass has the names that it has elsewhere, and so is computed once."""
        kernel = self.kernel(problem, "vjp")
        return gradients.vjp(Cuts.of(uncompiled(problem), kernel, pieces_at_once=False), grad_output, grad_lse)


def check_chunks(problem: Problem) -> None:
    """Raise the error of chunks that are no NumPy arrays."""
    for name in ("query", "key", "value"):
        array = getattr(problem, name)
        if array is None or isinstance(array, Source):
            continue
        if type(array._meta) is not np.ndarray:  # graphs of CuPy chunks were never tried on hardware
            raise TypeError(f"{name} must have chunks that are NumPy arrays, got {type(array._meta).__name__}")


def _stand_in(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return an array of this shape that takes no memory."""
    return None if array is None else np.broadcast_to(np.zeros((), dtype), array.shape)
