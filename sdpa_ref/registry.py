"""Backends by name: a plain entry-point group, read once, loaded at first use."""

from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, cast

from sdpa_ref.backend import Backend, Problem
from sdpa_ref.extras import install

GROUP = "sdpa_ref.backends"
STORES = "stores"  # the loop over pieces of a store, no backend that can be named
_OWN = {"cupy": "sdpa_cupy", "dask": "sdpa_dask", "numba": "sdpa_numba"}
_BY_KIND = {"numpy": ("numba", "reference"), "cupy": ("cupy",)}  # what backend=None tries, in this order
_BLOCKWISE = {"dask": "dask", "store": STORES}  # who cuts up what is not in memory, for backends that compute blocks
_BY_DEFAULT = _BY_KIND | {kind: (name,) for kind, name in _BLOCKWISE.items()}


class BackendUnavailable(RuntimeError):
    """A known backend that cannot run here; the message has the reason and what to install."""


def names() -> tuple[str, ...]:
    """Return the names of all known backends, usable here or not.

    Examples
    --------
    >>> "reference" in names()
    True
    """
    return ("reference", *sorted(_entry_points()))


@cache  # of successes: an error is found again, as what is missing may be installed meanwhile
def load(name: str) -> Backend:
    """Return the backend, ready to be used.

    Parameters
    ----------
    name : str
        One of `names`.

    Raises
    ------
    ValueError
        For an unknown name.
    BackendUnavailable
        For a backend that cannot run here, with the reason and the install command.
    """
    backend = _module(name)
    reason = backend.unavailable()
    if reason is not None:
        raise BackendUnavailable(f"backend {name!r} cannot run here: {reason}")
    return backend


def name_of(backend: Backend) -> str:
    """Return the name of a backend that was loaded."""
    for name in names():
        with suppress(BackendUnavailable):
            if _module(name) is backend:
                return name
    raise AssertionError("a backend has a name")


def choose(problem: Problem, name: str | None, task: str = "forward") -> Backend:
    """Return the backend that solves the problem: the named one and no other, or the first fit for the kind of array.

    Nothing about the answer is remembered: whether a backend can solve a problem may depend on the current device or
    the environment.
    """
    if name is None:
        return _default(problem, task)
    if not isinstance(name, str):
        raise TypeError(f"backend must be a name or None, got {type(name).__name__}")
    backend = load(name)
    if backend.ARRAYS != problem.kind and problem.kind in _BLOCKWISE:
        backend = load(_BLOCKWISE[problem.kind]).over(name)  # the named one computes the blocks
    elif backend.ARRAYS != problem.kind:
        raise TypeError(
            f"backend {name!r} takes {backend.ARRAYS} arrays, got {problem.kind} arrays; "
            "nothing is moved between host and device"
        )
    reason = _refusal(backend, problem, task)
    if reason is not None:
        raise NotImplementedError(f"backend {name!r} does not support this problem: {reason}")
    return backend


def _default(problem: Problem, task: str) -> Backend:
    reasons = []
    for name in _BY_DEFAULT[problem.form.kind]:
        try:
            backend = load(name)
        except (BackendUnavailable, ValueError) as error:
            reasons.append(str(error))
            continue
        reason = backend.unsupported(problem) if task == "forward" else _refusal(backend, problem, task)
        if reason is None:
            return backend
        reasons.append(f"{name}: {reason}")
    raise BackendUnavailable(f"no backend for {problem.kind} arrays: " + "; ".join(reasons))


def _refusal(backend: Backend, problem: Problem, task: str) -> str | None:
    if task == "stages" and problem.kind == "dask":
        return "the stages come from the reference, which takes NumPy arrays: pass .compute()"
    if task != "forward" and task not in backend.TASKS:
        return {
            "vjp": "it has no gradients",
            "stages": 'the stages come from the reference: backend="reference"',
        }[task]
    return backend.unsupported(problem)


@cache
def _entry_points() -> dict[str, Any]:
    from importlib.metadata import EntryPoint, entry_points
    from importlib.util import find_spec

    own = {name: EntryPoint(name, module, GROUP) for name, module in _OWN.items()}  # there without metadata, too
    found: dict[str, Any] = {name: entry for name, entry in own.items() if find_spec(entry.value) is not None}
    for entry in entry_points(group=GROUP):
        if entry.name == "reference" or (entry.name in found and found[entry.name].value != entry.value):
            raise ValueError(
                f"two backends are registered as {entry.name!r}, one of them by {entry.value!r}: uninstall one"
            )
        found[entry.name] = entry
    return found


@cache
def _module(name: str) -> Backend:
    if name in ("reference", STORES):
        return cast(Backend, import_module(f"sdpa_ref.{name}"))
    if name not in _entry_points():
        raise ValueError(f"unknown backend {name!r}; there are {', '.join(map(repr, names()))}")
    try:
        backend: Backend = _entry_points()[name].load()
    except ImportError as error:
        if (error.name or "").startswith(_entry_points()[name].module + "."):
            raise  # a fault inside the backend is not something to install
        command = "pip install sdpa-ref-cupy (in a checkout: pip install ./backends)"
        if error.name != _OWN["cupy"]:
            command = install(name)
        raise BackendUnavailable(f"backend {name!r} cannot be loaded: {error}; try: {command}") from error
    return backend
