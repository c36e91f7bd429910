"""Arrays as small pictures in a page, without a library for pictures."""

import base64
import struct
import zlib

import numpy as np

from sdpa_ref.testing.case_options import Array

_LOW, _HIGH = np.array([255, 255, 255]), np.array([38, 84, 124])
_WRONG, _WORST = np.array([255, 196, 120]), np.array([160, 0, 20])


def errors(units: Array) -> str:
    """Return a data address of a picture of errors in units of what is allowed.

    Up to 1 it goes from white to blue, beyond, on a logarithmic scale to 1000, from orange to dark red.

    Examples
    --------
    >>> errors(np.array([[0.1, 30.0]]))[:32]
    'data:image/png;base64,iVBORw0KGg'
    """
    within = _LOW + np.clip(units, 0, 1)[..., None] * (_HIGH - _LOW)
    far = np.clip(np.log10(np.maximum(units, 1)) / 3, 0, 1)[..., None]
    return _address(np.where(units[..., None] > 1, _WRONG + far * (_WORST - _WRONG), within))


def shares(weights: Array, most: float = 1.0) -> str:
    """Return a data address of a picture of weights: white for 0, blue for `most`, red for what cannot be a weight."""
    legal = (weights >= 0) & (weights <= 1.001)
    shade = np.sqrt(np.clip(np.nan_to_num(weights / most), 0, 1))[..., None]
    return _address(np.where(legal[..., None], _LOW + shade * (_HIGH - _LOW), _WORST))


def _address(pixels: Array) -> str:
    """Return the PNG of an array (height, width, 3)."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line begins with its filter, none
    lines[:, 1:] = pixels.round().astype(np.uint8).reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
