"""A launcher without a device: an interpreter of the PTX that NVRTC makes of the kernels.

It runs the inline assembly and the compiler's own output, the blocks of a grid in lockstep with a NumPy call for each
instruction. It reports what a device would only now and then get wrong: reads outside all arrays, misaligned
ones, races in shared memory, copies that are not waited for, barriers that some threads miss. Shared memory and new
arrays hold NaN at first.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from sdpa_cupy.compile import KERNELS, compiled
from sdpa_cupy.plan import Launch

from .faults import Array, Fault, UnknownInstruction
from .memory import Global
from .parse import Kernel, kernels
from .schedule import run

__all__ = ["Fault", "Global", "Interpreter", "Kernel", "UnknownInstruction", "kernels", "run"]


class Interpreter:
    """A launcher on arrays of NumPy, for the PTX of one architecture, and of the kernels in a folder."""

    def __init__(self, arch: int, folder: Path = KERNELS) -> None:
        self._arch, self._folder = arch, folder
        self._memory = Global()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return a new array with all bits set."""
        array = np.empty(shape, dtype)
        if array.size:
            array.view(np.uint8)[...] = 0xFF
        return array

    def address(self, array: Array | None) -> int:
        """Return where an array begins, 0 for None; kernels may read it from now on, or write it if it is writeable."""
        if array is None:
            return 0
        self._memory.add(array)
        return int(array.ctypes.data)

    def moved(self, array: Array | None) -> Array | None:
        """Return the array, which kernels can read where it lies."""
        return array

    def run(self, launch: Launch, parameters: Array) -> None:
        """Run one kernel after those before it.

        Raises
        ------
        Fault
            With the block, the thread and the instruction.
        UnknownInstruction
            For PTX that the interpreter does not implement.
        """
        kernel = _module(compiled(launch.source, launch.defines, self._arch, "ptx", self._folder))[launch.kernel]
        run(kernel, launch, self._memory, parameters.tobytes())


@cache
def _module(ptx: bytes) -> dict[str, Kernel]:
    return kernels(ptx.decode())
