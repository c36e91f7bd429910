"""The rules of floating-point arithmetic are a thread's own, and other libraries change them: here they are IEEE's.

A library that flushes subnormal numbers to zero for its own speed, or rounds in a direction for its bounds, can leave
the calling thread like that. What this library computes does not depend on it: law 18.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import ParamSpec, TypeVar

SMALLEST = sys.float_info.min  # of the normal numbers
ONE, HALF = 1.0, 0.5 * sys.float_info.epsilon  # 1 and half of its distance to the next number: no constants to fold

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def ieee(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Return `function` such that it computes by the default rules, and leaves the thread's as they were."""

    @wraps(function)
    def computed(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if keeps_subnormals() and rounds_to_nearest():
            return function(*args, **kwargs)
        with default_rules():
            return function(*args, **kwargs)

    return computed


def keeps_subnormals() -> bool:
    """Return whether this thread neither makes zeros of subnormal results nor of subnormal operands."""
    return SMALLEST * 0.5 * 2.0 == SMALLEST


def rounds_to_nearest() -> bool:
    """Return whether this thread rounds to the nearest number, and what lies halfway to the even one."""
    return ONE + HALF == ONE == ONE - HALF / 2


@contextmanager
def default_rules() -> Iterator[None]:
    """Let this thread compute by the default rules meanwhile, where its C library has a way to say so."""
    save, change, restore = _controls()
    before = save()
    change()
    try:
        yield
    finally:
        restore(before)


@cache
def _controls() -> tuple[Callable[[], object], Callable[[], object], Callable[[object], object]]:
    """Return functions that save the rules, set the default ones, and restore those that were saved."""
    try:
        if sys.platform == "win32":
            control, denormals = ctypes.CDLL("ucrtbase")._controlfp, 0x03000000
            return lambda: control(0, 0), lambda: control(0, denormals), lambda before: control(before, denormals)
        library = ctypes.CDLL(None)
        default = ctypes.c_void_p(-1)
        if sys.platform == "darwin":
            default = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(library, "_FE_DFL_ENV")))
        get, put = library.fegetenv, library.fesetenv
    except (OSError, AttributeError, ValueError):
        return lambda: None, lambda: None, lambda before: None

    def save() -> object:
        before = ctypes.create_string_buffer(256)  # more than any system's fenv_t
        get(before)
        return before

    return save, lambda: put(default), put
