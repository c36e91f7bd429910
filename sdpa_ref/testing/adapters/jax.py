"""``jax.nn.dot_product_attention``, the XLA implementation.

Not claimed: float64, whose softmax is taken in float32; float16, whose products processors lack; lse in 16-bit types,
which has the type of the keys. A row that sees no key gives the mean of all values, since masked scores become a large
finite number.
"""

from functools import cache
from typing import Any

import numpy as np

from sdpa_ref.masks import Causal, KeyLengths, Window
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.target import Target


def target() -> Target:
    """Return JAX as a target."""
    import jax

    claims = Capabilities(
        dtypes=("bfloat16", "float32"),
        layouts=("LHE",),
        ranks=(3, 4),
        grouped_heads=True,
        scale="any",
        bias="same",
        mask=True,
        masks=("causal", "window", "key lengths"),
        mask_and_bias=True,
        offsets=("start",),
        lse=True,
        empty_row="mean",
    )
    return Target("jax", _forward, claims, state=_state, about=f"JAX {jax.__version__}, on {jax.default_backend()}")


def _forward(query: Array, key: Array, value: Array, **options: Any) -> Array:
    return np.asarray(_attention(query, key, value, **options))


def _state(query: Array, key: Array, value: Array, **options: Any) -> tuple[Array, Array]:
    if query.dtype.itemsize == 2:
        raise NotImplementedError("the lse has the type of the keys")
    output, lse = _attention(query, key, value, return_residual=True, **options)
    return np.asarray(output), np.asarray(lse)


def _attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Any = None,
    query_offset: Any = None,
    **options: Any,
) -> Any:
    if isinstance(mask, Causal):
        options["is_causal"] = True
    elif isinstance(mask, Window):
        wide = query.shape[-3] + key.shape[-3]
        options["local_window_size"] = tuple(wide if side is None else int(side) for side in (mask.left, mask.right))
    elif isinstance(mask, KeyLengths):
        batch = query.shape[0] if query.ndim == 4 else 1
        options["key_value_seq_lengths"] = np.broadcast_to(np.asarray(mask.n, np.int32), (batch,))
    elif mask is not None:
        options["mask"] = mask
    try:
        return _compiled()(query, key, value, **options)
    except RuntimeError as error:
        if "not supported" in str(error):  # by XLA on this processor: bfloat16 products of some shapes
            raise NotImplementedError(str(error)) from None
        raise


@cache  # of one function, or each call would be compiled anew
def _compiled() -> Any:
    import jax

    static = "scale", "is_causal", "local_window_size", "return_residual"
    return jax.jit(jax.nn.dot_product_attention, static_argnames=static)
