"""Masks of documents that share a row, and of trees: their rules need numbers for each row or key."""

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdpa_ref.masks.algebra import AnyOf, BooleanArray, Given, Mask, rule
from sdpa_ref.masks.block import Block
from sdpa_ref.masks.checks import broadcasts, integers, last_axis, lengths, put
from sdpa_ref.masks.grid import Grid
from sdpa_ref.masks.intervals import Bound, Rows

__all__ = ["Packed", "Segments", "Tree"]


@rule
class Segments(Mask):
    """Queries attend to the keys of their own segment: ``q_ids[i] == k_ids[j]``.

    Parameters
    ----------
    q_ids : array of int, shape (..., L)
        Segment of each query; leading axes broadcast to the batch axes.
    k_ids : array of int, shape (..., S), optional
        Segment of each key; left out, `q_ids` serves both.

    Examples
    --------
    >>> print(Segments([7, 7, 3]).show(3, 3))
        012
      0 ##.
      1 ##.
      2 ..#
    """

    q_ids: Any
    k_ids: Any = None

    def __post_init__(self) -> None:
        put(self, "q_ids", integers("Segments q_ids", self.q_ids, axes=1))
        put(
            self,
            "k_ids",
            self.q_ids if self.k_ids is None else integers("Segments k_ids", self.k_ids, axes=1),
        )

    def _rows(self, grid: Grid) -> Rows | None:
        lead = self._axes()[0]
        if math.prod(lead) == 0 or grid.S == 0:
            return []
        pieces: list[tuple[int, int]] = []
        for queries, keys in zip(_listed(self.q_ids, lead), _listed(self.k_ids, lead), strict=True):
            runs, start = {}, 0
            for name, run in itertools.groupby(keys):
                if name in runs:
                    return None  # a segment lies in several pieces
                runs[name] = start, start + len([*run])
                start = runs[name][1]
            pieces += [runs.get(name, (0, 0)) for name in queries]
        bounds = np.array(pieces, np.int64).reshape(*lead, grid.L, 2)
        return [(bounds[..., 0], bounds[..., 1])]

    def _pairs(self, grid: Grid, i0: int, i1: int) -> Any:
        queries, keys = grid.there(self.q_ids[..., i0:i1]), grid.there(self.k_ids)
        return (queries[..., None] == keys[..., None, :])[..., None, :, :]

    def _within(self, block: Block) -> Mask:
        (i0, i1), (j0, j1) = block.rows, block.keys
        return Segments(block.entries(self.q_ids[..., i0:i1], 1), block.entries(self.k_ids[..., j0:j1], 1))

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        for name, ids, size in (("q_ids", self.q_ids, L), ("k_ids", self.k_ids, S)):
            last_axis(f"Segments {name}", ids, batch, size, "L" if name == "q_ids" else "S")

    def _axes(self) -> tuple[tuple[int, ...], int]:
        return np.broadcast_shapes(self.q_ids.shape[:-1], self.k_ids.shape[:-1]), 1


def _listed(ids: Bound, lead: tuple[int, ...]) -> list[list[int]]:
    """Return the ids of each batch entry."""
    all_ids = ids if ids.shape[:-1] == lead else np.broadcast_to(ids, (*lead, ids.shape[-1]))
    rows: list[list[int]] = all_ids.reshape(math.prod(lead), ids.shape[-1]).tolist()
    return rows


@rule
class Packed(Mask):
    """Documents of these lengths lie one after another in a row; each attends to itself only.

    What is positional, and ``query_offset="start"`` or ``"end"``, counts within the document. Queries after the last
    document see no key.

    Parameters
    ----------
    q_lengths : array of int, shape (n,) or (B, n)
        Queries of each document; they add up to at most L.
    k_lengths : array of int, same shape, optional
        Keys of each document; they add up to at most S. Left out, `q_lengths` serves both.

    Examples
    --------
    >>> from sdpa_ref import Causal
    >>> print((Packed([2, 3]) & Causal()).show(5, 5))
        01234
      0 #....
      1 ##...
      2 ..#..
      3 ..##.
      4 ..###
    """

    q_lengths: Any
    k_lengths: Any = None

    def __post_init__(self) -> None:
        put(self, "q_lengths", lengths("Packed q_lengths", self.q_lengths, axes=1))
        same = self.k_lengths is None
        put(self, "k_lengths", self.q_lengths if same else lengths("Packed k_lengths", self.k_lengths, axes=1))
        if self.q_lengths.shape[-1] != self.k_lengths.shape[-1]:
            raise ValueError(
                "mask: Packed needs as many q_lengths as k_lengths, one a document, "
                f"got {self.q_lengths.shape[-1]} and {self.k_lengths.shape[-1]}"
            )

    def documents(self, L: int) -> tuple[Bound, Bound, Bound, Bound]:
        """Return of each row's document the first query and key, and how many: (..., L) each, 0 in the tail."""
        q, k = np.broadcast_arrays(self.q_lengths, self.k_lengths)
        entries, documents = math.prod(q.shape[:-1]), q.shape[-1] + 1  # the tail counts as one more, empty document
        rows = np.concatenate([q, L - q.sum(-1, keepdims=True)], -1)
        document = np.repeat(np.tile(np.arange(documents), entries), rows.ravel()).reshape(*q.shape[:-1], L)
        first_query, first_key = np.cumsum(q, -1) - q, np.cumsum(k, -1) - k
        tail = np.zeros((*q.shape[:-1], 1), np.int64)
        return tuple(  # type: ignore[return-value]
            np.take_along_axis(np.concatenate([x, tail], -1), document, -1) for x in (first_query, first_key, q, k)
        )

    def _rows(self, grid: Grid) -> Rows:
        _, first_key, _, keys = self.documents(grid.L)
        return [(first_key, first_key + keys)]

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        for name, given, size in (("q_lengths", self.q_lengths, L), ("k_lengths", self.k_lengths, S)):
            broadcasts(f"Packed {name}", given.shape[:-1], batch)
            total = np.minimum(given, size + 1).sum(-1)  # the sum of what was given may be beyond int64
            if (total > size).any():
                axis = "L" if name == "q_lengths" else "S"
                most = np.max(given.astype(object).sum(-1))
                raise ValueError(f"mask: Packed {name} add up to {most}, more than {axis} = {size}")

    def _axes(self) -> tuple[tuple[int, ...], int]:
        return np.broadcast_shapes(self.q_lengths.shape[:-1], self.k_lengths.shape[:-1]), 1


