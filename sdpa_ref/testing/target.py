"""What the suite is pointed at: a name, functions, and what they claim.

A target is a `Target`. Its functions take and return NumPy arrays, in the keywords of `sdpa_ref.sdpa` and no others;
an option that is not set is not passed, one that is not claimed is never passed, and ``layout`` only where both layouts
are claimed; key and value are a `Paged` or a `Quantized` where those are claimed, for some laws:

- ``forward(query, key, value, **options) -> output``;
- ``state(query, key, value, **options) -> (output, lse)``, optional, never with a sink;
- ``weights(query, key, **options) -> weights (..., Hq, L, S)``, optional;
- ``vjp(query, key, value, grad_output, **options) -> (d_query, d_key, d_value, d_bias, d_sink)``, optional, with
  ``grad_lse=`` where that is claimed; the last two are None for what was not given;
- ``merge(state, state) -> state`` of two pairs ``(output, lse)`` over other keys, by default the sum of two
  `AttentionState`. What ``state`` returns behind output and lse comes back here.

A function may decline a problem by `NotImplementedError`: that is counted and reported, and no failure.

From the outside a target is named by one word:

- the name of a backend (``numba``), which claims everything;
- the name of an adapter in `sdpa_ref.testing.adapters` (``torch``), which claims what that library documents;
- ``module:name`` or ``path/to/file.py:name``, the name of a `Target`, of a function without arguments that returns one,
  or of a plain function `forward`, whose claims are those of a manifest, else its attribute ``capabilities`` (a
  `Capabilities` or a dictionary), else what its keywords say.
"""

import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import sdpa_ref
from sdpa_ref.testing import chunks, device
from sdpa_ref.testing.capabilities import Capabilities

ADAPTERS = tuple(sorted(file.stem for file in (Path(__file__).parent / "adapters").glob("[!_]*.py")))
"""Other libraries; none in the wheel, where the adapters are not."""
OPTIONS = "mask", "bias", "scale", "softcap", "sink", "query_offset", "key_positions", "score_mod", "dropout", "layout"
_STAND_ALONE = "sdpa_ref_target_"  # before the name of a module that is loaded from a file


class TargetError(Exception):
    """A target that cannot be found, or that cannot run here; the message says why."""


