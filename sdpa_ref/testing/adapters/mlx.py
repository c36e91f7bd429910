"""``mlx.core.fast.scaled_dot_product_attention``.

Causal attention ends at the last key ("end"). Not claimed: 16-bit types, and rows that see no key, for which the
documentation has no rule.
"""

from typing import Any

import numpy as np

from sdpa_ref.masks import Causal
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.target import Target


def target() -> Target:
    """Return MLX as a target."""
    import mlx.core

    claims = Capabilities(
        grouped_heads=True,
        value_width=True,
        scale="any",
        sink=True,
        bias="same",
        mask=True,
        mask_rows=True,
        masks=("causal",),
        offsets=("end",),
        empty_row="any",
    )
    device = mlx.core.default_device()
    return Target("mlx", _forward, claims, about=f"MLX {mlx.core.__version__}, on {device}")


def _forward(
    query: Array, key: Array, value: Array, *, mask: Any = None, bias: Any = None, scale: float | None = None,
    sink: Any = None, query_offset: Any = None,
) -> Array:  # fmt: skip
    import mlx.core as mx

    given: Any = "causal" if isinstance(mask, Causal) else bias if mask is None else mask
    result = mx.fast.scaled_dot_product_attention(
        *(mx.array(array) for array in (query, key, value)),
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        mask=mx.array(given) if isinstance(given, np.ndarray) else given,
        sinks=None if sink is None else mx.array(np.broadcast_to(sink, query.shape[1:2]).astype(query.dtype)),
    )
    return np.array(result)
