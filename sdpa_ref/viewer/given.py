"""What a page shows, from what the caller gave: checked first, each error naming the argument."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdpa_ref.arrays import Array, as_integer, host_array

_SHAPES = "(L, S), (heads, L, S), (layers, heads, L, S), or a list or dict of the second, one for each layer"


_MOST_FLAT = 1.1  # of the sides of a patch, where an image was resized for the model


@dataclass(frozen=True)
class Picture:
    """An image of patches, and how many tokens stand before them."""

    pixels: Array
    rows: int
    columns: int
    before: int


@dataclass(frozen=True)
class Text:
    """Layers of weights (heads, L, S) by name, and the names of their rows and columns (None: the same)."""

    layers: dict[str, Array]
    rows: list[str]
    columns: list[str] | None
    picture: Picture | None


def texts_of(weights: Any, tokens: Any, keys: Any, image: Any, patch: Any) -> dict[str, Text]:
    """Return what is shown, by its name: of several texts where tokens is a dict."""
    if not isinstance(tokens, Mapping):
        return {"0": _text_of(weights, tokens, keys, image, patch)}
    if not isinstance(weights, Mapping) or weights.keys() != tokens.keys() or not tokens:
        raise ValueError("weights must be a dict with the names of tokens, one for each text")
    if keys is not None or image is not None or patch is not None:
        raise ValueError("keys, image and patch go with one text, but tokens is a dict of several")
    return {
        str(text): _text_of(weights[text], words, None, None, None, f"weights[{text!r}]")
        for text, words in tokens.items()
    }


def _text_of(weights: Any, tokens: Any, keys: Any, image: Any, patch: Any, name: str = "weights") -> Text:
    layers = _layers(name, weights)
    shapes = {layer.shape[1:] for layer in layers.values()}
    if len(shapes) > 1:
        raise ValueError(f"{name} must have the same L and S in all layers, got {_listed(shapes)}")
    ((L, S),) = shapes
    for layer, array in layers.items():
        _check_numbers(f"{name} of layer {layer}" if len(layers) > 1 else name, array)
    rows = [] if tokens is None else _words("tokens", tokens)
    if image is not None:
        if keys is not None:
            raise ValueError("keys: the patches of an image attend to one another, so they have no other keys")
        if L != S:
            raise ValueError(f"{name} must be square over the patches of an image, got {L} queries and {S} keys")
        picture = _picture(image, patch, L, len(rows), name)
        patches = [f"row {i}, column {j}" for i in range(picture.rows) for j in range(picture.columns)]
        return Text(layers, rows + patches, None, picture)
    if patch is not None:
        raise ValueError("patch is the size of an image's patches, but image was not given")
    if tokens is None:
        raise TypeError("tokens is missing: a string for each query, or give image")
    if keys is None and L != S:
        raise ValueError(f"keys is missing: {name} has {L} queries and {S} keys, so that tokens cannot name both")
    columns = None if keys is None else _words("keys", keys)
    for argument, words, n, of in (("tokens", rows, L, "queries"), ("keys", columns, S, "keys")):
        if words is not None and len(words) != n:
            raise ValueError(f"{argument} must be {n} strings, as {name} has {n} {of}; got {len(words)}")
    return Text(layers, rows, columns, None)


def sums(text: Text) -> str:
    """Return a sentence about rows that do not sum to one, empty where all do."""
    each = np.concatenate([layer.sum(-1, dtype=np.float64).ravel() for layer in text.layers.values()])
    off = abs(each - 1) > 0.01
    if not off.any():
        return ""
    least, most = each.min(), each.max()
    return (
        f"{off.sum()} of {each.size} rows do not sum to 1; the sums are {least:.3f} to {most:.3f}. "
        "A sink, dropout, or a row that sees nothing does that."
    )


def _layers(name: str, weights: Any) -> dict[str, Array]:
    if isinstance(weights, Mapping):
        given = {str(layer): host_array(f"{name}[{layer!r}]", array) for layer, array in weights.items()}
    elif isinstance(weights, list | tuple) and all(getattr(array, "ndim", 0) == 3 for array in weights):
        given = {str(i): host_array(f"{name}[{i}]", array) for i, array in enumerate(weights)}
    else:
        array = host_array(name, weights)
        if array.ndim not in (2, 3, 4):
            raise ValueError(f"{name} must have the shape {_SHAPES}; got {array.shape}")
        stack = array.reshape((1,) * (4 - array.ndim) + array.shape)
        given = {str(i): layer for i, layer in enumerate(stack)}
    for layer, array in given.items():
        if array.ndim != 3 or 0 in array.shape:
            raise ValueError(
                f"{name} of layer {layer} must be (heads, L, S) with at least one of each; got {array.shape}"
            )
    if not given:
        raise ValueError(f"{name} has no layer; its shape must be {_SHAPES}")
    return given


def _check_numbers(name: str, array: Array) -> None:
    if not (array.dtype.kind == "f" or array.dtype.name == "bfloat16"):
        raise TypeError(f"{name} must be weights in a float type, got {array.dtype}")
    numbers = array.astype(np.float64)
    wrong = {"NaN or infinity": ~np.isfinite(numbers), "a negative number": numbers < 0}
    for what, where in wrong.items():
        if where.any():
            h, i, j = map(int, np.argwhere(where)[0])
            hint = "; scores become weights by softmax, as sdpa_weights returns them" if what.startswith("a") else ""
            raise ValueError(f"{name} has {what} at head {h}, query {i}, key {j}: {array[h, i, j]}{hint}")


def _words(name: str, words: Any) -> list[str]:
    if isinstance(words, str) or not (isinstance(words, Sequence) or hasattr(words, "tolist")):
        hint = ": split it" if isinstance(words, str) else ""
        raise TypeError(f"{name} must be a sequence of strings, got a {type(words).__name__}{hint}")
    listed = [str(word) if isinstance(word, str) else word for word in words]
    wrong = next((word for word in listed if not isinstance(word, str)), None)
    if wrong is not None:
        raise TypeError(f"{name} must be a sequence of strings, got a {type(wrong).__name__} in it")
    return listed


def _picture(image: Any, patch: Any, N: int, before: int, name: str) -> Picture:
    """Return the image in 8 bits and its grid, whose square patches number N less what stands before them."""
    pixels = host_array("image", image)
    if pixels.ndim == 2:
        pixels = pixels[..., None].repeat(3, axis=-1)
    if pixels.ndim != 3 or pixels.shape[-1] != 3 or 0 in pixels.shape:
        raise ValueError(f"image must be (height, width) or (height, width, 3), got {pixels.shape}")
    if pixels.dtype != np.uint8:
        if pixels.dtype.kind != "f" or not ((pixels >= 0) & (pixels <= 1)).all():
            raise ValueError("image must be uint8, or floats from 0 to 1, without NaN")
        pixels = pixels.astype(np.float64) * 255
    height, width, _ = pixels.shape
    patches = N - before
    grids = [(rows, patches // rows) for rows in range(1, patches + 1) if patches % rows == 0]
    if patch is not None:
        side = as_integer("patch", patch)
        grids = [grid for grid in grids if grid == (height / side, width / side)] if side > 0 else []
    flatness = [max(height * columns, width * rows) / min(height * columns, width * rows) for rows, columns in grids]
    if not grids or min(flatness) > _MOST_FLAT:
        raise ValueError(
            f"{name} has {N} tokens, {before} of them named; the other {patches} make no grid of square patches"
            f"{'' if patch is None else f' of {patch} pixels'} over an image of {height} by {width} pixels. "
            "Name what stands before the patches: tokens=['class']"
        )
    return Picture(pixels, *grids[int(np.argmin(flatness))], before)


def _listed(shapes: set[tuple[int, ...]]) -> str:
    return " and ".join(map(str, sorted(shapes)))
