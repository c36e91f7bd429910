"""The errors of masks: wrong types, shapes and lengths. Each names the argument."""

from typing import Any

import numpy as np

from sdpa_ref.arrays import as_integer, host_array

_LARGEST = 2**63 - 1


def check_broadcast(name: str, shape: tuple[int, ...], batch: tuple[int, ...], heads: int, L: int, S: int) -> None:
    """Raise a ValueError unless an array of this shape broadcasts to the shape of the weights."""
    target = (*batch, heads, L, S)
    if shape == target[-len(shape) :] or broadcastable(shape, target):
        return
    hint = ""
    if len(shape) == 3 and batch and shape[0] == batch[-1] and broadcastable(shape[1:], (L, S)):
        hint = f"; axis -3 counts query heads: for one {name} a batch entry pass {name}[:, None]"
    elif len(shape) == 2 and batch and shape == (batch[-1], S):
        hint = f"; for padding pass {name}[:, None, None, :]" + (" or KeyLengths" if name == "mask" else "")
    raise ValueError(f"{name} must broadcast to (..., Hq, L, S) = {target}, got {shape}{hint}")


def broadcastable(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return whether NumPy broadcasts this shape to the target without widening it."""
    return len(shape) <= len(target) and all(
        n in (1, m) for n, m in zip(reversed(shape), reversed(target), strict=False)
    )


def broadcasts(name: str, shape: tuple[int, ...], batch: tuple[int, ...]) -> None:
    """Raise a ValueError unless the shape broadcasts to the batch axes."""
    if shape != batch and not broadcastable(shape, batch):
        raise ValueError(f"mask: {name} must broadcast to {batch}, got {shape}")


def fits(name: str, n: Any, batch: tuple[int, ...], size: int, axis: str) -> None:
    """Raise the error of lengths that do not fit batch and size."""
    if type(n) is int:
        if n > size:
            raise ValueError(f"mask: {name} must be in [0, {axis}] = [0, {size}], got {n}")
        return
    broadcasts(f"{name} (one a batch entry)", n.shape, batch)
    if n.size and extremes(n)[1] > size:
        raise ValueError(f"mask: {name} must be in [0, {axis}] = [0, {size}], got {n.max()}")


def extremes(array: Any) -> tuple[int, int]:
    """Return the least and the largest integer of an array; of few Python finds them sooner than NumPy."""
    numbers = array.ravel().tolist() if array.size < 100 else (array.min(), array.max())
    return min(numbers), max(numbers)


def last_axis(name: str, array: Any, batch: tuple[int, ...], size: int, axis: str) -> None:
    """Raise a ValueError unless there is one entry a position, and the leading axes broadcast."""
    if array.shape[-1] != size:
        raise ValueError(f"mask: {name} must have one entry for each of {axis} = {size}, got shape {array.shape}")
    broadcasts(name, array.shape[:-1], batch)


def integers(name: str, value: Any, axes: int = 0) -> Any:
    """Return a read-only int64 copy."""
    given = host_array(f"mask: {name}", value)
    if given.size == 0 and not hasattr(value, "dtype"):
        given = given.astype(np.int64)  # an empty list has no type of its own
    if given.dtype.kind not in "iu":
        raise TypeError(f"mask: {name} must be integers, got {given.dtype}")
    if given.ndim < axes:
        raise ValueError(f"mask: {name} must have at least {axes} axis, got shape {given.shape}")
    if given.dtype == np.uint64 and (given > np.uint64(_LARGEST)).any():
        raise ValueError(f"mask: {name} must be below 2**63, got {given.max()}")
    array = given.astype(np.int64)
    array.setflags(write=False)
    return array


def lengths(name: str, value: Any, axes: int = 0) -> Any:
    """Return an int, or a read-only int64 copy, without negative entries."""
    if type(value) is int and axes == 0 and value <= _LARGEST:
        if value < 0:
            raise ValueError(f"mask: {name} must not be negative, got {value}")
        return value
    array = integers(name, value, axes)
    if array.size and extremes(array)[0] < 0:
        raise ValueError(f"mask: {name} must not be negative, got {array.min()}")
    return array if array.ndim else int(array)


def count(name: str, value: Any, hint: str = "", minimum: int = 0) -> int:
    """Return a Python int of at least `minimum`."""
    number = as_integer(f"mask: {name}", value, hint)
    if number < minimum:
        raise ValueError(f"mask: {name} must be at least {minimum}, got {number}{hint}")
    return number


def put(mask: Any, name: str, value: Any) -> None:
    """Give a frozen mask its own checked form of what it was made of."""
    object.__setattr__(mask, name, value)
