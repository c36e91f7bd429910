"""Masks: which query may attend to which key.

`rules` and `documents` have the objects, `algebra` what they share, `reduction` the normal form that backends see, a
`band` or `intervals`; `positions` says where the queries stand, `looking` shows a mask, `checks` has the errors.
"""

from sdpa_ref.masks import documents, rules
from sdpa_ref.masks.algebra import RULES, All, BooleanArray, Mask, as_mask, joined, leaves
from sdpa_ref.masks.band import FAR, Band
from sdpa_ref.masks.block import Block, once, spans
from sdpa_ref.masks.documents import *  # noqa: F403  # the masks, which those files list
from sdpa_ref.masks.grid import Grid
from sdpa_ref.masks.intervals import Intervals
from sdpa_ref.masks.positions import place_queries, placed_keys, valid_keys
from sdpa_ref.masks.reduction import Normal, normal
from sdpa_ref.masks.rules import *  # noqa: F403

__all__ = [
    "FAR",
    "RULES",
    "All",
    "Band",
    "Block",
    "BooleanArray",
    "Grid",
    "Intervals",
    "Mask",
    "Normal",
    "as_mask",
    "joined",
    "leaves",
    "normal",
    "once",
    "place_queries",
    "placed_keys",
    "spans",
    "valid_keys",
]
__all__ += documents.__all__
__all__ += rules.__all__
