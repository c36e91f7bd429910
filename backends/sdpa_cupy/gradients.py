"""Gradients of a problem: by the kernels, or by whole arrays, at once or a strip of query rows after the other."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from sdpa_ref.arrays import is_aligned
from sdpa_ref.backend import Gradients, Problem, Result
from sdpa_ref.backflow import sink_gradient

from . import array_gradients
from .flows import Flow, flow_of
from .launch import Launcher, by_rows, takes_kernels
from .launch import forward as launched
from .pulls import pull, unpulled
from .strips import ROWS
from .tracing import traced

WANT = frozenset({"output", "lse", "m", "z"})
PAIRS_AT_ONCE = 2**19  # of a head, in a strip: of all heads, the others would have a say in the bits of each

Array = Any


def differentiate(
    problem: Problem, grad: Array, grad_lse: Array | None, result: Result | None, arch: int, launcher: Launcher, xp: Any
) -> Gradients:
    """Return the canonical gradients in the accumulation type, those of biases summed to their shapes.

    Both passes are done by kernels, or both by whole arrays: scores of other bits have weights of another sum. A row
    whose `result` is that of more keys keeps it.
    """

    def forward(problem: Problem, want: frozenset[str]) -> Result:
        return launched(problem, want, arch, launcher, xp, fused)

    def by_kernels(problem: Problem, flow: Flow) -> Gradients:
        return pull(by_rows(problem), flow, arch, launcher, xp)

    fused = unpulled(problem, arch) is None
    if result is not None and not fused and takes_kernels(traced(problem), WANT, arch):
        result = _of_these_scores(result, launched(problem, WANT, arch, launcher, xp, True), forward(problem, WANT), xp)
    by = by_kernels if fused else partial(array_gradients.pull, xp=xp)
    return gradients_of(problem, grad, grad_lse, result, forward, by, xp, fused)


def _of_these_scores(result: Result, by_kernels: Result, by_arrays: Result, xp: Any) -> Result:
    """Return the result, by arrays for those rows whose result is, bit by bit, that of the kernels for these keys."""
    here = (result.m == by_kernels.m) & (result.z == by_kernels.z)
    return Result(
        xp.where(here[..., None], by_arrays.output, result.output), xp.where(here, by_arrays.lse, result.lse), None,
        xp.where(here, by_arrays.m, result.m), xp.where(here, by_arrays.z, result.z),
    )  # fmt: skip


def gradients_of(
    problem: Problem,
    grad: Array,
    grad_lse: Array | None,
    result: Result | None,
    forward: Callable[[Problem, frozenset[str]], Result],
    pull: Callable[[Problem, Flow], Gradients],
    xp: Any,
    fused: bool = False,
) -> Gradients:
    """Return the same by two functions: `forward`, and `pull` for some rows; `fused` says that it takes any number."""
    problem = problem._replace(out=None).aligned()
    if grad.dtype != problem.dtype and problem.dtype != problem.acc_dtype:
        problem, result = _widened(problem), None  # scores have other bits in another type
    if grad.dtype != problem.dtype or not is_aligned(grad):
        with np.errstate(over="ignore"):
            grad = grad.astype(problem.dtype)
    if 0 in (problem.B, problem.Hq, problem.L, problem.S):
        return _nothing(problem, grad_lse, xp)
    result = forward(problem, WANT) if result is None else result
    flow = flow_of(problem, grad, grad_lse, result, forward, xp)
    gradients = in_strips(problem, flow, fused, pull, xp)
    if problem.sink is None:
        return gradients
    seen = result._replace(lse=xp.where(flow.z == 0, -np.inf, result.lse))
    return gradients._replace(sink=sink_gradient(problem.sink, seen, grad, flow.grad_lse))


def in_strips(
    problem: Problem, flow: Flow, fused: bool, pull: Callable[[Problem, Flow], Gradients], xp: Any
) -> Gradients:
    """Return the gradients that `pull` gives for strips of rows, their sums over rows added in the order of rows."""
    shapes = _shapes(problem)
    whole = fused and not problem.blockwise and all(shape == problem.scores_shape for shape in shapes)
    step = ROWS if not fused else max(ROWS, PAIRS_AT_ONCE // problem.S // ROWS * ROWS)
    if whole or step >= problem.L:
        found = pull(problem if whole else problem.rows(0, problem.L), flow)
        return found._replace(bias=_of_biases([_reduced(found.bias, shape) for shape in shapes]))
    query, sums = xp.zeros(problem.query.shape, problem.acc_dtype), [xp.zeros(x, problem.acc_dtype) for x in shapes]
    key = value = None
    for i in range(0, problem.L, step):
        here = slice(i, min(i + step, problem.L))
        found = pull(problem.rows(here.start, here.stop), flow.rows(here))
        query[..., here, :] = found.query
        key, value = (found.key, found.value) if key is None else (key + found.key, value + found.value)
        for total in sums:
            rows = slice(None) if total.shape[-2] == 1 else here
            part = total[..., rows, :]
            total[..., rows, :] = part + _reduced(found.bias, part.shape)
    return Gradients(query, key, value, _of_biases(sums))


def _widened(problem: Problem) -> Problem:
    """Return a problem of 16-bit types in float32."""
    acc = problem.acc_dtype
    query, key, value = (array.astype(acc) for array in (problem.query, problem.key, problem.value))
    return problem._replace(form=problem.form._replace(dtype=acc), query=query, key=key, value=value)


def _nothing(problem: Problem, grad_lse: Array | None, xp: Any) -> Gradients:
    """Return the gradients of no rows or no keys; the lse of a row without keys is its sink."""
    acc, lead = problem.acc_dtype, (*problem.batch, problem.Hkv, problem.S)
    biases = [xp.zeros(shape, acc) for shape in _shapes(problem)]
    key, value = xp.zeros((*lead, problem.E), acc), xp.zeros((*lead, problem.Ev), acc)
    sink = None
    if problem.sink is not None:
        sink = xp.zeros(problem.Hq, acc) if grad_lse is None else grad_lse.astype(acc).sum(-1)
    return Gradients(xp.zeros(problem.query.shape, acc), key, value, _of_biases(biases), sink)


def _shapes(problem: Problem) -> list[tuple[int, ...]]:
    """Return the shapes of the biases, with all axes that scores have."""
    axes = len(problem.scores_shape)
    return [(1,) * (axes - bias.ndim) + bias.shape for bias in problem.biases]


def _reduced(gradient: Array, shape: tuple[int, ...]) -> Array:
    """Return the gradient summed over the axes along which a bias of this shape was broadcast."""
    axes = tuple(axis for axis, n in enumerate(gradient.shape) if n != shape[axis])
    return gradient.sum(axes, keepdims=True) if axes else gradient


def _of_biases(sums: list[Array]) -> Any:
    return tuple(sums) if len(sums) > 1 else sums[0] if sums else None
