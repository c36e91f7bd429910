"""Output and weights of attention from one call of the backend, which no public function returns."""

from typing import Any

from sdpa_ref import registry
from sdpa_ref._problem import pose
from sdpa_ref.arrays import Array

_BOTH = frozenset({"output", "weights"})


def sdpa_and_weights(
    query: Array, key: Array, value: Array, *, backend: str | None = None, **options: Any
) -> tuple[Array, Array]:
    """Return what `sdpa` and `sdpa_weights` return, bit for bit, of arrays of one type that have a head axis."""
    problem, caller = pose(query, key, value, **options, output=True)
    result = registry.choose(problem, backend).forward(problem, _BOTH)
    return caller.output(result.output), result.weights
