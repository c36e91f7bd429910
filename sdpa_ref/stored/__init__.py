"""Keys and values that are stored: in pages, as codes of few bits, in caches that grow."""

from sdpa_ref.stored.paged import Paged
from sdpa_ref.stored.quantized import Quantized
from sdpa_ref.stored.recipes import Float8, Int4, Int8

__all__ = ["Float8", "Int4", "Int8", "Paged", "Quantized"]
