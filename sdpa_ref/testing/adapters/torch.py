"""``torch.nn.functional.scaled_dot_product_attention`` on the CPU, and its autograd.

Not claimed: rows are neither independent of the batch nor of strides to the bit, a NaN that is masked out spreads
(pytorch issue 101967), and what a visible infinity gives depends on the path that is chosen.
"""

from typing import Any

import numpy as np

from sdpa_ref.masks import Causal
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
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
    return Target("torch", _forward, claims, vjp=_vjp, about=f"PyTorch {torch.__version__}, on the CPU")


def _forward(query: Array, key: Array, value: Array, **options: Any) -> Array:
    import torch

    with torch.inference_mode():
        return _array(_attention(*map(_tensor, (query, key, value)), **options))


def _vjp(query: Array, key: Array, value: Array, grad_output: Array, **options: Any) -> tuple[Any, ...]:
    import torch

    tensors = [_tensor(array).requires_grad_() for array in (query, key, value)]
    bias = _tensor(options.pop("bias")).requires_grad_() if "bias" in options else None
    output = _attention(*tensors, bias=bias, **options)
    leaves = [*tensors, *([] if bias is None else [bias])]
    gradients = [_array(g) for g in torch.autograd.grad(output, leaves, _tensor(grad_output))]
    return (*gradients, *(None,) * (5 - len(gradients)))


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
    given = _tensor(mask) if mask is not None and not causal else None
    if bias is not None:
        given = _tensor(bias) if isinstance(bias, np.ndarray) else bias
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=given, is_causal=causal, scale=scale, enable_gqa=query.shape[-3] != key.shape[-3]
    )


def _tensor(array: Array) -> Any:
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _array(tensor: Any) -> Array:
    import torch

    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return np.asarray(tensor.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.asarray(tensor.numpy())
