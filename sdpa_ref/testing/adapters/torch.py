"""``torch.nn.functional.scaled_dot_product_attention`` on the CPU, and its autograd.

Not claimed: rows are neither independent of the batch nor of strides to the bit, a NaN that is masked out spreads
(pytorch issue 101967), and what a visible infinity gives depends on the path that is chosen.
"""

from functools import partial
from typing import Any

from sdpa_ref.masks import Causal
from sdpa_ref.testing.adapters import _tensors
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.target import Target


def target() -> Target:
    """Return PyTorch as a target."""
    import torch

    torch.set_num_threads(1)  # cases are small
    claims = Capabilities(
        dtypes=("float16", "bfloat16", "float32", "float64"),
        ranks=(3, 4, 5),
        grouped_heads=True,
        value_width=True,
        scale="any",
        bias="same",
        mask=True,
        mask_rows=True,
        masks=("causal",),
        offsets=("start",),
        gradients=True,
    )
    forward, vjp = (partial(way, _attention) for way in (_tensors.output, _tensors.gradients))
    return Target("torch", forward, claims, vjp=vjp, about=f"PyTorch {torch.__version__}, on the CPU")


def _attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    query_offset: Any = None,
) -> Any:
    import torch

    causal = isinstance(mask, Causal)
    given = _tensors.tensor(mask) if mask is not None and not causal else bias
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=given, is_causal=causal, scale=scale, enable_gqa=query.shape[-3] != key.shape[-3]
    )
