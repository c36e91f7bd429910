"""The instructions of tensor cores, by the figures of the PTX ISA: each lane of a warp holds pieces of matrices.

In every one of these fragments lane 4 g + t holds, in a row g of 8, the piece t of 4. A register is a piece of `h`
neighbours (two 16-bit numbers, or one of 32 bits); further registers are 8 rows below or 4 pieces to the right.

Sums are those of the hardware as far as it was measured. It takes the terms of a sum in groups, and adds each group to
what was there before in one step: products are exact; all of them, and the old sum, are aligned to the largest exponent
among them and cut off some bits below float32's last; their sum is cut off to float32. Nothing is rounded to nearest.

- M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh: Numerical behavior of NVIDIA tensor cores. PeerJ Computer Science 7,
  2021. (V100, T4, A100)
- F. A. Khattak, M. Mikaitis: Accurate models of NVIDIA tensor cores. arXiv 2512.07004, 2025. (V100 to B200)
- P. Xie and others: MMA-Sim, bit-accurate reference model of tensor cores and matrix cores. arXiv 2511.10909, 2025.
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
LEAST = {"f16": -14, "bf16": -126, "tf32": -126}  # exponents of the smallest normal numbers


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
        c = np.stack(c_words).reshape(2, 2, -1, 8, 4).transpose(2, 0, 3, 4, 1)  # warp, below, g, t, h
        d = product(a, b, c.reshape(-1, 16, 8), a_kind, machine.target).reshape(-1, 2, 8, 4, 2)
        for n, result in enumerate(results):
            np.copyto(result, d[:, n // 2, :, :, n % 2].reshape(-1), where=active)

    return step


def product(a: Array, b: Array, c: Array, kind: str, target: int) -> Array:
    """Return a b + c as tensor cores of an architecture add it up, float32.

    Parameters
    ----------
    a, b : float64 array (..., m, k), (..., k, n)
        Of numbers that `kind` can hold.
    c : float32 array (..., m, n)
    kind : {"f16", "bf16", "tf32"}
    target : int
        The architecture, as in 80.
    """
    bits, size = (24, 16) if target < 90 else (25, 32)  # of fractions beside the largest term; bytes of a group's terms
    group = size // (4 if kind == "tf32" else 2)
    below, right = _exponents(a, LEAST[kind]), _exponents(b, LEAST[kind])
    terms = a[..., :, None, :] * b.swapaxes(-1, -2)[..., None, :, :]
    powers = below[..., :, None, :] + right.swapaxes(-1, -2)[..., None, :, :]
    powers[terms == 0] = LEAST["tf32"]
    for k in range(0, a.shape[-1], group):
        wide = c.astype(np.float64)
        own = np.where(wide == 0, LEAST["tf32"], _exponents(wide, LEAST["tf32"]))
        scale = np.ldexp(1.0, bits - np.maximum(powers[..., k : k + group].max(-1), own))
        total = np.trunc(terms[..., k : k + group] * scale[..., None]).sum(-1) + np.trunc(wide * scale)
        c = _cut(total / scale)
    return c


def _exponents(numbers: Array, least: int) -> Array:
    """Return the exponents of numbers, that of the smallest normal one for those below it."""
    exponents: Array = np.maximum(np.frexp(numbers)[1] - 1, least)
    return exponents


def _cut(numbers: Array) -> Array:
    """Return float64 numbers cut off to float32; beyond its range they are infinite."""
    near = numbers.astype(np.float32)
    beyond = (abs(near.astype(np.float64)) > abs(numbers)) & (abs(numbers) < 2.0**128)
    return np.where(beyond, np.nextafter(near, np.float32(0)), near)


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
