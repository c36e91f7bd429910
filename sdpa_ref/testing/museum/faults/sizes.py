# ruff: noqa: E501 (a table reads better with a row a line)
"""Faults that begin at some size: kernels take another path there, and nobody tested it.

Each is a plain mistake at a plain condition, made for this museum; the others of it stand for public bugs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import arguments, backward, kernel, visibility
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import Fault
from sdpa_ref.testing.museum.kernel import Kernel, Stages, State

When = Callable[[Call], bool]


def _columns(lost: Callable[[int], slice]) -> Kernel:
    """Return a kernel that reads some columns of the query as 0."""

    def scores(call: Call, query: Array, key: Array, keys: slice) -> Stages:
        query = query.copy()
        query[..., lost(query.shape[-1])] = 0
        return kernel.scores(call, query, key, keys)

    return Kernel(scores=scores)


def _scaled(factor: Callable[[int], float]) -> Kernel:
    return Kernel(scale=lambda call: kernel.scale(call) * factor(call.query.shape[-1]))


def _values(lost: Callable[[int], slice]) -> Kernel:
    """Return a kernel whose output is 0 in some columns."""

    def finish(call: Call, state: State, seen: Array) -> tuple[Array, Array]:
        output, lse = kernel.finish(call, state, seen)
        output[..., lost(output.shape[-1])] = 0
        return output, lse

    return Kernel(finish=finish)


def _unwritten(lost: Callable[[Call], Any]) -> Kernel:
    """Return a kernel whose output is 0 in some places, an index or a mask of ``(B, Hq, L, Ev)``."""

    def finish(call: Call, state: State, seen: Array) -> tuple[Array, Array]:
        output, lse = kernel.finish(call, state, seen)
        output[lost(call)] = 0
        return output, lse

    return Kernel(finish=finish)


def _past_64(when: Callable[[int, int], bool]) -> Kernel:
    """Return a kernel whose output is 0 in columns past 64 at some widths E and Ev."""
    return _unwritten(lambda call: (..., slice(64 if when(_E(call), call.value.shape[-1]) else 1 << 30, None)))


def _unseen(lost: Callable[[Call, Any], Array]) -> Kernel:
    """Return a kernel that does not see some keys, a boolean array over the scores."""

    def visible(call: Call) -> Array:
        seen: Array = visibility.visible(call) & ~lost(call, visibility.indices(call))
        return seen

    return Kernel(visible=visible)


def _key(S_wrong: Callable[[int], bool], at: Callable[[int], int] = lambda S: S - 1) -> Kernel:
    """Return a kernel that does not see one key where there are so many."""
    return _unseen(lambda call, x: (x.j == at(call.shape[3])) & S_wrong(call.shape[3]))


def _heads(reads: Callable[[Any, int], Array], when: When = lambda call: True) -> Kernel:
    """Return a kernel whose query heads read other key heads."""

    def of_heads(call: Call, array: Array, name: str) -> Array:
        Hq, Hkv = call.shape[1], max(1, array.shape[1])
        right = np.arange(Hq) // max(1, Hq // Hkv)
        heads = reads(np.arange(Hq), Hkv) if when(call) else right
        return array[:, np.clip(np.where(heads < 0, right, heads), 0, Hkv - 1)] if array.shape[1] else array

    return Kernel(of_heads=of_heads)


def _group(call: Call) -> int:
    return call.shape[1] // max(1, call.key_heads)


def _entries(first: int) -> Kernel:
    """Return a kernel whose batch entries from some one on read the keys of the one before."""

    def of_heads(call: Call, array: Array, name: str) -> Array:
        return kernel.of_heads(call, array, name)[np.minimum(np.arange(len(array)), first - 1)]

    return Kernel(of_heads=of_heads)


def _arrays(wrong: Callable[[Array], Array]) -> Kernel:
    """Return a kernel that misreads masks of some shapes."""

    def rule(mask: Any, at: Any, call: Call) -> Array:
        given = getattr(mask, "array", mask)
        return visibility.rule(wrong(given) if isinstance(given, np.ndarray) else mask, at, call)

    return Kernel(rule=rule)


def _biases(wrong: Callable[[Array], Array]) -> Kernel:
    """Return a kernel that misreads biases of some shapes."""

    def bias(call: Call, keys: slice) -> Array:
        given = tuple(b if isinstance(b, sr.ALiBi) else wrong(np.asarray(b)) for b in call.biases)
        return kernel.bias(replace(call, biases=given), keys)

    return Kernel(bias=bias)


def _strides(wrong: Callable[[Array], Array]) -> Kernel:
    return Kernel(read=lambda array, dtype: arguments.read(wrong(array), dtype))


def _reach(array: Array) -> int:
    """Return the offset of the last number, in numbers."""
    steps = zip(array.shape, array.strides, strict=True)
    last: int = sum((n - 1) * stride for n, stride in steps)
    return last // int(array.itemsize)


def _positions(wrong: Callable[[Array, Call], Array]) -> Kernel:
    def positions(call: Call) -> tuple[Array, Array]:
        p, origin = arguments.positions(call)
        return wrong(p, call), origin

    return Kernel(positions=positions)


def _rule(kind: type, wrong: Callable[[Any, Any, Call], Array]) -> Kernel:
    """Return a kernel with another rule for one kind of mask."""

    def rule(mask: Any, at: Any, call: Call) -> Array:
        return wrong(mask, at, call) if type(mask) is kind else visibility.rule(mask, at, call)

    return Kernel(rule=rule)


def _causal_from(row: int) -> Kernel:
    return _rule(sr.Causal, lambda m, at, call: at.j <= at.p + (at.i >= row))


def _window(wrong: Callable[[Any], bool]) -> Kernel:
    return _rule(
        sr.Window,
        lambda m, at, call: visibility.window(
            at, m.left + 1 if m.left is not None and wrong(m.left) else m.left, m.right
        ),
    )


def _kept(from_index: int, axis: int) -> Kernel:
    """Return a kernel whose dropout counts an index anew from some one on."""

    def kept(call: Call) -> Array:
        factors: Array = kernel.kept(call)
        n = factors.shape[axis]
        return factors.take(np.arange(n) - np.where(np.arange(n) >= from_index, from_index, 0), axis)

    return Kernel(kept=kept)


def _lse(when: When) -> Kernel:
    def rounded_lse(call: Call, lse: Array) -> Array:
        return kernel.rounded_lse(call, lse + np.where(when(call), 0.125, 0))

    return Kernel(rounded_lse=rounded_lse)


def _no_sink(when: When) -> Kernel:
    return Kernel(with_sink=lambda call, state: state if when(call) else kernel.with_sink(call, state))


def _no_cap(when: When) -> Kernel:
    return Kernel(capped=lambda call, s: s if when(call) else kernel.capped(call, s))


def _no_mask(when: When) -> Kernel:
    def rule(mask: Any, at: Any, call: Call) -> Array:
        right = visibility.rule(mask, at, call)
        return np.ones_like(right) if when(call) else right

    return Kernel(rule=rule)


def _rows(lost: Callable[[Array, Call], Array]) -> Kernel:
    def finish(call: Call, state: State, seen: Array) -> tuple[Array, Array]:
        output, lse = kernel.finish(call, state, seen)
        return output * ~lost(np.arange(call.shape[2]), call)[:, None], lse

    return Kernel(finish=finish)


def _inputs(wrong: Callable[[Call, list[Array]], None]) -> Kernel:
    """Return a kernel whose gradients by query, key and value are changed in place."""

    def d_inputs(call: Call, p: Any, d_capped: Array) -> list[Array]:
        gradients = [np.array(x) for x in backward.d_inputs(call, p, d_capped)]
        wrong(call, gradients)
        return gradients

    return Kernel(d_inputs=d_inputs)


def _zero(n: int, *index: Any) -> Callable[[Call, list[Array]], None]:
    def wrong(call: Call, gradients: list[Array]) -> None:
        gradients[n][index] = 0

    return wrong


def _first_head(array: Array, n: int) -> Array:
    return np.broadcast_to(array[..., :1, :, :], array.shape) if array.ndim == n and array.shape[-3] > 1 else array


def _narrow(when: When, dtype: str) -> Kernel:
    """Return a kernel whose scores have fewer digits under some condition."""

    def scores(call: Call, query: Array, key: Array, keys: slice) -> Stages:
        if when(call):
            query, key = (x.astype(dtype).astype(x.dtype) for x in (query, key))
        return kernel.scores(call, query, key, keys)

    return Kernel(scores=scores)


def _E(call: Call) -> int:
    return int(call.query.shape[-1])


_TABLE: dict[str, tuple[str, Kernel]] = {
    "columns past 64": ("Columns of the query past 64 are not read.", _columns(lambda E: slice(64, None))),
    "columns past 128": ("Columns of the query past 128 are not read.", _columns(lambda E: slice(128, None))),
    "columns past 256": ("Columns of the query past 256 are not read.", _columns(lambda E: slice(256, None))),
    "odd column": ("The last column of an odd width is lost.", _columns(lambda E: slice(E - E % 2, None))),
    "width tail": (
        "Above 64, columns beyond the last multiple of 16 are lost.",
        _columns(lambda E: slice(E - E % 16 if E > 64 else E, None)),
    ),
    "width 4 n + 2": (
        "The last two columns are lost where four at a time leave two, above width 4.",
        _columns(lambda E: slice(E - 2 if E > 4 and E % 4 == 2 else E, None)),
    ),
    "width 80": ("A head of width 80 is read as one of 64.", _columns(lambda E: slice(64 if E == 80 else E, None))),
    "scale at 65": ("The scale of a head of width 65 is that of 64.", _scaled(lambda E: (65 / 64) ** 0.5 if E == 65 else 1)),
    "scale of padding": (
        "Above 64, the scale is that of the width padded to 16.",
        _scaled(lambda E: (E / (-(-E // 16) * 16)) ** 0.5 if E > 64 else 1),
    ),
    "scale from 192": ("From width 192 on the scale is that of 128.", _scaled(lambda E: (E / 128) ** 0.5 if E >= 192 else 1)),
    "half a vector of values": (
        "The last four columns of the values are lost where eight at a time leave four, above width 8.",
        _values(lambda Ev: slice(Ev - 4 if Ev > 8 and Ev % 8 == 4 else Ev, None)),
    ),
    "values past 64": ("Columns of the values past 64 are not written.", _values(lambda Ev: slice(64, None))),
    "values past 128": ("Columns of the values past 128 are not written.", _values(lambda Ev: slice(128, None))),
    "value tail": ("The last column is lost at widths 127 and 129.", _values(lambda Ev: slice(Ev - (Ev in (127, 129)), None))),
    "equal wide widths": ("Where both widths are the same and above 64, columns past 64 are not written.", _past_64(lambda E, Ev: E == Ev > 64)),
    "equal widths of 128": ("Where both widths are 128, columns past 64 are not written.", _past_64(lambda E, Ev: E == Ev == 128)),
    "widths of 192 and 128": ("At widths of 192 and 128, columns past 64 are not written.", _past_64(lambda E, Ev: (E, Ev) == (192, 128))),
    "two wide widths": ("Where both widths are above 64 and differ, columns past 64 are not written.", _past_64(lambda E, Ev: min(E, Ev) > 64 and E != Ev)),
    "key 64": ("The last of 64 n + 1 keys is lost, from 65 on.", _key(lambda S: S > 64 and S % 64 == 1)),
    "key 128": ("The last of 65, 129 and 1025 keys is lost.", _key(lambda S: S in (65, 129, 1025))),
    "key 1024": ("The last of 1025 keys is lost.", _key(lambda S: S == 1025)),
    "whole tiles": ("The last key of a multiple of 256 is lost.", _key(lambda S: S % 256 == 0)),
    "before the edge": ("The last of 128 n - 1 keys is lost.", _key(lambda S: S % 128 == 127)),
    "beyond 1024": ("With more than 1024 keys, key 1024 is lost.", _key(lambda S: S > 1024, lambda S: 1024)),
    "beyond 2048": ("With more than 2048 keys, key 2048 is lost.", _key(lambda S: S > 2048, lambda S: 2048)),
    "keys in 16 bits": ("Keys beyond 32767 have a negative index and are lost.", _unseen(lambda call, x: x.j > 32767)),
    "keys in 17 bits": ("Keys beyond 65535 are lost.", _unseen(lambda call, x: x.j > 65535)),
    "rows in 16 bits": ("Rows beyond 32767 are not written.", _rows(lambda i, call: i > 32767)),
    "heads from 8 on": ("Query heads from the ninth on read the first key head.", _heads(lambda h, Hkv: np.where(h >= 8, 0, -1))),
    "heads from 16 on": ("Query heads from 16 on read the first key head.", _heads(lambda h, Hkv: np.where(h >= 16, 0, -1))),
    "group of 3": ("Groups of three are read as interleaved.", _heads(lambda h, Hkv: h % Hkv, lambda call: _group(call) == 3)),
    "group of 5": ("Groups of five are read as interleaved.", _heads(lambda h, Hkv: h % Hkv, lambda call: _group(call) == 5)),
    "group of 7": ("Groups of seven are read as groups of eight.", _heads(lambda h, Hkv: h // 8, lambda call: _group(call) == 7)),
    "groups above 8": ("Groups above eight are read as groups of eight.", _heads(lambda h, Hkv: h // 8, lambda call: _group(call) > 8)),
    "entries from 4 on": ("Batch entries from the fifth on read the keys of the fourth.", _entries(4)),
    "entries from 8 on": ("Batch entries from the ninth on read the keys of the eighth.", _entries(8)),
    "mask of heads": ("Of a mask (H, L, S) the first head is used.", _arrays(lambda a: _first_head(a, 3))),
    "mask of entries": (
        "A mask (B, 1, 1, S) is read as that of the first entry.",
        _arrays(lambda a: np.broadcast_to(a[:1], a.shape) if a.ndim == 4 and a.shape[1:3] == (1, 1) else a),
    ),
    "mask of one column": (
        "A mask (..., L, 1) is taken for one of the keys.",
        _arrays(lambda a: np.ones_like(a) if a.ndim > 1 and a.shape[-1] == 1 and a.shape[-2] > 1 else a),
    ),
    "square mask": (
        "A mask (L, S) of as many rows as columns is read by columns.",
        _arrays(lambda a: a.T if a.ndim == 2 and a.shape[0] == a.shape[1] else a),
    ),
    "square bias": (
        "A bias (L, S) of as many rows as columns is read by columns.",
        _biases(lambda a: a.T if a.ndim == 2 and a.shape[0] == a.shape[1] else a),
    ),
    "bias of heads": ("Of a bias (H, L, S) the first head is used.", _biases(lambda a: _first_head(a, 3))),
    "bias of entries": (
        "A bias (B, 1, 1, S) is read as that of the first entry.",
        _biases(lambda a: np.broadcast_to(a[:1], a.shape) if a.ndim == 4 and a.shape[1:3] == (1, 1) else a),
    ),
    "bias of rows": (
        "A bias (B, 1, L, S) is read as that of the first entry.",
        _biases(lambda a: np.broadcast_to(a[:1], a.shape) if a.ndim == 4 and a.shape[1] == 1 < a.shape[2] else a),
    ),
    "heads backwards": (
        "A negative stride of the head axis is taken for a positive one.",
        _strides(lambda a: a[..., ::-1, :, :] if a.ndim > 2 and a.strides[-3] < 0 else a),
    ),
    "width backwards": ("A negative stride of the last axis is not seen.", _strides(lambda a: a[..., ::-1] if a.strides[-1] < 0 else a)),
    "rows pitched": (
        "Rows are taken to follow one another.",
        _strides(lambda a: np.roll(a, 1, -1) if a.ndim > 1 and a.shape[-2] > 1 and a.strides[-1] == a.itemsize
                 and a.strides[-2] > a.shape[-1] * a.itemsize > 0 and a.strides[-2] < 2 * a.shape[-1] * a.itemsize else a),
    ),
    "heads with a stride of 0": (
        "Heads that repeat one another are read as zeros but for the first.",
        _strides(lambda a: a * (np.arange(a.shape[-3]) == 0)[:, None, None].astype(a.dtype)
                 if a.ndim > 2 and a.strides[-3] == 0 and a.shape[-3] > 1 else a),
    ),
    "offsets in 32 bits": (
        "Offsets beyond 2**31 numbers wrap.",
        _strides(lambda a: a[:1] + np.zeros_like(a) if _reach(a) >= 1 << 31 else a),
    ),
    "positions within the keys": ("Positions beyond the keys are taken for the last key.", _positions(lambda p, call: np.minimum(p, call.shape[3] - 1))),
    "no row before the keys": ("Positions before -2 are taken for -1.", _positions(lambda p, call: np.where(p < -2, 0, p))),
    "positions in 16 bits": ("Positions wrap at 32768.", _positions(lambda p, call: p.astype(np.int16).astype(np.int64))),
    "positions in 32 bits": ("Positions wrap at 2**31.", _positions(lambda p, call: p.astype(np.int32).astype(np.int64))),
    "diagonal beyond 128": ("From row 128 on a query sees one key too many.", _causal_from(128)),
    "diagonal beyond 256": ("From row 256 on a query sees one key too many.", _causal_from(256)),
    "diagonal beyond 384": ("From row 384 on a query sees one key too many.", _causal_from(384)),
    "wide windows": ("Windows of 64 keys and more are one too long.", _window(lambda left: left >= 64)),
    "window of 127": ("A window of 127 is taken for one of 128.", _window(lambda left: left == 127)),
    "dropout of a half": (
        "A probability of dropout above 0.4 is taken for a half where the weights are scaled.",
        Kernel(kept=lambda call: np.sign(kernel.kept(call)) * call.acc.type(2) if call.dropout and call.dropout.p > 0.4 else kernel.kept(call)),
    ),
    "dropout of key 128": ("The dropout of keys from 128 on is that of the first.", _kept(128, 3)),
    "dropout of key 1024": ("The dropout of keys from 1024 on is that of the first.", _kept(1024, 3)),
    "dropout of row 64": ("The dropout of rows from 64 on is that of the first.", _kept(64, 2)),
    "dropout of head 8": ("The dropout of heads from 8 on is that of the first.", _kept(8, 1)),
    "lse of groups": ("The lse of grouped heads is off.", _lse(lambda call: _group(call) > 1)),
    "lse of wide heads": ("The lse is off for widths above 64.", _lse(lambda call: _E(call) > 64)),
    "lse of long rows": ("The lse is off for more than 512 keys.", _lse(lambda call: call.shape[3] > 512)),
    "lse of five entries": ("The lse is off for more than four entries.", _lse(lambda call: call.shape[0] > 4)),
    "sink with a window": ("With a window the sink is forgotten.", _no_sink(lambda call: isinstance(call.mask, sr.Window))),
    "sink of long rows": ("With more than 256 keys the sink is forgotten.", _no_sink(lambda call: call.shape[3] > 256)),
    "sink of wide heads": ("Above width 64 the sink is forgotten.", _no_sink(lambda call: _E(call) > 64)),
    "sink of groups of 3": ("With groups of three the sink is forgotten.", _no_sink(lambda call: _group(call) == 3)),
    "cap of wide heads": ("Above width 64 the soft cap is forgotten.", _no_cap(lambda call: _E(call) > 64)),
    "cap of long rows": ("With more than 256 keys the soft cap is forgotten.", _no_cap(lambda call: call.shape[3] > 256)),
    "cap of many heads": ("With more than eight heads the soft cap is forgotten.", _no_cap(lambda call: call.shape[1] > 8)),
    "mask of wide heads": ("Above width 128 the mask is forgotten.", _no_mask(lambda call: _E(call) > 128)),
    "mask of long rows": ("With more than 1024 keys the mask is forgotten.", _no_mask(lambda call: call.shape[3] > 1024)),
    "mask of many heads": ("With more than 16 heads the mask is forgotten.", _no_mask(lambda call: call.shape[1] > 16)),
    "lengths on a tile": (
        "A key length that is a multiple of 16 is one too short.",
        _rule(sr.KeyLengths, lambda m, at, call: at.j < (n := visibility.lengths(m, call)) - ((n % 16 == 0) & (n > 0))),
    ),
    "no keys": (
        "A key length of 0 is taken for all.",
        _rule(sr.KeyLengths, lambda m, at, call: at.j < np.where((n := visibility.lengths(m, call)) == 0, 1 << 30, n)),
    ),
    "row 128": ("Rows from 128 on are not written.", _rows(lambda i, call: i >= 128)),
    "last row": ("The last of 64 n + 1 rows is not written.", _rows(lambda i, call: (i == call.shape[2] - 1) & (call.shape[2] % 64 == 1) & (call.shape[2] > 1))),
    "grid of 64": (
        "Heads of all entries together are counted up to 64; those beyond are not written.",
        _unwritten(lambda call: np.arange(call.shape[0] * call.shape[1]).reshape(call.shape[:2]) >= 64),
    ),
    "rows in 12 bits": (
        "Rows of all heads together are counted up to 4096; those beyond are not written.",
        _unwritten(lambda call: (slice(None), np.arange(call.shape[1] * call.shape[2]).reshape(call.shape[1:3]) >= 4096)),
    ),
    "decoding long rows": (
        "One query over more than 512 keys: those after the last multiple of 512 are lost.",
        _unseen(lambda call, x: (x.j >= max(1, call.shape[3] // 512) * 512) & (call.shape[2] == 1)),
    ),
    "decoding groups": ("One query of grouped heads: the last key is lost.", _unseen(lambda call, x: (x.j == call.shape[3] - 1) & (call.shape[2] == 1) & (_group(call) > 1))),
    "slopes from head 8 on": (
        "ALiBi's slopes begin anew at the ninth head.",
        Kernel(slope=lambda slopes, ahead: kernel.slope(slopes[:, np.arange(slopes.shape[1]) % 8], ahead)),
    ),
    "slopes of one entry": (
        "ALiBi's slopes are those of the first batch entry for all.",
        Kernel(slope=lambda slopes, ahead: kernel.slope(slopes[:1], ahead)),
    ),
    "far slopes": ("ALiBi's distance ends at 100.", Kernel(slope=lambda slopes, ahead: kernel.slope(slopes, np.clip(ahead, -100, 100)))),
    "keys' gradient past 64": ("The keys' gradient is 0 in columns past 64.", _inputs(_zero(1, ..., slice(64, None)))),
    "values' gradient past 128": ("The gradient of values is 0 from key 128 on.", _inputs(_zero(2, ..., slice(128, None), slice(None)))),
    "queries' gradient past 128": ("The gradient of queries is 0 from row 128 on.", _inputs(_zero(0, ..., slice(128, None), slice(None)))),
    "gradient of head 8": ("The keys' gradient is 0 from head 8 on.", _inputs(_zero(1, slice(None), slice(8, None)))),
    "half digits of wide heads": ("Above width 128, scores have 11 bits.", _narrow(lambda call: _E(call) > 128, "float16")),
    "single digits of long rows": (
        "With more than 128 keys, float64 is computed in float32.",
        _narrow(lambda call: call.shape[3] > 128, "float32"),
    ),
}  # fmt: skip

FAULTS = tuple(Fault(name, wrong, "", made) for name, (wrong, made) in _TABLE.items())
