"""What instructions work on: the registers and the memory of some blocks, which run in lockstep."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_cupy.plan import Launch

from .copies import Copies
from .faults import Array, UnknownInstruction, check
from .memory import Generic, Global, Parameters, Pieces, Shared
from .parse import SIZES, Instruction, Kernel
from .races import Races
from .registers import Registers

Step = Callable[[Any], None]  # takes which lanes are active: a bool array, or True for all
WARP = 32


class Machine:
    """Some blocks of a grid.

    Attributes
    ----------
    every : int64 array
        The numbers of all lanes.
    target : int
        The architecture.
    spaces : dict
        The memory, by the name of its state space; "" where an address says which.
    """

    def __init__(self, kernel: Kernel, memory: Global, parameters: bytes, launch: Launch, blocks: Array) -> None:
        self.registers = Registers(kernel, blocks, launch.grid, launch.threads)
        self.blocks, self.threads, self.target = blocks, launch.threads, kernel.target
        self.every = np.arange(self.registers.lanes)
        size = kernel.sizes["shared"] + launch.shared
        self.races = Races(Pieces.stride(size) * len(blocks), _piece(kernel), self.registers.thread)
        own = Shared(Pieces(size, self.registers.block), self.races)
        self.copies = Copies(own, memory, self.registers.lanes)
        self.spaces: dict[str, Any] = {"global": memory, "shared": own, "param": Parameters(parameters)}
        self.spaces["local"] = Pieces(kernel.sizes["local"], self.every)
        self.spaces[""] = Generic(memory, own, self.spaces["local"])

    def lanes(self, active: Any) -> Array:
        """Return the numbers of the active lanes."""
        return self.every if active is True else np.flatnonzero(active)

    def whole_warps(self, active: Any) -> None:
        """Raise a fault unless the lanes of each warp are all active, or none."""
        if active is not True:
            of_warp = active.reshape(-1, WARP)
            parted = of_warp.any(1) & ~of_warp.all(1)
            check(parted, "only a part of the warp is at an instruction for all of it", np.arange(0, active.size, WARP))

    def address(self, operand: str) -> Callable[[Array], Array]:
        """Return the function that gives the address in ``[%rd1+16]`` for some lanes."""
        base, _, offset = operand.strip("[] ").partition("+")
        register = np.broadcast_to(self.registers.raw(base), self.registers.lanes)
        add = int(offset or "0", 0)
        return lambda lanes: register[lanes].astype(np.int64) + add

    def space(self, instruction: Instruction) -> Any:
        """Return the memory that the instruction names."""
        return self.spaces[next((part for part in instruction.parts if part in self.spaces), "")]


def unknown(instruction: Instruction) -> UnknownInstruction:
    """Return the error for an instruction that is not known, or not in this form."""
    return UnknownInstruction(f"the interpreter of PTX does not know {'.'.join(instruction.parts)}: {instruction.text}")


def _piece(kernel: Kernel) -> int:
    """Return the size of the smallest access to shared memory, which is what the watch on races tells apart."""
    sizes = [SIZES[each.parts[-1]] for each in kernel.code if each.parts[0] in ("ld", "st", "atom", "red")
             and not {"global", "param", "local"} & set(each.parts)]  # fmt: skip
    return min([4, *sizes])
