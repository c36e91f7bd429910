"""Compilation with Numba, kept on disk under a key of everything that the machine code depends on.

Numba's own cache checks the one file that holds a function, cannot tell apart what functions made at run time call,
and keeps an index that processes overwrite for each other. Here every compilation is a file of its own; a change in any
source of this package, other versions or another processor lead to other files. What the key cannot describe is
compiled in every process anew, and a file that cannot be read back is as good as none.
"""

import hashlib
import math
import pickle
import pkgutil
import platform
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import CodeType, EllipsisType, FunctionType
from typing import Any

import llvmlite
import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

from sdpa_ref import disk

PACKAGE = str(__package__).partition(".")[0]
SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "DEBUGINFO_DEFAULT")  # of Numba, that change machine code
LIBRARIES = (math, np, numba)  # known by the names of what is in them, as their versions are in the key


def jit(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Return `function` compiled by Numba, without the GIL, with IEEE arithmetic and cached on disk.

    Parameters
    ----------
    function : callable, optional
        What to compile. Without it, a decorator that takes it.
    **options
        More options of `numba.njit`.

    Returns
    -------
    numba.core.dispatcher.Dispatcher
        Compiles, or loads from disk, once for each combination of argument types.
    """
    if function is None:
        return lambda function: jit(function, **options)
    dispatcher = numba.njit(nogil=True, error_model="numpy", boundscheck=False, **options)(function)
    dispatcher._cache = _DiskCache(dispatcher)  # where Numba's `cache=True` puts its own
    return dispatcher


@cache
def cache_directory() -> Path:
    """Return the directory for kernels of exactly these sources, versions and settings; it need not exist.

    Raises
    ------
    OSError
        There is no folder for it, or no telling what this package consists of.
    """
    versions = [platform.python_implementation(), platform.python_version()]
    versions += [module.__version__ for module in (numba, llvmlite, np)]
    settings = [getattr(numba.config, name, None) for name in SETTINGS]
    return disk.directory("numba", repr((versions, settings, _modules())).encode())


def cache_info() -> disk.State:
    """Return where compiled kernels are kept, or why they cannot be, after trying to write a file there."""
    return disk.state(cache_directory)


def _modules() -> list[tuple[str, Any]]:
    """Return what each module of this package is made of: its source, or its code where there is no source."""
    try:
        found = sorted(_modules_in(PACKAGE, sys.modules[PACKAGE].__path__))
    except Exception as error:  # whatever the loader of an installation without files raises
        raise OSError(f"the sources of {PACKAGE} cannot be read ({type(error).__name__}: {error})") from None
    if __name__ not in dict(found):
        raise OSError(f"the modules of {PACKAGE} cannot be listed")
    return found


def _modules_in(package: str, path: Any) -> Iterator[tuple[str, Any]]:
    """Yield the modules of a package and of the packages in it."""
    for module in pkgutil.iter_modules(path):
        name = f"{package}.{module.name}"
        spec: Any = module.module_finder.find_spec(name, None)
        source = spec.loader.get_source(name)
        yield name, _describe(spec.loader.get_code(name), {}) if source is None else source
        if module.ispkg:
            yield from _modules_in(name, spec.submodule_search_locations)


class _Unknown(Exception):
    """A thing without a description that other processes would share."""


_FAILURES = (
    _Unknown, pickle.PickleError, AttributeError, EOFError, ImportError, LookupError, MemoryError, RuntimeError,
    TypeError, ValueError,
)  # fmt: skip
"""Beside an OSError: a kernel that cannot be described, pickled, or built again.

Anything else comes from a handler of signals, which may raise here as anywhere, and is the caller's.
"""


class _DiskCache(NullCache):
    """The stored compilations of one function: for each signature a file, which starts with the digest of the rest."""

    def __init__(self, dispatcher: Any) -> None:
        self.dispatcher = dispatcher

    @property
    def cache_path(self) -> str:
        """The directory, for `dispatcher.stats`."""
        return str(cache_info().directory)

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """Return the compilation stored for `signature`, None where there is none or none that works."""
        rtsys.initialize(target_context)  # all that loaded code needs; compilers load the rest, which takes 0.1 s
        with disk.harmless(*_FAILURES):  # compiling is the remedy
            content = disk.read(self._file(signature, target_context.codegen()))
            return None if content is None else CompileResult._rebuild(target_context, *pickle.loads(content))
        return None

    def save_overload(self, signature: Any, compilation: Any) -> None:
        """Store `compilation`; if that fails, do without."""
        if compilation.library.has_dynamic_globals:  # addresses in this process
            return
        with disk.harmless(*_FAILURES):
            disk.write(self._file(signature, compilation.codegen), dumps(compilation._reduce()))

    def _file(self, signature: Any, codegen: Any) -> Path:
        arguments = tuple(getattr(signature, "args", signature))
        key = repr(_describe((self.dispatcher, arguments, codegen.magic_tuple()), {}))
        return cache_directory() / f"{self.dispatcher.__name__}-{hashlib.sha256(key.encode()).hexdigest()[:32]}"


def _describe(thing: Any, seen: dict[int, int]) -> Any:
    """Return nested tuples of text, equal in two processes only if kernels that use `thing` are equal there.

    `seen` numbers the functions that are described already, as most are used more than once.
    """
    describe = partial(_describe, seen=seen)
    match thing:
        case None | bool() | int() | float() | complex() | str() | bytes() | np.generic() | np.dtype() | EllipsisType():
            return type(thing).__name__, repr(thing)
        case tuple() | list():
            return tuple(map(describe, thing))
        case set() | frozenset():
            return tuple(sorted(map(describe, thing)))
        case dict():
            return tuple((name, describe(thing[name])) for name in sorted(thing))
        case types.Number() | types.Boolean() | types.NoneType() | types.Array() | types.CPointer() | types.Literal():
            return type(thing).__name__, repr(thing)
        case types.Type() if _is_ours(type(thing)):
            return type(thing).__name__, repr(thing)
        case types.BaseTuple():
            return type(thing).__name__, getattr(thing, "fields", ()), describe(thing.types)
        case types.Dispatcher():
            return "type of", describe(thing.dispatcher)
        case ir.Type() | ir.Constant():
            return "llvm", str(thing)
        case type() if _is_ours(thing):
            return thing.__module__, thing.__qualname__
        case _ if place := _place_in_library(thing):
            return place
        case FunctionType() if id(thing) in seen:
            return "again", seen[id(thing)]
        case FunctionType():
            seen[id(thing)] = len(seen)
            return describe(_ingredients(thing))
        case CodeType():
            return thing.co_code.hex(), thing.co_names, describe(thing.co_consts)
        case _ if hasattr(thing, "__wrapped__"):  # a dispatcher or an intrinsic
            options = [getattr(thing, name, None) for name in ("targetoptions", "locals")]
            return type(thing).__name__, describe(options), describe(thing.__wrapped__)
    raise _Unknown(thing)


def _is_ours(thing: Any) -> bool:
    """Return whether a function or class is of this package, whose sources are in the key."""
    return str(thing.__module__).startswith(f"{PACKAGE}.")


def _place_in_library(thing: Any) -> str | None:
    """Return the name of a library, or of what a library has under its own name, None for anything else."""
    name = str(getattr(thing, "__name__", ""))
    for library in LIBRARIES:
        if thing is library or thing is getattr(library, name, None):
            return f"{library.__name__}: {name}"
    return None


def _ingredients(function: FunctionType) -> tuple[Any, ...]:
    """Return what makes a function: what it encloses, and its place in this package or else its code and globals."""
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    enclosed, code = (cells, function.__defaults__, function.__kwdefaults__), function.__code__
    if _is_ours(function):
        return enclosed, function.__module__, function.__qualname__, code.co_firstlineno
    names = {name for part in _codes(code) for name in part.co_names} & function.__globals__.keys()
    return enclosed, code, {name: function.__globals__[name] for name in names}


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function and of all functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
