"""Attention in whole-array operations over `xp`, NumPy or CuPy: for what a device or a type cannot do in one kernel.

Each head of each batch entry is computed on its own, in tiles of one size, so that no operation depends on
the rest: matrix products and sums of array libraries may add in another order for another shape. Products are taken in
the accumulation type; CuPy's of batched 16-bit arrays are slow or fail.
"""

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from sdpa_ref.backend import Problem, Result
from sdpa_ref.storage import Stored

Array: TypeAlias = Any
KEYS = 4096  # of a tile; a multiple of the four keys that share a draw of the dropout
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


class Scores(NamedTuple):
    """The scores of a head and a tile of keys, by stages.

    Attributes
    ----------
    capped, biased : after the soft cap; after bias and ALiBi
    final : after `score_mod`, -inf where the row drops the key
    keep : whether it keeps the key
    """

    capped: Array
    biased: Array
    final: Array
    keep: Array


def attend(problem: Problem, result: Result, xp: Any, keys: int = KEYS) -> None:
    """Fill in the arrays of `result` for a problem of few rows, without rules, with any number of keys."""
    problem = spread(problem)
    with np.errstate(all="ignore"):  # NaN and inf follow IEEE, silently
        for n, batch in enumerate(np.ndindex(problem.batch)):
            for h in range(problem.Hq):
                _one_head(problem, result, xp, keys, n, (*batch, h))


def spread(p: Problem) -> Problem:
    """Return the problem with all arrays broadcast to the batch, heads and rows."""

    def to(array: Any, *shape: int) -> Any:
        return array if array is None or isinstance(array, Stored) else np.broadcast_to(array, (*p.batch, *shape))

    pairs = p.Hq, p.L, p.S
    return p._replace(
        key=to(p.key, p.Hkv, p.S, p.E), value=to(p.value, p.Hkv, p.S, p.Ev), keep=to(p.keep, *pairs),
        bias=to(p.bias, *pairs), visible=p.intervals, positions=None if p.slopes is None else to(p.stands(), p.L),
        key_positions=to(p.key_positions, p.S), slopes=to(p.slopes, p.Hq),
    )  # fmt: skip


