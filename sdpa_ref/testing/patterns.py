"""What all failures of a cause have in common, and nothing that passed has: the sizes, the options, the places."""

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.testing import recipes
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.cases import Case
from sdpa_ref.testing.coverage import SIZES, sizes_of
from sdpa_ref.testing.diagnose import Diagnosis, heads_first, units_of
from sdpa_ref.testing.judge import Failure
from sdpa_ref.testing.recipes import Words

_PROBES = (*range(1, 10), 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 72, 80, 96, 127, 128, 129, 160, 192, 255, 256, 257,
           384, 511, 512, 513, 1023, 1024, 1025, 1026, 2049)  # fmt: skip
_WORK = 1 << 20
_OPTIONS = ("scale", "softcap", "sink", "score_mod", "dropout", "mask", "bias")
Fails = Callable[[Words, int], bool]


class Probe(NamedTuple):
    """At which sizes of one dimension the smallest case fails, and at which it passes."""

    name: str
    failed: tuple[int, ...]
    passed: tuple[int, ...]


def sizes_told(failure: Failure, fails: Fails, claims: Capabilities, end: float = math.inf) -> str:
    """Return at which sizes the smallest case of a failure fails, in words, or "" where no rule has them all.

    A dimension that is not probed to its end says nothing.

    Parameters
    ----------
    failure : Failure
    fails : callable
        Whether the law fails for words and a seed.
    claims : Capabilities
    end : float
        When to stop, as `time.process_time` tells it.
    """
    words, seed = recipes.parse(failure.case.recipe)
    parts = [_sizes(_probed(words, seed, name, fails, claims, end)) for name in SIZES if name != "key heads"]
    return ", ".join(filter(None, parts))


def _probed(words: Words, seed: int, name: str, fails: Fails, claims: Capabilities, end: float) -> Probe:
    """Return the probe of one dimension, the other sizes as they are; an empty one where the time is up."""
    sizes = sizes_of(words)
    here = sizes[name]
    if here == 1:
        return Probe(name, (), ())
    most = {"E": claims.max_width, "Ev": claims.max_width, "L": claims.max_length, "S": claims.max_length}.get(name)
    work = sizes["batch entries"] * sizes["query heads"] * sizes["L"] * sizes["S"] * (sizes["E"] + sizes["Ev"]) / here
    probes = sorted({here, *(n for n in _PROBES if n * work <= _WORK and (most is None or n <= most))})
    outcomes: dict[int, bool] = {}
    for n in probes:
        other = _resized(words, name, n, claims)
        if time.process_time() > end:
            return Probe(name, (), ())
        if other is not None:
            outcomes[n] = any(fails(other, one) for one in dict.fromkeys((seed, 0, 1)))  # one may hide it by luck
    return Probe(name, tuple(n for n in outcomes if outcomes[n]), tuple(n for n in outcomes if not outcomes[n]))


def _resized(words: Words, name: str, n: int, claims: Capabilities) -> Words | None:
    """Return the words with another size, or None where it cannot be changed alone."""
    Hq, Hkv = words.get("heads", (1, 1))
    if name == "batch entries":
        axes = words.get("batch") or ()
        return words | {"batch": (*axes[:-1], n)} if all(axis == 1 for axis in axes[:-1]) else None
    if name == "group":
        return words | {"heads": (n * Hkv, Hkv)} if claims.grouped_heads else None
    if name == "query heads":
        return words | {"heads": (n, n)} if Hq == Hkv else None
    if name in ("E", "Ev") and not claims.value_width:
        return words | {"E": n, "Ev": n} if name == "E" else None
    return words | {name: n}


def _sizes(probe: Probe) -> str:
    """Return in words at which sizes the case fails, or "" where at all or at no other."""
    name, failed, passed = probe
    if not failed or not passed:
        return ""
    if min(failed) > max(passed) and max(passed) < 3:
        return ""  # one key or one row has nothing to err in
    if min(failed) > max(passed):
        return f"{name} of {min(failed)} and more"
    if max(failed) < min(passed):
        return f"{name} up to {max(failed)}"
    for tile in (256, 128, 64, 32, 16, 8, 4, 2):
        for rest in dict.fromkeys((0, 1, tile - 1)):
            first = min(failed)
            if all((n % tile == rest) == (n in failed) for n in (*failed, *passed) if n >= first) and len(failed) > 1:
                what = f"multiples of {tile}" + {0: "", 1: " plus 1"}.get(rest, " minus 1")
                return f"{name} of {what}" + (f", from {first} on" if any(n % tile == rest for n in passed) else "")
        first = min(failed)
        if len(failed) > 2 and all((n % tile != 0) == (n in failed) for n in (*failed, *passed) if n >= first):
            return f"{name} of no multiple of {tile}" + (f", from {first} on" if first > tile else "")
    if len(failed) <= 6:
        return f"{name} of {', '.join(map(str, failed))}"
    return ""


