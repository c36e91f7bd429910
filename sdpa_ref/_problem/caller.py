"""What belongs to the caller: the layout, the missing head axis, `out`, and the types of gradients."""

from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref._problem.checks import one_kind
from sdpa_ref.arrays import FLOATS, Array, as_array, is_float, summed_to
from sdpa_ref.backend import Gradients, Problem
from sdpa_ref.biases import ALiBi
from sdpa_ref.floating_point import ieee
from sdpa_ref.sources import Source, source_of
from sdpa_ref.storage import Stored


class Caller(NamedTuple):
    """How to turn canonical results back.

    Attributes
    ----------
    layout : {"HLE", "LHE"}
    headless : bool
        Whether the caller's arrays have no head axis.
    array : array or None
        The caller's `out`.
    """

    layout: str
    headless: bool
    array: Array = None

    def output(self, canonical: Array) -> Array:
        """Return the output: `out`, where the backend has put it, or its array."""
        return self.turned(canonical) if self.array is None else self.array

    def turned(self, canonical: Array) -> Array:
        """Return a canonical array with the axes of the output."""
        if self.headless:
            return canonical[0]
        return canonical if self.layout == "HLE" else canonical.swapaxes(-2, -3)

    def lse(self, canonical: Array) -> Array:
        """Return a canonical array with a number a row, such as the lse."""
        if self.headless:
            return canonical[0]
        return canonical if self.layout == "HLE" else canonical.swapaxes(-1, -2)

    def weights(self, canonical: Array) -> Array:
        """Return a canonical array with a number a pair, such as the weights."""
        weights = canonical[0] if self.headless else canonical
        if self.array is None:
            return weights
        self.array[...] = weights
        return self.array

    def incoming(self, problem: Problem, grad_output: Any, grad_lse: Any) -> tuple[Array, Array]:
        """Return the incoming gradients in canonical order, or raise the error of the first that is wrong."""
        output = self._taken("grad_output", grad_output, problem, (problem.Ev,))
        return output, None if grad_lse is None else self._taken("grad_lse", grad_lse, problem, ())

    def _taken(self, name: str, given: Any, problem: Problem, width: tuple[int, ...]) -> Array:
        array = as_array(name, given)
        if not is_float(array.dtype):
            raise TypeError(f"{name} must be {FLOATS}, got {array.dtype}")
        one_kind({"query": problem.query, name: array})
        rows = (problem.Hq, problem.L) if self.layout == "HLE" else (problem.L, problem.Hq)
        shape = (problem.L, *width) if self.headless else (*problem.batch, *rows, *width)
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {array.shape}")
        if self.headless:
            return array[None]
        if self.layout == "HLE":
            return array
        return array.swapaxes(-2, -3) if width else array.swapaxes(-1, -2)

    @ieee
    def gradients(self, gradients: Gradients, query: Any, key: Any, value: Any, bias: Any, sink: Any) -> Gradients:
        """Return canonical gradients in the types and shapes of the arguments.

        Broadcast axes are summed, unless they are summed already and have length 1. The gradient by the bias may be a
        tuple: one for each array among the biases.
        """
        by_bias = iter(gradients.bias) if isinstance(gradients.bias, tuple) else repeat(gradients.bias)

        def for_input(gradient: Array, given: Any) -> Array:
            if type(gradient) is Source:  # it is written where the caller wanted it
                return gradient.array
            given = source_of(given) or as_array("input", given)
            turn = self.layout == "LHE" and given.ndim > 2
            return _summed_to(gradient.swapaxes(-2, -3) if turn else gradient, given)

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


def differentiable(problem: Problem) -> Problem:
    """Return the problem itself, or raise the error of keys that are stored, or of a score_mod without derivative."""
    for name in ("key", "value"):
        if isinstance(getattr(problem, name), Stored):
            raise NotImplementedError(f"gradients need dense arrays, {name} is Paged or Quantized: pass {name}.dense()")
    if problem.score_mod is not None and not callable(getattr(problem.score_mod, "derivative", None)):
        raise NotImplementedError(
            "gradients need the derivative of score_mod by s: set score_mod.derivative = f(s, b, h, i, j)"
        )
    return problem


def _summed_to(gradient: Array, given: Array) -> Array:
    """Return the gradient summed over the axes along which `given` was broadcast, in its type."""
    gradient = summed_to(gradient, given.shape)
    dtype = given.dtype.newbyteorder("=") if given.dtype.kind not in "iu" else np.dtype(np.float64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return gradient.astype(dtype, copy=False)
