"""The bodies of the tasks: what runs on the workers."""

import math
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from sdpa_ref import registry
from sdpa_ref.arrays import kind, module_of
from sdpa_ref.backend import Backend, Problem, Result, Sums
from sdpa_ref.backflow import flow_of, sink_gradient
from sdpa_ref.blocks import add, alone, divided_by, filled, merged, no_sums, part, seen, widened
from sdpa_ref.masks import Block, BooleanArray, Mask
from sdpa_ref.masks.grid import Grid
from sdpa_ref.sources import Source, pieces

Array = Any


@dataclass(frozen=True)
class Call:
    """What all tasks of a call have in common.

    Attributes
    ----------
    kernel : str
        The backend that computes blocks, chosen on the client: another one would give other bits.
    keep : bool
        Whether the first of the arrays is a boolean mask.
    biases : int
        How many arrays behind it are biases; the others belong to rules.
    given : tuple
        Type and shape of query, key, value and the arrays, None for what is read in the task.
    alone : bool
        Whether states are made by the backend's ordinary call, which is faster where a key head has few rows.
    limit : int
        The most bytes of a store that are read at a time.
    """

    kernel: str
    keep: bool
    biases: int
    given: tuple[Any, ...]
    alone: bool
    limit: int


@dataclass(frozen=True, eq=False)
class Outline:
    """An outline of so many rows in a graph, which would take a named tuple apart."""

    problem: Problem
    length: int


@dataclass(frozen=True, eq=False, repr=False)
class Slot(Mask):
    """The place of a Dask array in a rule, whose chunk the task is given."""

    number: int

    def _rows(self, grid: Grid) -> Any:
        return None

    def _within(self, block: Block) -> Mask:
        return self


@dataclass(frozen=True, eq=False)
class Reader:
    """Entries and heads of a store, read in the task, so that they outlive none."""

    source: Source
    batch: tuple[tuple[int, int], ...]
    heads: tuple[int, int]

    def keys(self, keys: tuple[int, int], dtype: np.dtype[Any]) -> Array:
        """Return these keys."""
        return self.source.read(self.batch, self.heads, keys, dtype)


def backend_of(call: Call) -> Backend:
    """Return the backend that was chosen on the client, or say that this worker has it not."""
    try:
        return registry.load(call.kernel)
    except (registry.BackendUnavailable, ValueError) as error:
        raise registry.BackendUnavailable(
            f"the client chose backend {call.kernel!r} for the blocks of this call, and this worker has it not: {error}"
        ) from None


def check(call: Call, rows: Outline, keys: tuple[int, int], q: Array, k: Any, v: Any, arrays: list[Array]) -> None:
    """Raise the error of chunks that are not what their Dask arrays say: kernels read memory by these words."""
    form, L, S = rows.problem.form, rows.length, int(keys[1]) - int(keys[0])
    chunks = (("query", q, form.Hq, L, form.E), ("key", k, form.Hkv, S, form.E), ("value", v, form.Hkv, S, form.Ev),
              *(("mask or bias", x, form.Hq, L, S) for x in arrays))  # fmt: skip
    for (name, x, *sizes), given in zip(chunks, call.given, strict=True):
        if given is not None:
            dtype, whole = given
            check_chunk(name, x, form.kind, dtype, whole, (*form.batch, *sizes))


def check_chunk(
    name: str, x: Any, whose: str, dtype: np.dtype[Any], whole: tuple[int, ...], grid: tuple[int, ...]
) -> None:
    """Raise the error of a chunk that is not of this kind and type, or not the part of the whole that is laid out."""
    shape = tuple(1 if n == 1 else size for n, size in zip(whole, grid[len(grid) - len(whole) :], strict=True))
    same = kind(x) == whose and isinstance(x, module_of(whose).ndarray) and not isinstance(x, np.ma.MaskedArray)
    if not same or x.dtype != dtype or x.shape != shape:
        got = f"{type(x).__name__} of {getattr(x, 'dtype', 'no dtype')} and shape {getattr(x, 'shape', None)}"
        raise TypeError(f"a chunk of {name} must be a {whose} array of {dtype} and shape {shape}, got {got}")


def problem_of(
    call: Call, rows: Outline, keys: tuple[int, int], rules: list[Mask], q: Array, k: Any, v: Any, arrays: list[Array]
) -> Problem:
    """Return the problem of a block without its sink."""
    whole = rows.problem
    form = whole.form
    lead = tuple((0, n) for n in form.batch)
    block = Block(lead, form.batch, (0, form.Hq), (0, rows.length), (int(keys[0]), int(keys[1])))
    here = part(whole, block)
    keep = arrays[0] if call.keep else None
    biases, others = arrays[call.keep :][: call.biases], arrays[call.keep + call.biases :]
    rules = [_with_chunks(rule, others) for rule in rules]
    here = here._replace(rules=tuple(rules), sink=None)
    k, v = (x.keys(block.keys, form.dtype) if isinstance(x, Reader) else x for x in (k, v))
    v = k[..., :0] if v is None else v
    return filled(here, q, k, v, keep, tuple(biases))