@rule
class Tree(Mask):
    """Queries are nodes of a tree and attend to themselves and their ancestors (speculative decoding).

    The nodes are the last L keys that exist, by a `KeyLengths` joined by & at the top; every key before them is
    visible to all.

    Parameters
    ----------
    parents : array of int, shape (..., L)
        Parent of each node, -1 for a root; a parent stands before its child.

    Examples
    --------
    >>> print(Tree([-1, 0, 0, 2]).show(4, 5))
        01234
      0 ##...
      1 ###..
      2 ##.#.
      3 ##.##
    """

    parents: Any

    def __post_init__(self) -> None:
        parents = integers("Tree parents", self.parents, axes=1)
        wrong = (parents < -1) | (parents >= np.arange(parents.shape[-1]))
        if wrong.any():
            node = int(np.argwhere(wrong)[0][-1])
            raise ValueError(
                f"mask: Tree parents must be -1 (a root) or an earlier node, got {parents[wrong][0]} for node {node}"
            )
        put(self, "parents", parents)

    def _settled(self, grid: Grid) -> Mask:
        past = np.maximum(np.asarray(grid.S if grid.lengths is None else grid.lengths) - grid.L, 0)
        nodes = self._pairs(grid._replace(S=grid.L, lengths=None), 0, grid.L)
        return AnyOf((Given(((np.zeros(1, np.int64), past[..., None]),)), Nodes(nodes, past)))

    def _pairs(self, grid: Grid, i0: int, i1: int) -> Any:
        past = np.maximum(np.asarray(grid.S if grid.lengths is None else grid.lengths) - grid.L, 0)
        lead = np.broadcast_shapes(past.shape, self.parents.shape[:-1])
        past, parents = np.broadcast_to(past, lead), np.broadcast_to(self.parents, (*lead, grid.L))
        keep = np.empty((*lead, i1 - i0, grid.S), bool)
        keep[...] = np.arange(grid.S) < past[..., None, None]
        node = np.broadcast_to(np.arange(i0, i1), keep.shape[:-1])
        while (node >= 0).any():  # all rows climb towards their roots together
            at = np.nonzero(node >= 0)
            keep[(*at, past[at[:-1]] + node[at])] = True
            node = np.where(node >= 0, np.take_along_axis(parents, np.maximum(node, 0), -1), -1)
        return keep[..., None, :, :]

    def _check(self, batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
        last_axis("Tree parents", self.parents, batch, L, "L")
        if S < L:
            raise ValueError(f"mask: Tree needs its L = {L} nodes among the keys, but S = {S}")

    def _axes(self) -> tuple[tuple[int, ...], int]:
        return self.parents.shape[:-1], 1


@dataclass(frozen=True, eq=False, repr=False)
class Nodes(Mask):
    """What nodes of a tree see of one another, ``(..., 1, L, L)``, where the first of them is key `past`."""

    seen: Any
    past: Any

    def _within(self, block: Block) -> Mask:
        (i0, i1), (j0, j1) = block.rows, block.keys
        seen, past = block.entries(self.seen, 3)[..., i0:i1, :], block.entries(np.asarray(self.past), 0)
        nodes = np.arange(j0, j1) - past[..., None]
        inside = (nodes >= 0) & (nodes < seen.shape[-1])
        if not inside.any():
            return Given(())
        lead = np.broadcast_shapes(seen.shape[:-3], nodes.shape[:-1])
        nodes = np.broadcast_to(np.where(inside, nodes, 0), (*lead, j1 - j0))[..., None, None, :]
        seen = np.take_along_axis(np.broadcast_to(seen, (*lead, *seen.shape[-3:])), nodes, -1)
        return BooleanArray(seen & inside[..., None, None, :])
