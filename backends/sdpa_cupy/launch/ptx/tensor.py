"""The instructions of tensor cores, by the figures of the PTX ISA: each lane of a warp holds pieces of matrices.

In every one of these fragments lane 4 g + t holds, in a row g of 8, the piece t of 4. A register is a piece of `h`
neighbours (two 16-bit numbers, or one of 32 bits); further registers are 8 rows below or 4 pieces to the right.
Sums are rounded once here; devices cut off bits on the way.
"""

import re
from typing import Any

import numpy as np

from .faults import Array
from .machine import WARP, Machine, Step, unknown
from .parse import Instruction, braced
from .registers import TYPES

SHAPE = re.compile(r"m16n8k(\d+)")
ROW = 16  # bytes of a row of a matrix in shared memory
TF32_BITS = np.uint32(0xFFFFE000)


def multiply(machine: Machine, instruction: Instruction) -> Step:
    """Return a step of mma.sync: d = a b + c, with float32 sums of float16, bfloat16 or TF32 numbers."""
    _, *how, shape, a_order, b_order, d_kind, a_kind, b_kind, c_kind = instruction.parts
    size = SHAPE.fullmatch(shape)
    described = (how, a_order, b_order, d_kind, c_kind, a_kind in ("f16", "bf16", "tf32"))
    if size is None or a_kind != b_kind or described != (["sync", "aligned"], "row", "col", "f32", "f32", True):
        raise unknown(instruction)
    D, A, B, C = (braced(operand) for operand in instruction.operands)
    pieces = 2 if a_kind != "tf32" else 1
    across = int(size[1]) // (4 * pieces)
    if [len(D), len(A), len(B), len(C)] != [4, 2 * across, across, 4]:
        raise unknown(instruction)
    a_words, b_words, c_words = (
        [np.broadcast_to(machine.registers.read(name, kind), machine.registers.lanes) for name in names]
        for names, kind in ((A, "b32"), (B, "b32"), (C, "f32"))
    )
    results = [machine.registers.write(name, "f32") for name in D]

    def step(active: Any) -> None:
        machine.whole_warps(active)
        a = _numbers(a_words, a_kind).reshape(across, 2, -1, 8, 4, pieces)  # right, below, warp, g, t, h
        b = _numbers(b_words, a_kind).reshape(across, -1, 8, 4, pieces)
        a = a.transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 4 * pieces * across)
        b = b.transpose(1, 0, 3, 4, 2).reshape(-1, 4 * pieces * across, 8)
        product = (a @ b).reshape(-1, 2, 8, 4, 2)  # warp, below, g, t, h
        totals = [product[:, n // 2, :, :, n % 2].reshape(-1) + c_words[n] for n in range(4)]
        for result, total in zip(results, totals, strict=True):
            np.copyto(result, total, where=active)

    return step


def _numbers(words: list[Array], kind: str) -> Array:
    """Return what registers hold as float64, which is exact for products."""
    stacked = np.stack(words)
    numbers = (stacked & TF32_BITS).view(np.float32) if kind == "tf32" else stacked.view(TYPES[kind])
    return numbers.astype(np.float64)


def load_matrices(machine: Machine, instruction: Instruction) -> Step:
    """Return a step of ldmatrix: lane 8 m + i names the row i of matrix m; each register receives a matrix."""
    target, source = instruction.operands
    names = braced(target)
    transposed = "trans" in instruction.parts
    known = ("ldmatrix", "sync", "aligned", "m8n8", f"x{len(names)}", *["trans"] * transposed, "shared", "b16")
    if tuple(part.removesuffix(":cta") for part in instruction.parts) != known:
        raise unknown(instruction)
    shared, address = machine.space(instruction), machine.address(source)
    registers = [machine.registers.write(name, "b32") for name in names]

    def step(active: Any) -> None:
        machine.whole_warps(active)
        lanes = machine.lanes(active)
        naming = lanes[lanes % WARP < 8 * len(names)]
        rows = shared.load(naming, address(naming), ROW).view(np.uint16).reshape(-1, len(names), 8, 8)
        if transposed:
            rows = np.ascontiguousarray(rows.swapaxes(2, 3))
        words = rows.view(np.uint32).reshape(-1, len(names), WARP)
        for n, register in enumerate(registers):
            register[lanes] = words[:, n].reshape(-1)

    return step
