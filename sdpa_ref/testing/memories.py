"""The laws of state: a call owns its result, leaves its arguments alone, and does not depend on any other call.

Arguments are judged as a caller would meet them: an array whose numbers have changed since the last call, a second
call while the first one runs, a result that is looked at later.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sdpa_ref.testing import recipes
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.cases import Case
from sdpa_ref.testing.judge import Declined, Failure, called, judged
from sdpa_ref.testing.target import Target

_THREADS, _TIMES = 4, 4
_SWITCH = 1e-6  # seconds after which the interpreter lets another thread run: as often as it can


def owns_its_result(target: Target, case: Case) -> Failure | None:
    """Return the failure of a result that shares memory with an argument, or that a later call changes."""
    others = [_other(target, case, n) for n in (1, 2)]
    for name, call in _functions(target):
        first = call(case)
        if isinstance(first, Failure):
            return first
        kept = [array.copy() for array in first]
        for array in first:
            for what, given in _arguments(case):
                if np.may_share_memory(array, given):
                    return Failure(case, f"the result of {name} shares memory with {what}")
        for other in others:
            later = call(other)
            if isinstance(later, Failure):
                return later
            for array, before in zip(first, kept, strict=True):
                if array.tobytes() != before.tobytes():
                    return Failure(case, f"the result of {name} changed when it was called again")
    return None


def forgets(target: Target, case: Case) -> Failure | None:
    """Return the failure of a call after others, with the same arrays that hold other numbers, or other options."""
    claims = target.capabilities
    held = _copied(case)
    other, longer, single = _other(target, case, 1), _other(target, case, 2, longer=True), _with_one_other_key(held)
    steps = [
        ("", held, case),
        ("after a call with other numbers in the same arrays", _filled(held, other), other),
        ("after a call whose numbers are put back", _filled(held, case), case),
        ("after a call with one other number in the keys", _filled(held, single), single),
        ("after a call with more keys", longer, longer),
        ("", _filled(held, case), case),
    ]
    for n, (why, given, right) in enumerate(steps):
        now = _fill(given, right) if n not in (0, 4) else given
        failure = judged(called(target, "forward", now, *now.arrays, **now.options), right, claims)
        if failure:
            when = f"in call {n + 1} of {len(steps)}, {why}: " if n else ""
            return replace(failure, case=case, message=f"{when}{failure.message}")
    return None


def leaves_arguments_alone(target: Target, case: Case) -> Failure | None:
    """Return the failure of a call that writes to an argument, even where it puts back what was there."""
    given = _copied(case)
    watched = [(name, array, array.tobytes()) for name, array in _arguments(given)]
    seen: list[str] = []

    def watch() -> None:
        seen.extend(name for name, array, before in watched if array.tobytes() != before)

    repeated = (call for name, call in _functions(target) for _ in range(3 if name == "forward" else 1))
    for call in repeated:
        result = _watched(partial(call, given), watch, seen) if target.capabilities.threads else call(given)
        if isinstance(result, Failure):
            return replace(result, case=case)
        if seen:
            return Failure(case, f"it wrote to {seen[0]} while it computed")
        watch()
        if seen:
            return Failure(case, f"it wrote to {seen[0]}")
    return None


def takes_one_array_thrice(target: Target, case: Case) -> Failure | None:
    """Return the failure of attention of an array over itself, which one call gets as query, key and value.

    There is none where there are not as many queries as keys, of one width, in as many heads.
    """
    if len({array.shape[-3:] for array in case.arrays}) > 1:
        return None
    lead = np.broadcast_shapes(*(array.shape[:-3] for array in case.arrays))
    array = np.array(np.broadcast_to(case.query, (*lead, *case.query.shape[-3:])))
    same = replace(case, query=array, key=array, value=array)
    return judged(called(target, "forward", same, *same.arrays, **same.options), same, target.capabilities)


def works_in_threads(target: Target, case: Case) -> Failure | None:
    """Return the failure of calls that run at the same time, over other numbers and over the same."""
    alone = judged(called(target, "forward", case, *case.arrays, **case.options), case, target.capabilities)
    if alone:
        return alone
    cases = [case, *(_other(target, case, n) for n in range(1, _THREADS))]
    given = [_copied(each) for each in (*cases[:-1], case)]
    given[-1] = given[0]  # the same arrays in two threads
    cases[-1] = case
    calls = [_direct(target, each) for each in given]
    barrier = threading.Barrier(len(calls))

    def work(call: Callable[[], Any]) -> list[Any]:
        barrier.wait()
        return [call() for _ in range(_TIMES)]

    with _many_switches(), ThreadPoolExecutor(len(calls)) as pool:
        results = list(pool.map(work, calls))
    for right, several in zip(cases, results, strict=True):
        for result in several:
            if isinstance(result, Declined):
                raise result
            failure = judged(result, right, target.capabilities)
            if failure:
                message = f"with {len(calls)} calls at the same time: {failure.message}"
                return replace(failure, case=case, message=message)
    return None


def _functions(target: Target) -> Iterator[tuple[str, Callable[[Case], Any]]]:
    """Yield the functions of the target that are claimed, of a case, which return a list of arrays or a Failure."""

    def wrapped(name: str) -> Callable[[Case], Any]:
        def call(case: Case) -> Any:
            options = {key: x for key, x in case.options.items() if key != "sink" or name != "state"}
            arrays = (case.query, case.key) if name == "weights" else case.arrays
            arrays = (*arrays, _incoming(target, case)) if name == "vjp" else arrays
            got = called(target, name, case, *arrays, **options)
            if isinstance(got, Failure):
                return got
            return [x for x in (got if isinstance(got, tuple | list) else [got]) if isinstance(x, np.ndarray)]

        return call

    claims = target.capabilities
    for name, claimed in (
        ("forward", True),
        ("state", claims.lse),
        ("weights", claims.weights),
        ("vjp", claims.gradients),
    ):
        if claimed:
            yield name, wrapped(name)


def _incoming(target: Target, case: Case) -> Array:
    """Return a gradient of the output."""
    lead = np.broadcast_shapes(*(array.shape[:-3] for array in case.arrays))
    shape = (*lead, *case.query.shape[-3:-1], case.value.shape[-1])
    return np.random.default_rng(7).standard_normal(shape).astype(case.query.dtype.newbyteorder("="))


def _direct(target: Target, case: Case) -> Callable[[], Any]:
    """Return a call that a thread can make: it returns what comes, or the Failure or Declined that was raised."""
    options = dict(case.options)
    if len(target.capabilities.layouts) == 1:
        options.pop("layout", None)

    def call() -> Any:
        try:
            with np.errstate(all="ignore"):
                return target.forward(*case.arrays, **options)
        except NotImplementedError as error:
            return Declined(str(error))
        except BaseException as error:  # as in `called`: whatever is raised is a finding
            return Failure(case, f"raised {type(error).__name__}: {error}")

    return call


def _watched(call: Callable[[], Any], watch: Callable[[], None], seen: list[str]) -> Any:
    """Return what the call returns in another thread, while this one reads the arguments."""
    with _many_switches(), ThreadPoolExecutor(1) as pool:
        done = pool.submit(call)
        while not done.done():
            if seen:
                break
            watch()
    return done.result()


@contextmanager
def _many_switches() -> Iterator[None]:
    """Let threads alternate as often as the interpreter can, and warnings be ignored in all of them."""
    before = sys.getswitchinterval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.setswitchinterval(_SWITCH)
        try:
            yield
        finally:
            sys.setswitchinterval(before)


def _other(target: Target, case: Case, n: int, *, longer: bool = False) -> Case:
    """Return a case of the same sizes, or with more keys, whose numbers and options are others."""
    words, seed = recipes.parse(case.recipe)
    if longer:
        most = target.capabilities.max_length
        words = words | {"S": min(words.get("S", 1) + 70, most or 1 << 30)}
    if words.get("scale") is not None and target.capabilities.scale != "none":
        words = words | {"scale": (0.5, 3.0)[n % 2]}
    if words.get("softcap") is not None:
        words = words | {"softcap": (1.5, 7.0)[n % 2]}
    return recipes.fitted(recipes.seeded(words, seed + n), target.capabilities)


def _copied(case: Case) -> Case:
    """Return the case with arrays that may be written to, options included."""
    query, key, value = (np.array(array) for array in case.arrays)
    options = {name: np.array(x) if isinstance(x, np.ndarray) else x for name, x in case.options.items()}
    return replace(case, query=query, key=key, value=value, options=options)


def _filled(held: Case, other: Case) -> Case:
    """Return the case of the other's numbers in the arrays that are held, which are not yet written."""
    arrays = (
        a if a.shape == b.shape and a.dtype == b.dtype else b for a, b in zip(held.arrays, other.arrays, strict=True)
    )
    query, key, value = arrays
    options = {name: mine if _alike(mine := held.options.get(name), x) else x for name, x in other.options.items()}
    return replace(other, query=query, key=key, value=value, options=options)


