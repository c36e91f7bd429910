"""Scaled dot-product attention without a framework: exact semantics, NumPy or CuPy arrays in and out."""

import importlib
import typing

from sdpa_ref.api import (
    scaled_dot_product_attention,
    sdpa,
    sdpa_stages,
    sdpa_state,
    sdpa_vjp,
    sdpa_weights,
    sdpa_with_vjp,
)
from sdpa_ref.backend import Gradients
from sdpa_ref.biases import ALiBi, alibi_slopes
from sdpa_ref.dropout import Dropout
from sdpa_ref.masks import Mask
from sdpa_ref.masks import documents as _documents
from sdpa_ref.masks import rules as _rules
from sdpa_ref.masks.documents import *  # noqa: F403  # the masks, which those files list
from sdpa_ref.masks.rules import *  # noqa: F403
from sdpa_ref.reference import Stages
from sdpa_ref.registry import BackendUnavailable, load, names
from sdpa_ref.sources import reading
from sdpa_ref.state import AttentionState

if typing.TYPE_CHECKING:  # the rest of `__all__`, which `__getattr__` imports at the first use
    from sdpa_ref.layers import (
        AttentionHead,
        DynamicScaling,
        Embedding,
        LayerNorm,
        Linear,
        LinearScaling,
        Llama3Scaling,
        MultiHeadAttention,
        RMSNorm,
        SpatialAttention,
        YarnScaling,
        gelu,
        gelu_derivative,
        patchify,
        silu,
        silu_derivative,
        sinusoidal_positions,
        unpatchify,
    )
    from sdpa_ref.layers.rotary import Rotary, rotary, rotary_vjp
    from sdpa_ref.stored import CacheFull, Float8, Int4, Int8, KVCache, Paged, PagePool, Quantized

__version__ = "0.1.0"
__all__ = [
    "ALiBi",
    "AttentionHead",
    "AttentionState",
    "BackendUnavailable",
    "CacheFull",
    "Dropout",
    "DynamicScaling",
    "Embedding",
    "Float8",
    "Gradients",
    "Int4",
    "Int8",
    "KVCache",
    "LayerNorm",
    "Linear",
    "LinearScaling",
    "Llama3Scaling",
    "Mask",
    "MultiHeadAttention",
    "PagePool",
    "Paged",
    "Quantized",
    "RMSNorm",
    "Rotary",
    "SpatialAttention",
    "Stages",
    "YarnScaling",
    "alibi_slopes",
    "gelu",
    "gelu_derivative",
    "get_num_threads",
    "load",
    "names",
    "patchify",
    "reading",
    "rotary",
    "rotary_vjp",
    "scaled_dot_product_attention",
    "sdpa",
    "sdpa_stages",
    "sdpa_state",
    "sdpa_vjp",
    "sdpa_weights",
    "sdpa_with_vjp",
    "set_num_threads",
    "silu",
    "silu_derivative",
    "sinusoidal_positions",
    "unpatchify",
]
__all__ += _documents.__all__
__all__ += _rules.__all__


def set_num_threads(n: int) -> None:
    """Set how many threads the CPU backend may use, the calling one included.

    Parameters
    ----------
    n : int
        At least 1.
    """
    load("numba").set_num_threads(n)


def get_num_threads() -> int:
    """Return how many threads the CPU backend may use.

    The default is the environment variable ``SDPA_REF_NUM_THREADS``, else the number of processors that the process may
    use.
    """
    return load("numba").get_num_threads()


_STORED = {"CacheFull", "Float8", "Int4", "Int8", "KVCache", "PagePool", "Paged", "Quantized"}


def __getattr__(name: str) -> typing.Any:
    """Import layers and caches when one is asked for: attention alone needs none, and starts in half the time."""
    if name in ("layers", "stored"):
        return importlib.import_module(f"sdpa_ref.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"sdpa_ref.{'stored' if name in _STORED else 'layers'}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "layers", "stored"})
