"""Gradients as the caller passed the arguments: their shapes, types and layout."""

from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arrays import Array, as_array
from sdpa_ref.biases import ALiBi
from sdpa_ref.floating_point import ieee
from sdpa_ref.problem import Problem


class Gradients(NamedTuple):
    """Gradients of attention, each in the type and shape of what was passed; None for what was not given.

    Attributes
    ----------
    query, key, value : array
    bias : array, None (also for ALiBi), or a tuple of them for a tuple of biases
    sink : array or None
    """

    query: Array
    key: Array
    value: Array
    bias: Any = None
    sink: Array = None


@ieee
def to_caller(
    gradients: Gradients, problem: Problem, query: Any, key: Any, value: Any, bias: Any, sink: Any
) -> Gradients:
    """Return canonical gradients as the caller passed the arguments.

    Broadcast axes are summed, unless they are summed already and have length 1. The gradient by the bias may be a
    tuple: one for each array among the biases.
    """
    by_bias = iter(gradients.bias) if isinstance(gradients.bias, tuple) else repeat(gradients.bias)

    def for_input(gradient: Array, given: Any) -> Array:
        given = as_array("input", given)
        if problem.layout == "LHE" and given.ndim > 2:
            return _summed_to(gradient.swapaxes(-2, -3), given)
        return _summed_to(gradient, given)

    def for_bias(given: Any) -> Array:
        if isinstance(given, tuple):
            return tuple(map(for_bias, given))
        if given is None or isinstance(given, ALiBi):
            return None
        return _summed_to(next(by_bias), as_array("bias", given))

    return Gradients(
        for_input(gradients.query, query),
        for_input(gradients.key, key),
        for_input(gradients.value, value),
        for_bias(bias),
        None if sink is None else _summed_to(gradients.sink, as_array("sink", sink)),
    )


def _summed_to(gradient: Array, given: Array) -> Array:
    """Return the gradient summed over the axes along which `given` was broadcast, in its type."""
    lead = gradient.ndim - given.ndim
    axes = tuple(axis for axis, size in enumerate(given.shape, lead) if size == 1 and gradient.shape[axis] != 1)
    if lead or axes:
        gradient = gradient.sum((*range(lead), *axes), keepdims=True).reshape(given.shape)
    dtype = given.dtype.newbyteorder("=") if given.dtype.kind not in "iu" else np.dtype(np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return gradient.astype(dtype, copy=False)
