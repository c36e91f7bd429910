"""Gradients: the kernel on the whole problem, or on strips of rows where NumPy has a part in them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_ref.gradients import Gradients
from sdpa_ref.problem import Problem, Result

from . import backward
from .plan import SMALL, Sizes, host_registers, numbers_of, sizes_for
from .strips import PRODUCT_ROWS, applied, scores
from .threads import get_num_threads, run

CHUNKS, LEAST_CHUNK = 4, 2  # at most so many chunks of keys, of at least so many blocks
STRIP = 4  # tiles, at most, that share a pass over the keys
TILE_ROWS = 48  # a multiple of every tile's rows: cut there, dK and dV add up in the same order
PAIRS_AT_ONCE = 2**17  # of a head, in a strip: of all heads, the others would have a say in the bits of each

Array = np.ndarray[Any, np.dtype[Any]]
Forward = Callable[[Problem, frozenset[str]], Result]


def differentiate(
    problem: Problem, grad_output: Array, grad_lse: Array, result: Result | None, forward: Forward
) -> Gradients:
    """Return the canonical gradients in the accumulation type, those of biases summed to their shapes.

    A `result` in a 16-bit type is computed again: its output is rounded.
    """
    acc = problem.acc_dtype
    if problem.dtype != acc:
        arrays = {name: as_type(getattr(problem, name), acc) for name in ("query", "key", "value")}
        problem = problem._replace(**arrays, dtype=acc, plans=problem.plans.setdefault("numba, wide", {}))
        result = None
    problem = problem._replace(out=None)
    output, lse, _ = result or forward(problem, frozenset({"output", "lse"}))
    empty = empty_rows(problem, lse, forward)
    grad = as_type(grad_output, acc)
    grad_lse = None if grad_lse is None else np.ascontiguousarray(as_type(grad_lse, acc))
    rows = grad, output, np.where(empty, acc.type(np.inf), lse), grad_lse
    shapes = [(1,) * (len(problem.batch) + 3 - bias.ndim) + bias.shape for bias in problem.biases]
    whole = (*problem.batch, problem.Hq, problem.L, problem.S)
    if problem.blockwise or problem.score_mod is not None or any(shape != whole for shape in shapes):
        gradients = pull_strips(problem, rows, shapes)
    else:
        gradients = new_gradients(problem, whole if shapes else None)
        pull(problem, rows, gradients)
    if problem.sink is None:
        return gradients
    return gradients._replace(sink=sink_gradient(problem.sink, grad, output, lse, grad_lse, empty))


def empty_rows(problem: Problem, lse: Array, forward: Forward) -> Array:
    """Return, (*batch, Hq, L), which rows see nothing."""
    if problem.sink is None:
        return lse == -np.inf
    alone = lse == problem.sink.astype(lse.dtype)[:, None]  # the sink, or what else there is vanishes beside it
    if not alone.any():
        return alone
    return forward(problem._replace(sink=None, plans={}), frozenset({"lse"})).lse == -np.inf


def sink_gradient(sink: Array, grad: Array, output: Array, lse: Array, grad_lse: Array, empty: Array) -> Array:
    """Return the gradient by the sink, (*batch, Hq)."""
    with np.errstate(all="ignore"):
        inner = np.where(empty, 0, np.einsum("...d,...d->...", grad, output))
        share = np.where(lse == -np.inf, 0, np.exp(sink[:, None] - lse))
        flow = share * ((0 if grad_lse is None else grad_lse) - inner)
    return np.where(share == 0, 0, flow).sum(-1)


def new_gradients(problem: Problem, bias: tuple[int, ...] | None) -> Gradients:
    """Return arrays for the gradients, that of the bias in this shape and all zero."""
    acc, lead = problem.acc_dtype, (*problem.batch, problem.Hkv, problem.S)
    new = np.empty if problem.Hq and problem.L else np.zeros
    query = (np.empty if problem.S else np.zeros)(problem.query.shape, acc)
    d_bias = None if bias is None else np.zeros(bias, acc)
    return Gradients(query, new((*lead, problem.E), acc), new((*lead, problem.Ev), acc), d_bias)


def pull_strips(problem: Problem, rows: tuple[Array, ...], shapes: list[tuple[int, ...]]) -> Gradients:
    """Return the gradients, of a strip of rows after the other, with those of biases summed to these shapes."""
    acc, S = problem.acc_dtype, problem.S
    whole = new_gradients(problem, None)
    sums = [np.zeros(shape, acc) for shape in shapes]
    step = max(TILE_ROWS, PAIRS_AT_ONCE // max(1, S) // TILE_ROWS * TILE_ROWS)
    for i in range(0, problem.L if S else 0, step):
        part, slope, derivative = problem.rows(i, min(i + step, problem.L)), None, None
        if problem.score_mod is not None:
            part, slope, derivative = with_slopes(part, min(PRODUCT_ROWS, problem.L))
        here = slice(i, i + part.L)
        lead = (*problem.batch, problem.Hq, part.L)
        d_bias = np.zeros((*lead, S), acc) if sums else None
        strip = Gradients(np.empty((*lead, problem.E), acc), whole.key, whole.value, d_bias)
        grad, output, lse, grad_lse = rows
        views = grad[..., here, :], output[..., here, :], lse[..., here], None if grad_lse is None else grad_lse[..., here]
        pull(part, views, strip, slope, first=i == 0)
        whole.query[..., here, :] = strip.query
        if derivative is not None and sums:
            np.multiply(d_bias, derivative, out=d_bias, where=d_bias != 0)
        for total in sums:
            target = total if total.shape[-2] == 1 else total[..., here, :]
            axes = tuple(x for x, (n, m) in enumerate(zip(d_bias.shape, target.shape, strict=True)) if n != m)
            target += d_bias.sum(axes, keepdims=True)
    return whole._replace(bias=tuple(sums) if len(sums) > 1 else sums[0] if sums else None)


def with_slopes(problem: Problem, product: int) -> tuple[Problem, Array, Array]:
    """Return the problem with all that leads to the scores in its bias, their slope by ``q . k``, and by the bias."""
    capped, biased, keep = scores(problem, product)
    with np.errstate(all="ignore"):
        s, derivative = (applied(problem, f, biased) for f in (problem.score_mod, problem.score_mod.derivative))
        slope = derivative if problem.softcap is None else derivative * (1 - (capped / problem.softcap) ** 2)
    part = problem._replace(softcap=None, bias=s, slopes=None, positions=None, dense=keep, score_mod=None)
    return part, np.ascontiguousarray(slope, s.dtype), derivative


def pull(
    problem: Problem, rows: tuple[Array, ...], gradients: Gradients, slope: Array = None, first: bool = True
) -> None:
    """Fill the gradients by the kernel; but add to those of key and value unless this is the `first` strip."""
    sizes = sizes_for(problem.acc_dtype.name, *host_registers())
    widest, unit = sizes.lanes * sizes.tile_vectors, problem.acc_dtype.itemsize
    B, Hkv, L, S, E, Ev, group = (getattr(problem, name) for name in ("B", "Hkv", "L", "S", "E", "Ev", "group"))
    if 0 in (B, problem.Hq, L, S):
        return
    numbers = numbers_of(problem, slope is not None, backward.BACKWARD)
    n = numbers[0]
    n["E_row"], n["Ev_row"], n["E_parts"] = row_of(E, sizes), row_of(Ev, sizes), E + -E % sizes.tile_rows
    n["fold"] = fold = group if widest > L else 1
    n["tiles"] = tiles = -(-fold * L // widest)
    n["regular"], n["units"], n["strip"] = fold == 1 or L == 1, B * Hkv, STRIP
    n["chunk"] = chunk = sizes.block * max(LEAST_CHUNK, -(-S // (CHUNKS * sizes.block)))
    n["chunks"] = chunks = -(-S // chunk)
    n["split"] = split = chunks if B * Hkv < 4 * get_num_threads() else 1
    n["resume"], n["final"] = not first, slope is not None
    n["block_bytes"] = 2 * sizes.block * (n["E_row"] + n["Ev_row"]) * unit + 64
    n["counters"] = counters = 8 * B * Hkv + -8 * B * Hkv % 64
    memory = None
    if split > 1:
        shares = B * Hkv * split * tiles * (group // fold) * int(n["E_parts"]) * widest * unit
        memory = np.empty(counters + shares, np.uint8)
        memory[:counters] = 0
    grad, output, lse, grad_lse = rows
    lse = np.ascontiguousarray(lse)
    grad_lse = None if grad_lse is None else np.ascontiguousarray(grad_lse)
    intervals = problem.intervals or (None, None, None)
    arrays = backward.Arrays(
        problem.query, problem.key, problem.value, output, grad, lse, grad_lse, gradients.query, gradients.key,
        gradients.value, gradients.bias, slope, *intervals, problem.dense, problem.bias, problem.slopes,
        problem.positions,
    )  # fmt: skip
    addresses = np.array([0 if array is None else id(array) for array in arrays], np.int64)
    changes = problem.dense, problem.bias, problem.slopes, problem.dropout, problem.softcap
    kernel = backward.kernel(sizes, any(change is not None for change in changes))
    start = 0 if memory is None else memory.ctypes.data
    arguments = numbers.ctypes.data, start, addresses.ctypes.data
    alone = B * problem.Hq * L * S * (E + Ev) <= SMALL
    run(kernel, arguments, B * Hkv * split, alone=alone)


def row_of(width: int, sizes: Sizes) -> int:
    """Return the numbers in a packed row: whole vectors, and not eight of them, which would crowd some cache sets."""
    vectors = -(-width // sizes.panel) * sizes.panel // sizes.lanes
    return (vectors + (vectors > 0 and vectors % 8 == 0)) * sizes.lanes


def as_type(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return the array in this type and aligned, a copy only where that takes one; repeated axes stay repeated."""
    once = array[tuple(slice(None if stride else 1) for stride in array.strides)]
    with np.errstate(over="ignore"):
        return np.broadcast_to(np.require(once, dtype, "A"), array.shape)
