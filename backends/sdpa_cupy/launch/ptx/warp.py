"""What the lanes of a warp do together, except with matrices."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .faults import Array, Fault
from .machine import WARP, Machine, Step
from .parse import Instruction

ALL_LANES = 0xFFFFFFFF
SOURCES: dict[str, Callable[[Array, Array, Array, Array], tuple[Array, Array]]] = {
    "up": lambda lane, by, first, last: (lane - by, lane - by >= last),
    "down": lambda lane, by, first, last: (lane + by, lane + by <= last),
    "bfly": lambda lane, by, first, last: (lane ^ by, (lane ^ by) <= last),
    "idx": lambda lane, by, first, last: (first | by, (first | by) <= last),
}
"""Which lane a shuffle reads from, and whether that is within the lane's segment of the warp."""
VOTES: dict[str, Callable[[Array], Array]] = {
    "any": lambda flags: flags.any(1),
    "all": lambda flags: flags.all(1),
    "uni": lambda flags: flags.any(1) == flags.all(1),
    "ballot": lambda flags: np.packbits(flags, axis=1, bitorder="little").view(np.uint32)[:, 0],
}


def shuffle(machine: Machine, instruction: Instruction) -> Step:
    """Return a step of shfl.sync: each lane reads a number of another one."""
    target, source, which, limits, members = instruction.operands
    names = [name.strip() for name in target.split("|")]
    results = [machine.registers.write(names[0], "b32"), *(machine.registers.write(name, "pred") for name in names[1:])]
    value, by, limit = (np.broadcast_to(machine.registers.read(one, "b32"), machine.every.shape)
                        for one in (source, which, limits))  # fmt: skip
    together, lane = _together(machine, members), machine.registers.thread % WARP
    place = SOURCES[instruction.parts[2]]

    def step(active: Any) -> None:
        together(active)
        segment, clamp = limit.astype(np.int64) >> 8 & 31, limit.astype(np.int64) & 31
        first = lane & segment
        other, valid = place(lane, by.astype(np.int64) & 31, first, first | (clamp & ~segment))
        shuffled = value[machine.every - lane + np.where(valid, other, lane)]
        for result, number in zip(results, (shuffled, valid), strict=False):
            np.copyto(result, number, where=active)

    return step


def vote(machine: Machine, instruction: Instruction) -> Step:
    """Return a step of vote.sync: one answer for the warp about a predicate of each lane."""
    target, source, members = instruction.operands
    count, together = VOTES[instruction.parts[2]], _together(machine, members)
    flags = np.broadcast_to(machine.registers.read(source, "pred"), machine.every.shape)
    result = machine.registers.write(target, instruction.parts[-1])

    def step(active: Any) -> None:
        together(active)
        np.copyto(result, np.repeat(count(flags.reshape(-1, WARP)), WARP), where=active)

    return step


def meet(machine: Machine, instruction: Instruction) -> Step:
    """Return a step of bar.warp.sync, which puts the lanes' accesses to memory in order."""
    together = _together(machine, instruction.operands[0])

    def step(active: Any) -> None:
        together(active)
        machine.races.since_warp[machine.lanes(active)] = machine.races.now

    return step


def _together(machine: Machine, operand: str) -> Step:
    """Return a check that all lanes of the active warps are active, and are named as those that take part."""
    members = np.broadcast_to(machine.registers.read(operand, "u32"), machine.every.shape)

    def check(active: Any) -> None:
        machine.whole_warps(active)
        if (members[machine.lanes(active)] != ALL_LANES).any():
            raise Fault("only some lanes of the warp are named as taking part")

    return check
