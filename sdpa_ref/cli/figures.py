"""The demo's pictures, as PNG files in memory."""

import io
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

_SHADES = colormaps["inferno_r"](np.linspace(0.05, 0.95, 256))
_SHADES[:, 3] = np.linspace(0, 1, 256) ** 0.6  # where nothing is, the photo shows through
_SPOTLIGHT = ListedColormap(_SHADES)
_FRAME = "#0077ff"


def photo_picture(photo: Any, weights: Any, patch: int, queries: Sequence[tuple[int, int]]) -> bytes:
    """Return the attention of some patches over the photo, a column for each head.

    Parameters
    ----------
    photo : array, shape (h, w, 3)
        In [0, 1].
    weights : array, shape (Hq, L, L)
        L counts the patches in row-major order.
    patch : int
        Side of a patch.
    queries : sequence of (int, int)
        Row and column of each query patch.
    """
    heads, rows, columns = len(weights), photo.shape[0] // patch, photo.shape[1] // patch
    figure = Figure(figsize=(2 * (heads + 1) + 0.8, 2 * len(queries) + 0.8), dpi=130, layout="constrained")
    axes = figure.subplots(len(queries), heads + 1, squeeze=False)
    shown = [weights[:, row * columns + column].reshape(heads, rows, columns) for row, column in queries]
    for (row, column), maps, line in zip(queries, shown, axes, strict=True):
        _photo(line[0], photo)
        line[0].set_ylabel(f"query: patch ({row}, {column})")
        for over, ax in zip(maps, line[1:], strict=True):
            image = _over(ax, photo, over, max(map(np.max, shown)))
        for ax in line:
            _frame(ax, column * patch, row * patch, patch)
    for ax, title in zip(axes[0], ["the photo", *(f"head {head}" for head in range(heads))], strict=True):
        ax.set_title(title, fontsize=10)
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8, pad=0.01)
    figure.suptitle(
        "Attention weights of a patch of the photo: largest for patches like itself\n"
        "nothing is trained: queries and keys are one random projection of the pixels, another one in each head",
        fontsize=11,
    )
    return _png(figure)


def words_picture(words: Sequence[str], weights: Any) -> bytes:
    """Return the matrix of weights from word to word, one for each head.

    Parameters
    ----------
    words : sequence of str
    weights : array, shape (Hq, L, L)
    """
    heads, n = len(weights), len(words)
    across = heads if n <= 8 else 2
    down = -(-heads // across)
    side = min(0.9 + 0.4 * n, 6)
    figure = Figure(figsize=(side * across + 1.8, (side + 0.4) * down + 0.9), dpi=130, layout="constrained")
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    labels = [word if len(word) <= 14 else f"{word[:13]}…" for word in words]
    size = 9 if n <= 20 else 6
    for head, (matrix, ax) in enumerate(zip(weights, axes.flat, strict=True)):
        image = ax.imshow(matrix, cmap=_SPOTLIGHT, vmin=0, vmax=weights.max())
        ax.set_title(f"head {head}", fontsize=10)
        ax.set_xticks(range(n), labels, rotation=90, fontsize=size, parse_math=False)
        ax.set_yticks(range(n), labels, fontsize=size, parse_math=False)
        for i, j in np.ndindex(n, n) if n <= 10 else ():
            ink = "white" if matrix[i, j] > 0.5 * weights.max() else "black"
            ax.text(j, i, f"{matrix[i, j]:.2f}", ha="center", va="center", color=ink, fontsize=8)
    figure.supylabel("the query: a word", fontsize=10)
    figure.supxlabel("the word that is looked at", fontsize=10)
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8, pad=0.01)
    figure.suptitle(
        "Attention weights between the words; every row sums to 1\n"
        "nothing is trained: embeddings and projections are random, so the weights mean nothing yet",
        fontsize=11,
    )
    return _png(figure)


def map_picture(photo: Any, weights: Any, queries: Sequence[tuple[int, int]]) -> bytes:
    """Return the attention of some positions of a feature map over the map, drawn over the photo it came from.

    Parameters
    ----------
    photo : array, shape (h, w, 3)
        In [0, 1].
    weights : array, shape (heads, side * side, side * side)
    queries : sequence of (int, int)
        Row and column of each query position.
    """
    side = int(weights.shape[-1] ** 0.5)
    cell = photo.shape[0] // side
    figure = Figure(figsize=(2.6 * (len(queries) + 1) + 0.8, 3.4), dpi=130, layout="constrained")
    axes = figure.subplots(1, len(queries) + 1)
    shown = [weights.mean(axis=0)[row * side + column].reshape(side, side) for row, column in queries]
    _photo(axes[0], photo)
    axes[0].set_title("the photo", fontsize=10)
    for (row, column), over, ax in zip(queries, shown, axes[1:], strict=True):
        image = _over(ax, photo, over, max(map(np.max, shown)))
        ax.set_title(f"query: position ({row}, {column})", fontsize=10)
        for each in (axes[0], ax):
            _frame(each, column * cell, row * cell, cell)
    figure.colorbar(image, ax=axes, label="attention weight", shrink=0.8, pad=0.01)
    figure.suptitle(
        f"Attention weights of a position of the {side} x {side} feature map, mean of all heads:\n"
        "largest for positions like itself; "
        "nothing is trained: queries and keys are one random projection of the features",
        fontsize=11,
    )
    return _png(figure)


def _photo(ax: Axes, photo: Any) -> None:
    ax.imshow(photo, interpolation="nearest")
    ax.set(xticks=[], yticks=[])


def _over(ax: Axes, photo: Any, weights: Any, highest: float) -> Any:
    """Return the image of the weights, laid over the photo in pale grey."""
    height, width = photo.shape[:2]
    _photo(ax, np.repeat(0.55 + 0.45 * photo.mean(axis=-1, keepdims=True), 3, axis=-1))
    extent = (-0.5, width - 0.5, height - 0.5, -0.5)
    return ax.imshow(weights, cmap=_SPOTLIGHT, vmin=0, vmax=highest, extent=extent, interpolation="nearest")


def _frame(ax: Axes, x: int, y: int, side: int) -> None:
    ax.add_patch(Rectangle((x - 0.5, y - 0.5), side, side, fill=False, edgecolor=_FRAME, linewidth=1.8))


def _png(figure: Figure) -> bytes:
    memory = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a word in a script that the font lacks
        figure.savefig(memory, format="png", metadata={"Software": None})
    return memory.getvalue()
