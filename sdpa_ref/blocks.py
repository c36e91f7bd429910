"""Blocks of a problem: what a part of the queries and of the keys is told, so that the parts add up to the whole.

A backend that cuts a problem up outlines it once, takes `part` of the outline for each block, and fills in the arrays.
What becomes of the blocks are `Sums`, which `add` makes, `merged` joins and `finish` divides.
"""

from functools import reduce
from typing import Any

import numpy as np

from sdpa_ref import registry
from sdpa_ref.arrays import Array, kind, module_of
from sdpa_ref.backend import Backend, Problem, Result, Sums, sum_of_biases
from sdpa_ref.floating_point import ieee
from sdpa_ref.masks import FAR, Band, Block, Grid, Intervals, once

WHOLE = frozenset({"output", "lse", "m", "z"})


def outlined(problem: Problem) -> Problem:
    """Return the problem without its arrays, and with rules in the form of which blocks take parts."""
    rules = tuple(rule._settled(problem.grid) for rule in problem.rules if problem.grid is not None)
    nothing: dict[str, Any] = dict.fromkeys(("query", "key", "value", "out", "keep", "bias", "grid"))
    return problem._replace(**nothing, biases=(), rules=rules, plain=False, blockwise=False)


def part(outline: Problem, block: Block) -> Problem:
    """Return the outline of a block."""
    heads, _, keys = block.lengths
    i0, j0 = block.rows[0], block.keys[0]
    form = outline.form._replace(batch=block.lead, Hq=heads, Hkv=heads // outline.group)
    visible = outline.visible
    if isinstance(visible, Band):
        visible = _band(visible, block)
    elif visible is not None:
        visible = clipped(Intervals(*(once(block.entries(_rows(x, block), 1)) for x in visible)), j0, keys)
    offset, positions, key_positions = outline.offset, outline.positions, outline.key_positions
    if not isinstance(offset, int):
        offset = block.entries(np.asarray(offset), 0)
    if key_positions is None:
        offset = offset - j0
    else:
        key_positions = once(block.entries(np.asarray(key_positions)[..., slice(*block.keys)], 1))
    if positions is not None:
        positions = np.broadcast_to(block.bound(positions), (*block.lead, block.lengths[1]))
    entry, head, _, _ = block.first
    return outline._replace(
        form=form, visible=visible, offset=offset + i0, positions=positions, key_positions=key_positions,
        slopes=None if outline.slopes is None else block.entries(outline.slopes[..., slice(*block.heads)], 1),
        sink=None if outline.sink is None else outline.sink[slice(*block.heads)],
        rules=tuple(rule._within(block) for rule in outline.rules),
        first_row=outline.first_row + i0, first_key=outline.first_key + j0,
        first_head=outline.first_head + head, first_entry=outline.first_entry + entry,
    )  # fmt: skip


def filled(
    outline: Problem, query: Array, key: Array, value: Array, keep: Array = None, biases: tuple[Array, ...] = ()
) -> Problem:
    """Return the problem of an outlined block with these arrays, its rules evaluated."""
    lead = outline.batch
    if query.shape[:-3] != lead:
        query = np.broadcast_to(query, (*lead, *query.shape[-3:]))
    bias = None if not biases else biases[0] if len(biases) == 1 else sum_of_biases(list(biases))
    kept = [] if keep is None else [keep]
    if outline.rules:
        grid = Grid(lead, outline.Hq, query.shape[-2], key.shape[-2], 0, kind=outline.kind)
        kept += [grid.held(rule, 0, grid.L) for rule in outline.rules]
    keep = reduce(np.logical_and, kept) if kept else None
    biases = () if bias is None else (bias,)
    return outline._replace(query=query, key=key, value=value, keep=keep, bias=bias, biases=biases, rules=())


def computing(problem: Problem, name: str | None, task: str) -> Backend:
    """Return the backend that computes the blocks of a problem of stand-ins, or raise the error of one that cannot."""
    backend = registry.choose(problem, name, task)
    if task == "vjp" and "add" not in backend.TASKS:  # it may go by the keys of a block alone
        raise NotImplementedError(f"backend {registry.name_of(backend)!r} has no gradients of blocks: the task 'add'")
    return backend


def seen(visible: Band | Intervals | None, block: Block, S: int, cuts: list[tuple[int, int]]) -> list[int]:
    """Return which of these pieces of the keys some row of the block sees, in time that goes with rows plus pieces.

    The pieces lie one behind the other; `S` is the number of all keys.
    """
    if visible is None:
        return [n for n, (j0, j1) in enumerate(cuts) if j0 < j1]
    if isinstance(visible, Band):
        offset, rows = visible.offset + block.rows[0], visible.rows - block.rows[0]
        here = Band(*(x if isinstance(x, int) else block.entries(np.asarray(x), 0) for x in visible))
        here = here._replace(offset=block.entries(np.asarray(offset), 0), rows=block.entries(np.asarray(rows), 0))
        bounds: Any = here.intervals(block.lengths[1], S, block.lead)
    else:
        bounds = (block.entries(_rows(x, block), 1) for x in visible)
    prefix, start, stop = (x.ravel() for x in np.broadcast_arrays(*map(once, bounds)))
    edges = np.array([cuts[0][0], *(j1 for _, j1 in cuts)])
    change = np.zeros(len(cuts) + 2, np.int64)
    for low, high in ((np.zeros_like(prefix), prefix), (start, stop)):
        low, high = np.maximum(low, edges[0]), np.minimum(high, edges[-1])
        some = low < high
        np.add.at(change, np.searchsorted(edges, low[some], "right") - 1, 1)
        np.add.at(change, np.searchsorted(edges, high[some] - 1, "right"), -1)
    found: list[int] = np.flatnonzero(np.cumsum(change)[: len(cuts)] > 0).tolist()
    return found


def add(backend: Backend, problem: Problem, sums: Sums | None) -> Sums:
    """Return the sums with the keys of a block added, in new arrays; the block has no sink."""
    if "add" in backend.TASKS:
        return backend.add(problem, sums)
    own = alone(backend, problem, problem.acc_dtype)
    return own if sums is None else merged(sums, own)


@ieee
def alone(backend: Backend, problem: Problem, acc: np.dtype[Any]) -> Sums:
    """Return the sums over the keys of a block in this type, by the backend's `forward`."""
    result = backend.forward(widened(problem, acc), WHOLE)
    with np.errstate(all="ignore"):
        return Sums(result.m, result.z, result.output * result.z[..., None])


def finish(backend: Backend, problem: Problem, sums: Sums, want: frozenset[str] = WHOLE) -> Result:
    """Return what is wanted of output, lse, m and z, with the sink of a problem without keys."""
    return backend.finish(problem, sums, want) if "add" in backend.TASKS else divided(problem, sums)


def no_sums(problem: Problem, L: int) -> Sums:
    """Return the sums over no keys for so many rows."""
    rows, acc, module = (*problem.batch, problem.Hq, L), problem.acc_dtype, module_of(problem.kind)
    return Sums(module.full(rows, -np.inf, acc), module.zeros(rows, acc), module.zeros((*rows, problem.Ev), acc))


def divided_by(backend: Backend, problem: Problem, sums: Sums, dtype: np.dtype[Any] | None = None) -> Result:
    """Return output, lse, m and z that the backend makes of sums, in this type; by default in that of the problem."""
    form = problem.form._replace(kind=kind(sums.total), E=0)
    if dtype is not None:
        form = form._replace(dtype=dtype, acc_dtype=dtype)
    query = sums.total[..., :0].astype(form.dtype)
    value = sums.total[..., : form.Hkv, :0, :].astype(form.dtype)
    return finish(backend, Problem(form, query, value[..., :0], value, None, 1.0, sink=problem.sink), sums)


@ieee
def merged(a: Sums, b: Sums) -> Sums:
    """Return the sums over the union of two disjoint sets of keys; those of no keys change no bit."""
    with np.errstate(all="ignore"):
        m = np.maximum(a.m, b.m)
        base = np.where(m == -np.inf, 0, m).astype(m.dtype)
        x, y = np.exp(a.m - base), np.exp(b.m - base)
        return Sums(m, a.z * x + b.z * y, a.total * x[..., None] + b.total * y[..., None])


@ieee
def divided(problem: Problem, sums: Sums) -> Result:
    """Return output, lse, m and z, with the problem's sink."""
    m, z, total = sums
    if problem.sink is not None:
        logits = module_of(kind(m)).asarray(problem.sink.astype(problem.acc_dtype).astype(m.dtype)[:, None])
        zero = np.zeros_like(total[..., :1, :1, :])
        m, z, total = merged(sums, Sums(np.broadcast_to(logits, m.shape), np.ones_like(z), zero))
    with np.errstate(all="ignore"):
        output = np.where((sums.z == 0)[..., None], 0, total / np.where(z == 0, 1, z)[..., None])
        return Result(output.astype(problem.dtype), (m + np.log(z)).astype(problem.acc_dtype), None, m, z)


@ieee
def widened(problem: Problem, acc: np.dtype[Any]) -> Problem:
    """Return the problem with arrays of the type in which sums are made, so that no result is rounded to less."""
    if problem.dtype == acc:
        return problem
    arrays = {n: a.astype(acc) for n in ("query", "key", "value") if (a := getattr(problem, n)) is not None}
    return problem._replace(form=problem.form._replace(dtype=acc, acc_dtype=acc), **arrays)


def clipped(visible: Intervals, j0: int, keys: int) -> Intervals:
    """Return intervals of the keys from j0 on, so many."""
    prefix, start, stop = (np.minimum(np.maximum(bound - j0, 0), keys) for bound in visible)
    none = start >= stop
    return Intervals(prefix, np.where(none, 0, start), np.where(none, 0, stop))


def _rows(x: Array, block: Block) -> Array:
    return x if x.shape[-1] == 1 else x[..., slice(*block.rows)]


def _band(band: Band, block: Block) -> Band | Intervals:
    """Return what a band says of a block: a band, or intervals where its chunks begin elsewhere than the block."""
    (i0, _), (j0, _) = block.rows, block.keys
    band = Band(*(x if isinstance(x, int) else block.entries(np.asarray(x), 0) for x in band))
    if band.chunk != FAR and j0 % band.chunk:
        moved = band._replace(offset=band.offset + i0, rows=band.rows - i0)
        _, rows, keys = block.lengths
        return clipped(Intervals(*map(once, moved.intervals(rows, j0 + keys, block.lead))), j0, keys)
    offset, rows_left = band.offset + i0 - j0, _less(band.rows, i0)
    start, stop, floor, first = (_less(x, j0) for x in (band.start, band.stop, band.floor, band.first))
    first = max(first, 0) if isinstance(first, int) else np.maximum(first, 0)
    return Band(offset, start, stop, band.left, band.right, floor, band.chunk, first, band.reach, rows_left)


def _less(number: Any, by: int) -> Any:
    return number if isinstance(number, int) and number == FAR else number - by
