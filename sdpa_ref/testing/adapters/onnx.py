"""The reference evaluator of ONNX, `Attention` of opset 25: NumPy in the type of the inputs.

Not claimed: 16-bit types, whose scores and softmax stay in 16 bits; scales that are not positive, whose root is taken;
and NaN or infinity in what is masked, which spreads.
"""

from typing import Any

import numpy as np

from sdpa_ref.masks import Causal, KeyLengths, Window
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.onnx_model import attention_model
from sdpa_ref.testing.target import Target

_OPSET = 25


def target() -> Target:
    """Return ONNX's reference evaluator as a target."""
    import onnx
    import onnx.reference

    claims = Capabilities(
        dtypes=("float32", "float64"),
        grouped_heads=True,
        value_width=True,
        scale="positive",
        softcap=True,
        bias="same",
        mask=True,
        mask_rows=True,
        masks=("causal", "window", "key lengths"),
        offsets=("start",),
    )
    return Target("onnx", _forward, claims, about=f"the reference evaluator of onnx {onnx.__version__}")


def _forward(
    query: Array,
    key: Array,
    value: Array,
    *,
    mask: Any = None,
    bias: Any = None,
    query_offset: Any = None,
    **attributes: Any,
) -> Array:
    from onnx.reference import ReferenceEvaluator

    given, lengths = bias, None
    if isinstance(mask, Causal):
        attributes["is_causal"] = 1
    elif isinstance(mask, Window):
        left, right = (-1 if side is None else int(side) for side in (mask.left, mask.right))
        attributes |= {"left_window_size": left, "right_window_size": right}
    elif isinstance(mask, KeyLengths):
        lengths = np.broadcast_to(np.asarray(mask.n, np.int64), query.shape[:1])
    elif mask is not None:
        given = mask
    if given is not None:  # a shorter last axis is filled up with dropped keys
        given = np.array(np.broadcast_to(given, (*given.shape[:-1], key.shape[-2])))
    model, feeds = attention_model(query, key, value, mask=given, lengths=lengths, opset=_OPSET, **attributes)
    (output,) = ReferenceEvaluator(model).run(None, feeds)
    return np.asarray(output)
