"""Problems of which each kind of option drops some keys."""

import numpy as np

from sdpa_ref import Causal, KeyLengths, Window

KINDS = ["lengths", "window", "array", "bias"]


def problem(kind, L, dtype=np.float32, Ev=12):
    """Return query, key and value, which keys the rows see, by batch entry, and the options that say so."""
    rng = np.random.default_rng(2)
    arrays = [
        rng.standard_normal((2, 2, n, width), np.float32).astype(dtype) for n, width in ((L, 12), (300, 12), (300, Ev))
    ]
    i, j = np.arange(100, 100 + L)[:, None], np.arange(300)
    seen = rng.random((2, L, 300)) < 0.5
    options = {"mask": seen[:, None]}
    if kind == "lengths":
        lengths = np.array([171, 103])
        seen, options = np.broadcast_to(j < lengths[:, None, None], (2, L, 300)), {"mask": KeyLengths(lengths)}
    if kind == "window":
        seen = np.broadcast_to((i - 9 <= j) & (j <= i), (2, L, 300))
        options = {"mask": Window(9, 3) & Causal(), "query_offset": 100}
    if kind == "bias":
        options = {"bias": np.where(seen, 0.5, -np.inf)[:, None]}
    return arrays, seen, options
