"""``ScaledDotProductAttention-13`` of OpenVINO's CPU plugin.

Not claimed: 16-bit types, which the plugin computes in the precision that the processor suggests.
"""

from typing import Any

import numpy as np

from sdpa_ref.masks import Causal
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.target import Target


def target() -> Target:
    """Return OpenVINO as a target."""
    import openvino

    claims = Capabilities(
        value_width=True,
        scale="any",
        bias="same",
        mask=True,
        mask_rows=True,
        masks=("causal",),
        offsets=("start",),
        empty_row="any",  # its specification does not say
    )
    return Target("openvino", _forward, claims, about=f"OpenVINO {openvino.__version__}, on the CPU")


def _forward(
    query: Array, key: Array, value: Array, *, mask: Any = None, bias: Any = None, scale: float | None = None,
    query_offset: Any = None,
) -> Array:  # fmt: skip
    import openvino
    from openvino import opset13

    causal = isinstance(mask, Causal)
    given = bias if mask is None or causal else mask
    if scale is not None and given is None:  # the scale is the input after the mask
        given = np.zeros((query.shape[-2], key.shape[-2]), query.dtype)
    arrays = [query, key, value, given, None if scale is None else np.array(scale, query.dtype)]
    arrays = [np.ascontiguousarray(array) for array in arrays if array is not None]
    nodes = [opset13.parameter(array.shape, openvino.Type(array.dtype)) for array in arrays]
    attention = opset13.scaled_dot_product_attention(*nodes, causal=causal)
    options = {"INFERENCE_PRECISION_HINT": openvino.Type.f32, "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.Core().compile_model(openvino.Model([attention], nodes), "CPU", options)
    return np.array(compiled(arrays)[0])
