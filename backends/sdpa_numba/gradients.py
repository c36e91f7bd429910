"""Gradients: the kernel on the whole problem, or on strips of rows where NumPy has a part in them."""

import struct
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.backend import Gradients, Problem, Result
from sdpa_ref.floating_point import ieee
from sdpa_ref.masks import Band, Intervals

from .calls import bias_code, numbers_of, rounded_sink
from .kernels import backward
from .kernels.record import ALL, BAND, BAND_NUMBERS, INTERVALS, MIDDLE, SHAPE, Sizes
from .plan import host_registers, sizes_for
from .runtime.call import HEADER
from .runtime.threads import get_num_threads, run, team
from .strips import PRODUCT_ROWS, applied, as_type, compiled, forward, forward_in_strips, scores, widened

CHUNKS, LEAST_CHUNK = 4, 2  # at most so many chunks of keys, of at least so many blocks
TILE_ROWS = 96  # a multiple of every tile's rows: cut there, dK and dV add up in the same order
PAIRS_AT_ONCE = 2**17  # of a head, in a strip: of all heads, the others would have a say in the bits of each

Array = np.ndarray[Any, np.dtype[Any]]


class Flow(NamedTuple):
    """What flows into each row, ``(*batch, Hq, L)`` or with a last axis Ev, and what the forward pass made of it."""

    grad: Array
    output: Array
    m: Array  # the largest score, inf for an empty row
    factor: Array  # one by the sum of the exponentials, 0 for an empty row
    grad_lse: Array | None

    def rows(self, here: slice) -> "Flow":
        """Return that of some rows; what has no last axis is contiguous."""
        grad_lse = None if self.grad_lse is None else np.ascontiguousarray(self.grad_lse[..., here])
        m, factor = (np.ascontiguousarray(array[..., here]) for array in (self.m, self.factor))
        return Flow(self.grad[..., here, :], self.output[..., here, :], m, factor, grad_lse)


@ieee
def differentiate(
    problem: Problem,
    grad_output: Array,
    grad_lse: Array | None,
    result: Result | None,
) -> Gradients:
    """Return the canonical gradients in the accumulation type, those of biases summed to their shapes.

    A `result` whose output is rounded to 16 bits is computed again. So is one whose scores were made in the kernel by
    the user's function: here they are NumPy's, and weights from other scores would not sum to 1.
    """
    acc = problem.acc_dtype
    problem = widened(problem)._replace(out=None)
    if result is not None and result.output.dtype != acc:
        result = None
    want = frozenset({"output", "lse", "m", "z"})
    if compiled(problem.score_mod, acc.name) is not None:
        result = forward_in_strips(problem, want, None)
    output, lse, _, m, z = result or forward(problem, want)
    empty = empty_rows(problem, lse)
    grad_lse = None if grad_lse is None else as_type(grad_lse, acc)
    with np.errstate(all="ignore"):
        factor = np.where(empty, acc.type(0), acc.type(1) / z)
    flow = Flow(as_type(grad_output, acc), output, np.where(empty, acc.type(np.inf), m), factor, grad_lse)
    whole = (*problem.batch, problem.Hq, problem.L, problem.S)
    shapes = [(1,) * (len(whole) - bias.ndim) + bias.shape for bias in problem.biases]
    if problem.blockwise or problem.score_mod is not None or any(shape != whole for shape in shapes):
        gradients = pull_strips(problem, flow, shapes)
    else:
        gradients = new_gradients(problem)._replace(bias=np.zeros(whole, acc) if shapes else None)
        pull(problem, flow.rows(slice(None)), gradients)
    if problem.sink is None:
        return gradients
    return gradients._replace(sink=sink_gradient(rounded_sink(problem), flow, m, z, empty))


def empty_rows(problem: Problem, lse: Array) -> Any:
    """Return, ``(*batch, Hq, L)``, which rows see nothing."""
    if problem.sink is None:
        return lse == -np.inf
    alone = lse == rounded_sink(problem)[:, None]  # the sink, or what else there is vanishes beside it
    if not alone.any():
        return alone
    return forward(problem._replace(sink=None), frozenset({"lse"})).lse == -np.inf


