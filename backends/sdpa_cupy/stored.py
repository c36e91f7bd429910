"""What the kernels are passed about keys and values that are stored: their parts, and where in these a number lies."""

from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.storage import Stored

TYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3}
CODES = TYPES | {"int8": 4, "uint8": 5, "float8_e4m3fn": 6, "float8_e5m2": 7}
NIBBLES = 8
DENSE, PAGES, DECODED = range(3)  # how keys and values lie, STORED of stored.h
STORAGE = tuple(
    f"{side}_{name}"
    for side in ("key", "value")
    for name in (
        "page", "leap", "type", "zero",
        *(f"{part}_{name}" for part in ("scale", "offset") for name in ("type", "leap", "pages", "keys", "columns")),
    )
)  # fmt: skip


class Pages(NamedTuple):
    """An array whose first axis are pages."""

    array: Any


def parts_of(part: Any) -> tuple[Any, Any, Any, Any]:
    """Return numbers, table, scale and offset of keys or values."""
    if type(part) is not Stored:
        return part, None, None, None
    if part.table is None:
        return part.numbers, None, part.scale, part.offset
    by_page = (Pages(x) if x is not None and x.ndim > 3 else x for x in (part.scale, part.offset))
    return Pages(part.numbers), part.table, *by_page


def fields_of(part: Any) -> tuple[int, ...]:
    """Return what the kernels need of stored keys or values: the fields STORAGE of one side."""
    if type(part) is not Stored:
        return _NOWHERE if part is None else (0, 0, CODES[part.dtype.name], *_NOWHERE[3:])
    numbers, paged = part.numbers, part.table is not None
    S, width = part.shape[-2:]
    keys, pages = (numbers.shape[-2], len(numbers)) if paged else (max(1, S), 0)

    def serving(array: Any) -> tuple[int, ...]:
        if array is None:
            return 0, 0, 1, 1, 1
        shape = array.shape
        rows = shape[-2] if len(shape) > 1 else 1
        own = pages and len(shape) > 3 and shape[0] > 1  # whether pages differ
        return (
            CODES[array.dtype.name], array.strides[0] if own else 0, pages // shape[0] if own else 1,
            max(1, keys // max(1, rows)), max(1, width // max(1, shape[-1])),
        )  # fmt: skip

    code = NIBBLES if part.bits == 4 else CODES[numbers.dtype.name]
    return (keys, numbers.strides[0] if paged else 0, code, part.zero, *serving(part.scale), *serving(part.offset))


_NOWHERE = (0,) * (len(STORAGE) // 2)


def stored_parts(problem: Any) -> list[Stored]:
    """Return keys and values as far as they are stored."""
    return [part for part in (problem.key, problem.value) if type(part) is Stored]


def storage_of(problem: Any) -> int:
    """Return DENSE, PAGES or DECODED."""
    parts = stored_parts(problem)
    if any(part.bits or part.numbers.dtype != problem.dtype for part in parts):
        return DECODED
    return PAGES if any(part.table is not None for part in parts) else DENSE


def is_served(part: Stored, acc_dtype: np.dtype[Any]) -> bool:
    """Return whether the kernels can find scale and offset: one for each head and batch entry, or for all."""
    for array in (part.scale, part.offset):
        if array is None:
            continue
        if array.dtype.itemsize > acc_dtype.itemsize:
            return False
        places = range(-array.ndim, -2) if part.table is None else range(-array.ndim, -2)[-1:]
        if any(array.shape[axis] not in (1, part.numbers.shape[axis]) for axis in places):
            return False
    return True
