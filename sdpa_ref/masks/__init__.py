"""Masks: which query may attend to which key.

`rules` and `documents` have the objects, `algebra` what they share, `reduction` the normal form that backends see, a
`band` or `intervals`; `positions` says where the queries stand, `looking` shows a mask, `checks` has the errors.
"""

from sdpa_ref.masks.algebra import RULES, BooleanArray, Mask, as_mask, joined, leaves
from sdpa_ref.masks.band import FAR, Band
from sdpa_ref.masks.documents import Packed, Segments, Tree
from sdpa_ref.masks.grid import Grid
from sdpa_ref.masks.intervals import Intervals
from sdpa_ref.masks.positions import place_queries
from sdpa_ref.masks.reduction import Normal, normal
from sdpa_ref.masks.rules import (
    Causal,
    Chunked,
    FirstTokens,
    KeyLengths,
    KeyStarts,
    MaskFunction,
    Prefix,
    QueryLengths,
    Window,
)

__all__ = [
    "FAR",
    "RULES",
    "Band",
    "BooleanArray",
    "Causal",
    "Chunked",
    "FirstTokens",
    "Grid",
    "Intervals",
    "KeyLengths",
    "KeyStarts",
    "Mask",
    "MaskFunction",
    "Normal",
    "Packed",
    "Prefix",
    "QueryLengths",
    "Segments",
    "Tree",
    "Window",
    "as_mask",
    "joined",
    "leaves",
    "normal",
    "place_queries",
]
