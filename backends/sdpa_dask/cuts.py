"""How a problem is cut: chunks of batch, heads, rows and keys that fit one another, and what each block gets."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask.base import tokenize

from sdpa_ref.backend import Problem
from sdpa_ref.blocks import outlined, part, seen
from sdpa_ref.masks import Block, BooleanArray, Mask, spans
from sdpa_ref.sources import Source, pieces, settings

from .tasks import Call, Outline, Reader, Slot, bytes_of_key

MOST_TASKS = 128  # along the keys of a store, for each block of rows
FEW_ROWS = 8  # of a key head, in the whole problem: then keys are what takes time, and their states are added as a tree
Chunks = tuple[int, ...]
Index = tuple[int, ...]  # of a block of batch, heads and rows


@dataclass(frozen=True, eq=False)
class Cuts:
    """A problem of Dask arrays whose chunks fit one another.

    Attributes
    ----------
    problem, outline : Problem
        The problem with query, key and value in these chunks, and its outline, without arrays.
    batch, heads, rows, keys : chunks
        Of the batch axes, of query heads, rows and keys; heads in whole groups.
    arrays : tuple
        The boolean mask, the biases, and the Dask arrays within rules, in that order.
    call : Call
        What all tasks have in common.
    token : str
        What makes two graphs the same.
    tree : bool
        Whether states of keys are added as a tree, else one after the other.
    """

    problem: Problem
    outline: Problem
    batch: tuple[Chunks, ...]
    heads: Chunks
    rows: Chunks
    keys: Chunks
    arrays: tuple[Any, ...]
    call: Call
    token: str
    tree: bool

    @staticmethod
    def of(problem: Problem, kernel: str, pieces_at_once: bool = True) -> "Cuts":
        """Return the cuts that the chunks of the arrays suggest.

        A task may read several pieces of a store, one after the other, unless what it makes of them is as large.
        """
        batch, heads, rows, keys, query, key, value = _aligned(problem, MOST_TASKS if pieces_at_once else problem.S)
        slots: list[Any] = []
        outline = outlined(problem._replace(rules=tuple(_with_slots(rule, slots) for rule in problem.rules)))
        grid = (*batch, heads, rows, keys)
        keep = [problem.keep] if problem.keep is not None else []
        arrays = tuple(_fitting(x, grid) for x in (*keep, *problem.biases, *slots))
        few = sum(rows) * problem.group <= FEW_ROWS
        order = dask.config.get("sdpa-ref.order", "auto")
        if order not in ("auto", "chain", "tree"):
            raise ValueError(f'the Dask option sdpa-ref.order must be "auto", "chain" or "tree", got {order!r}')
        tree = few if order == "auto" else order == "tree"
        alone = few and tree and kernel != "reference"
        chunked = (query, *(None if isinstance(x, Source) else x for x in (key, value)), *arrays)
        given = tuple(None if x is None else (x.dtype, x.shape) for x in chunked)
        call = Call(kernel, problem.keep is not None, len(problem.biases), given, alone, settings().limit)
        names = [x if not isinstance(x, da.Array) else x.name for x in (query, key, value, *arrays)]
        token = tokenize(*names, grid, _plain(outline), problem.score_mod, call, tree)
        posed = problem._replace(query=query, key=key, value=value)
        return Cuts(posed, outline, batch, heads, rows, keys, arrays, call, token, tree)

    @cached_property
    def grid(self) -> tuple[Chunks, ...]:
        """The chunks of the weights."""
        return (*self.batch, self.heads, self.rows, self.keys)

    @cached_property
    def cuts_of_keys(self) -> list[tuple[int, int]]:
        """Where each chunk of keys begins and ends."""
        return spans(self.keys)

    @cached_property
    def _seen(self) -> dict[Index, list[int]]:
        return {}

    def blocks(self) -> Iterator[tuple[Index, Block]]:
        """Yield index and place of each block of batch, heads and rows over all keys."""
        places = [spans(chunks) for chunks in self.grid[:-1]]
        for index in itertools.product(*(range(len(chunks)) for chunks in self.grid[:-1])):
            *lead, heads, rows = (places[axis][n] for axis, n in enumerate(index))
            yield index, Block(tuple(lead), self.problem.batch, heads, rows, (0, sum(self.keys)))

    def seen(self, index: Index, block: Block) -> list[int]:
        """Return which chunks of the keys a block needs."""
        *lead, _, i = index
        key = (*lead, i)
        if key not in self._seen:
            self._seen[key] = seen(self.outline.visible, block, block.keys[1], self.cuts_of_keys)
        found = self._seen[key]
        keep = self.arrays[0] if self.call.keep else None
        if isinstance(keep, np.ndarray):  # one that is there is looked at; what is lazy cannot be
            cuts = self.cuts_of_keys
            found = [j for j in found if block._replace(keys=cuts[j]).scores(keep).any()]
        return found

    def rows_outline(self, block: Block) -> Outline:
        """Return what the tasks of a block of rows share; rules are described for each block of keys."""
        return Outline(part(self.outline._replace(rules=()), block), block.lengths[1])

    def inputs(self, index: Index, block: Block, j: int) -> tuple[Any, ...]:
        """Return the inputs of the task of one block: keys, rules, and the names of the arrays' chunks."""
        here = block._replace(keys=self.cuts_of_keys[j])
        rules = tuple(rule._within(here) for rule in self.outline.rules)
        *lead, h, i = index
        query = (self.problem.query.name, *lead, h, i, 0)
        key, value = (self._part(x, lead, h, here, j) for x in (self.problem.key, self.problem.value))
        more = [_chunk(x, (*index, j), here) for x in self.arrays]
        return here.keys, list(rules), query, key, value, more

    def _part(self, x: Any, lead: list[int], h: int, block: Block, j: int) -> Any:
        if x is None:
            return None
        if isinstance(x, Source):
            group = self.problem.group
            return Reader(x, block.batch, (block.heads[0] // group, block.heads[1] // group))
        place = [0 if n == 1 else p for n, p in zip(x.numblocks[:-3], lead[len(lead) - x.ndim + 3 :], strict=True)]
        return (x.name, *place, h, j, 0)

    def dependencies(self) -> list[da.Array]:
        """Return the Dask arrays that a graph of these blocks reads."""
        every = (self.problem.query, self.problem.key, self.problem.value, *self.arrays)
        return [x for x in every if isinstance(x, da.Array)]


def _aligned(problem: Problem, most: int) -> tuple[Any, ...]:
    """Return chunks of batch, query heads, rows and keys, and query, key and value that have them."""
    query, given = problem.query, {"key": problem.key, "value": problem.value}
    lead, group = len(problem.batch), problem.group
    lazy = {name: x for name, x in given.items() if isinstance(x, da.Array)}
    stores = {name: x for name, x in given.items() if isinstance(x, Source)}
    borders = [_borders(query.chunks[:lead], axis) for axis in range(lead)]
    for x in lazy.values():
        for axis, chunks in enumerate(x.chunks[:-3], lead - x.ndim + 3):
            borders[axis] |= _borders((chunks,), 0) if sum(chunks) == problem.batch[axis] else set()
    if problem.rules or problem.dropout or problem.score_mod:  # they count entries, which then lie one behind the other
        borders[1:] = [{0, n} for n in problem.batch[1:]]
    heads = {n // group for n in _borders(query.chunks, -3) if n % group == 0}
    keys = set()
    for x in lazy.values():
        heads |= _borders(x.chunks, -3)
        keys |= _borders(x.chunks, -2)
    if not lazy and stores:
        keys = _pieces(problem, list(stores.values()), most)
    if problem.dropout is not None:  # its bits come in fours
        keys = {n - n % 4 if n != problem.S else n for n in keys}
    batch = tuple(_chunks(b, n) for b, n in zip(borders, problem.batch, strict=True))
    own_heads, own_keys = _chunks(heads, problem.Hkv), _chunks(keys, problem.S)
    q_heads, rows = tuple(n * group for n in own_heads), query.chunks[-2]
    query = query.rechunk((*batch, q_heads, rows, (problem.E,)))
    for name, x in lazy.items():
        own = tuple(c if sum(c) == n else (1,) for c, n in zip(batch[lead - x.ndim + 3 :], x.shape[:-3], strict=True))
        given[name] = x.rechunk((*own, own_heads, own_keys, (x.shape[-1],)))
    return batch, q_heads, rows, own_keys, query, given["key"], given["value"]


def _borders(chunks: Any, axis: int) -> set[int]:
    return {0, *np.cumsum(chunks[axis]).tolist()}


def _chunks(borders: set[int], n: int) -> Chunks:
    """Return the chunks between these borders, one of length 0 where there is nothing."""
    cuts = sorted(borders | {0, n})
    return tuple(b - a for a, b in itertools.pairwise(cuts)) or (0,)


def _pieces(problem: Problem, stores: list[Source], most: int) -> set[int]:
    """Return where keys in stores are cut: between pieces, and so that there are no more tasks than that."""
    size = bytes_of_key(problem)
    ends = [j1 for _, j1 in pieces(problem.S, size, settings().limit, max(source.chunk() for source in stores))]
    at_once = -(-len(ends) // max(1, most))
    return {0, *ends[at_once - 1 :: max(1, at_once)]}


def _fitting(x: Any, grid: tuple[Chunks, ...]) -> Any:
    """Return an array that broadcasts to the weights in their chunks, whole along axes that it repeats."""
    if not isinstance(x, da.Array):
        return x
    own = tuple(c if n != 1 else (1,) for c, n in zip(grid[len(grid) - x.ndim :], x.shape, strict=True))
    return x.rechunk(own)


def _chunk(x: Any, index: Index, block: Block) -> Any:
    """Return the name of the chunk that a block of the weights needs, or the part of an array that is there."""
    if not isinstance(x, da.Array):
        return block.scores(x)
    return (x.name, *(0 if n == 1 else i for n, i in zip(x.shape, index[len(index) - x.ndim :], strict=True)))


def _with_slots(mask: Mask, slots: list[Any]) -> Mask:
    """Return the mask with a slot for each Dask array in it, which is added to the list."""
    if isinstance(mask, BooleanArray) and isinstance(mask.array, da.Array):
        slots.append(mask.array)
        return Slot(len(slots) - 1)
    if hasattr(mask, "parts"):
        return type(mask)(tuple(_with_slots(p, slots) for p in mask.parts))  # type: ignore[call-arg]
    return mask


def _plain(outline: Problem) -> tuple[Any, ...]:
    """Return what identifies an outline."""
    return tuple(outline._replace(score_mod=None))