def place_told(failure: Failure) -> str:
    """Return where in the result the wrong numbers are, in words, or "" where no simple place has them all."""
    if failure.got is None or failure.expected is None or failure.limit is None or failure.what != "output":
        return ""
    case = failure.case
    units = units_of(*(heads_first(array, case) for array in (failure.got, failure.expected, failure.limit)))
    wrong = units > 1
    if not wrong.any() or wrong.all():
        return ""
    places = [
        f"{what} {text}"
        for axis, what in ((-1, "columns"), (-2, "rows"), (-3, "heads"))
        if (text := _along(wrong, axis))
    ]
    flat = wrong.reshape(-1, *wrong.shape[-3:])
    if len(flat) > 1 and (text := _span(np.asarray(flat.any((-3, -2, -1))))):
        places.append(f"batch entries {text}")
    return f"wrong are only {', '.join(places)}" if places else ""


def _along(wrong: Array, axis: int) -> str:
    others = tuple(n for n in range(wrong.ndim) if n != wrong.ndim + axis)
    return _span(np.asarray(wrong.any(others))) if wrong.shape[axis] > 1 else ""


def _span(wrong: Array) -> str:
    """Return in words which of a row of things are wrong, "" where all are or no word fits."""
    at = np.flatnonzero(wrong)
    if len(at) in (0, len(wrong)):
        return ""
    if at[-1] == len(wrong) - 1 and len(at) == 1:
        return f"{at[0]}, the last"
    if len(at) == at[-1] - at[0] + 1:
        return f"{at[0]} to {at[-1]}" if len(at) > 1 else f"{at[0]}"
    return f"{', '.join(map(str, at))}" if len(at) <= 6 else ""


def weights_told(diagnosis: Diagnosis, case: Case) -> str:
    """Return at which keys the weights are wrong, in words, or ""."""
    if diagnosis.weights is None or diagnosis.right_weights is None or diagnosis.blame != "weights":
        return ""
    with np.errstate(all="ignore"):
        apart = np.nan_to_num(abs(diagnosis.weights - diagnosis.right_weights), nan=np.inf)
    lost = (diagnosis.weights == 0) & (diagnosis.right_weights > 0)
    extra = (diagnosis.weights > 0) & (diagnosis.right_weights == 0)
    for places, what in ((lost, "without weight"), (extra, "with a weight that they must not have")):
        if places.any():
            return f"keys {what}: {_keys(places, case)}"
    loudest = apart >= 0.5 * apart.max()
    return f"keys whose weight is most wrong: {_keys(loudest, case)}" if loudest.any() and not loudest.all() else ""


def _keys(places: Array, case: Case) -> str:
    rows, keys = np.nonzero(places)
    S = places.shape[1]
    if len(set(keys)) == 1:
        return f"key {keys[0]}" + (", the last" if keys[0] == S - 1 else ", the first" if keys[0] == 0 else "")
    ahead = keys - rows
    if len(set(ahead)) == 1 and len(rows) > 1:
        return f"those {ahead[0]} after the row's own index, a diagonal" if ahead[0] else "the diagonal"
    if keys.min() > 0 and set(keys) == set(range(keys.min(), S)):
        return f"all from key {keys.min()} on"
    return f"{keys.min()} to {keys.max()}"


def signature(words: Words) -> Any:
    """Return what cases of one cause have in common: which sizes are not small, else which options are set."""
    sizes = sizes_of(words)
    large = tuple(name for name in SIZES if sizes[name] > (16 if name in ("E", "Ev", "L", "S") else 3))
    options = tuple(name for name in _OPTIONS if words.get(name) not in (None, False, 0.0, ()))
    return large, sizes["group"] > 1, () if large else options
