"""The backend for Dask arrays: a graph of partial states, of which another backend computes each block."""

from typing import Any

from sdpa_ref.backend import Gradients, Problem, Result

from .over import Over

__all__ = ["ARRAYS", "TASKS", "details", "forward", "over", "unavailable", "unsupported", "vjp"]

ARRAYS, TASKS = "dask", frozenset({"vjp", "details"})
_DEFAULT = Over(None)


def unavailable() -> str | None:
    """Return why the backend cannot run here, None where it can: without Dask it cannot be imported."""
    return None


def over(name: str) -> Over:
    """Return the same backend with blocks that the named one computes."""
    return Over(name)


def unsupported(problem: Problem) -> str | None:
    """Return why the blocks of the problem cannot be computed; None where they can."""
    return _DEFAULT.unsupported(problem)


def forward(problem: Problem, want: frozenset[str]) -> Result:
    """Return what is wanted, as Dask arrays."""
    return _DEFAULT.forward(problem, want)


def vjp(problem: Problem, grad_output: Any, grad_lse: Any, result: Result | None = None) -> Gradients:
    """Return the gradients in canonical order, as Dask arrays."""
    return _DEFAULT.vjp(problem, grad_output, grad_lse, result)


def details() -> dict[str, str]:
    """Return the versions that are in use."""
    from importlib.metadata import version

    return {"Dask": version("dask")}
