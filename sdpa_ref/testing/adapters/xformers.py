"""``ref_attention`` of xformers, the plain PyTorch function that its kernels are compared with.

Its kernels have no CPU path. Not claimed: types other than float32, which is what it computes in and returns. Boolean
masks become biases of 0 and minus infinity, which is how it makes its own.
"""

from functools import partial
from typing import Any

import numpy as np

from sdpa_ref.masks import Causal, Window
from sdpa_ref.testing.adapters import _tensors
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.target import Target

PACKAGES = "xformers torch"


def target() -> Target:
    """Return the reference of xformers as a target."""
    import torch
    import xformers
    from xformers.attn_bias_utils import ref_attention  # noqa: F401 # what cannot be imported shall say so here

    torch.set_num_threads(1)  # cases are small
    claims = Capabilities(
        layouts=("LHE",),
        grouped_heads=True,
        value_width=True,
        scale="any",
        bias="same",
        mask=True,
        masks=("causal",),
        mask_and_bias=True,
        offsets=("start", "end"),
        empty_row="nan",
        gradients=True,
    )
    about = f"ref_attention of xformers {xformers.__version__} on PyTorch {torch.__version__}"
    forward, vjp = (partial(way, _attention) for way in (_tensors.output, _tensors.gradients))
    return Target("xformers", forward, claims, vjp=vjp, about=about)


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
    from xformers.attn_bias_utils import ref_attention
    from xformers.ops import fmha

    (B, L, Hq, E), Hkv = query.shape, key.shape[2]
    added = bias
    if isinstance(mask, Causal) and bias is None:
        end = query_offset == "end"
        kind = fmha.attn_bias.LowerTriangularFromBottomRightMask if end else fmha.attn_bias.LowerTriangularMask
        added = kind()
    elif mask is not None:
        keep = _dense(mask, L, key.shape[1], query_offset) if isinstance(mask, Causal | Window) else np.array(mask)
        hidden = torch.zeros(keep.shape).masked_fill(~torch.from_numpy(keep), -torch.inf)
        added = hidden.expand(B, Hq, L, -1) if bias is None else bias + hidden
    if Hq == Hkv:
        return ref_attention(query, key, value, added, scale=scale)
    group = Hq // Hkv
    grouped = query.reshape(B, L, Hkv, group, E)
    key, value = (x[:, :, :, None].expand(*x.shape[:3], group, x.shape[-1]) for x in (key, value))
    if isinstance(added, torch.Tensor):
        added = added.reshape(B, Hkv, group, L, -1)
    return ref_attention(grouped, key, value, added, scale=scale).reshape(B, L, Hq, -1)


def _dense(mask: Any, L: int, S: int, offset: Any) -> Any:
    return np.array(mask.dense(L, S, query_offset=offset))
