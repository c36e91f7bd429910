"""Ratios of two calls that take turns: slow paths that libraries have had, each with a limit for any machine."""

from functools import partial

import numpy as np

import sdpa_ref

from .common import BACKENDS, load, module, on_device, waiting, warm


def numbers(*shape, dtype=np.float32, seed=0):
    """Return normally distributed numbers."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def naive(query, key, value, keep=True):
    """Return attention as two matrix products and a softmax of NumPy, in float32."""
    scores = query @ key.swapaxes(-1, -2)
    scores *= np.float32(query.shape[-1] ** -0.5)
    scores = np.where(keep, scores, np.float32(-np.inf))
    np.exp(scores - scores.max(-1, keepdims=True), out=scores)
    return (scores @ value) / scores.sum(-1, keepdims=True)


def padding(sdpa, on, L):
    """Return a call with padded keys, and NumPy without a library. Limit 1.2."""
    query, key, value = numbers(3, 32, 8, L, 32)
    keep = (np.arange(L) < np.random.default_rng(1).integers(1, L + 1, (32, 1)))[:, None, None]
    arrays = *map(on, (query, key, value)), on(keep)
    return lambda: sdpa(*arrays[:3], mask=arrays[3]), partial(naive, query, key, value, keep), 1


def decode(sdpa, on, S):
    """Return a step of decoding with grouped heads, and NumPy without a library. Limit 1."""
    query, (key, value) = numbers(1, 32, 1, 128), numbers(2, 1, 8, S, 128)
    arrays = tuple(map(on, (query, key, value)))
    grouped = query.reshape(1, 8, 4, 128)
    return lambda: sdpa(*arrays), partial(naive, grouped, key, value), 1


def extra_axis(sdpa, on):
    """Return a call with an axis of length 1 more, and one without it. Limit 1.1."""
    short = on(numbers(4, 4, 200, 64))
    long = short[:, None]
    return lambda: sdpa(long, long, long), lambda: sdpa(short, short, short), 1


def without_batch(sdpa, on):
    """Return a call without a batch axis, and with one of length 1. Limit 1.1."""
    long = on(numbers(1, 8, 512, 64))
    short = long[0]
    return lambda: sdpa(short, short, short), lambda: sdpa(long, long, long), 1


def half(sdpa, on):
    """Return a call in float16, and one in float32. Limit 2."""
    x = numbers(1, 8, 512, 64)
    small, wide = on(x.astype(np.float16)), on(x)
    return lambda: sdpa(small, small, small), lambda: sdpa(wide, wide, wide), 1


def packed_cache(sdpa, on):
    """Return a step of decoding with views of a packed cache, and with contiguous keys and values. Limit 1.3."""
    query, cache = on(numbers(1, 32, 1, 128)), on(numbers(1, 2048, 2, 32, 128))
    views = [cache[:, :, i].swapaxes(1, 2) for i in (0, 1)]
    copies = [view.copy() for view in views]
    return lambda: sdpa(query, *views), lambda: sdpa(query, *copies), 1


def short_keys(sdpa, on):
    """Return a call that sees a tenth of the keys, and one that sees all. Limit 0.2."""
    x, rule = on(numbers(1, 8, 1024, 64)), sdpa_ref.KeyLengths([102])
    return lambda: sdpa(x, x, x, mask=rule), lambda: sdpa(x, x, x), 1


def segments(sdpa, on):
    """Return windows of an image as segments, and as a batch. Limit 2."""
    windows = on(numbers(1, 8, 16, 64, 32))  # heads, windows, positions in a window
    flat = windows.reshape(1, 8, 1024, 32)
    rule = sdpa_ref.Segments(np.arange(1024) // 64)
    return lambda: sdpa(flat, flat, flat, mask=rule), lambda: sdpa(windows, windows, windows), 1


def odd_length(sdpa, on, L, masked):
    """Return a call of a length that is one more than a multiple of 16, and that multiple, for each pair. Limit 1.5."""
    long = on(numbers(1, 8, L + 1, 64))
    short = long[:, :, :L]
    rule = sdpa_ref.Causal() if masked else None
    work = ((L + 1) / L) ** 2
    return lambda: sdpa(long, long, long, mask=rule), lambda: sdpa(short, short, short, mask=rule), work


def twice(sdpa, on):
    """Return twice as many heads, and once as many: 2, if the timer measures all of the work."""
    many = on(numbers(1, 16, 512, 64))
    few = many[:, :8]
    return lambda: sdpa(many, many, many), lambda: sdpa(few, few, few), 1


PAIRS = {
    "padding-16 / numpy": partial(padding, L=16),
    "padding-64 / numpy": partial(padding, L=64),
    "padding-256 / numpy": partial(padding, L=256),
    "decode-128 / numpy": partial(decode, S=128),
    "decode-1024 / numpy": partial(decode, S=1024),
    "decode-8192 / numpy": partial(decode, S=8192),
    "extra axis / none": extra_axis,
    "no batch / batch": without_batch,
    "float16 / float32": half,
    "packed cache / contiguous": packed_cache,
    "tenth of keys / all": short_keys,
    "segments / batch": segments,
    "length 129 / 128": partial(odd_length, L=128, masked=False),
    "length 145 / 144": partial(odd_length, L=144, masked=False),
    "length 129 / 128, causal": partial(odd_length, L=128, masked=True),
    "length 145 / 144, causal": partial(odd_length, L=144, masked=True),
    "16 heads / 8": twice,
}


class Pairs:
    """One call by another."""

    params = (BACKENDS, list(PAIRS))
    param_names = ("backend", "pair")

    def setup(self, backend, name):
        """Build both, and call each once."""
        load(backend)
        self.clock = module("sdpa_ref.bench.clock")
        sdpa = partial(sdpa_ref.sdpa, backend=backend)
        ours, other, self.work = PAIRS[name](sdpa, partial(on_device, backend))
        self.runs = {who: warm(waiting(backend, run)) for who, run in (("ours", ours), ("other", other))}

    def track_ratio(self, backend, name):
        """Return the time of the first by that of the second, per unit of work."""
        ours, other = (np.median(times) for times in self.clock.by_turns(self.runs, 0.2).values())
        return float(ours / other / self.work)

    track_ratio.unit = "ratio"
