"""A call described by words, and what it returns as bytes; alone, it finds no cache filled by another."""

import gc
import sys
from functools import _lru_cache_wrapper

import numpy as np

import sdpa_ref as sr
from sdpa_ref.testing.cases import case

_masks = {}  # the objects of earlier calls: a model makes its mask once, for all its layers and lengths
WANTED = ("output", "out", "state", "weights", "gradients")


def solved(words, wanted, backend):
    """Return what a call returns, as the types, shapes and bytes of its arrays."""
    it = case(**words)
    options = it.options | {"backend": backend}
    if isinstance(options.get("mask"), sr.Mask):
        options["mask"] = _masks.setdefault(options["mask"], options["mask"])
    query, key, value = it.arrays
    if wanted == "output":
        found = [sr.sdpa(query, key, value, **options)]
    elif wanted == "out":
        out = np.full_like(sr.sdpa_state(query, key, value, **without_sink(options)).output, np.nan)
        found = [sr.sdpa(query, key, value, **options, out=out)]
    elif wanted == "state":
        state = sr.sdpa_state(query, key, value, **without_sink(options))
        found = [state.output, state.lse]
    elif wanted == "weights":
        found = [sr.sdpa_weights(query, key, **options)]
    else:
        output, vjp = sr.sdpa_with_vjp(query, key, value, **options)
        found = [output, *(part for part in vjp(np.ones_like(output)) if isinstance(part, np.ndarray))]
    return [(str(array.dtype), array.shape, array.tobytes()) for array in found]


def without_sink(options):
    return {name: option for name, option in options.items() if name != "sink"}


def solved_alone(words, wanted, backend):
    """Return the same where nothing is remembered but compiled kernels."""
    _masks.clear()
    for cache in per_call_caches().values():
        cache.cache_clear()
    return solved(words, wanted, backend)


def caches():
    """Return all caches of functions in the modules of this project that are loaded, by their full names."""
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0].startswith("sdpa_")]
    found = {}
    for module in ours:
        for value in vars(module).values():
            if isinstance(value, _lru_cache_wrapper):
                found[f"{value.__module__}.{value.__name__}"] = value
    return found


def per_call_caches():
    """Return those that are asked in every call."""
    return {name: cache for name, cache in caches().items() if name.endswith((".arrays_of", ".plan_for", ".load"))}


def sizes():
    """Return how many entries each cache has."""
    gc.collect()
    return {name: cache.cache_info().currsize for name, cache in caches().items()}
