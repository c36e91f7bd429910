"""Loads, stores, copies and atomic operations."""

from typing import Any

import numpy as np

from .machine import Machine, Step, unknown
from .memory import ROWS
from .parse import SIZES, Instruction, braced
from .registers import TYPES

CACHED = {
    "volatile",
    "nc",
    "relaxed",
    "weak",
    "cta",
    "gpu",
    "sys",
    "ca",
    "cg",
    "cs",
    "cv",
    "lu",
    "wb",
    "wt",
    "v2",
    "v4",
}
HINTS = ("L1:", "L2:", "level:")
ATOMIC = {
    "add": np.add,
    "min": np.fmin,
    "max": np.fmax,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}


def load(machine: Machine, instruction: Instruction) -> Step:
    """Return a step that loads one, two or four numbers into as many registers."""
    target, source = instruction.operands
    space, kind, size = _access(machine, instruction, target)
    address = machine.address(source)
    registers = [machine.registers.write(name, kind) for name in braced(target)]

    def step(active: Any) -> None:
        lanes = machine.lanes(active)
        rows = space.load(lanes, address(lanes), size)
        numbers = rows.view(TYPES[kind]).reshape(len(lanes), len(registers))
        for register, column in zip(registers, numbers.T, strict=True):
            register[lanes] = column

    return step


def store(machine: Machine, instruction: Instruction) -> Step:
    """Return a step that stores one, two or four registers."""
    target, source = instruction.operands
    space, kind, size = _access(machine, instruction, source)
    address = machine.address(target)
    registers = [machine.registers.read(name, kind) for name in braced(source)]
    registers = [np.broadcast_to(register, machine.registers.lanes) for register in registers]

    def step(active: Any) -> None:
        lanes = machine.lanes(active)
        numbers = np.stack([register[lanes] for register in registers], 1)
        space.store(lanes, address(lanes), numbers.view(ROWS[size])[:, 0])

    return step


def copy(machine: Machine, instruction: Instruction) -> Step:
    """Return a step of cp.async: begin a copy, close a group of them, or wait for groups."""
    copies, (action, *_) = machine.copies, instruction.parts[2:]
    if instruction.parts[1] != "async":
        raise unknown(instruction)
    if action == "commit_group":
        return lambda active: copies.commit(machine.lanes(active))
    if action in ("wait_group", "wait_all"):
        groups = int(instruction.operands[0]) if action == "wait_group" else -1
        return lambda active: copies.wait(machine.lanes(active), groups)
    target, source, size, *given = instruction.operands
    to, of = machine.address(target), machine.address(source)
    number = np.broadcast_to(machine.registers.read(given[0] if given else size, "u32"), machine.registers.lanes)

    def begin(active: Any) -> None:
        lanes = machine.lanes(active)
        copies.start(lanes, to(lanes), of(lanes), int(size), number[lanes])

    return begin


def atomic(machine: Machine, instruction: Instruction) -> Step:
    """Return a step that changes memory lane after lane, and gives each what was there before."""
    if "global" not in instruction.parts:  # elsewhere the watch on races would take it for a plain write
        raise unknown(instruction)
    *targets, address, value = instruction.operands
    operation = ATOMIC[next(part for part in instruction.parts if part in ATOMIC)]
    space, kind = machine.space(instruction), instruction.parts[-1]
    size, place, given = SIZES[kind], machine.address(address), machine.registers.read(value, kind)
    given = np.broadcast_to(given, machine.registers.lanes)
    results = [machine.registers.write(name, kind) for name in targets]

    def step(active: Any) -> None:
        for lane in machine.lanes(active)[:, None]:
            old = space.load(lane, place(lane), size).view(TYPES[kind])
            space.store(lane, place(lane), operation(old, given[lane]).astype(old.dtype).view(ROWS[size]))
            for result in results:
                result[lane] = old

    return step


def _access(machine: Machine, instruction: Instruction, registers: str) -> tuple[Any, str, int]:
    """Return the memory, the type of a number, and the bytes of all."""
    kind = instruction.parts[-1]
    for part in instruction.parts[1:-1]:
        if part not in CACHED and part not in machine.spaces and not part.startswith(HINTS):
            raise unknown(instruction)
    return machine.space(instruction), kind, SIZES[kind] * len(braced(registers))
