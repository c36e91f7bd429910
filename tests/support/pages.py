"""What a page of sdpa_ref.viewer holds."""

import json
import re

import numpy as np

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def parts(html):
    """Return the template around the data, and the data."""
    before, data, after = re.split(
        r'(?<=type="application/json">)(.*?)(?=</script>)', html, maxsplit=1, flags=re.DOTALL
    )
    return before + after, json.loads(data)


def unpacked(packed, columns, top=1.0):
    """Return the weights of a head."""
    rows = np.zeros((packed.count(".") + 1, columns))
    for row, line in zip(rows, packed.split("."), strict=True):
        codes = np.array([LETTERS.index(letter) for letter in line], float)
        row[: len(codes) // 2] = top * ((64 * codes[::2] + codes[1::2]) / 4095) ** 2
    return rows


def weights_of(text):
    """Return the weights (layers, heads, L, S) of a text."""
    columns = len(text["columns"] or text["rows"])
    return np.array([[unpacked(head, columns, text["top"]) for head in layer["heads"]] for layer in text["layers"]])
