"""Keys and values that are stored: in pages, as codes of few bits, in caches that grow."""

from sdpa_ref.stored.cache import CacheFull
from sdpa_ref.stored.kv_cache import KVCache
from sdpa_ref.stored.paged import Paged
from sdpa_ref.stored.paged_cache import PagedCache
from sdpa_ref.stored.pool import PagePool
from sdpa_ref.stored.quantized import Quantized
from sdpa_ref.stored.recipes import Float8, Int4, Int8

__all__ = ["CacheFull", "Float8", "Int4", "Int8", "KVCache", "PagePool", "Paged", "PagedCache", "Quantized"]
