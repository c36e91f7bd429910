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
_IN_BYTES = bytes.__basicsize__ - 1  # from the address of a bytes object to what it holds


class Described(NamedTuple):
    """The arrays of keys and values, and the address of what is said of them, which `kept` keeps alive."""

    arrays: tuple[Any, Any]
    address: int
    kept: Any


def described(problem: Problem) -> Described:
    """Return what the kernels are told about the keys and values of a problem."""
    kept: list[Any] = []
    sides = [_source(each, problem.dtype, kept) for each in (problem.key, problem.value)]
    record = b"".join(sides)
    kept.append(record)
    arrays = tuple(each.numbers if type(each) is Stored else each for each in (problem.key, problem.value))
    return Described(arrays, id(record) + _IN_BYTES, kept)  # type: ignore[arg-type]


def _source(part: Any, dtype: np.dtype[Any], kept: list[Any]) -> bytes:
    """Return the record of one side, and keep what it points to."""
    if part is None:
        return bytes(_SOURCE.size)
    if type(part) is not Stored:
        S, width = part.shape[-2:]
        return _SOURCE.pack(id(part), 0, 0, max(1, S), 0, 1, 0, 0, 0, 0, 0, 0, S, width)
    numbers, table, scale, offset, zero, bits, shape = part[:7]
    S, width = shape[-2:]
    if table is not None and (table.dtype.itemsize not in (4, 8) or table.dtype.kind != "i"):
        kept.append(table := table.astype(np.int64))
    code = _CODES["nibble" if bits == 4 else numbers.dtype.name]
    return _SOURCE.pack(
        id(numbers),
        0 if table is None else id(table),
        0 if table is None else table.dtype.itemsize,
        max(1, S) if table is None else part.page,
        0 if table is None else len(numbers),
        bits == 0 and numbers.dtype == dtype,
        code,
        zero,
        0 if scale is None else id(scale),
        0 if scale is None else _CODES[scale.dtype.name],
        0 if offset is None else id(offset),
        0 if offset is None else _CODES[offset.dtype.name],
        S,
        width,
    )
