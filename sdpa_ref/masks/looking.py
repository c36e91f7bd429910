"""How a mask is shown: a picture in text, and an explanation in words."""

import math
from typing import Any

import numpy as np

from sdpa_ref.arrays import as_integer
from sdpa_ref.masks.grid import Grid

_LINES, _COLUMNS = 64, 96  # the most that is drawn; of a longer side several share a mark


def picture(keep: np.ndarray[Any, np.dtype[np.bool_]]) -> str:
    """Return the picture of a mask ``(L, S)`` or, one below another with a heading, of ``(*batch, Hq, L, S)``."""
    if keep.ndim == 2:
        return _panel(keep)
    panels = []
    for *b, h in np.ndindex(*keep.shape[:-2]):
        where = [f"batch {', '.join(map(str, b))}"] * bool(b) + [f"head {h}"] * (keep.shape[-3] > 1)
        panels.append("\n".join([*[", ".join(where)] * bool(where), _panel(keep[(*b, h)])]))
    return "\n\n".join(panels)


def explanation(mask: Any, grid: Grid, i: int, j: int, b: int, h: int) -> str:
    """Return in words which parts of a mask keep or drop key j for query i of head h in batch entry b."""
    sizes = {"i": (i, grid.L), "j": (j, grid.S), "b": (b, math.prod(grid.batch)), "h": (h, grid.heads)}
    for name, (index, size) in sizes.items():
        if not 0 <= as_integer(name, index) < size:
            raise ValueError(f"{name} must be in [0, {size}), got {index}")
    entry = tuple(map(int, np.unravel_index(b, grid.batch))) if grid.batch else ()
    lines: list[str] = []

    def visit(mask: Any, depth: int) -> tuple[bool, bool]:
        """Return whether the mask keeps the key, and whether any part of it is positional."""
        rows = np.broadcast_to(mask._keep(grid, i, i + 1), (*grid.shape[:-2], 1, grid.S))
        kept, positional = bool(rows[(*entry, h, 0, j)]), mask.positional
        lines.append(f"{'  ' * depth}{'keep' if kept else 'drop'}  {mask!r}")
        for part in getattr(mask, "parts", ()):
            positional |= visit(part, depth + 1)[1]
        return kept, positional

    kept, positional = visit(mask, 1)
    place = int(np.broadcast_to(grid.positions, (*grid.batch, grid.L))[(*entry, i)])
    stands = f" (at position {place})" if positional and place != i else ""
    return "\n".join([f"query {i}{stands} may{'' if kept else ' not'} attend to key {j}", *lines])


def _panel(keep: Any) -> str:
    L, S = keep.shape
    rows, keys = -(-L // _LINES) or 1, -(-S // _COLUMNS) or 1
    width = max(3, len(str(max(L - 1, 0))))
    lines = []
    if (rows, keys) != (1, 1):
        lines.append(f"(a mark is {rows} x {keys} pairs, # where any is kept; {L} x {S} in all)")
        keep = np.logical_or.reduceat(keep, np.arange(0, L, rows), axis=0)
        keep = np.logical_or.reduceat(keep, np.arange(0, S, keys), axis=1)
    if keys == 1:
        lines.append(" " * (width + 1) + "".join(str(j % 10) for j in range(S)))
    for i, marks in enumerate(keep):
        lines.append(f"{rows * i:>{width}} {''.join('#' if kept else '.' for kept in marks)}")
    return "\n".join(lines)
