"""Text pictures of masks."""

from typing import Any

import numpy as np

_LINES, _COLUMNS = 64, 96  # the most that is drawn; a longer side is thinned out


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
    every = -(-L // _LINES) or 1, -(-S // _COLUMNS) or 1
    width = max(3, len(str(max(L - 1, 0))))
    lines = [" " * (width + 1) + "".join(str(j % 10) for j in range(0, S, every[1]))] if every[1] == 1 else []
    for i in range(0, L, every[0]):
        marks = "".join("#" if kept else "." for kept in keep[i, :: every[1]])
        lines.append(f"{i:>{width}} {marks}")
    if every != (1, 1):
        lines.append(f"(one row in {every[0]}, one key in {every[1]}; {L} x {S} in all)")
    return "\n".join(lines)
