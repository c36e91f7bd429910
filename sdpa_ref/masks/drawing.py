"""Text pictures of masks."""

from typing import Any

import numpy as np

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
