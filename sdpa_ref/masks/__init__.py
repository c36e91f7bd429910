"""Masks: which query may attend to which key.

`rules` has the objects, `algebra` what they share, `intervals` the cheap form that backends see, `positions` where the
queries stand, `drawing` the text picture, `checks` the errors.
"""

from sdpa_ref.masks.algebra import Grid, Mask, as_mask, joined, reduce_mask, walk
from sdpa_ref.masks.intervals import Intervals
from sdpa_ref.masks.positions import place_queries
from sdpa_ref.masks.rules import (
    Causal,
    Chunked,
    FirstTokens,
    KeyLengths,
    KeyStarts,
    MaskFunction,
    Packed,
    Prefix,
    QueryLengths,
    Segments,
    Tree,
    Window,
)

__all__ = [
    "Causal",
    "Chunked",
    "FirstTokens",
    "Grid",
    "Intervals",
    "KeyLengths",
    "KeyStarts",
    "Mask",
    "MaskFunction",
    "Packed",
    "Prefix",
    "QueryLengths",
    "Segments",
    "Tree",
    "Window",
    "as_mask",
    "joined",
    "place_queries",
    "reduce_mask",
    "walk",
]
