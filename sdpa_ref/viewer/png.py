"""Pictures inside a page, without a library for pictures."""

import base64
import struct
import zlib

import numpy as np

from sdpa_ref.arrays import Array


def png_address(pixels: Array) -> str:
    """Return the data address of the PNG of an array (height, width, 3) of numbers from 0 to 255."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with its filter, none
    lines[:, 1:] = pixels.round().astype(np.uint8).reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
