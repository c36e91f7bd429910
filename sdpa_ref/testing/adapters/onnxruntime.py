"""The `Attention` operator of ONNX Runtime's CPU provider, opset 23.

Not claimed: scales that are not positive, which it refuses, and masks that broadcast over rows or keys.
"""

from typing import Any

import numpy as np

from sdpa_ref.masks import Causal
from sdpa_ref.testing.capabilities import Capabilities
from sdpa_ref.testing.case_options import Array
from sdpa_ref.testing.onnx_model import attention_model
from sdpa_ref.testing.target import Target

_FATAL = 4  # the runtime's log level: errors are raised as well


def target() -> Target:
    """Return ONNX Runtime as a target."""
    import onnx
    import onnxruntime

    claims = Capabilities(
        grouped_heads=True,
        value_width=True,
        scale="positive",
        softcap=True,
        bias="same",
        mask=True,
        masks=("causal",),
        offsets=("start",),
    )
    about = f"ONNX Runtime {onnxruntime.__version__}, models by onnx {onnx.__version__}"
    return Target("onnxruntime", _forward, claims, about=about)


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
    import onnxruntime

    causal = isinstance(mask, Causal)
    given = bias if mask is None or causal else mask
    model, feeds = attention_model(query, key, value, mask=given, is_causal=int(causal), **attributes)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = _FATAL, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])
