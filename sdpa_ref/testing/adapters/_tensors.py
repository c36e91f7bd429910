"""Arrays as tensors of PyTorch and back, and gradients by its autograd."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sdpa_ref.testing.case_options import Array


def tensor(array: Array) -> Any:
    """Return the array as a tensor over the same memory."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array(tensor: Any) -> Array:
    """Return the numbers of a tensor."""
    import torch

    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return np.asarray(tensor.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.asarray(tensor.numpy())


def output(attention: Callable[..., Any], query: Array, key: Array, value: Array, **options: Any) -> Array:
    """Return what a function of tensors computes; bias and sink become tensors, too."""
    import torch

    options |= {name: tensor(options[name]) for name in ("bias", "sink") if name in options}
    with torch.inference_mode():
        return array(attention(*map(tensor, (query, key, value)), **options).contiguous())


def gradients(
    attention: Callable[..., Any], query: Array, key: Array, value: Array, grad_output: Array, **options: Any
) -> tuple[Array | None, ...]:
    """Return the gradients of query, key, value, bias and sink, None for what was not given."""
    import torch

    given = [query, key, value, options.pop("bias", None), options.pop("sink", None)]
    leaves = [None if x is None else tensor(x).requires_grad_() for x in given]
    more = {name: x for name, x in zip(("bias", "sink"), leaves[3:], strict=True) if x is not None}
    result = attention(*leaves[:3], **more, **options)
    found = iter(torch.autograd.grad(result, [x for x in leaves if x is not None], tensor(grad_output)))
    return tuple(None if x is None else array(next(found).contiguous()) for x in leaves)
