"""The graph of the forward pass: a state for each block that some row sees, sums of these, and results."""

import itertools
from typing import Any

import dask.array as da
import numpy as np
from dask.array.utils import meta_from_array
from dask.highlevelgraph import HighLevelGraph

from sdpa_ref.backend import Result

from . import tasks
from .cuts import Cuts

FAN = 8  # states that a node of the tree adds
Graph = dict[Any, Any]


def forward(cuts: Cuts, want: frozenset[str]) -> Result:
    """Return what is wanted of output, lse, m, z and weights."""
    graph, ends = states(cuts)
    form, dtypes = cuts.problem.form, {"output": cuts.problem.dtype}
    wanted = [name for name in ("output", "lse", "m", "z") if name in want]
    alone = want == {*wanted} and len(wanted) == 1
    if not alone:
        graph |= results(cuts, ends)
    found: dict[str, da.Array] = {}
    for name in wanted:
        dtype = dtypes.get(name, form.acc_dtype)
        last: tuple[Any, ...] = ((form.Ev,),) if name == "output" else ()
        chunks = (*cuts.grid[:-1], *last)
        if alone:  # one node a block: an optimised graph has no names for parts of it, which a scheduler runs too
            found[name] = only(cuts, graph, ends, name, chunks, dtype)
        else:
            found[name] = picked(cuts, graph, f"sdpa-{name}", "sdpa-result", name, chunks, dtype)
    if "weights" in want:
        found["weights"] = weights(cuts, graph)
    return Result(**found)


def states(cuts: Cuts) -> tuple[Graph, dict[Any, Any]]:
    """Return the nodes of rows and states, and which node has the sums of all keys of each block of rows."""
    graph: Graph = {}
    ends: dict[Any, Any] = {}
    for index, block in cuts.blocks():
        rows = f"sdpa-rows-{cuts.token}", *index
        graph[rows] = cuts.rows_outline(block)
        leaves: dict[int, Any] = {}
        last = None
        for j in cuts.seen(index, block):
            node = f"sdpa-state-{cuts.token}", *index, j
            graph[node] = tasks.state, None if cuts.tree else last, cuts.call, rows, *cuts.inputs(index, block, j)
            leaves[j], last = node, node
        ends[index] = tree(graph, f"sdpa-sum-{cuts.token}", index, leaves, (tasks.total,)) if cuts.tree else last
    return graph, ends


def tree(graph: Graph, name: str, index: tuple[int, ...], leaves: dict[int, Any], how: tuple[Any, ...]) -> Any:
    """Return the node of the sum of all leaves, None of none: what is added to what goes by the index of the keys.

    So a leaf that some rows do not have changes nothing for the others.
    """
    level = 0
    while len(leaves) > 1:
        above: dict[int, list[Any]] = {}
        for j, node in leaves.items():
            above.setdefault(j // FAN, []).append(node)
        leaves = {}
        for j, parts in above.items():
            leaves[j] = parts[0]
            if len(parts) > 1:
                leaves[j] = (name, *index, level, j)
                graph[leaves[j]] = (*how, *parts)
        level += 1
    return next(iter(leaves.values()), None)


def results(cuts: Cuts, ends: dict[Any, Any], wide: bool = False) -> Graph:
    """Return the nodes of the results of each block of rows."""
    name = "sdpa-flow" if wide else "sdpa-result"
    return {
        (f"{name}-{cuts.token}", *index): (tasks.result, cuts.call, (f"sdpa-rows-{cuts.token}", *index), end, wide)
        for index, end in ends.items()
    }


def only(
    cuts: Cuts, graph: Graph, ends: dict[Any, Any], part: str, chunks: tuple[Any, ...], dtype: np.dtype[Any]
) -> da.Array:
    """Return the array of the only part of the results that is wanted; the last sum of a tree is no node of its own."""
    name, last = f"sdpa-{part}-{cuts.token}", len(chunks) - len(cuts.grid) + 1
    for index, end in ends.items():
        sums = graph.pop(end) if end is not None and graph[end][0] is tasks.total else end
        rows = f"sdpa-rows-{cuts.token}", *index
        graph[(name, *index, *(0,) * last)] = tasks.part_of, cuts.call, rows, sums, part, dtype
    return array(cuts, graph, name, chunks, dtype)


def picked(
    cuts: Cuts, graph: Graph, name: str, source: str, part: Any, chunks: tuple[Any, ...], dtype: np.dtype[Any]
) -> da.Array:
    """Return the array of one part of the results."""
    name, last = f"{name}-{cuts.token}", len(chunks) - len(cuts.grid) + 1
    layer = {
        (name, *index, *(0,) * last): (tasks.pick, (f"{source}-{cuts.token}", *index), part, dtype)
        for index, _ in cuts.blocks()
    }
    return array(cuts, graph | layer, name, chunks, dtype)


def array(
    cuts: Cuts,
    graph: Graph,
    name: str,
    chunks: tuple[Any, ...],
    dtype: np.dtype[Any],
    more: Any = (),
) -> da.Array:
    """Return the array that a graph ends with."""
    layers = HighLevelGraph.from_collections(name, graph, dependencies=[*cuts.dependencies(), *more])  # type: ignore[list-item]
    return da.Array(layers, name, chunks, meta=meta_from_array(cuts.problem.query._meta, len(chunks), dtype))


def weights(cuts: Cuts, graph: Graph) -> da.Array:
    """Return the array of weights, zeros where a mask drops whole blocks."""
    name, dtype, layer = f"sdpa-weights-{cuts.token}", cuts.problem.dtype, {}
    for index, block in cuts.blocks():
        found = set(cuts.seen(index, block))
        row, lead = (f"sdpa-rows-{cuts.token}", *index), (*block.lead, *block.lengths[:2])
        for j, (j0, j1) in enumerate(cuts.cuts_of_keys):
            if j not in found:
                layer[(name, *index, j)] = np.zeros_like, cuts.problem.query._meta, dtype, "C", True, (*lead, j1 - j0)
                continue
            whole = (f"sdpa-result-{cuts.token}", *index)
            layer[(name, *index, j)] = tasks.weights, whole, cuts.call, dtype, row, *cuts.inputs(index, block, j)
    return array(cuts, graph | layer, name, cuts.grid, dtype)


def positions(chunks: tuple[Any, ...]) -> Any:
    """Yield the index of each chunk."""
    return itertools.product(*(range(len(each)) for each in chunks))
