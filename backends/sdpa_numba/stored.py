"""The arguments for keys and values that are stored: where their parts lie, and in which types."""

import struct
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.backend import Problem
from sdpa_ref.storage import Stored

from .kernels.codes import CODES
from .kernels.record import Source

NIBBLE = CODES.index("nibble")
_SOURCE = struct.Struct(f"{len(Source._fields)}q")
_NOTHING = 0, 1, 1, 1  # of what is absent: type 0, which serves one number, key and page
_IN_BYTES = bytes.__basicsize__ - 1  # from the address of a bytes object to what it holds


class Described(NamedTuple):
    """The arrays of keys and values, and the address of what is said of them, which `kept` keeps alive."""

    key: Any
    value: Any
    address: int
    kept: Any


def described(problem: Problem) -> Described:
    """Return the arguments of the kernels for the keys and values of a problem."""
    key, value, dtype = problem.key, problem.value, problem.form.dtype
    kept: list[Any] = []
    record = _source(key, dtype, kept) + (bytes(_SOURCE.size) if value is None else _source(value, dtype, kept))
    kept.append(record)
    keys, values = (part.numbers if type(part) is Stored else part for part in (key, value))
    return Described(keys, values, id(record) + _IN_BYTES, kept)


def _source(part: Any, dtype: np.dtype[Any], kept: list[Any]) -> bytes:
    """Return the record of one side, and keep what it points to."""
    if type(part) is not Stored:
        S, width = part.shape[-2:]
        return _SOURCE.pack(id(part), 0, 0, 0, S, width, 1, 0, 0, 0, max(1, S), 0, *_NOTHING, *_NOTHING)
    numbers, table, scale, offset, zero, bits, shape, *_ = part
    S, width = shape[-2:]
    keys, pages, place, item = max(1, S), 0, 0, 0
    if table is not None:
        item = table.dtype.itemsize
        if item not in (4, 8) or table.dtype.kind != "i":
            kept.append(table := table.astype(np.int64))
            item = 8
        keys, pages, place = numbers.shape[-2], len(numbers), id(table)
    code = NIBBLE if bits == 4 else code_of(numbers.dtype)
    return _SOURCE.pack(
        id(numbers), place, 0 if scale is None else id(scale), 0 if offset is None else id(offset),
        S, width, bits == 0 and numbers.dtype == dtype, code, zero, pages, keys, item,
        *_serving(scale, width, keys, pages), *_serving(offset, width, keys, pages),
    )  # fmt: skip


def _serving(array: Any, width: int, keys: int, pages: int) -> tuple[int, int, int, int]:
    """Return the type of a scale or an offset, and how many numbers, keys and pages one of theirs serves."""
    if array is None:
        return _NOTHING
    shape = array.shape
    rows = keys // max(1, shape[-2]) if len(shape) > 1 else keys
    run = max(1, width // max(1, shape[-1])) if shape else max(1, width)
    return code_of(array.dtype), run, max(1, rows), max(1, pages // max(1, shape[0])) if len(shape) > 3 and pages else 1


@cache
def code_of(dtype: np.dtype[Any]) -> int:
    """Return the number of a type in `CODES`."""
    return CODES.index(dtype.name)
