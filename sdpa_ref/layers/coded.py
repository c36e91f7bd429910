"""Weights in few bytes: as codes with scales, and the blocks in which GGUF files have them."""

from typing import Any

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.stored.quantized import Quantized

_RUN = 32  # numbers of a row that share a scale, or a multiple of it, where kernels read weights in place
_AT_ONCE = 64  # rows that are widened at a time, so that they stay in the processor's cache
_HALF = np.dtype("<f2")
_BLOCKS = {  # of 32 weights, by the numbers that ggml gives to their types, and the code that means 0
    2: (np.dtype([("scale", _HALF), ("halves", "u1", 16)]), 8),  # Q4_0
    3: (np.dtype([("scale", _HALF), ("least", _HALF), ("halves", "u1", 16)]), 0),  # Q4_1
    8: (np.dtype([("scale", _HALF), ("codes", "i1", 32)]), 0),  # Q8_0
}


def of_blocks(raw: Array, kind: int, shape: tuple[int, ...]) -> Quantized | None:
    """Return the weights of this shape that the bytes of a GGUF tensor are, exactly; None for codes of another kind.

    Parameters
    ----------
    raw : array of uint8
        All of the tensor, contiguous; codes of eight bits are not copied.
    kind : int
        Type of the tensor, as ggml counts: 2 (Q4_0), 3 (Q4_1) and 8 (Q8_0) are known.
    shape : tuple of int
        Rows and their width, in NumPy's order.
    """
    if kind not in _BLOCKS or not shape or shape[-1] % 32:
        return None
    dtype, zero = _BLOCKS[kind]
    blocks = raw.reshape(-1).view(dtype).reshape(*shape[:-1], shape[-1] // 32)
    scale = blocks["scale"].astype(np.float16)
    if kind == 8:
        return Quantized(np.ascontiguousarray(blocks["codes"]).reshape(shape), scale)
    halves, codes = blocks["halves"], np.empty((*blocks.shape, 16), np.uint8)
    for half, to in ((halves & 15, codes[..., :8]), (halves >> 4, codes[..., 8:])):  # of a byte, numbers i and i + 16
        np.left_shift(half[..., 1::2], 4, out=to)
        to |= half[..., ::2]
    offset = blocks["least"].astype(np.float16) if kind == 3 else None
    return Quantized(codes.reshape(*shape[:-1], shape[-1] // 2), scale, offset, zero=zero, bits=4)


def of_rows(weight: Any, index: Any) -> Any:
    """Return rows of weights, an array or codes."""
    if not isinstance(weight, Quantized):
        return weight[index]
    n = weight.shape[0]
    for part in (weight.scale, weight.offset):
        if part is not None and part.ndim == weight.ndim and part.shape[0] not in (1, n):
            return weight.dense()[index]

    def rows(part: Array) -> Array:
        return part[index] if part.ndim == weight.ndim and part.shape[0] == n else part

    return weight._map(rows)


def in_place(weight: Any) -> bool:
    """Return whether kernels read weights ``(out, in)`` as they are: rows of numbers, or of codes with own scales."""
    numbers = weight.codes if isinstance(weight, Quantized) else weight
    if type(numbers) is not np.ndarray or numbers.ndim != 2 or not numbers.size or weight.shape[1] % _RUN:
        return False
    if numbers.strides[1] != numbers.itemsize:
        return False
    if numbers is weight:
        return bool(weight.dtype.isnative and weight.dtype.itemsize < 8)
    n, width = weight.shape
    for part in (weight.scale, weight.offset):
        if part is None:
            continue
        if part.ndim != 2 or part.shape[0] != n or not part.dtype.isnative or part.dtype.itemsize > 4:
            return False
        if part.shape[1] == 0 or width // part.shape[1] % _RUN or part.strides[1] != part.itemsize:
            return False
    same = weight.offset is None or weight.offset.shape == weight.scale.shape
    return bool(same and numbers.dtype.char in "bB")


def dense(weight: Any, dtype: Any) -> Array:
    """Return weights as an array of this type; codes rounded to it once."""
    if not isinstance(weight, Quantized):
        return weight.astype(dtype, copy=False)
    factors = [part for part in (weight.scale, weight.offset) if part is not None]
    short = weight.codes.dtype.kind in "iu" and all(part.dtype == np.float16 for part in factors)
    if dtype != np.float32 or not short or not in_place(weight):
        return weight.dense().astype(dtype)
    # products of such codes and scales are float32 numbers, and so nothing is rounded before the sum with an offset
    made, groups = np.empty(weight.shape, np.float32), weight.scale.shape[1]
    with np.errstate(all="ignore"):
        for first in range(0, len(made), _AT_ONCE):
            some = slice(first, first + _AT_ONCE)
            codes, part = weight.codes[some], made[some]
            if weight.bits == 4:
                np.bitwise_and(codes, 15, out=part[:, ::2], casting="unsafe")
                np.right_shift(codes, 4, out=part[:, 1::2], casting="unsafe")
            else:
                part[...] = codes
            if weight.zero:
                part -= weight.zero
            grouped = part.reshape(len(part), groups, -1)
            grouped *= weight.scale[some, :, None]
            if weight.offset is not None:
                grouped += weight.offset[some, :, None]
    return made