def _fill(given: Case, right: Case) -> Case:
    """Write the right numbers into the arrays, and return the case."""
    for mine, theirs in zip(given.arrays, right.arrays, strict=True):
        if mine is not theirs:
            mine[...] = theirs
    for name, option in right.options.items():
        if isinstance(option, np.ndarray) and given.options[name] is not option:
            given.options[name][...] = option
    return given


def _alike(mine: Any, theirs: Any) -> bool:
    both = isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray)
    return both and mine.shape == theirs.shape and mine.dtype == theirs.dtype


def _with_one_other_key(case: Case) -> Case:
    """Return the case with other numbers in the middle of the keys, which neither the first nor the last tells."""
    key = case.key.copy()
    axis = -3 if case.options.get("layout") == "LHE" else -2
    if key.shape[axis]:
        middle = np.moveaxis(key, axis, 0)[key.shape[axis] // 2]
        middle[...] = -middle
    return replace(case, key=key)


def _arguments(case: Case) -> Iterator[tuple[str, Array]]:
    """Yield all arrays that a call is given, by name: those of masks too."""
    yield from zip(("query", "key", "value"), case.arrays, strict=True)
    for name, option in case.options.items():
        yield from ((name, array) for array in _arrays_in(option))


def _arrays_in(option: Any) -> Iterator[Array]:
    if isinstance(option, np.ndarray):
        yield option
    elif isinstance(option, tuple):
        for part in option:
            yield from _arrays_in(part)
    elif is_dataclass(option):
        for each in fields(option):
            yield from _arrays_in(getattr(option, each.name))
