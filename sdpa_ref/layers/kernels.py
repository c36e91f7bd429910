"""Kernels of a backend that layers use between their attentions, where it has them."""

from collections.abc import Callable
from typing import Any

from sdpa_ref.registry import BackendUnavailable, load


def kernel(task: str, backend: str | None, what: str) -> Callable[..., Any] | None:
    """Return the backend's function for a task, by default that of Numba where it is; None where NumPy is to do it."""
    if backend == "reference":
        return None
    try:
        chosen = load("numba" if backend is None else backend)
    except (BackendUnavailable, ValueError):
        if backend is None:
            return None
        raise
    if task not in chosen.TASKS:
        raise NotImplementedError(f"backend {backend!r} has no {what}")
    function: Callable[..., Any] = getattr(chosen, task)
    return function
