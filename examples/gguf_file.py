"""What the chat reads of a GGUF file, in a fraction of the time that the package `gguf` takes for the list of words.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Any file of weights, with all kinds of codes, is
read by `sdpa_ref.layers.read_weights`.
"""

import math
import mmap
import struct

import numpy as np

from sdpa_ref import Quantized
from sdpa_ref.layers.coded import dense, of_blocks

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
FLOATS = {0: np.dtype("<f4"), 1: np.dtype("<f2")}
BYTES = {2: 18, 3: 20, 8: 34}  # of 32 codes with their scale: Q4_0, Q4_1 and Q8_0


class File:
    """A GGUF file: `fields` has what it says about the model, and a call returns weights, an array or `Quantized`."""

    def __init__(self, path):
        with open(path, "rb") as file:
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self.bytes[:4] != b"GGUF":
            raise SystemExit(f"{path} is no GGUF file")
        self.at, self.fields, self.tensors = 8, {}, {}
        tensors, fields = self._next("Q"), self._next("Q")
        for _ in range(fields):
            name = self._string()
            self.fields[name] = self._value(self._next("I"))
        for _ in range(tensors):
            name = self._string()
            shape = [self._next("Q") for _ in range(self._next("I"))][::-1]
            self.tensors[name] = shape, self._next("I"), self._next("Q")
        unit = self.fields.get("general.alignment", 32)
        self.begin = -(-self.at // unit) * unit

    def __call__(self, name):
        """Return the weights of this name, as they are stored."""
        shape, kind, at = self.tensors[name]
        if kind in FLOATS:
            return np.frombuffer(self.bytes, FLOATS[kind], math.prod(shape), self.begin + at).reshape(shape)
        if kind not in BYTES:
            raise SystemExit(f"{name} has codes of kind {kind}; this example reads F32, F16, Q8_0, Q4_0 and Q4_1")
        raw = np.frombuffer(self.bytes, np.uint8, math.prod(shape) // 32 * BYTES[kind], self.begin + at)
        return of_blocks(raw, kind, tuple(shape))

    def _next(self, kind):
        (value,) = struct.unpack_from(f"<{kind}", self.bytes, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def _string(self):
        length = self._next("Q")
        self.at += length
        return self.bytes[self.at - length : self.at].decode("utf-8")

    def _value(self, kind):
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            return self._next(SCALARS[kind])
        kind, length = self._next("I"), self._next("Q")
        return [self._value(kind) for _ in range(length)]


def joined(weights):
    """Return weights one behind the other, so that what reads the same input is one product."""
    codes = [each for each in weights if isinstance(each, Quantized)]
    alike = {(each.bits, each.zero, each.codes.dtype, each.offset is None) for each in codes}
    if len(codes) < len(weights) or len(alike) > 1:
        return np.concatenate([dense(each, np.float32) for each in weights])
    parts = [
        None if each[0] is None else np.concatenate(each)
        for each in zip(*((each.codes, each.scale, each.offset) for each in codes), strict=True)
    ]
    return Quantized(*parts, zero=codes[0].zero, bits=codes[0].bits)
