"""The GPU backend over NumPy arrays, its kernels run on fibers.

The schedule follows from the shape: laws that compare the bits of two problems then compare schedules, too.
"""

import numpy as np
from sdpa_cupy import launch
from sdpa_cupy.gradients import differentiate
from sdpa_cupy.launch.fibers import SCHEDULES, Fibers, unavailable

__all__ = ["ARRAYS", "TASKS", "forward", "unavailable", "unsupported", "vjp"]

ARRAYS, TASKS = "numpy", frozenset({"vjp"})
ARCH = 80


def unsupported(problem):
    return None


def forward(problem, want):
    return launch.forward(problem, want, ARCH, machine(problem))


def vjp(problem, grad_output, grad_lse, result=None):
    return differentiate(problem, grad_output, grad_lse, result, ARCH, machine(problem), np)


def machine(problem):
    order, late = SCHEDULES[(problem.B + problem.Hq + problem.L + problem.S + problem.E) % len(SCHEDULES)]
    return Fibers(ARCH, order, late)
