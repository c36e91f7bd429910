"""``Tensor.scaled_dot_product_attention`` of tinygrad.

Not claimed: types other than float32, since scores are rounded to the type of the query before the softmax; a scale,
for which it has no argument. A row that sees no key is NaN, or the value where there is one key.
"""

from typing import Any

import numpy as np

from sdpa_ref.masks import Causal
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.target import Target, TargetError


def target() -> Target:
    """Return tinygrad as a target."""
    from importlib.metadata import version

    import tinygrad

    try:
        device = tinygrad.Device.DEFAULT
    except RuntimeError as error:
        raise TargetError(f"tinygrad cannot run here: {error}; on a CPU it needs clang") from None
    claims = Capabilities(
        ranks=(3, 4, 5),
        grouped_heads=True,
        value_width=True,
        bias="same",
        mask=True,
        mask_rows=True,
        masks=("causal",),
        offsets=("start",),
        empty_row="any",
        gradients=True,
        threads=False,
    )
    about = f"tinygrad {version('tinygrad')}, on {device}"
    return Target("tinygrad", _forward, claims, vjp=_vjp, about=about)


def _forward(query: Array, key: Array, value: Array, **options: Any) -> Array:
    from tinygrad import Tensor

    bias = Tensor(options.pop("bias")) if "bias" in options else None
    return np.asarray(_attention(*(Tensor(array) for array in (query, key, value)), bias=bias, **options).numpy())


def _vjp(query: Array, key: Array, value: Array, grad_output: Array, **options: Any) -> tuple[Any, ...]:
    from tinygrad import Tensor

    bias = options.pop("bias", None)
    leaves = [Tensor(array) for array in (query, key, value, *([] if bias is None else [bias]))]
    output = _attention(*leaves[:3], bias=None if bias is None else leaves[3], **options)
    found = [gradient.numpy() for gradient in output.gradient(*leaves, gradient=Tensor(grad_output))]
    return (*found, *(None,) * (5 - len(found)))


def _attention(
    query: Any, key: Any, value: Any, *, mask: Any = None, bias: Any = None, query_offset: Any = None
) -> Any:
    from tinygrad import Tensor

    causal = isinstance(mask, Causal)
    given = bias if mask is None or causal else Tensor(np.array(mask))
    grouped = query.shape[-3] != key.shape[-3]
    return query.scaled_dot_product_attention(key, value, attn_mask=given, is_causal=causal, enable_gqa=grouped)
