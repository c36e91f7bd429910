"""A page that shows where each word, or each patch of an image, looks: one HTML file that needs no network."""

import json
import re
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.viewer.given import Picture, Text, sums, texts_of
from sdpa_ref.viewer.png import png_address

__all__ = ["page"]

_LETTERS = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)
_MOST_PIXELS = 1024  # of a side; more would make a large page
_SMALL = 256  # below, pixels are drawn as squares


def page(
    weights: Any,
    tokens: Any = None,
    *,
    keys: Any = None,
    image: Any = None,
    patch: int | None = None,
    title: str = "Attention",
) -> str:
    """Return an HTML page in which one chooses layer, head and word, and sees where the word looks.

    The page is one file that loads nothing. It works with pointer, touch and keyboard, on a phone, and in light and
    dark. A weight takes two letters, 12 bits of its root: it is right to 0.0003, and to 1 % at 0.001.

    Parameters
    ----------
    weights : array, shape (L, S), (heads, L, S) or (layers, heads, L, S); or a list or dict of (heads, L, S)
        Weights after softmax, as `sdpa_weights` and ``with_weights`` of a layer return them, for one text. The dict
        has the names of the layers, which may have different numbers of heads.
    tokens : sequence of L str
        The words. With `image`, what stands before its patches, such as ``["class"]``.
    keys : sequence of S str, optional
        The words that are looked at, where they are others.
    image : array, shape (height, width, 3) or (height, width), optional
        In uint8, or floats from 0 to 1. Its patches in row-major order, as `patchify` makes them, are the tokens.
    patch : int, optional
        The side of a patch in pixels; by default the grid of the right number whose patches are nearest to squares.
    title : str
        Of the page.

    Returns
    -------
    str

    Raises
    ------
    TypeError, ValueError
        Shapes, numbers of tokens or types that do not fit one another; NaN, infinity or negative numbers in the
        weights. Rows that do not sum to one are shown, and the page says so.

    Notes
    -----
    Several texts go into one page as dicts with the same names: ``page({"German": {"0": w}}, {"German": words})``.
    Then the weights of each are one of the forms above.

    Examples
    --------
    >>> from pathlib import Path
    >>> import numpy as np
    >>> from sdpa_ref import sdpa_weights
    >>> words = "Wie geht es dir".split()
    >>> query, key = np.random.default_rng(0).normal(size=(2, 3, 4, 8))
    >>> html = page(sdpa_weights(query, key), words)
    >>> html[:15], len(html) < 20_000
    ('<!doctype html>', True)
    """
    if not isinstance(title, str):
        raise TypeError(f"title must be a string, got {type(title).__name__}")
    return html_of(texts_of(weights, tokens, keys, image, patch), title)


def html_of(texts: dict[str, Text], title: str) -> str:
    """Return the page of texts that have been checked."""
    data = json.dumps([_described(name, text) for name, text in texts.items()], separators=(",", ":"))
    template = files(__name__).joinpath("page.html").read_text(encoding="utf-8")
    filled = {"TITLE": escape(title), "DATA": data.replace("<", "\\u003c")}
    return re.sub("TITLE|DATA", lambda found: filled[found[0]], template)


def _described(name: str, text: Text) -> dict[str, Any]:
    """Return a text as the page reads it."""
    top = max(1.0, *(float(layer.max()) for layer in text.layers.values()))  # dropout makes weights larger than 1
    return {
        "name": name,
        "rows": text.rows,
        "columns": text.columns,
        "top": top,
        "sums": sums(text),
        "image": None if text.picture is None else _shown(text.picture),
        "layers": [{"name": n, "heads": [_packed(head / top) for head in layer]} for n, layer in text.layers.items()],
    }


def _packed(weights: Array) -> str:
    """Return rows between dots, two letters a weight, without the zeros at the end of a row.

    Examples
    --------
    >>> _packed(np.array([[1.0, 0.0], [0.25, 0.75]]))
    '//.gA3a'
    """
    codes = np.rint(4095 * np.sqrt(weights.astype(np.float64))).astype(np.int64)
    letters = _LETTERS[np.stack([codes >> 6, codes & 63], -1)].reshape(len(codes), -1)
    used = 2 * np.where(codes.any(-1), codes.shape[1] - (codes[:, ::-1] != 0).argmax(-1), 0)
    return ".".join(row[:n].tobytes().decode() for row, n in zip(letters, used, strict=True))


def _shown(picture: Picture) -> dict[str, Any]:
    step = -(-max(picture.pixels.shape) // _MOST_PIXELS)
    return {
        "source": png_address(picture.pixels[::step, ::step]),
        "small": max(picture.pixels.shape) <= _SMALL,
        "ratio": picture.pixels.shape[1] / picture.pixels.shape[0],
        "rows": picture.rows,
        "columns": picture.columns,
        "before": picture.before,
    }
