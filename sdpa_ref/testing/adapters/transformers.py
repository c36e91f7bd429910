"""The eager attention of Hugging Face Transformers: Llama's, Gemma 2's for soft caps, GPT-OSS's for sinks.

A mask is what its own masks are: 0, and the lowest finite number of the type where a key is dropped. Not claimed: types
other than float32, since scores are rounded to 16-bit types, and the softmax of float64 is taken in float32; mask and
bias in one call.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from sdpa_ref.testing.adapters import _tensors
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.target import Target

PACKAGES = "transformers torch"


def target() -> Target:
    """Return the eager attention of Transformers as a target."""
    import torch
    import transformers
    from transformers.models.gemma2 import modeling_gemma2  # noqa: F401 # what cannot be imported shall say so here
    from transformers.models.gpt_oss import modeling_gpt_oss  # noqa: F401

    torch.set_num_threads(1)  # cases are small
    claims = Capabilities(
        grouped_heads=True,
        value_width=True,
        scale="any",
        softcap=True,
        sink=True,
        bias="same",
        mask=True,
        mask_rows=True,
        empty_row="mean",
        weights=True,
        gradients=True,
    )
    about = f"the eager attention of Transformers {transformers.__version__} on PyTorch {torch.__version__}"
    return Target(
        "transformers",
        partial(_tensors.output, _attention),
        claims,
        weights=_weights,
        vjp=partial(_tensors.gradients, _attention),
        about=about,
    )


def _attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    return _pair(query, key, value, **options)[0].transpose(1, 2)


def _weights(query: Array, key: Array, **options: Any) -> Array:
    def weights(query: Any, key: Any, value: Any, **options: Any) -> Any:
        return _pair(query, key, value, **options)[1]

    return _tensors.output(weights, query, key, key, **options)


def _pair(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Array | None = None,
    bias: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Any = None,
) -> tuple[Any, Any]:
    """Return the output, heads after lengths, and the weights."""
    import torch
    from transformers.models.gemma2 import modeling_gemma2
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.llama import modeling_llama

    if sink is not None and softcap is not None:
        raise NotImplementedError("no model has both a sink and a soft cap")
    module = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], training=False)
    added = bias
    if mask is not None:
        lowest = torch.finfo(query.dtype).min
        added = torch.where(torch.from_numpy(np.array(mask)), 0.0, lowest).to(query.dtype)
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    if sink is not None:
        module.sinks = sink.to(query.dtype).expand(query.shape[1])
        found = modeling_gpt_oss.eager_attention_forward(module, query, key, value, added, scaling)
    elif softcap is not None:
        found = modeling_gemma2.eager_attention_forward(
            module, query, key, value, added, scaling=scaling, softcap=softcap
        )
    else:
        found = modeling_llama.eager_attention_forward(module, query, key, value, added, scaling)
    output, weights = found
    return output, weights
