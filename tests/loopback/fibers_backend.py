"""The GPU backend over NumPy arrays, its kernels run on fibers.

The schedule follows from the shape: laws that compare the bits of two problems then compare schedules, too.
"""

from sdpa_cupy import launch
from sdpa_cupy.launch.fibers import SCHEDULES, Fibers, unavailable

__all__ = ["ARRAYS", "TASKS", "forward", "unavailable", "unsupported"]

ARRAYS, TASKS = "numpy", frozenset()
ARCH = 80


def unsupported(problem):
    return None


def forward(problem, want):
    order, late = SCHEDULES[(problem.B + problem.Hq + problem.L + problem.S + problem.E) % len(SCHEDULES)]
    return launch.forward(problem, want, ARCH, Fibers(ARCH, order, late))
