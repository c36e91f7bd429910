"""The CPU backend: the whole forward specification in kernels that Numba compiles for the processor at hand."""

from typing import Any

from sdpa_ref.backend import Gradients, Problem, Result

from .compile.products import products
from .compile.target import unusable
from .encoding import encode
from .runtime.threads import get_num_threads, set_num_threads
from .strips import forward
from .sums import add, finish
from .warmup import details, warmup

__all__ = [
    "ARRAYS", "TASKS", "add", "affine", "details", "encode", "finish", "forward", "gelu", "get_num_threads",
    "precision", "set_num_threads", "unavailable", "unsupported", "vjp", "warmup",
]  # fmt: skip

ARRAYS = "numpy"
TASKS = frozenset({"vjp", "details", "gelu", "affine", "encode", "precision", "warmup", "threads", "add", "wide"})


def unavailable() -> str | None:
    """Return why the backend cannot run here, None where it can."""
    return unusable()


def unsupported(problem: Problem) -> str | None:
    """Return why the backend cannot solve the problem: it always can."""
    return None


def precision() -> str:
    """Return how bfloat16 inputs are computed; other types are as this library requires of a backend."""
    return "bfloat16 products" if products() else "float32"


def vjp(problem: Problem, grad_output: Any, grad_lse: Any, result: Result | None = None) -> Gradients:
    """Return the gradients in canonical order, those of broadcast inputs not yet summed."""
    from .gradients import differentiate  # whoever does not train does not wait for it

    return differentiate(problem, grad_output, grad_lse, result)


def gelu(x: Any) -> Any:
    """Return the exact GELU of an array of float32 or a 16-bit type."""
    from .activations import gelu as compiled  # likewise

    return compiled(x)


def affine(weight: Any) -> Any:
    """Return the function of rows and bias that returns ``rows @ weight.T + bias``; weights are read as stored."""
    from .weights import affine as compiled  # likewise

    return compiled(weight)
