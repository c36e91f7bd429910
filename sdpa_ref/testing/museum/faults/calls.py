"""Faults of state: what a call leaves behind for the next, keeps from the last, or does to its arguments meanwhile.

Each is a plain mistake, made for this museum.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum.exhibit import Fault
from sdpa_ref.testing.museum.kernel import Kernel

Options = dict[str, Any]
Call = Callable[..., Any]


@dataclass(frozen=True)
class Remembering(Kernel):
    """A kernel whose calls go through a function ``(memory, forward, arrays, options)`` with a memory of its own."""

    through: Callable[[dict[Any, Any], Call, tuple[Array, ...], Options], Array] = lambda m, f, a, o: f(*a, **o)
    memory: dict[Any, Any] = field(default_factory=dict, init=False, compare=False)

    def forward(self, query: Array, key: Array, value: Array, **options: Any) -> Array:
        """Return the output, as `sdpa` does, or not quite."""
        return self.through(self.memory, super().forward, (query, key, value), options)


def _buffer(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
    output = forward(*arrays, **options)
    room = memory.setdefault((output.shape, output.dtype), np.empty_like(output))
    room[...] = output
    return room


def _two_buffers(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
    memory["n"] = memory.get("n", 0) + 1
    return _buffer(memory.setdefault(memory["n"] % 2, {}), forward, arrays, options)


def _writing(n: int) -> Any:
    """Return a kernel that changes an input while it computes, and then restores it."""

    def through(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
        array = arrays[n]
        if not array.flags.writeable:
            return forward(*arrays, **options)
        before = array.copy()
        array *= array.dtype.type(2)
        changed = array.copy()
        for _ in range(3):
            changed = changed + 0
        with np.errstate(all="ignore"):
            given = list(arrays)
            given[n] = before
            output = forward(*given, **options)
        array[...] = before
        return output

    return through


def _mask_restored(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
    mask = options.get("mask")
    if not isinstance(mask, np.ndarray) or not mask.flags.writeable:
        return forward(*arrays, **options)
    given = mask.copy()
    np.logical_not(mask, out=mask)
    output = forward(*arrays, **options | {"mask": given})
    np.logical_not(mask, out=mask)
    return output


def _written(name: str) -> Any:
    """Return a kernel that leaves an option changed."""

    def through(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
        output = forward(*arrays, **options)
        given = options.get(name)
        if isinstance(given, np.ndarray) and given.flags.writeable and given.size:
            given[(0,) * given.ndim] = (
                ~given[(0,) * given.ndim] if given.dtype == bool else given[(0,) * given.ndim] - 1
            )
        return output

    return through


def _cached(key_of: Callable[[Any, Options], Any]) -> Any:
    """Return a kernel that takes keys it has seen before from a cache."""

    def through(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
        query, key, value = arrays
        at = (key_of(key, options), key.shape, key.dtype)
        key = memory.setdefault(at, key.copy())
        return forward(query, key, value, **options)

    return through


def _cached_option(name: str, key_of: Callable[[Any, Any], Any]) -> Any:
    """Return a kernel that takes an option from a cache."""

    def through(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
        if name in options:
            option = options[name]
            copied = option.copy() if isinstance(option, np.ndarray) else option
            at = (key_of(option, arrays), np.shape(option) if isinstance(option, np.ndarray) else type(option))
            options = options | {name: memory.setdefault(at, copied)}
        return forward(*arrays, **options)

    return through


def _whole_result(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
    at = tuple((id(a), a.shape, a.dtype.str) for a in arrays)
    if options or at not in memory:
        memory[at] = forward(*arrays, **options).copy(), arrays
    return memory[at][0].copy()


def _some_calls(wrong: Callable[[int], bool]) -> Any:
    """Return a kernel that is off at some numbers of calls, counted from 1."""

    def through(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
        memory["n"] = memory.get("n", 0) + 1
        output = forward(*arrays, **options)
        return output + output.dtype.type(0.5) if wrong(memory["n"]) else output

    return through


def _some_random(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
    rng = memory.setdefault("rng", np.random.default_rng(0))
    output = forward(*arrays, **options)
    return output + output.dtype.type(0.5) if rng.random() < 0.3 else output


def _left_over(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
    output = forward(*arrays, **options)
    last = memory.get(output.shape)
    memory[output.shape] = output.copy()
    if last is None or last.dtype != output.dtype:
        return output
    with np.errstate(all="ignore"):
        return (output + output.dtype.type(0.0625) * np.nan_to_num(last)).astype(output.dtype)


def _after_larger(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
    output, S = forward(*arrays, **options), arrays[1].shape[-2]
    stale = memory.get("S", 0) > S
    memory["S"] = S
    return output * output.dtype.type(1.0625) if stale else output


def _scratch(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
    memory["arrays"] = arrays
    forward(*(a[..., :1, :] for a in arrays))  # work during which another thread may come
    shapes = [a.shape for a in arrays]
    mine = memory["arrays"]
    return forward(*(mine if [a.shape for a in mine] == shapes else arrays), **options)


def _of_one_key(memory: Any, forward: Call, arrays: Any, options: Options) -> Array:
    output = forward(*arrays, **options)
    value = arrays[2]
    one = value.shape[-2] == 1 and not options and output.shape == value.shape
    return value if one and output.dtype == value.dtype else output


_TABLE: dict[str, tuple[str, Any]] = {
    "one buffer": ("The result lies in a buffer that the next call of the same shape overwrites.", _buffer),
    "two buffers": ("The result is overwritten by the call after the next.", _two_buffers),
    "value returned": ("With one key the value itself is returned, not a copy.", _of_one_key),
    "query restored": ("The query is scaled in place and then restored.", _writing(0)),
    "key restored": ("The keys are scaled in place and then restored.", _writing(1)),
    "value restored": ("The values are scaled in place and then restored.", _writing(2)),
    "mask restored": ("The mask is inverted in place and then restored.", _mask_restored),
    "mask written": ("The mask is changed.", _written("mask")),
    "bias written": ("The bias is changed.", _written("bias")),
    "keys cached by identity": ("Keys are cached by the identity of their array.", _cached(lambda key, o: id(key))),
    "keys cached by address": ("Keys are cached by their address.", _cached(lambda key, o: key.ctypes.data)),
    "keys cached by shape": ("Keys are cached by their shape.", _cached(lambda key, o: 0)),
    "keys cached by ends": (
        "Keys are cached by their first and last number.",
        _cached(lambda key, o: (key.ravel()[:1].tobytes(), key.ravel()[-1:].tobytes())),
    ),
    "masks cached by identity": ("Masks are cached by identity.", _cached_option("mask", lambda x, a: id(x))),
    "masks cached by shape": ("Masks are cached by their shape.", _cached_option("mask", lambda x, a: 0)),
    "biases cached by shape": ("Biases are cached by their shape.", _cached_option("bias", lambda x, a: 0)),
    "biases cached by identity": ("Biases are cached by identity.", _cached_option("bias", lambda x, a: id(x))),
    "scale cached by shape": ("The scale is cached by shape.", _cached_option("scale", lambda x, a: a[0].shape)),
    "cap cached by shape": ("The soft cap is cached by shape.", _cached_option("softcap", lambda x, a: a[0].shape)),
    "sink cached": ("The sink is cached by its shape.", _cached_option("sink", lambda x, a: a[0].shape)),
    "offset cached": ("The offset is cached by shape.", _cached_option("query_offset", lambda x, a: a[0].shape)),
    "seed cached": ("The seed of dropout is cached by shape.", _cached_option("dropout", lambda x, a: a[0].shape)),
    "results cached by identity": ("Results are cached by the identity of the arrays.", _whole_result),
    "every third call": ("Every third call is wrong.", _some_calls(lambda n: n % 3 == 0)),
    "after forty calls": ("From the fortieth call on all are wrong.", _some_calls(lambda n: n >= 40)),
    "first call": ("The first call is wrong.", _some_calls(lambda n: n == 1)),
    "some calls": ("Three of ten calls are wrong, by chance.", _some_random),
    "left over": ("What the last call of the same shape left is added.", _left_over),
    "after a longer one": ("A call after one with more keys is off.", _after_larger),
    "scratch for all threads": ("Calls of several threads share their scratch memory.", _scratch),
}  # fmt: skip

FAULTS = tuple(Fault(name, wrong, "", Remembering(through=through)) for name, (wrong, through) in _TABLE.items())
