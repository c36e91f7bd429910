"""The registers of all lanes of some blocks at once: each an array with a number a lane, seen in any type."""

from typing import Any

import ml_dtypes
import numpy as np

from .faults import Array
from .parse import INTEGERS, SIZES, Kernel

BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
KINDS = {"b": "u", "u": "u", "s": "i"}
TYPES = {name: np.dtype(f"{KINDS[name[0]]}{size}") for name, size in INTEGERS.items()}
TYPES |= {"pred": np.dtype(bool), "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
TYPES |= {"f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}


class Registers:
    """The lanes of blocks of a grid, one after the other.

    A view that `read` or `write` returns stays valid: the operands of an instruction are resolved once. Before anything
    is written, all bits are set, which is NaN in every floating type.

    Attributes
    ----------
    block, thread : int64 arrays, one number a lane
        The lane's block among those that run, and its number in it.
    """

    def __init__(self, kernel: Kernel, blocks: Array, grid: tuple[int, int, int], threads: int) -> None:
        self.lanes = len(blocks) * threads
        self.block, self.thread = np.divmod(np.arange(self.lanes), threads)
        self._offsets = kernel.offsets
        self._arrays: dict[str, Array] = {}
        for kind in set(kernel.registers.values()):
            names = [name for name, each in kernel.registers.items() if each == kind]
            self._arrays |= zip(names, unset(kind, (len(names), self.lanes)), strict=True)
        special: dict[str, Any] = {
            "%tid.x": self.thread,
            "%ntid.x": threads,
            "%laneid": self.thread % 32,
            "%warpid": self.thread // 32,
        }
        for axis, letter in enumerate("xyz"):
            special |= {f"%ctaid.{letter}": blocks[self.block, axis], f"%nctaid.{letter}": grid[axis]}
        special |= {"%tid.y": 0, "%tid.z": 0, "%ntid.y": 1, "%ntid.z": 1}
        self._special = {name: np.broadcast_to(np.uint32(value), self.lanes).copy() for name, value in special.items()}

    def read(self, operand: str, kind: str) -> Array:
        """Return the numbers of a register, a literal or the offset of a variable, in this type."""
        dtype = TYPES[kind]
        if operand in self._arrays:
            return _low(self._arrays[operand], dtype)
        if operand in self._special:
            return _low(self._special[operand], dtype)
        if operand in self._offsets:
            return np.array([self._offsets[operand]], dtype)
        return literal(operand, dtype)

    def raw(self, operand: str) -> Array:
        """Return an address: the bits of a register, or the offset of a variable."""
        return self._arrays[operand] if operand in self._arrays else self.read(operand, "u64")

    def write(self, name: str, kind: str) -> Array:
        """Return where to write numbers of this type: a wider register takes them extended by their sign."""
        if name == "_":
            return unset(kind, (self.lanes,))
        array, dtype = self._arrays[name], TYPES[kind]
        same = array.dtype.itemsize == dtype.itemsize
        return array.view(dtype if same else f"{dtype.kind}{array.dtype.itemsize}")


def unset(kind: str, shape: tuple[int, ...]) -> Array:
    """Return an array of raw bits, all of them set, or of predicates that do not hold."""
    return np.zeros(shape, bool) if kind == "pred" else np.full(shape, -1, f"i{SIZES[kind]}").view(BITS[SIZES[kind]])


def literal(text: str, dtype: np.dtype) -> Array:
    """Return a number of PTX as an array of size 1, whose type counts in any arithmetic."""
    if text[:2] in ("0f", "0F", "0d", "0D"):
        return np.array([int(text[2:], 16)], BITS[(len(text) - 2) // 2]).view(dtype)
    if dtype.kind == "b":
        return np.array([bool(int(text))])
    if dtype.kind in "iu":
        value = int(text.rstrip("U"), 0) % (1 << 8 * dtype.itemsize)
        return np.array([value], BITS[dtype.itemsize]).view(dtype)
    return np.array([float(text)], dtype)


def _low(array: Array, dtype: np.dtype) -> Array:
    """Return the lowest bytes of each number as another type."""
    if array.dtype == bool or array.dtype.itemsize == dtype.itemsize:
        return array.view(dtype)
    return array.view(dtype)[:: array.dtype.itemsize // dtype.itemsize]
