"""The graph of the gradients: a node for each block that some row sees, and sums of what these make."""

from functools import reduce
from typing import Any

import dask.array as da
import numpy as np

from sdpa_ref.arrays import is_float, summed_to
from sdpa_ref.backend import Gradients, Result
from sdpa_ref.blocks import widened
from sdpa_ref.floating_point import ieee

from . import tasks
from .cuts import Cuts
from .graph import Graph, array, positions, results, states, tree

Array = Any


def vjp(cuts: Cuts, grad_output: Any, grad_lse: Any) -> Gradients:
    """Return the gradients in canonical order, in the accumulation type."""
    problem = cuts.problem
    acc, rows = problem.acc_dtype, (*cuts.grid[:-1],)
    grad = _lazy(grad_output).rechunk((*rows, (problem.Ev,)))
    grads = [grad, *([] if grad_lse is None else [_lazy(grad_lse).rechunk(rows)])]
    graph, ends = states(cuts)
    graph |= results(cuts, ends, wide=True)
    name = f"{cuts.token}-{'-'.join(x.name for x in grads)}"
    nothing = np.zeros_like, problem.query._meta, acc, "C", True  # of the kind of the chunks
    by_row: dict[Any, dict[int, Any]] = {}
    by_key: dict[Any, dict[int, Any]] = {}
    by_bias: list[dict[Any, dict[int, Any]]] = [{} for _ in problem.biases]
    for index, block in cuts.blocks():
        *lead, h, i = index
        flow, row = (f"sdpa-flow-{cuts.token}", *index), (f"sdpa-rows-{cuts.token}", *index)
        incoming = [(grad.name, *index, 0), (grads[1].name, *index) if grad_lse is not None else None]
        for j in cuts.seen(index, block):
            node = f"sdpa-pull-{name}", *index, j
            graph[node] = pull, flow, *incoming, cuts.call, row, *cuts.inputs(index, block, j)
            by_row.setdefault(index, {})[j] = node
            by_key.setdefault((*lead, h, j), {})[i] = node
            for bias, target in zip(problem.biases, by_bias, strict=True):
                at = (*index, j)[len(cuts.grid) - bias.ndim :]
                place = tuple(0 if n == 1 else x for n, x in zip(bias.shape, at, strict=True))
                nodes = target.setdefault(place, {})
                nodes[len(nodes)] = node

    def summed(part: int, to: str, chunks: tuple[Any, ...], nodes: Any, trailing: int) -> da.Array:
        title = f"sdpa-{to}-{name}"
        layer: Graph = {}
        for place in positions(chunks[: len(chunks) - trailing]):
            target, found = (title, *place, *(0,) * trailing), nodes.get(place, {})
            shape = tuple(c[n] for c, n in zip(chunks, (*place, *(0,) * trailing), strict=True))
            last = tree(layer, f"sdpa-{to}-sum-{name}", place, _split(layer, title, place, found, part), (added,))
            layer[target] = (*nothing, shape) if last is None else (tasks.pick, [last], 0, acc)
        return array(cuts, graph | layer, title, chunks, acc, grads)

    key_heads = tuple(n // problem.group for n in cuts.heads)
    keys = (*cuts.batch, key_heads, cuts.keys)
    gradients = [
        summed(0, "dq", (*rows, (problem.E,)), by_row, 1),
        summed(1, "dk", (*keys, (problem.E,)), by_key, 1),
        summed(2, "dv", (*keys, (problem.Ev,)), by_key, 1),
    ]
    biases = []
    for n, bias in enumerate(problem.biases):
        grid = cuts.grid[len(cuts.grid) - bias.ndim :] if bias.ndim else ()
        own = tuple(c if length != 1 else (1,) for c, length in zip(grid, bias.shape, strict=True))
        biases.append(summed(3 + n, f"db{n}", own, by_bias[n], 0))
    by = None if not biases else biases[0] if len(biases) == 1 else tuple(biases)
    return Gradients(gradients[0], gradients[1], gradients[2], by, _sink(cuts, graph, name, grads))


@ieee
def pull(
    flow: Result, grad: Array, grad_lse: Array, call: tasks.Call, rows: tasks.Outline, keys: Any, rules: Any, q: Array,
    k: Any, v: Any, arrays: list[Array],
) -> tuple[Array, ...]:  # fmt: skip
    """Return a block's part of the gradients by query, key, value and each bias."""
    tasks.check(call, rows, keys, q, k, v, arrays)
    form = rows.problem.form
    shape = (*form.batch, form.Hq, rows.length, form.Ev)
    for name, x, own in (("grad_output", grad, shape), ("grad_lse", grad_lse, shape[:-1])):
        if x is not None:
            dtype = getattr(x, "dtype", form.acc_dtype)
            tasks.check_chunk(name, x, form.kind, dtype if is_float(dtype) else form.acc_dtype, own, own)
    problem = widened(tasks.problem_of(call, rows, keys, rules, q, k, v, arrays), flow.z.dtype)
    acc = problem.acc_dtype
    grads = grad.astype(acc, copy=False), None if grad_lse is None else grad_lse.astype(acc, copy=False)
    gradients = tasks.backend_of(call).vjp(problem, *grads, flow)
    biases = arrays[call.keep :][: call.biases]
    whole = gradients.bias[0] if isinstance(gradients.bias, tuple) else gradients.bias
    return (*gradients[:3], *(summed_to(whole, bias.shape) for bias in biases))


def added(*parts: Array) -> Array:
    """Return the sum, from left to right."""
    return reduce(np.add, parts)


def _sink(cuts: Cuts, graph: Graph, name: str, grads: list[da.Array]) -> Any:
    """Return the gradient by the sink, ``(Hq,)``, None without one."""
    if cuts.problem.sink is None:
        return None
    layer: Graph = {}
    nothing = np.zeros_like, cuts.problem.query._meta, np.float64, "C", True  # of the kind of the chunks
    by_head: dict[int, list[Any]] = {n: [] for n in range(len(cuts.heads))}
    for index, _ in cuts.blocks():
        flow, row = (f"sdpa-flow-{cuts.token}", *index), (f"sdpa-rows-{cuts.token}", *index)
        node = f"sdpa-dsink-part-{name}", *index
        more = (grads[1].name, *index) if len(grads) > 1 else None
        layer[node] = tasks.sink, flow, row, (grads[0].name, *index, 0), more
        by_head[index[-2]].append(node)
    for h, nodes in by_head.items():
        layer[(f"sdpa-dsink-{name}", h)] = (added, *nodes) if nodes else (*nothing, (cuts.heads[h],))
    return array(cuts, graph | layer, f"sdpa-dsink-{name}", (cuts.heads,), cuts.problem.acc_dtype, grads)


def _split(layer: Graph, title: str, place: Any, found: dict[int, Any], part: int) -> dict[int, Any]:
    """Return nodes with one of the parts of what each task has made."""
    nodes = {}
    for n, node in found.items():
        nodes[n] = (f"{title}-part", *place, n)
        layer[nodes[n]] = tasks.pick, node, part
    return nodes


def _lazy(x: Any) -> da.Array:
    return x if isinstance(x, da.Array) else da.from_array(x, chunks=-1)
