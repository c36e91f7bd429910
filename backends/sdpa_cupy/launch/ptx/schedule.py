"""The order in which lanes run: those at the lowest instruction first, and a warp together where it has to be.

Lanes that part meet again by that order where code follows code. Where the compiler put the end of a loop before its
body, they meet at the next instruction of the whole warp, before which some wait for the others.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_cupy.plan import Launch

from .faults import Array, Fault
from .instructions import step
from .machine import WARP, Machine, Step, unknown
from .memory import Global
from .parse import Instruction, Kernel

NOWHERE = -1
TOGETHER = ("shfl", "vote", "mma", "ldmatrix")  # and bar.warp
LANES, SHARED_BYTES = 2048, 1 << 22  # of the blocks that run at once


def run(kernel: Kernel, launch: Launch, memory: Global, parameters: bytes) -> None:
    """Return when all blocks of a grid have run.

    Parameters
    ----------
    kernel : Kernel
    launch : Launch
        Of which grid, threads and shared memory count.
    memory : Global
    parameters : bytes

    Raises
    ------
    Fault
        With the block, the thread and the instruction.
    UnknownInstruction
        For PTX that the interpreter does not implement, where it would run.
    """
    if len(parameters) != kernel.sizes["param"]:
        raise ValueError(f"{kernel.name} takes {kernel.sizes['param']} bytes of parameters, got {len(parameters)}")
    size = kernel.sizes["shared"] + launch.shared
    at_once = max(1, min(LANES // launch.threads, SHARED_BYTES // max(size, 1)))
    blocks = np.stack(np.unravel_index(np.arange(np.prod(launch.grid)), launch.grid, order="F"), 1)
    with np.errstate(all="ignore"):
        for n in range(0, len(blocks), at_once):
            Schedule(kernel, Machine(kernel, memory, parameters, launch, blocks[n : n + at_once])).run()


class Schedule:
    """The code of a kernel, prepared for a machine as far as it runs, and which lanes stand where.

    Attributes
    ----------
    at : dict
        The lanes that stand before each instruction and can go on.
    parted : dict
        The lanes that wait before an instruction of the whole warp for the rest of theirs.
    barrier : int array, one number a lane
        The barrier at which the lane waits, or NOWHERE.
    flags : bool array, one a lane
        What each brings to a barrier that tests whether any has a flag.
    """

    def __init__(self, kernel: Kernel, machine: Machine) -> None:
        self.kernel, self.machine = kernel, machine
        self.at = {0: np.ones(machine.registers.lanes, bool)}
        self.parted: dict[int, Array] = {}
        self.barrier = np.full(machine.registers.lanes, NOWHERE)
        self.flags = np.zeros(machine.registers.lanes, bool)
        self._prepared: dict[int, tuple[bool, bool, Step]] = {}

    def run(self) -> None:
        """Return when all lanes have ended."""
        while self.at:
            here = min(self.at)
            lanes = self.at.pop(here)
            self._until(min(self.at, default=len(self.kernel.code)), here, lanes)
        for n, lanes in self.parted.items():
            raise self._fault(n, Fault("a part of the warp waits for lanes that do not come", int(np.argmax(lanes))))
        if (self.barrier != NOWHERE).any():
            lane = int(np.argmax(self.barrier != NOWHERE))
            raise self._fault(self.barrier[lane], Fault("some threads wait at a barrier, others have ended", lane))

    def _until(self, end: int, here: int, lanes: Array) -> None:
        """Run these lanes up to an instruction where others stand, or to one after which they may part."""
        active = True if lanes.all() else lanes
        while here < end:
            flow, together, do = self._prepared.get(here) or self._prepare(here)
            self.machine.races.now += 1
            if together and active is not True:
                lanes = active = self._whole_warps(here, lanes)
                if not lanes.any():
                    return
            try:
                if flow:
                    do(lanes)
                    return
                do(active)
            except Fault as fault:
                raise self._fault(here, fault) from fault
            here += 1
        self._go(here, lanes)

    def _go(self, target: int, lanes: Array) -> None:
        """Let lanes stand before an instruction."""
        if lanes.any():
            self.at[target] = self.at[target] | lanes if target in self.at else lanes

    def _whole_warps(self, n: int, lanes: Array) -> Array:
        """Return the lanes, with those that waited for them, whose whole warp is there; the others wait."""
        lanes = lanes | self.parted.pop(n, False)
        whole = np.repeat(lanes.reshape(-1, WARP).all(1), WARP)
        if (lanes & ~whole).any():
            self.parted[n] = lanes & ~whole
        return whole

    def _fault(self, n: int, fault: Fault) -> Fault:
        block, thread = divmod(fault.lane, self.machine.threads)
        place, text = tuple(int(axis) for axis in self.machine.blocks[block]), self.kernel.code[n].text
        return Fault(f"{self.kernel.name}, block {place}, thread {thread}: {fault} in: {text}", fault.lane)

    def _prepare(self, n: int) -> tuple[bool, bool, Step]:
        """Return whether an instruction says where to go on, whether it is one of whole warps, and what it does."""
        instruction = self.kernel.code[n]
        guard = self.machine.registers.read(instruction.guard, "pred") if instruction.guard else None
        of_warp = instruction.parts[0] in TOGETHER or instruction.parts[:2] == ("bar", "warp")
        make = None if of_warp else FLOW.get(instruction.parts[0])
        if make is None:
            do = _guarded(step(self.machine, instruction), guard, instruction.negated)
        else:
            do = self._parting(n, make(self, n, instruction), guard, instruction.negated)
        self._prepared[n] = make is not None, of_warp, do
        return self._prepared[n]

    def _parting(self, n: int, do: Step, guard: Array | None, negated: bool) -> Step:
        """Return what lanes do that a guard may part: some this, the others the next instruction."""

        def part(lanes: Array) -> None:
            chosen = lanes if guard is None else lanes & (guard != negated)
            self._go(n + 1, lanes & ~chosen)
            if chosen.any():
                do(chosen)

        return part


def _guarded(do: Step, guard: Array | None, negated: bool) -> Step:
    if guard is None:
        return do

    def guarded(active: Any) -> None:
        chosen = (guard != negated) & active
        if chosen.any():
            do(chosen)

    return guarded


def _branch(schedule: Schedule, n: int, instruction: Instruction) -> Step:
    target = schedule.kernel.labels[instruction.operands[0]]
    return lambda lanes: schedule._go(target, lanes)


def _choose_branch(schedule: Schedule, n: int, instruction: Instruction) -> Step:
    """Return the way of brx.idx: a number in a register chooses among labels."""
    choice = schedule.machine.registers.read(instruction.operands[0], "u32")
    labels = schedule.kernel.targets[instruction.operands[1]]

    def go(lanes: Array) -> None:
        for number, label in enumerate(labels):
            schedule._go(schedule.kernel.labels[label], lanes & (choice == number))

    return go


def _end(schedule: Schedule, n: int, instruction: Instruction) -> Step:
    return lambda lanes: None


def _trap(schedule: Schedule, n: int, instruction: Instruction) -> Step:
    def trap(lanes: Array) -> None:
        raise Fault("the kernel gives up", int(np.argmax(lanes)))

    return trap


def _meet(schedule: Schedule, n: int, instruction: Instruction) -> Step:
    """Return the way of a barrier: on when all threads of the block are there, perhaps with whether any has a flag."""
    parts = [part for part in instruction.parts[1:] if part not in ("cta", "aligned", "all")]
    registers = schedule.machine.registers
    asks = parts == ["red", "or", "pred"]
    operands = list(instruction.operands)
    result = registers.write(operands.pop(0), "pred") if asks else None
    flag = registers.read(operands.pop(), "pred") if asks else False
    if not (asks or parts == ["sync"]) or operands != ["0"]:
        raise unknown(instruction)

    def meet(lanes: Array) -> None:
        schedule.barrier[lanes] = n
        schedule.flags[lanes] = np.broadcast_to(flag, lanes.shape)[lanes]
        waits = schedule.barrier.reshape(-1, schedule.machine.threads)
        elsewhere = (waits != n) & (waits != NOWHERE) & lanes.reshape(waits.shape).any(1)[:, None]
        if elsewhere.any():
            raise Fault("other threads of the block wait at another barrier", int(np.argmax(lanes)))
        complete = np.repeat((waits == n).all(1), schedule.machine.threads)
        if result is not None:
            some = np.repeat(schedule.flags.reshape(waits.shape).any(1), schedule.machine.threads)
            np.copyto(result, some, where=complete)
        schedule.barrier[complete] = NOWHERE
        schedule.machine.races.since_block[complete] = schedule.machine.races.now
        schedule._go(n + 1, complete)

    return meet


FLOW: dict[str, Callable[[Schedule, int, Instruction], Step]] = {
    "bra": _branch,
    "brx": _choose_branch,
    "ret": _end,
    "exit": _end,
    "trap": _trap,
    "bar": _meet,
    "barrier": _meet,
}