def state(
    before: Sums | None, call: Call, rows: Outline, keys: tuple[int, int], rules: list[Mask], q: Array, k: Any, v: Any,
    arrays: list[Array],
) -> Sums:  # fmt: skip
    """Return the sums of a block, added to those of the keys before it; a store is read a piece at a time."""
    check(call, rows, keys, q, k, v, arrays)
    backend, sums, form, L = backend_of(call), before, rows.problem.form, rows.length
    lead, j0 = tuple((0, n) for n in form.batch), int(keys[0])
    block = Block(lead, form.batch, (0, form.Hq), (0, L), (j0, int(keys[1])))
    cuts = _cuts(call, rows.problem, block, [x.source for x in (k, v) if isinstance(x, Reader)])
    some = seen(rows.problem.visible, block, block.keys[1], cuts) if len(cuts) > 1 else range(1)
    for n in some:  # of one piece it is known that a row sees it
        here = block._replace(keys=(cuts[n][0] - j0, cuts[n][1] - j0))
        key, value = (x if x is None or isinstance(x, Reader) else x[..., slice(*here.keys), :] for x in (k, v))
        within = [rule._within(here) for rule in rules]
        problem = problem_of(call, rows, cuts[n], within, q, key, value, [here.scores(x) for x in arrays])
        if not call.alone:
            sums = add(backend, problem, sums)
        else:
            own = alone(backend, problem, problem.acc_dtype)
            sums = own if sums is None else merged(sums, own)
    return no_sums(rows.problem, L) if sums is None else sums


def _cuts(call: Call, problem: Problem, block: Block, stores: list[Source]) -> list[tuple[int, int]]:
    """Return the pieces of a block's keys."""
    j0, j1 = block.keys
    if not stores:
        return [(j0, j1)]
    chunk = max(source.chunk() for source in stores)
    size = bytes_of_key(problem) * math.prod(problem.batch)
    return [(j0 + a, j0 + b) for a, b in pieces(j1 - j0, size, call.limit, chunk)]


def bytes_of_key(problem: Problem) -> int:
    """Return what a key and its value take in all heads, with what a kernel packs of them."""
    return problem.Hkv * (problem.E + problem.Ev) * (problem.dtype.itemsize + problem.acc_dtype.itemsize)


def total(*states: Sums) -> Sums:
    """Return the sums over the keys of all states, from left to right."""
    return reduce(merged, states)


def result(call: Call, rows: Outline, sums: Sums | None, wide: bool = False) -> Result:
    """Return output, lse, m and z of a block of rows; `wide`: in the type of the sums, as gradients need it."""
    backend = backend_of(call)  # it imports the library of the arrays
    if sums is None:
        sums = no_sums(rows.problem, rows.length)
    return (flow_of if wide else divided_by)(backend, rows.problem, sums)


def part_of(call: Call, rows: Outline, sums: Sums | None, name: str, dtype: np.dtype[Any]) -> Array:
    """Return a part of the result of a block of rows."""
    return pick(result(call, rows, sums), name, dtype)


def sink(flow: Result, rows: Outline, grad: Array, grad_lse: Array) -> Array:
    """Return a block's part of the gradient by the sink, a number a head."""
    part = sink_gradient(rows.problem.sink, flow, grad, grad_lse)
    return part.sum(tuple(range(part.ndim - 1)))


def pick(whole: Any, name: Any, dtype: Any = None) -> Array:
    """Return a part of what a task has made."""
    found = getattr(whole, name) if isinstance(name, str) else whole[name]
    return found if dtype is None else found.astype(dtype, copy=False)


def weights(
    whole: Result, call: Call, dtype: np.dtype[Any], rows: Outline, keys: tuple[int, int], rules: list[Mask], q: Array,
    k: Any, v: Any, arrays: list[Array],
) -> Array:  # fmt: skip
    """Return the weights of a block beside all other keys of its rows."""
    check(call, rows, keys, q, k, v, arrays)
    problem = problem_of(call, rows, keys, rules, q, k, v, arrays)
    block = backend_of(call).forward(widened(problem, whole.z.dtype), frozenset({"weights", "lse", "m", "z"}))
    with np.errstate(all="ignore"):
        base = np.where(whole.m == -np.inf, 0, whole.m)
        share = block.z * np.exp(block.m - base) / np.where(whole.z == 0, 1, whole.z)
        return np.where(block.weights == 0, 0, block.weights * share[..., None]).astype(dtype)


def _with_chunks(mask: Mask, chunks: list[Array]) -> Mask:
    """Return the mask with the chunks of Dask arrays in their slots."""
    if isinstance(mask, Slot):
        return BooleanArray(chunks[mask.number])
    if hasattr(mask, "parts"):
        return type(mask)(tuple(_with_chunks(each, chunks) for each in mask.parts))  # type: ignore[call-arg]
    return mask
