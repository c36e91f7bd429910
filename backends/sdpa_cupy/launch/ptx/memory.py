"""The memory of a launch: each space checks that an access is aligned and inside of what there is."""

import ctypes
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .faults import Array, check
from .races import Races

ROWS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.complex128}  # moved as bits
READ, WRITE = 1, 2
LINE = 16  # bytes of the widest access
WINDOW_BITS = 56  # an address of the process is below
WINDOWS = {"global": 0, "shared": 1 << WINDOW_BITS, "local": 2 << WINDOW_BITS, "param": 0}


class Extent(NamedTuple):
    """A stretch of the process's memory: its bytes, and which of them may be read and written."""

    start: int
    content: Array
    allowed: Array


def _extents(arrays: list[Array]) -> list[Extent]:
    """Return the stretches that the arrays cover, in order, overlapping ones as one."""
    bounds = [_bounds(array) for array in arrays]
    stretches: list[list[int]] = []
    for low, high in sorted((low // LINE * LINE, -(-high // LINE) * LINE) for low, high in bounds):
        if stretches and low <= stretches[-1][1]:
            stretches[-1][1] = max(high, stretches[-1][1])
        else:
            stretches.append([low, high])
    extents = [_extent(low, high - low) for low, high in stretches]
    starts = [extent.start for extent in extents]
    for array, (low, _) in zip(arrays, bounds, strict=True):
        extent = extents[bisect_right(starts, low) - 1]
        shape, strides = (*array.shape, array.itemsize), (*array.strides, 1)
        own = np.ndarray(shape, np.uint8, extent.allowed.data, array.ctypes.data - extent.start, strides)
        own |= READ | WRITE if array.flags.writeable else READ
    return extents


def _bounds(array: Array) -> tuple[int, int]:
    """Return the lowest address of an array's bytes, and the one after the highest."""
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    low = array.ctypes.data + sum(min(each, 0) for each in reach)
    return low, array.ctypes.data + sum(max(each, 0) for each in reach) + array.itemsize


def _extent(start: int, size: int) -> Extent:
    memory = (ctypes.c_uint8 * size).from_address(start)
    return Extent(start, np.asarray(memory), np.zeros(size, np.uint8))


class Global:
    """Arrays of the host as device memory: what is between their elements does not exist."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._extents: list[Extent] = []

    def add(self, array: Array) -> None:
        """Let the kernels read an array, and write it unless it is read-only."""
        if array.size:
            self._arrays.append(array)
            self._extents = []

    def load(self, lanes: Array, address: Array, size: int) -> Array:
        """Return `size` bytes at each address as one number."""
        rows = np.empty(len(lanes), ROWS[size])
        for some, extent, row in self._places(lanes, address, size, READ):
            rows[some] = extent.content.view(rows.dtype)[row]
        return rows

    def store(self, lanes: Array, address: Array, rows: Array) -> None:
        """Write one number of `rows` at each address."""
        for some, extent, row in self._places(lanes, address, rows.itemsize, WRITE):
            extent.content.view(rows.dtype)[row] = rows[some]

    def _places(
        self, lanes: Array, address: Array, size: int, flag: int
    ) -> Iterator[tuple[Array | slice, Extent, Array]]:
        check(address % size != 0, f"global access of {size} bytes is misaligned", lanes, address)
        extents = self._extents = self._extents or _extents(self._arrays)
        which = np.searchsorted([extent.start for extent in extents], address, "right") - 1
        outside = f"global {'read' if flag == READ else 'write'} of {size} bytes outside of the arrays"
        check(which < 0, outside, lanes, address)
        for n in np.unique(which):
            some = which == n
            extent, offset = extents[n], address[some] - extents[n].start
            check(offset + size > extent.content.size, outside, lanes[some], address[some])
            row = offset // size
            allowed = extent.allowed.reshape(-1, size)[row] & flag
            check(~allowed.all(1), outside, lanes[some], address[some])
            yield some, extent, row


class Pieces:
    """A piece of memory for each owner, a block or a lane, with all bits set, which is NaN."""

    def __init__(self, size: int, owner: Array) -> None:
        self.size = size
        self._base = owner * self.stride(size)
        self._content = np.full(int(owner[-1] + 1) * self.stride(size), 0xFF, np.uint8)

    @staticmethod
    def stride(size: int) -> int:
        """Return how far apart the pieces of two owners lie."""
        return -(-size // LINE) * LINE

    def places(self, lanes: Array, address: Array, size: int) -> Array:
        """Return where among all pieces each lane's address is."""
        check(address % size != 0, f"access of {size} bytes is misaligned", lanes, address)
        outside = (address < 0) | (address + size > self.size)
        check(outside, f"access of {size} bytes outside of the block's or thread's {self.size}", lanes, address)
        return self._base[lanes] + address

    def load(self, lanes: Array, address: Array, size: int) -> Array:
        """Return `size` bytes at each address as one number."""
        return self._content.view(ROWS[size])[self.places(lanes, address, size) // size]

    def store(self, lanes: Array, address: Array, rows: Array) -> None:
        """Write one number of `rows` at each address."""
        self._content.view(rows.dtype)[self.places(lanes, address, rows.itemsize) // rows.itemsize] = rows


class Shared:
    """The shared memory of blocks, with a watch on races."""

    def __init__(self, pieces: Pieces, races: Races) -> None:
        self._pieces, self._races = pieces, races

    def load(self, lanes: Array, address: Array, size: int) -> Array:
        """Return `size` bytes at each address as one number."""
        self._races.read(lanes, self._pieces.places(lanes, address, size), size)
        return self._pieces.load(lanes, address, size)

    def store(self, lanes: Array, address: Array, rows: Array) -> None:
        """Write one number of `rows` at each address."""
        self._races.write(lanes, self._pieces.places(lanes, address, rows.itemsize), rows.itemsize)
        self._pieces.store(lanes, address, rows)

    def begin_copy(self, lanes: Array, address: Array, size: int) -> None:
        """Set where a copy will land to NaN; until it does, a read of the place is a fault."""
        self._races.write(lanes, self._pieces.places(lanes, address, size), size, landed=False)
        self._pieces.store(lanes, address, np.full((len(lanes), size), 0xFF, np.uint8).view(ROWS[size])[:, 0])

    def end_copy(self, lanes: Array, address: Array, rows: Array) -> None:
        """Let copies land."""
        self._races.land(self._pieces.places(lanes, address, rows.itemsize), rows.itemsize)
        self._pieces.store(lanes, address, rows)


class Parameters:
    """The parameters of the kernel, the same for all."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def load(self, lanes: Array, address: Array, size: int) -> Array:
        """Return `size` bytes at each address as one number."""
        outside = (address < 0) | (address + size > len(self._content)) | (address % size != 0)
        check(outside, f"misaligned, or outside of {len(self._content)} bytes of parameters", lanes, address)
        each = address[:, None] + np.arange(size)
        return np.frombuffer(self._content, np.uint8)[each].view(ROWS[size])[:, 0]


class Generic:
    """All that an address of 64 bits can name: each space has a window of its own, and global memory the rest."""

    def __init__(self, memory: Global, shared: Shared, local: Pieces) -> None:
        self._spaces: dict[int, Any] = {0: memory, 1: shared, 2: local}

    def load(self, lanes: Array, address: Array, size: int) -> Array:
        """Return `size` bytes at each address as one number."""
        rows = np.empty(len(lanes), ROWS[size])
        for n, space in self._spaces.items():
            some = address >> WINDOW_BITS == n
            if some.any():
                rows[some] = space.load(lanes[some], address[some] - (n << WINDOW_BITS), size)
        return rows

    def store(self, lanes: Array, address: Array, rows: Array) -> None:
        """Write one number of `rows` at each address."""
        for n, space in self._spaces.items():
            some = address >> WINDOW_BITS == n
            if some.any():
                space.store(lanes[some], address[some] - (n << WINDOW_BITS), rows[some])
