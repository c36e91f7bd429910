"""What masks and biases share: they never change, also as a copy or in another process."""

from dataclasses import fields
from typing import Any

import numpy as np


class Frozen:
    """A frozen dataclass whose own arrays are read-only.

    A copy or an unpickled object has the fields and nothing that was derived from them: hashes differ between
    processes, and NumPy forgets that an array was read-only.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
            object.__setattr__(self, name, value)

    @property
    def key(self) -> Any:
        """What makes two of these equal: type and values, the identity of a function."""
        values = self.__getstate__().values()
        return (
            type(self),
            *((v.shape, v.tobytes()) if isinstance(v, np.ndarray) else id(v) if callable(v) else v for v in values),
        )

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Frozen) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)
