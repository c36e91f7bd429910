"""The array-level path of the CuPy backend over NumPy, in tiles so small that short problems have several."""

from functools import partial

import numpy as np
from sdpa_cupy import array_gradients, arrays
from sdpa_cupy.gradients import gradients_of
from sdpa_cupy.strips import in_strips

__all__ = ["ARRAYS", "TASKS", "forward", "unavailable", "unsupported", "vjp"]

ARRAYS, TASKS = "numpy", frozenset({"vjp"})
KEYS = 12


def unavailable() -> None:
    return None


def unsupported(problem) -> None:
    return None


def forward(problem, want):
    return in_strips(problem, want, np.empty, partial(arrays.attend, xp=np, keys=KEYS))


def vjp(problem, grad_output, grad_lse, result=None):
    pull = partial(array_gradients.pull, xp=np, keys=KEYS)
    return gradients_of(problem, grad_output, grad_lse, result, forward, pull, np)
