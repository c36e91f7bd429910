"""The laws of stored keys: in pages, as codes, with positions of their own, and in a buffer that grows."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.masks import Mask
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.cases import Case
from sdpa_ref.testing.compare import assert_same_bits
from sdpa_ref.testing.judge import Failure, called, judged
from sdpa_ref.testing.laws import returns_weights
from sdpa_ref.testing.target import Target

_PAGES = 1, 3, 8, 16, 16, 128
_MOST = {"int8": 127, "uint8": 127, "int4": 7, "float8_e4m3fn": 448, "float8_e5m2": 57344}
"""What the largest number of a block becomes, by the kind of code."""
_ZEROS = {"int8": (0, 0, -5), "uint8": (128, 120), "int4": (8, 8, 7)}


def reads_pages(target: Target, case: Case) -> Failure | None:
    """Return the failure of keys in pages, which must give what they give in one page for each batch entry."""
    claims, rng = target.capabilities, _rng(case)
    if case.query.ndim == 2:
        return None
    case, book = _booked(rng, case, claims)
    keys = [book.around(book.cut(_turned(x, case))) for x in case.arrays[1:]]
    stored = _with(case, *keys)
    got = called(target, "forward", stored, *stored.arrays, **stored.options)
    failure = judged(got, stored, claims) or _weighs(target, stored)
    if failure or not claims.invariant:
        return failure
    single = replace(book, table=np.arange(book.lengths.size).reshape(*book.lengths.shape, 1))
    whole = _with(stored, *(single.around(x.dense().reshape(book.lengths.size, *x.shape[-3:])) for x in keys))
    gathered = called(target, "forward", whole, *whole.arrays, **whole.options)
    if isinstance(gathered, Failure):
        return gathered
    try:
        assert_same_bits(got, gathered)
    except AssertionError as error:
        return Failure(stored, f"pages must give the bits of the same keys in one page: {error}")
    return None


def reads_codes(target: Target, case: Case) -> Failure | None:
    """Return the failure of keys that are codes with scales, in pages where those are claimed too."""
    claims, rng = target.capabilities, _rng(case)
    kind, book = str(rng.choice(_kinds())), None
    if claims.paged and case.query.ndim > 2 and rng.random() < 0.4:
        case, book = _booked(rng, case, claims)
    key, value = (_encoded(rng, _turned(x, case), kind, case, claims, book) for x in case.arrays[1:])
    stored = _with(case, key, value)
    got = called(target, "forward", stored, *stored.arrays, **stored.options)
    return judged(got, stored, claims) or _weighs(target, stored)


def _weighs(target: Target, stored: Case) -> Failure | None:
    """Return the failure of the weights over stored keys, where weights are claimed."""
    return returns_weights(target, stored) if target.capabilities.weights else None


def counts_in_positions(target: Target, case: Case) -> Failure | None:
    """Return the failure of masks and ALiBi over keys whose positions are given."""
    claims, rng = target.capabilities, _rng(case)
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in case.arrays))
    L, S = (_turned(x, case).shape[-2] for x in case.arrays[:2])
    positions = rng.integers(21) + rng.integers(1, 5, (*(lead if rng.random() < 0.5 else ()), S)).cumsum(-1)
    options = dict(case.options)
    if not isinstance(options.get("query_offset"), str):
        options["query_offset"] = int(positions.max(initial=0)) - L + int(rng.integers(-3, 4))
    mask = options.get("mask")
    if isinstance(mask, Mask) and claims.mask_algebra and "key lengths" in claims.masks and rng.random() < 0.4:
        n = int(rng.integers(S + 1))
        options["mask"] = mask & sr.KeyLengths(n)
        positions[..., n:] = rng.choice((0, 3, 1 << 40))  # what stands in free slots does not count
    stored = replace(case, options=options | {"key_positions": positions})
    return judged(called(target, "forward", stored, *stored.arrays, **stored.options), stored, claims)


def decodes(target: Target, case: Case) -> Failure | None:
    """Return the failure of a step of a decode loop, which writes its key into a buffer with garbage behind."""
    claims, rng = target.capabilities, _rng(case)
    query, key, value = (_turned(x, case) for x in case.arrays)
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
    T, most = key.shape[-2], claims.max_length or 1 << 20
    room = min(int(rng.integers(1, 40)), most - key.shape[-2])
    P = int(rng.choice(_PAGES)) if claims.paged and query.ndim > 2 and rng.random() < 0.5 else 0
    P = min(P, most - T - room)
    full = [np.broadcast_to(x, (*lead, *x.shape[-3:])) if x.ndim > 2 else x for x in (key, value)]
    bad = np.nan if claims.poison else 64.0
    if P:
        M, entries = -(-(T + room) // P), int(np.prod(lead, dtype=int))
        order, table = rng.permutation(entries * M).reshape(*lead, M), np.full((*lead, M), -1, np.int32)
        shapes = [(entries * M, x.shape[-3], P, x.shape[-1]) for x in full]
    else:
        shapes = [(*x.shape[:-2], T + room, x.shape[-1]) for x in full]
    held: list[Any] = [
        np.full_like(_turned(np.empty(n, x.dtype), case), bad, order="C") for n, x in zip(shapes, full, strict=True)
    ]
    buffers = [_turned(x, case) for x in held]
    steps, written = sorted({0, T // 2, T - 1, *rng.integers(T, size=2).tolist()}), 0
    for t in steps:
        for j in range(written, t + 1):
            for buffer, x in zip(buffers, full, strict=True):
                if P:
                    table[..., j // P] = order[..., j // P]
                    buffer[order[..., j // P], :, j % P] = x[..., j, :]
                else:
                    buffer[..., j, :] = x[..., j, :]
        written = t + 1
        row = query[..., min(t, query.shape[-2] - 1), :][..., None, :]
        options, now = dict(case.options), held
        if P:
            now = [sr.Paged(x, table, np.asarray(written), case.options.get("layout", "HLE")) for x in held]
        elif "key lengths" in claims.masks:
            options["mask"] = sr.KeyLengths(written)
        else:
            heads = () if query.ndim == 2 else (*lead, query.shape[-3])
            kept = np.broadcast_to(np.arange(T + room) <= t, (*heads, 1, T + room))
            options["mask"] = np.array(kept, order="C")
        step = replace(_with(case, *now), query=np.array(_turned(row, case), order="C"), options=options)
        failure = judged(called(target, "forward", step, *step.arrays, **options), step, claims)
        if failure:
            when = f"after {written} of {T} tokens: " if t else ""
            return replace(failure, message=f"{when}{failure.message}")
    return None


@dataclass(frozen=True)
class Book:
    """Where the keys of a batch lie: a table of pages, some shared, and what stands where no key is."""

    table: Array
    order: Array
    lengths: Array
    pages: int
    page: int
    bad: float
    layout: str

    def around(self, pages: Any) -> Any:
        """Return the `Paged` of pages."""
        return sr.Paged(pages, self.table, self.lengths, self.layout)

    def cut(self, array: Array) -> Array:
        """Return the pages of keys ``(*batch, H, S, E)``, in the layout of the call."""
        P = self.page
        whole = array.dtype.kind in "iu"
        pages = np.full((self.pages, array.shape[-3], P, array.shape[-1]), 77 if whole else self.bad, array.dtype)
        for *b, m in np.argwhere(np.arange(self.order.shape[-1]) * P < self.lengths[..., None]).tolist():
            keys = array[tuple(b)][:, m * P : min(m * P + P, int(self.lengths[tuple(b)]))]
            pages[self.order[(*b, m)], :, : keys.shape[-2]] = keys
        return np.array(pages.swapaxes(1, 2), order="C") if self.layout == "LHE" else pages


def _booked(rng: np.random.Generator, case: Case, claims: Capabilities) -> tuple[Case, Book]:
    """Return the case with as many keys as its pages have slots, and all leading axes; and the pages."""
    Hkv = case.key.shape[-2 if case.options.get("layout") == "LHE" else -3]
    P = int(rng.choice((*_PAGES, Hkv, Hkv, Hkv)))  # as many slots as heads, which may be taken for them
    P = max(1, min(P, claims.max_length or P))
    bad = np.nan if claims.poison else 64.0
    lead = np.broadcast_shapes(*(x.shape[:-3] for x in case.arrays))
    key, value = (np.array(np.broadcast_to(x, (*lead, *x.shape[-3:])), order="C") for x in case.arrays[1:])
    axis = -3 if case.options.get("layout") == "LHE" else -2
    S = key.shape[axis]
    exact = S >= P and rng.random() < 0.4  # no spare slot, so that a length may be M * P
    S = S // P * P if exact else S
    M = max(1, -(-S // P)) + (0 if exact else int(rng.integers(3)))
    M = M if claims.max_length is None else min(M, claims.max_length // P)
    S = min(S, M * P)
    edges = [0, S, S, *(n for k in range(P, S + 1, P) for n in (k - 1, k, k + 1) if n <= S)]
    lengths = np.where(rng.random(lead) < 0.7, rng.choice(edges, lead), rng.integers(S + 1, size=lead))
    entries = int(np.prod(lead, dtype=int))
    N = entries * M + 2
    order = rng.permutation(N)[: entries * M].reshape(*lead, M)
    if entries > 1 and rng.random() < 0.3:  # a prefix of whole pages that all entries share
        whole, flat = int(rng.integers(1, M + 1)), order.reshape(entries, M)
        lengths, flat[:, :whole] = np.maximum(lengths, min(whole * P, S)), flat[0, :whole]
        for x in (key, value):
            keys = np.moveaxis(x.reshape(entries, *x.shape[-3:]), axis, 1)[:, : whole * P]
            keys[...] = keys[:1]
    stale = rng.choice([-1, -1, N, 2**31 - 1, *range(N)], order.shape)
    table = np.where(np.arange(M) * P < lengths[..., None], order, stale).astype(rng.choice(["int32", "int64"]))
    fitted = [_fit(x, axis, S, M * P) for x in (key, value)]
    options = {name: _sized(name, x, key.shape[axis], S, M * P) for name, x in case.options.items()}
    case = replace(_with(case, *fitted), options=options)
    return case, Book(table, order, np.asarray(lengths), N, P, bad, case.options.get("layout", "HLE"))


def _encoded(rng: np.random.Generator, x: Array, kind: str, case: Case, claims: Capabilities, book: Book | None) -> Any:
    """Return keys, heads first, as codes of the kind, in blocks that are drawn and in the layout of the call."""
    *lead, S, E = x.shape
    kind = "int8" if kind == "int4" and E % 2 else kind
    divisors = [n for n in range(1, E + 1) if E % n == 0] or [0]
    groups = E // 32 if E % 32 == 0 and rng.random() < 0.5 else int(rng.choice(divisors))
    runs = int(rng.choice([n for n in range(1, S + 1) if S % n == 0] or [0]))
    shapes = [(S, 1 if E else 0), (S, groups), (1 if S else 0, E), (runs, E)]
    s, e = shapes[rng.integers(2 if book else 4)]
    numbers = np.nan_to_num(x.astype(np.float64))
    numbers[..., rng.random(S) < 0.1, :] = 0  # groups without range
    blocks = numbers.reshape(*lead, s, S // max(s, 1), e, E // max(e, 1))
    offset = blocks.mean((-3, -1)).astype(np.float32) if rng.random() < 0.3 and blocks.size else None
    rest = blocks - (0 if offset is None else offset[..., :, None, :, None])
    scale = (abs(rest).max((-3, -1), initial=0) / _MOST[kind]).astype(rng.choice(["float32", "float32", "float16"]))
    with np.errstate(all="ignore"):
        steps = np.where(scale > 0, 1 / scale.astype(np.float64), 0)[..., :, None, :, None]
        codes = np.nan_to_num(rest * steps).reshape(x.shape)
    zero = int(rng.choice(_ZEROS.get(kind, (0,))))
    if kind in _ZEROS:
        low, high = (0, 15) if kind == "int4" else (np.iinfo(kind).min, np.iinfo(kind).max)
        codes = np.clip(np.round(codes) + zero, low, high).astype("uint8" if kind == "int4" else kind)
    else:
        import ml_dtypes

        codes = np.clip(codes, -_MOST[kind], _MOST[kind])
        if claims.nonfinite and codes.size and rng.random() < 0.3:
            codes[..., int(rng.integers(S)), 0] = np.nan
        codes = codes.astype(getattr(ml_dtypes, kind))
    if kind == "int4":
        codes = codes[..., 0::2] | codes[..., 1::2] << 4
    lies = book.cut if book else lambda x: np.ascontiguousarray(_turned(x, case))
    parts = [x if x is None else lies(x) for x in (codes, scale, offset)]
    stored = sr.Quantized(*parts, zero=zero, bits=4 if kind == "int4" else 8)
    return stored if book is None else book.around(stored)


def _kinds() -> list[str]:
    return list(_MOST) if find_spec("ml_dtypes") else list(_ZEROS)


def _rng(case: Case) -> np.random.Generator:
    """Return a generator that depends on the seed alone, so that a smaller case keeps its storage."""
    return np.random.default_rng(int(case.recipe[5:].split(",")[0].rstrip(")")))


def _turned(array: Array, case: Case) -> Array:
    """Return an array with heads before lengths, or one that has them so in the layout of the call."""
    return array.swapaxes(-2, -3) if case.options.get("layout") == "LHE" and array.ndim > 2 else array


def _with(case: Case, key: Any, value: Any) -> Case:
    return replace(case, key=key, value=value)


def _fit(array: Array, axis: int, S: int, capacity: int) -> Array:
    """Return the first S keys, and zeros up to the capacity."""
    keys = np.moveaxis(array, axis, 0)[:S]
    room = np.zeros((capacity - S, *keys.shape[1:]), keys.dtype)
    return np.ascontiguousarray(np.moveaxis(np.concatenate([keys, room]), 0, axis))


def _sized(name: str, option: Any, before: int, S: int, capacity: int) -> Any:
    """Return a mask or a bias over `before` keys for the first S of them and free slots up to the capacity."""
    if isinstance(option, tuple):
        return tuple(_sized(name, part, before, S, capacity) for part in option)
    if name not in ("mask", "bias") or not isinstance(option, np.ndarray) or not option.ndim:
        return option
    return _fit(np.broadcast_to(option, (*option.shape[:-1], before)), -1, S, capacity)