def merged(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the state over the union of two disjoint sets of keys."""
    both = sdpa_ref.AttentionState(*a[:2]) + sdpa_ref.AttentionState(*b[:2])
    return both.output, both.lse


@dataclass(frozen=True)
class Target:
    """An implementation of attention and its claims.

    Attributes
    ----------
    name : str
    forward : callable
    capabilities : Capabilities
    state, weights, vjp : callable, optional
    merge : callable
    about : str
        One line for reports: the version of the library, and what the claims leave out and why.

    Examples
    --------
    >>> from sdpa_ref.testing import check
    >>> import numpy as np
    >>> def uniform(query, key, value):
    ...     mean = value.mean(-2, keepdims=True)
    ...     return np.broadcast_to(mean, (*query.shape[:-1], value.shape[-1]))
    >>> run = check(Target("uniform", uniform, Capabilities()), seconds=5)
    >>> run.passed, run.failures[0].law.name
    (False, 'plain')
    """

    name: str
    forward: Callable[..., Any]
    capabilities: Capabilities
    state: Callable[..., Any] | None = None
    weights: Callable[..., Any] | None = None
    vjp: Callable[..., Any] | None = None
    merge: Callable[..., Any] = merged
    about: str = ""

    def __post_init__(self) -> None:
        claims = self.capabilities
        for claim, function in (("lse", "state"), ("weights", "weights"), ("gradients", "vjp")):
            if getattr(claims, claim) and getattr(self, function) is None:
                raise ValueError(f"{self.name} claims {claim} but has no function {function!r}")


Claims = Capabilities | Mapping[str, Any] | None
"""Capabilities stand for all claims; a mapping adds to what a target claims by itself, or takes from it."""


def as_target(given: Any, claims: Claims = None) -> Target:
    """Return the target that is given: a `Target`, a word as `resolve` takes, or a plain function.

    Raises
    ------
    TargetError
        For what is none of these.
    """
    if isinstance(given, str):
        return resolve(given, claims)
    return _claiming(_of_object(getattr(given, "__name__", "function"), given), claims)


def resolve(word: str, capabilities: Claims = None) -> Target:
    """Return the target that a word names, with other claims where `capabilities` are given.

    Raises
    ------
    TargetError
        For one that is not there, or cannot run here.

    Examples
    --------
    >>> resolve("reference").capabilities.softcap
    True
    >>> resolve("nonsense")
    Traceback (most recent call last):
    sdpa_ref.testing.target.TargetError: unknown target 'nonsense'; there are the backends ...
    """
    if ":" in word:
        with _importable(word):
            target = _of_object(word, _named(word))
    elif word in sdpa_ref.names():
        target = _of_backend(word)
    elif word in ADAPTERS:
        adapter = import_module(f"sdpa_ref.testing.adapters.{word}")
        try:
            target = adapter.target()
        except ImportError as error:
            packages = getattr(adapter, "PACKAGES", word)
            raise TargetError(f"{word} cannot run here: {error}; try: pip install {packages}") from None
    else:
        others = ", ".join(ADAPTERS) or "of other libraries (in a checkout, after pip install -e .)"
        raise TargetError(
            f"unknown target {word!r}; there are the backends {', '.join(sdpa_ref.names())}, the adapters {others}, "
            "and your own as module:name or file.py:name"
        )
    return _claiming(target, capabilities)


def _claiming(target: Target, claims: Claims) -> Target:
    """Return the target with these claims, or with these beside its own."""
    try:
        if isinstance(claims, Mapping):
            claims = target.capabilities.updated(claims)
        return target if claims is None else replace(target, capabilities=claims)
    except ValueError as error:
        raise TargetError(str(error)) from None


def _of_backend(name: str) -> Target:
    try:
        backend = sdpa_ref.load(name)
    except sdpa_ref.BackendUnavailable as error:
        raise TargetError(str(error)) from None

    def state(*arrays: Any, **options: Any) -> tuple[Any, ...]:
        return _triple(sdpa_ref.sdpa_state(*arrays, backend=name, **options))

    def merge(a: tuple[Any, ...], b: tuple[Any, ...]) -> tuple[Any, ...]:
        return _triple(a[2] + b[2])

    about = f"a backend of sdpa_ref {sdpa_ref.__version__}"
    precision = backend.precision() if "precision" in backend.TASKS else "float32"
    if backend.ARRAYS == "dask":
        return _of_chunks(name, about)
    has_gradients = "vjp" in backend.TASKS
    claims = Capabilities.everything(gradients=has_gradients, lse_gradients=has_gradients, precision=precision)
    if backend.ARRAYS != "numpy":
        return Target(
            name=name,
            forward=device.over(sdpa_ref.sdpa, name),
            capabilities=claims,
            state=device.over(sdpa_ref.sdpa_state, name),
            weights=device.over(sdpa_ref.sdpa_weights, name),
            vjp=device.over(sdpa_ref.sdpa_vjp, name) if has_gradients else None,
            merge=device.merged,
            about=f"{about}; cases are moved to {backend.ARRAYS} arrays and back",
        )
    return Target(
        name=name,
        forward=partial(sdpa_ref.sdpa, backend=name),
        capabilities=claims,
        state=state,
        weights=partial(sdpa_ref.sdpa_weights, backend=name),
        vjp=partial(sdpa_ref.sdpa_vjp, backend=name) if has_gradients else None,
        merge=merge,
        about=about,
    )


def _of_chunks(name: str, about: str) -> Target:
    return Target(
        name=name,
        forward=chunks.over(sdpa_ref.sdpa, name),
        capabilities=Capabilities.everything(paged=False, quantized=False),
        state=chunks.over(sdpa_ref.sdpa_state, name),
        weights=chunks.over(sdpa_ref.sdpa_weights, name),
        vjp=chunks.over(sdpa_ref.sdpa_vjp, name),
        merge=lambda a, b: _triple(a[2] + b[2]),
        about=f"{about}; cases are cut into chunks",
    )


def _triple(state: sdpa_ref.AttentionState) -> tuple[Any, ...]:
    """Return output and lse, and the state itself, which has more."""
    return state.output, state.lse, state


def _named(word: str) -> Any:
    """Return the object that ``module:name`` or ``file.py:name`` names."""
    where, _, name = word.rpartition(":")
    is_file = where.endswith(".py")
    if is_file and not Path(where).is_file():
        raise TargetError(f"there is no file {where!r}")
    try:
        module = _of_file(Path(where)) if is_file else import_module(where)
    except ImportError as error:
        raise TargetError(f"cannot import {where!r}: {error}") from None
    except (Exception, SystemExit) as error:  # whatever the caller's module raises while it is imported
        raise TargetError(f"importing {where!r} raised {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise TargetError(f"{where!r} has no {name!r}")
    return getattr(module, name)


@contextmanager
def _importable(word: str) -> Iterator[None]:
    """Import from the folder of the file in the word, and from the current one, before all others."""
    folders = [str(folder.resolve()) for folder in (Path(word.rpartition(":")[0]).parent, Path())]
    sys.path[:0] = folders
    try:
        yield
    finally:
        for folder in folders:
            with suppress(ValueError):  # the target took it out itself
                sys.path.remove(folder)


def _of_file(path: Path) -> ModuleType:
    name = _STAND_ALONE + path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError("this is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _of_object(word: str, found: Any) -> Target:
    if isinstance(found, Target):
        return found
    if not callable(found):
        raise TargetError(f"{word} is neither a function nor a Target but {type(found).__name__}")
    claims = getattr(found, "capabilities", None)
    if claims is None and not _required(found):
        made = _made(word, found)
        if not isinstance(made, Target):
            raise TargetError(f"{word}() must return a Target, got {type(made).__name__}")
        return made
    if claims is None:
        claims = Capabilities.of_signature(found)
    elif not isinstance(claims, Capabilities):
        try:
            claims = Capabilities.of(claims)
        except ValueError as error:
            raise TargetError(f"{word}: {error}") from None
    return Target(word, found, claims, about=_never_passed(found))  # its other functions are those of a Target


def _made(word: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise TargetError(f"{word}() raised {type(error).__name__}: {error}") from error


def _never_passed(function: Callable[..., Any]) -> str:
    """Return which optional parameters of the function no call will have, in a sentence, or ""."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # a compiled function without a signature
        return ""
    options = [p for n, p in enumerate(parameters) if p.default is not p.empty and (n > 2 or p.kind is p.KEYWORD_ONLY)]
    foreign = ", ".join(p.name for p in options if p.name not in OPTIONS)
    return f"its keywords {foreign} are not ours and were never passed; ours: {', '.join(OPTIONS)}" if foreign else ""


def _required(function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
