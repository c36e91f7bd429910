"""The way of a problem through a launcher: the same for CuPy, for the fibers and for the interpreter of PTX."""

from typing import Any, Protocol

import numpy as np

from sdpa_cupy import arrays, calls
from sdpa_cupy.folding import folded
from sdpa_cupy.parameters import AXES, bands_of
from sdpa_cupy.plan import Launch, Plan, bound, copies_16, fused, make_plan
from sdpa_cupy.strips import in_strips, new_result
from sdpa_cupy.tracing import traced
from sdpa_cupy.variants import WIDEST
from sdpa_ref.arrays import is_aligned
from sdpa_ref.backend import Problem, Result
from sdpa_ref.masks import Band
from sdpa_ref.storage import Stored


class Launcher(Protocol):
    """What runs kernels somewhere."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array in the memory that kernels write; of type uint8 for what the launches of one call share."""

    def address(self, array: Any) -> int:
        """Return where an array begins, 0 for None."""

    def moved(self, array: np.ndarray[Any, Any] | None) -> Any:
        """Return a small array in the memory that kernels read, None of None."""

    def run(self, launch: Launch, parameters: np.ndarray[Any, Any]) -> None:
        """Run a kernel after those before it."""


def forward(
    problem: Problem, want: frozenset[str], arch: int, launcher: Launcher, xp: Any = np, kernels: bool | None = None
) -> Result:
    """Return what is wanted, through copies of arrays at addresses that a device cannot read or write.

    `kernels` is what `takes_kernels` says, where that is known.
    """
    return calls.attend(problem, want, arch, launcher) or by_any_way(problem, want, arch, launcher, xp, kernels)


def by_any_way(
    problem: Problem, want: frozenset[str], arch: int, launcher: Launcher, xp: Any = np, kernels: bool | None = None
) -> Result:
    """Return the same where no call is too rare for it."""
    problem = problem if kernels is False else traced(problem)
    out = problem.out
    if problem.keep is not None or problem.bias is not None or problem.stored or not copies_16(problem):
        problem = problem.aligned()
    kernels = takes_kernels(problem, want, arch) if kernels is None else kernels
    if is_aligned(out):
        return _launched(problem, want, arch, launcher, xp, kernels)
    result = _launched(problem._replace(out=None), want, arch, launcher, xp, kernels)
    if result.output is None:
        return result
    out[...] = result.output
    return result._replace(output=out)


def _launched(problem: Problem, want: frozenset[str], arch: int, launcher: Launcher, xp: Any, kernels: bool) -> Result:
    """Return what is wanted: by the kernels, or by `arrays` over `xp` where `fused` says why they cannot."""
    if kernels and not problem.blockwise:
        return by_pieces(problem, want, arch, launcher)

    def by_kernels(strip: Problem, views: Result) -> None:
        by_pieces(strip, want, arch, launcher, views)

    def by_arrays(strip: Problem, views: Result) -> None:
        arrays.attend(strip, views, xp)

    return in_strips(problem, want, launcher.empty, by_kernels if kernels else by_arrays)


def takes_kernels(problem: Problem, want: frozenset[str], arch: int) -> bool:
    """Return whether the fused kernels solve a problem, as a whole or in strips."""
    return fused(problem._replace(blockwise=False) if problem.blockwise else problem, want, arch) is None


def by_rows(problem: Problem) -> Problem:
    """Return the problem with visible keys and, where ALiBi needs them, positions as kernels read them.

    These are a few numbers, of all or of each batch entry, or numbers a row. Tables of pages become what kernels read.
    """
    if problem.slopes is None and problem.visible is None and not problem.stored:
        return problem
    few = problem.positions is None and type(problem.offset) is int
    positions = None if problem.slopes is None or few else problem.stands()
    visible = problem.visible if type(problem.visible) is Band else problem.intervals
    key, value = (_with_pages(part) if type(part) is Stored else part for part in (problem.key, problem.value))
    return problem._replace(key=key, value=value, visible=visible, positions=positions)


def _with_pages(part: Stored) -> Stored:
    """Return stored keys or values with a table of pages that exist, int64: what nothing needs may name any page."""
    if not isinstance(part.table, np.ndarray):
        return part
    table = part.table
    return part._replace(table=np.where((table >= 0) & (table < len(part.numbers)), table, 0).astype(np.int64))


def by_pieces(
    problem: Problem, want: frozenset[str], arch: int, launcher: Launcher, result: Result | None = None
) -> Result:
    """Return what is wanted of a problem without rules: many leading axes as one, wide values in parts."""
    if len(problem.form.batch) > AXES:
        found = by_pieces(folded(problem), want, arch, launcher)
        result = new_result(problem, want, launcher.empty) if result is None else result
        for array, own in zip(result, found, strict=True):
            if array is not None:
                array[...] = own.reshape(array.shape)
        return result
    if problem.form.Ev <= WIDEST:
        return attend(problem, want, make_plan(problem, want, arch), launcher, result)
    result = new_result(problem, want, launcher.empty) if result is None else result
    for d in range(0, problem.Ev if result.output is not None else 1, WIDEST):
        value = problem.value[..., d : d + WIDEST]
        piece = problem._replace(form=problem.form._replace(Ev=value.shape[-1]), value=value)
        views = result if d == 0 else Result()
        views = views._replace(output=None if result.output is None else result.output[..., d : d + WIDEST])
        own = want if d == 0 else want - {"weights"}
        attend(piece, own, make_plan(piece, own, arch), launcher, views)
    return result


def attend(
    problem: Problem, want: frozenset[str], plan: Plan, launcher: Launcher, result: Result | None = None
) -> Result:
    """Return what is wanted of a problem without rules, in the arrays of `result` where it is given."""
    result = new_result(problem, want, launcher.empty) if result is None else result
    problem = by_rows(problem)
    workspace = launcher.empty((plan.workspace,), np.uint8) if plan.workspace else None
    bands = launcher.moved(bands_of(problem.visible, problem.batch))
    parameters = bound(plan, launcher.address, problem, result, *map(launcher.address, (workspace, bands)))
    for launch in plan.launches:
        launcher.run(launch, parameters)
    return result
