"""Keys and values that are stored: in pages, as codes of few bits, in caches that grow."""

from sdpa_ref.stored.paged import Paged
from sdpa_ref.stored.quantized import Quantized

__all__ = ["Paged", "Quantized"]
