"""What the kernels are told about keys and values that are stored: where their parts lie, and in which types."""

import struct
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.backend import Problem
from sdpa_ref.storage import Stored

from .kernels.record import Source
from .kernels.stored import CODES

_CODES = {name: code for code, name in enumerate(CODES)}
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
    """Return what the kernels are told about the keys and values of a problem."""
    kept: list[Any] = []
    sides = [_source(each, problem.dtype, kept) for each in (problem.key, problem.value)]
    record = b"".join(sides)
    kept.append(record)
    key, value = (each.numbers if type(each) is Stored else each for each in (problem.key, problem.value))
    return Described(key, value, id(record) + _IN_BYTES, kept)


def _source(part: Any, dtype: np.dtype[Any], kept: list[Any]) -> bytes:
    """Return the record of one side, and keep what it points to."""
    if part is None:
        return bytes(_SOURCE.size)
    if type(part) is not Stored:
        S, width = part.shape[-2:]
        return _SOURCE.pack(id(part), 0, 0, 0, S, width, 1, 0, 0, 0, max(1, S), 0, *_NOTHING, *_NOTHING)
    numbers, table, scale, offset, zero, bits, shape = part[:7]
    S, width = shape[-2:]
    paged = table is not None
    keys, pages = (part.page, len(numbers)) if paged else (max(1, S), 0)
    if table is not None and (table.dtype.itemsize not in (4, 8) or table.dtype.kind != "i"):
        kept.append(table := table.astype(np.int64))
    code = _CODES["nibble" if bits == 4 else numbers.dtype.name]
    direct, item = bits == 0 and numbers.dtype == dtype, table.dtype.itemsize if paged else 0
    return _SOURCE.pack(
        id(numbers), id(table) if paged else 0, 0 if scale is None else id(scale), 0 if offset is None else id(offset),
        S, width, direct, code, zero, pages, keys, item,
        *_serving(scale, width, keys, pages), *_serving(offset, width, keys, pages),
    )  # fmt: skip


def _serving(array: Any, width: int, keys: int, pages: int) -> tuple[int, int, int, int]:
    """Return the type of a scale or an offset, and how many numbers, keys and pages one of theirs serves."""
    if array is None:
        return _NOTHING
    shape = array.shape
    rows = keys // shape[-2] if len(shape) > 1 else keys
    return _CODES[array.dtype.name], width // shape[-1], rows, pages // shape[0] if len(shape) > 3 and pages else 1