def _one_head(p: Problem, result: Result, xp: Any, keys: int, b: int, at: tuple[int, ...]) -> None:
    """Fill in one head of the batch entry `b`, by a softmax that goes on from tile to tile."""
    tiles = [slice(j, min(j + keys, p.S)) for j in range(0, p.S, keys)]
    query = p.query[at].astype(p.acc_dtype, order="C")
    kv = (*at[:-1], at[-1] // p.group)
    m = xp.full(p.L, -np.inf, p.acc_dtype)
    z, o = xp.zeros(p.L, p.acc_dtype), xp.zeros((p.L, p.Ev), p.acc_dtype)
    for tile in tiles:
        _, _, s, keep = scores(p, xp, query, b, at, tile)
        top = xp.maximum(m, s.max(1))
        base = finite(xp, top)
        e, shrunk = xp.exp(s - base[:, None]), xp.exp(m - base)
        m, z = top, z * shrunk + e.sum(1)
        if result.output is not None:
            value = taken(p, p.value, kv, tile).astype(p.acc_dtype, order="C")
            o = o * shrunk[:, None] + mixed(xp, e * dropped(p, xp, b, at, tile), keep, value)

    top = m if p.sink is None else xp.maximum(m, p.sink[at[-1]].astype(p.acc_dtype))
    base = finite(xp, top)
    shrunk = xp.exp(m - base)
    z = z * shrunk
    if p.sink is not None:
        z = z + xp.exp(p.sink[at[-1]].astype(p.acc_dtype) - base)
    divisor = xp.where(z == 0, 1, z)
    if result.output is not None:
        o = xp.where((m == -np.inf)[:, None], 0, o * (shrunk / divisor)[:, None])
        result.output[at] = o.astype(p.dtype)
    if result.lse is not None:
        result.lse[at] = base + xp.log(z)
    if result.m is not None:
        result.m[at], result.z[at] = top, z
    if result.weights is not None:
        for tile in tiles:
            _, _, s, keep = scores(p, xp, query, b, at, tile)
            w = xp.where(keep, xp.exp(s - base[:, None]) / divisor[:, None], 0) * dropped(p, xp, b, at, tile)
            result.weights[at][:, tile] = w.astype(p.dtype)


def taken(p: Problem, array: Array | Stored, at: tuple[int, ...], tile: slice) -> Array:
    """Return the keys or values of a tile of one head, gathered and decoded where they are stored."""
    if not isinstance(array, Stored):
        return array[at][tile]
    rows = array.rows(tile.start, tile.stop)
    return np.broadcast_to(rows, (*p.batch, *rows.shape[-3:]))[at]


def scores(p: Problem, xp: Any, query: Array, b: int, at: tuple[int, ...], tile: slice) -> Scores:
    """Return the scores of a head and a tile of keys, ``(L, keys of the tile)``."""
    batch, h, acc = at[:-1], at[-1], p.acc_dtype
    j, most = xp.arange(tile.start, tile.stop), float(np.finfo(acc).max)
    s = query @ taken(p, p.key, (*batch, h // p.group), tile).astype(acc, order="C").T
    s = s * acc.type(p.scale)
    if p.softcap is not None:
        s = xp.tanh(s / acc.type(p.softcap)) * acc.type(p.softcap)
    capped = s
    keep = xp.ones(s.shape, bool)
    if p.visible is not None:
        prefix, start, stop = (bound[batch][:, None] for bound in p.visible)
        keep = (j < prefix) | ((start <= j) & (j < stop))
    if p.keep is not None:
        keep = keep & p.keep[at][:, tile]
    if p.bias is not None:
        bias = p.bias[at][:, tile].astype(np.float64)
        keep = keep & (bias != -np.inf)
        s = s + xp.where(xp.isfinite(bias), xp.clip(bias, -most, most), bias).astype(acc)
    if p.slopes is not None:
        keys = j if p.key_positions is None else p.key_positions[batch][tile]
        s = s - (p.slopes[at] * abs(p.positions[batch][:, None] - keys)).astype(acc)
    biased = s
    if p.score_mod is not None:
        s = by_function(p.score_mod, p, xp, s, b, h, tile)
    return Scores(capped, biased, xp.where(keep, s, -np.inf), keep)


def by_function(f: Any, p: Problem, xp: Any, s: Array, b: int, h: int, tile: slice) -> Array:
    """Return what a function of the user's makes of the scores of a head and a tile of keys."""
    i, j = xp.arange(p.first_row, p.first_row + p.L), p.first_key + xp.arange(tile.start, tile.stop)
    first = xp.full((1, 1, 1, 1), p.first_entry + b), xp.full((1, 1, 1, 1), p.first_head + h)
    indices = (*first, i[None, None, :, None], j[None, None, None, :])
    plain = getattr(f, "py_func", f)  # of a function that Numba would compile for the CPU
    return xp.broadcast_to(xp.asarray(plain(s[None, None], *indices), p.acc_dtype), (1, 1, *s.shape))[0, 0]


def mixed(xp: Any, weights: Array, keep: Array, value: Array) -> Array:
    """Return weights times value, where a key that a row drops adds nothing to it, not even 0 * NaN."""
    harmful = ~xp.isfinite(value)
    if not harmful.any():
        return weights @ value
    mixed = weights @ xp.where(harmful, 0, value)
    for j in xp.flatnonzero(harmful.any(1)).tolist():
        row = xp.where(harmful[j], value[j], 0)
        mixed = mixed + xp.where(keep[:, j, None], weights[:, j, None] * row, 0)
    return mixed


def dropped(p: Problem, xp: Any, b: int, at: tuple[int, ...], tile: slice) -> Any:
    """Return what dropout multiplies the weights of a tile with."""
    if p.dropout is None:
        return p.acc_dtype.type(1)
    i = xp.arange(p.first_row, p.first_row + p.L, dtype=np.uint64)[:, None] & _LOW
    first = p.first_key // 4
    quads = xp.arange(first + tile.start // 4, first - (-tile.stop // 4), dtype=np.uint64)[None, :]
    zero = xp.zeros((p.L, quads.size), np.uint64)
    counter = (zero + quads, zero + i, zero + np.uint64(p.first_head + at[-1]), zero + np.uint64(p.first_entry + b))
    words = xp.stack(_philox(counter, p.dropout.seed), axis=-1).reshape(p.L, -1)
    kept = words[:, : tile.stop - tile.start] >= np.uint64(p.dropout.threshold)
    return xp.where(kept, p.dropout.factor, 0).astype(p.acc_dtype)


def _philox(counter: tuple[Array, ...], seed: int) -> tuple[Array, ...]:
    """Return the four words of 32 bits, in uint64, that ten rounds of Philox 4x32 make of the counter."""
    c0, c1, c2, c3 = counter
    for turn in range(10):
        k0, k1 = (
            np.uint64((key + turn * step) & 0xFFFFFFFF)
            for key, step in zip((seed & 0xFFFFFFFF, seed >> 32), _WEYL, strict=True)
        )
        a, c = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (c >> _HALF) ^ c1 ^ k0, c & _LOW, (a >> _HALF) ^ c3 ^ k1, a & _LOW
    return c0, c1, c2, c3


def finite(xp: Any, top: Array) -> Array:
    """Return the maxima, with 0 for a row that sees nothing, where -inf - -inf would be NaN."""
    return xp.where(top == -np.inf, 0, top)
