"""A backend that runs, but supports no problem and has no gradients."""

from loopback_backend import ARRAYS, forward, unavailable

__all__ = ["ARRAYS", "TASKS", "forward", "unavailable", "unsupported"]

TASKS = frozenset()


def unsupported(problem) -> str:
    return f"L = {problem.L} is not its taste"
