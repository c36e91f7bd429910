"""A backend that is the reference under another name: it proves the way through a real entry point."""

from sdpa_ref.reference import ARRAYS, TASKS, forward, stages, unavailable, unsupported, vjp

__all__ = ["ARRAYS", "TASKS", "forward", "stages", "unavailable", "unsupported", "vjp"]
