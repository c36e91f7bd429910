"""What the chat reads of a GGUF file, in a fraction of the time that the package `gguf` takes for the list of words.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Any file of weights, with all kinds of codes, is
read by `sdpa_ref.layers.read_weights`.
"""

import math
import mmap
import struct

import numpy as np

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
KINDS = {  # how a block of 32 weights lies in the file: all of a kind, or codes and what they are multiplied by
    0: np.dtype(("<f4", 32)),
    1: np.dtype(("<f2", 32)),
    3: np.dtype([("scale", "<f2"), ("least", "<f2"), ("halves", "u1", 16)]),  # Q4_1
    8: np.dtype([("scale", "<f2"), ("codes", "i1", 32)]),  # Q8_0
}


class File:
    """A GGUF file: `fields` has what it says about the model, and a call returns weights as float32."""

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
        """Return the weights of this name."""
        shape, kind, at = self.tensors[name]
        if kind not in KINDS:
            raise SystemExit(f"{name} has codes of kind {kind}; this example reads F32, F16, Q8_0 and Q4_1")
        blocks = np.frombuffer(self.bytes, KINDS[kind], -(-math.prod(shape) // 32), self.begin + at)
        if not blocks.dtype.names:
            return blocks.astype(np.float32).reshape(-1)[: math.prod(shape)].reshape(shape)
        scale, made = blocks["scale"].astype(np.float32)[:, None], np.empty((len(blocks), 32), np.float32)
        if kind == 8:
            np.multiply(blocks["codes"], scale, out=made)
        else:
            halves = blocks["halves"]
            np.multiply(halves & 15, scale, out=made[:, :16])
            np.multiply(halves >> 4, scale, out=made[:, 16:])
            made += blocks["least"].astype(np.float32)[:, None]
        return made.reshape(shape)

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
