"""A model of one ONNX `Attention` node, for the adapters and for counterexamples."""

from typing import Any

import numpy as np

from sdpa_ref.testing.case_options import Array

_IR_VERSION = 11


def attention_model(
    query: Array, key: Array, value: Array, *, mask: Array | None = None, lengths: Array | None = None, opset: int = 23,
    **attributes: Any,
) -> tuple[Any, dict[str, Array]]:  # fmt: skip
    """Return the model and its feeds.

    Parameters
    ----------
    query, key, value : array (B, H, length, width)
    mask : array, optional
        Boolean, or a bias in the type of the query; None leaves it out.
    lengths : int64 array (B,), optional
        `nonpad_kv_seqlen`, from opset 24 on.
    opset : int
    **attributes
        Of the node.
    """
    from onnx import helper

    inputs = {
        "Q": query,
        "K": key,
        "V": value,
        "attn_mask": mask,
        "past_key": None,
        "past_value": None,
        "nonpad_kv_seqlen": lengths,
    }
    feeds = {name: np.ascontiguousarray(array) for name, array in inputs.items() if array is not None}
    names = [name if name in feeds else "" for name in inputs]
    while not names[-1]:
        names.pop()
    node = helper.make_node("Attention", names, ["Y"], **attributes)
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    kind = helper.np_dtype_to_tensor_dtype(query.dtype)
    result = helper.make_tensor_value_info("Y", kind, (*query.shape[:-1], value.shape[-1]))
    graph = helper.make_graph([node], "attention", declared, [result])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=_IR_VERSION), feeds
