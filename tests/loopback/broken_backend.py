"""A backend that is known and never usable here."""

from loopback_backend import ARRAYS, TASKS, forward, unsupported

__all__ = ["ARRAYS", "TASKS", "forward", "unavailable", "unsupported"]


def unavailable() -> str:
    return "it needs a machine that does not exist; install one: pip install machine"
