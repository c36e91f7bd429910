"""Copies from global to shared memory that run beside the threads, and land as late as they may: when waited for."""

from typing import NamedTuple

import numpy as np

from .faults import Array, Fault
from .memory import ROWS, Global, Shared


class Flight(NamedTuple):
    """Copies under way: whose they are, in which of their thread's groups, where they go and what they bring."""

    lanes: Array
    group: Array
    address: Array
    rows: Array

    def some(self, which: Array) -> "Flight":
        """Return some of them."""
        return Flight(*(array[which] for array in self))


class Copies:
    """All copies under way; each thread waits for its own."""

    def __init__(self, shared: Shared, memory: Global, lanes: int) -> None:
        self._shared, self._memory = shared, memory
        self._groups = np.zeros(lanes, np.int64)  # that each lane has closed
        self._flights: list[Flight] = []

    def start(self, lanes: Array, target: Array, source: Array, size: int, given: Array) -> None:
        """Begin to copy the `given` first bytes of `size` for each lane, and zeros after them.

        An address must be one of memory even where nothing is taken from it.
        """
        rows = np.zeros((len(lanes), size), np.uint8)
        for number in np.unique(given):
            if number > size:
                raise Fault(f"a copy of {size} bytes takes {number} from its source", int(lanes[np.argmax(given)]))
            some = given == number
            if number == 0:
                self._memory.load(lanes[some], source[some], 1)
            whole = int(number) == size
            for byte in range(0, int(number), size if whole else 1):
                part = self._memory.load(lanes[some], source[some] + byte, size if whole else 1)
                rows[some, byte : byte + part.itemsize] = part[:, None].view(np.uint8)
        self._shared.begin_copy(lanes, target, size)
        self._flights.append(Flight(lanes, self._groups[lanes], target, rows.view(ROWS[size])[:, 0]))

    def commit(self, lanes: Array) -> None:
        """Close the group that each lane's last copies are in."""
        self._groups[lanes] += 1

    def wait(self, lanes: Array, groups: int) -> None:
        """Let copies land but those of the last `groups` closed groups and of the open one; of all for -1."""
        until = np.full(len(self._groups), -1)
        until[lanes] = self._groups[lanes] - groups
        under_way = []
        for flight in self._flights:
            lands = flight.group < until[flight.lanes]
            landing = flight.some(lands)
            self._shared.end_copy(landing.lanes, landing.address, landing.rows)
            if not lands.all():
                under_way.append(flight.some(~lands))
        self._flights = under_way
