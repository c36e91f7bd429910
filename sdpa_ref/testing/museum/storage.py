"""Keys that are stored, read once more: pages and codes, each step a function that a fault can replace."""

from typing import TYPE_CHECKING, Any

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.stored import Paged, Quantized

if TYPE_CHECKING:
    from sdpa_ref.testing.museum.kernel import Kernel


def numbers_of(kernel: "Kernel", given: Any, acc: np.dtype[Any], layout: str) -> Array:
    """Return the numbers that stored keys mean as ``(..., H, S, E)``, codes in the type of the sums."""
    if isinstance(given, Paged):
        return kernel.gathered(kernel, given, acc)
    return kernel.heads_first(kernel.decoded(kernel, given, acc), layout)


def gathered(kernel: "Kernel", given: Paged, acc: np.dtype[Any]) -> Array:
    """Return the keys of pages that are needed, with all of their slots; the others are 0."""
    pages = given.pages
    numbers = kernel.decoded(kernel, pages, acc) if isinstance(pages, Quantized) else pages
    numbers = kernel.slots(np.asarray(numbers), given.layout)
    _, H, P, E = numbers.shape
    ids, needed = kernel.entries(given.table, kernel.stored_lengths(given), numbers.shape[0], P)
    found = np.where(needed[..., None, None, None], numbers[np.where(needed, ids, 0)], np.zeros((), numbers.dtype))
    return np.array(found.swapaxes(-4, -3)).reshape(*ids.shape[:-1], H, ids.shape[-1] * P, E)


def slots(pages: Array, layout: str) -> Array:
    """Return pages as ``(N, H, P, E)``."""
    return pages if layout == "HLE" else pages.swapaxes(1, 2)


def stored_lengths(given: Paged) -> Array:
    """Return how many keys each batch entry has."""
    return given.lengths


def entries(table: Array, lengths: Array, N: int, P: int) -> tuple[Array, Array]:
    """Return the page of each entry of the table, and which entries are needed."""
    return table, np.arange(table.shape[-1]) * P < lengths[..., None]


def decoded(kernel: "Kernel", given: Quantized, acc: np.dtype[Any]) -> Array:
    """Return the numbers that codes mean."""
    with np.errstate(all="ignore"):
        codes = kernel.unpacked(given)
        numbers = kernel.scaled(codes - kernel.zero(given), kernel.blocks(given.scale, given.shape), acc)
        if given.offset is not None:
            numbers = numbers + kernel.blocks(given.offset, given.shape).astype(acc)
    return np.array(numbers, acc)


def unpacked(given: Quantized) -> Array:
    """Return codes as numbers, a byte of two as two."""
    if given.bits == 8:
        return given.codes.astype(np.float64)
    return np.stack([given.codes & 15, given.codes >> 4], -1).reshape(given.shape).astype(np.float64)


def zero(given: Quantized) -> int:
    """Return the code that means 0."""
    return given.zero


def scaled(codes: Array, scale: Array, acc: np.dtype[Any]) -> Array:
    """Return codes, less their zero, times their scale."""
    return codes.astype(acc) * scale.astype(acc)


def blocks(part: Array, shape: tuple[int, ...]) -> Array:
    """Return a scale or an offset with each entry as often as it serves a number."""
    for axis in range(-part.ndim, 0):
        if part.shape[axis] not in (1, shape[axis]):
            part = part.repeat(shape[axis] // part.shape[axis], axis)
    return part


def weights_over(given: Any, weights: Array) -> Array:
    """Return the weights over the keys as they were given: pages have one for each slot."""
    return weights
