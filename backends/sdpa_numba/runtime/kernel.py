"""A kernel as threads run it: a function of the worker that runs it and of the record of its call."""

from functools import cached_property

from sdpa_numba.compile.parts import linked, native, part
from sdpa_numba.vector.simd import load_int64

from .call import ARGUMENTS, CALL


class Kernel:
    """A compiled kernel, which takes the address of a worker."""

    def __init__(self, dispatcher):
        self.dispatcher = dispatcher

    @cached_property
    def address(self):
        """Where the machine code begins, which is compiled or loaded by then."""
        return native(self.dispatcher)


def kernel(function):
    """Return `function`, of a worker and the record of its call, compiled with all its parts, and cached on disk."""
    inner = part(function)

    def entry(worker):
        inner(worker, load_int64(worker + CALL) + ARGUMENTS)

    entry.__name__ = entry.__qualname__ = function.__name__
    return Kernel(linked(entry))
