"""How layers attend: output and weights from one call of the backend, and over caches."""

from contextlib import suppress
from typing import Any

from sdpa_ref import registry
from sdpa_ref._problem import pose
from sdpa_ref.api import sdpa
from sdpa_ref.arrays import Array
from sdpa_ref.masks import KeyLengths
from sdpa_ref.stored.cache import Cache

_BOTH = frozenset({"output", "weights"})


def sdpa_and_weights(
    query: Array, key: Array, value: Array, *, backend: str | None = None, **options: Any
) -> tuple[Array, Array]:
    """Return what `sdpa` and `sdpa_weights` return, bit for bit, of arrays of one type that have a head axis."""
    problem, caller = pose(query, key, value, **options, output=True)
    result = registry.choose(problem, backend).forward(problem, _BOTH)
    return caller.output(result.output), result.weights


def append_and_attend(cache: Cache, query: Array, key: Array, value: Array, options: Any) -> Array:
    """Add tokens to a cache and return their attention; all arrays "LHE"."""
    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be a KVCache or a cache of a PagePool, got {type(cache).__name__}")
    before = cache.lengths
    cache.append(_turned(cache, key), _turned(cache, value))
    try:
        return _turned(cache, cache.attend(_turned(cache, query), **options))
    except BaseException:
        with suppress(ValueError):  # of a window that has dropped what came before
            cache.crop(before)
        raise


def attend_over(cache: Cache, query: Array, options: Any, attend: Any = sdpa) -> Any:
    """Return attention over all that a cache holds, whatever comes first; query and output "LHE".

    With `sdpa_and_weights` to attend it is output and weights.
    """
    mask = KeyLengths(cache.key_lengths)
    options = options | {"mask": mask if options.get("mask") is None else mask & options["mask"]}
    result = attend(_turned(cache, query), cache.key, cache.value, layout=cache.layout, **options)
    return (_turned(cache, result[0]), result[1]) if isinstance(result, tuple) else _turned(cache, result)


def _turned(cache: Cache, array: Array) -> Array:
    """Return an array of layout "LHE" in that of the cache, or the other way round."""
    return array if cache.layout == "LHE" else array.swapaxes(-2, -3)