def sink_gradient(sink: Array, flow: Flow, m: Array, z: Array, empty: Array) -> Array:
    """Return the gradient by the sink, ``(*batch, Hq)``."""
    with np.errstate(all="ignore"):
        inner = np.where(empty, 0, np.einsum("...d,...d->...", flow.grad, flow.output))
        share = np.where(z == 0, 0, np.exp(sink[:, None] - m) / z)
        change = share * ((0 if flow.grad_lse is None else flow.grad_lse) - inner)
    total: Array = np.where(share == 0, 0, change).sum(-1)
    return total


def new_gradients(problem: Problem) -> Gradients:
    """Return arrays for the gradients by query, key and value; zeros where there is nothing to compute."""
    acc, lead = problem.acc_dtype, (*problem.batch, problem.Hkv, problem.S)
    new = np.empty if problem.Hq and problem.L and problem.S else np.zeros
    return Gradients(new(problem.query.shape, acc), new((*lead, problem.E), acc), new((*lead, problem.Ev), acc))


def pull_strips(problem: Problem, flow: Flow, shapes: list[tuple[int, ...]]) -> Gradients:
    """Return the gradients, of a strip of rows after the other, with those of biases summed to these shapes."""
    acc, S, whole = problem.acc_dtype, problem.S, new_gradients(problem)
    sums = [np.zeros(shape, acc) for shape in shapes]
    step = max(TILE_ROWS, PAIRS_AT_ONCE // max(1, S) // TILE_ROWS * TILE_ROWS)
    for i in range(0, problem.L if S else 0, step):
        part, here = problem.rows(i, min(i + step, problem.L)), slice(i, i + step)
        slope: Array | None = None
        if problem.score_mod is not None:
            part, slope, derivative = with_slopes(part, min(PRODUCT_ROWS, problem.L))
        d_query = np.empty(part.query.shape, acc)
        d_bias = np.zeros((*d_query.shape[:-1], S), acc)
        strip = whole._replace(query=d_query, bias=d_bias if sums else None)
        pull(part, flow.rows(here), strip, slope, first=i == 0)
        whole.query[..., here, :] = d_query
        if slope is not None:
            np.multiply(d_bias, derivative, out=d_bias, where=d_bias != 0)
        for total in sums:
            target = total if total.shape[-2] == 1 else total[..., here, :]
            axes = tuple(x for x, n in enumerate(target.shape) if n != d_bias.shape[x])
            target += d_bias.sum(axes, keepdims=True)
    return whole._replace(bias=tuple(sums) if len(sums) > 1 else sums[0] if sums else None)


def with_slopes(problem: Problem, product: int) -> tuple[Problem, Array, Array]:
    """Return the problem with the scores as its bias, and their slopes: by ``scale * q . k``, and by the own bias."""
    function: Any = problem.score_mod
    capped, biased, keep = scores(problem, product)
    with np.errstate(all="ignore"):
        s, derivative = (applied(problem, f, biased) for f in (function, function.derivative))
        slope = derivative if problem.softcap is None else derivative * (1 - (capped / problem.softcap) ** 2)
    part = problem._replace(softcap=None, bias=s, slopes=None, keep=keep, score_mod=None)
    return part, np.ascontiguousarray(slope, s.dtype), derivative


def pull(problem: Problem, flow: Flow, gradients: Gradients, slope: Array | None = None, first: bool = True) -> None:
    """Fill the gradients by the kernel, but add to those of key and value unless this is the `first` strip."""
    if 0 in (problem.B, problem.Hq, problem.L, problem.S):
        return
    sizes = sizes_for(problem.acc_dtype.name, *host_registers())
    record, arrays_of_band = record_of(problem, slope is not None)
    n = record[0]
    n["resume"] = not first
    shares = set_sizes(n, problem, sizes)
    memory = np.empty(n["counters"] + shares, np.uint8)
    memory[: n["counters"]] = 0
    n["memory"] = memory.ctypes.data
    intervals = problem.visible if isinstance(problem.visible, Intervals) else (None, None, None)
    arrays = (
        problem.query, problem.key, problem.value, flow.output, flow.grad, flow.m, flow.factor, flow.grad_lse,
        gradients.query, gradients.key, gradients.value, gradients.bias, slope, *intervals, problem.keep, problem.bias,
        problem.slopes, problem.positions, problem.key_positions,
    )  # fmt: skip
    for name, array in zip(backward.Arrays._fields, arrays, strict=True):
        n[name] = 0 if array is None else id(array)
    changes = problem.keep, problem.bias, problem.slopes, problem.dropout, problem.softcap
    kernel = backward.kernel(sizes, any(change is not None for change in changes))
    alone = problem.B * problem.Hq * problem.L * problem.S * (problem.E + problem.Ev) <= MIDDLE
    pool, helpers = team()
    most = 0 if alone else int(n["units"] * n["split"]) - 1
    run(struct.pack(HEADER, kernel.address, 0, pool, min(helpers, most)) + record.tobytes())
    del arrays_of_band  # until here the kernel reads it


def record_of(problem: Problem, final: bool) -> tuple[Array, Any]:
    """Return the record of a problem with its sizes and options, and what it points to; `final` as in `solve`."""
    record = np.zeros(1, backward.BACKWARD)
    n = record[0]
    for name in (*SHAPE, "first_row", "first_key", "first_head", "first_entry", "scale"):
        n[name] = getattr(problem, name)
    n["softcap"], n["bias_drops"], n["final"] = problem.softcap or 0, not final, final
    if problem.bias is not None:
        n["bias_code"] = bias_code(problem.bias.dtype)
    if problem.dropout is not None:
        n["dropout_threshold"], n["dropout_factor"] = problem.dropout.threshold, problem.dropout.factor
        n["seed_low"], n["seed_high"] = problem.dropout.seed & 0xFFFFFFFF, problem.dropout.seed >> 32
    band = problem.visible if isinstance(problem.visible, Band) else Band(problem.offset)
    n["visible"] = ALL if problem.visible is None else BAND if band is problem.visible else INTERVALS
    n["entries"], numbers, arrays = numbers_of(band)
    for name, number in zip(BAND_NUMBERS, numbers, strict=True):
        n[name] = number
    return record, arrays


def set_sizes(n: Any, problem: Problem, sizes: Sizes) -> int:
    """Set how the work is cut up, and return how many bytes the tasks share."""
    unit, group, units = problem.acc_dtype.itemsize, problem.group, problem.B * problem.Hkv
    strip = 1 if problem.visible is None else 2  # tiles: the finer they are, the more of the keys a mask skips
    width = 2 // strip * sizes.lanes * sizes.tile_vectors
    fold = group if width > problem.L else 1
    tiles = -(-fold * problem.L // width)
    chunk = sizes.block * max(LEAST_CHUNK, -(-problem.S // (CHUNKS * sizes.block)))
    chunks = -(-problem.S // chunk)
    split = chunks if units < 4 * get_num_threads() else 1
    n["width"], n["strip"], n["fold"], n["tiles"], n["units"] = width, strip, fold, tiles, units
    n["regular"], n["chunk"], n["chunks"], n["split"] = fold == 1 or problem.L == 1, chunk, chunks, split
    n["E_row"], n["Ev_row"] = row_of(problem.E, sizes), row_of(problem.Ev, sizes)
    n["E_parts"] = problem.E + -problem.E % sizes.tile_rows
    n["block_bytes"] = 2 * sizes.block * (n["E_row"] + n["Ev_row"]) * unit + 64
    n["counters"] = 8 * units + -8 * units % 64
    return int(units * split * tiles * (group // fold) * n["E_parts"] * width * unit) if split > 1 else 0


def row_of(width: int, sizes: Sizes) -> int:
    """Return the numbers in a packed row: whole vectors, and not eight of them, which would crowd some cache sets."""
    vectors = -(-width // sizes.panel) * sizes.panel // sizes.lanes
    return (vectors + (vectors > 0 and vectors % 8 == 0)) * sizes.lanes
