"""The normal form of a mask: what every backend sees instead of mask objects."""

from typing import NamedTuple

from sdpa_ref.masks.algebra import BooleanArray, Mask, joined
from sdpa_ref.masks.band import EVERYTHING, Band
from sdpa_ref.masks.grid import Grid
from sdpa_ref.masks.intervals import Intervals, Rows, intersection, normal_form


class Normal(NamedTuple):
    """What a mask comes to: three parts, to be joined by "and".

    Attributes
    ----------
    visible : Band, Intervals or None
        The keys that a row sees; None for all.
    arrays : tuple of BooleanArray
    rules : tuple of Mask
        What neither intervals nor arrays can say.
    """

    visible: Band | Intervals | None = None
    arrays: tuple[BooleanArray, ...] = ()
    rules: tuple[Mask, ...] = ()


def normal(mask: Mask, grid: Grid) -> Normal:
    """Return the normal form of a mask that is no band, or whose positions are not those of the keys."""
    band, arrays, rules = EVERYTHING, [], []
    rows: Rows | None = None
    for part in joined(mask):
        own = part._band() if grid.documents is None and grid.key_positions is None else None
        both = None if own is None else band.intersection(own)
        if both is not None:
            band = both
            continue
        pieces = part._rows(grid)
        if pieces is not None:
            rows = pieces if rows is None else intersection(rows, pieces)
        elif isinstance(part, BooleanArray):
            arrays.append(part)
        else:
            rules.append(part)
    if rows is None:
        placed = None if band is EVERYTHING else band.at(grid.offset)
        return Normal(placed, tuple(arrays), tuple(rules))
    if band is not EVERYTHING:
        rows = intersection(rows, band.on(grid.positions, 0))
    intervals, exact = normal_form(rows, grid.S)
    if not exact:
        rules += [part for part in joined(mask) if part not in arrays and part not in rules]
    return Normal(intervals, tuple(arrays), tuple(rules))
