"""Each instruction of PTX as a step: what it reads and writes is looked up once, then done for the active lanes.

`step(machine, instruction)` finds the function for the first part of an instruction's name in `STEPS`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from . import arithmetic, tensor, transfers, warp
from .conversions import conversion
from .faults import Array
from .machine import Machine, Step, unknown
from .memory import WINDOWS
from .parse import SIZES, Instruction, braced
from .registers import TYPES

NEUTRAL = {"rn", "ftz", "approx"}  # in the name of arithmetic, beside its last part
WIDE = {f"{kind}{bits}": f"{kind}{2 * bits}" for kind in "us" for bits in (16, 32)}


def step(machine: Machine, instruction: Instruction) -> Step:
    """Return what the instruction does, or raise UnknownInstruction."""
    make = STEPS.get(instruction.parts[0], _arithmetic)
    try:
        return make(machine, instruction)
    except (KeyError, ValueError, IndexError) as error:
        raise unknown(instruction) from error


def _arithmetic(machine: Machine, instruction: Instruction) -> Step:
    name, *parts = instruction.parts
    kind = parts.pop()
    operation = arithmetic.OPERATIONS[".".join((name, *(part for part in parts if part not in NEUTRAL)))]
    types = {"t": kind, "w": WIDE.get(kind, kind), "u": "u32", "p": "pred"}
    target, *given = instruction.operands
    if len(given) != len(operation.takes):
        raise unknown(instruction)
    numbers = [machine.registers.read(one, types[letter]) for one, letter in zip(given, operation.takes, strict=True)]
    result, function = machine.registers.write(target, types[operation.gives]), operation.function
    if "ftz" in parts and kind == "f32":
        return _stored(result, lambda: arithmetic.flush(function(*map(arithmetic.flush, numbers))))
    if isinstance(function, np.ufunc):
        return lambda active: function(*numbers, out=result, where=active)
    return _stored(result, lambda: function(*numbers))


def _stored(result: Array, value: Callable[[], Array]) -> Step:
    return lambda active: np.copyto(result, value(), where=active)


def _compare(machine: Machine, instruction: Instruction) -> Step:
    _, order, *combined, kind = (part for part in instruction.parts if part != "ftz")
    compare = arithmetic.COMPARISONS[order]
    target, *given = instruction.operands
    a, b = (machine.registers.read(one, kind) for one in given[:2])
    results = [machine.registers.write(name.strip(), "pred") for name in target.split("|")]
    combine = arithmetic.COMBINATIONS[combined[0] if combined else "or"]
    also = machine.registers.read(given[2], "pred") if combined else np.zeros(1, bool)

    def both(active: Any) -> None:
        holds = compare(a, b)
        for result, value in zip(results, (holds, ~holds), strict=False):
            np.copyto(result, combine(value, also), where=active)

    return both


def _move(machine: Machine, instruction: Instruction) -> Step:
    """Return a step that copies a register, takes one apart, or puts one together."""
    kind = instruction.parts[-1]
    target, source = instruction.operands
    parts = max(braced(target), braced(source), key=len)
    if len(parts) == 1:
        value, result = machine.registers.read(source, kind), machine.registers.write(target, kind)
        return lambda active: np.copyto(result, value, where=active)
    piece = f"b{8 * SIZES[kind] // len(parts)}"
    if target.startswith("{"):
        whole = np.ascontiguousarray(machine.registers.read(source, kind))
        pieces = whole.view(TYPES[piece]).reshape(-1, len(parts)).T
        results = [machine.registers.write(name, piece) for name in parts]

        def take_apart(active: Any) -> None:
            for result, value in zip(results, pieces.copy(), strict=True):
                np.copyto(result, value, where=active)

        return take_apart
    given = [np.broadcast_to(machine.registers.read(name, piece), machine.registers.lanes) for name in parts]
    result = machine.registers.write(target, kind)
    return _stored(result, lambda: np.stack(given, 1).view(result.dtype)[:, 0])


def _convert(machine: Machine, instruction: Instruction) -> Step:
    *how, to, of = instruction.parts[1:]
    function = conversion(tuple(how), to, of)
    target, *given = instruction.operands
    numbers = [machine.registers.read(one, of) for one in given]
    result = machine.registers.write(target, "b32" if to in ("f16x2", "bf16x2", "tf32") else to)
    return _stored(result, lambda: function(*numbers))


def _convert_address(machine: Machine, instruction: Instruction) -> Step:
    """Return a step that turns an address in a space into one of its window, or back."""
    space = next(part for part in instruction.parts if part in WINDOWS)
    move = np.array([WINDOWS[space]], np.uint64)
    value = machine.registers.read(instruction.operands[1], "u64")
    result = machine.registers.write(instruction.operands[0], "u64")
    return _stored(result, lambda: value - move if "to" in instruction.parts else value + move)


def _nothing(machine: Machine, instruction: Instruction) -> Step:
    return lambda active: None


STEPS: dict[str, Callable[[Machine, Instruction], Step]] = {
    "setp": _compare,
    "mov": _move,
    "cvt": _convert,
    "cvta": _convert_address,
    "shfl": warp.shuffle,
    "vote": warp.vote,
    "bar": warp.meet,
    "ld": transfers.load,
    "ldu": transfers.load,
    "st": transfers.store,
    "cp": transfers.copy,
    "atom": transfers.atomic,
    "red": transfers.atomic,
    "ldmatrix": tensor.load_matrices,
    "mma": tensor.multiply,
    "prefetch": _nothing,
    "membar": _nothing,
    "fence": _nothing,
}
