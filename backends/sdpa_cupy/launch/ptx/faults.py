"""What the interpreter reports."""

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # of NumPy


class Fault(Exception):
    """What a device would not survive or would get wrong only now and then; `lane` is the first to do it."""

    def __init__(self, what: str, lane: int = 0) -> None:
        super().__init__(what)
        self.lane = lane


class UnknownInstruction(Exception):
    """PTX that this interpreter does not implement."""


def check(wrong: Array, what: str, lanes: Array, address: Array | None = None) -> None:
    """Raise a fault for the first lane for which something is wrong."""
    if wrong.any():
        first = int(np.argmax(wrong))
        where = "" if address is None else f", at address {int(address[first]):#x}"
        raise Fault(what + where, int(lanes[first]))
