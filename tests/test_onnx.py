"""The node tests of ONNX's `Attention` operator (opsets 23 to 25), mapped onto our call by one function for all."""

import numpy as np
import pytest

from sdpa_ref import Causal, KeyLengths, Window, sdpa, sdpa_stages
from sdpa_ref.testing import error_budget

onnx = pytest.importorskip("onnx", minversion="1.22")
# `collect_testcases` would import the tests of all operators, which takes seconds and warns.
from onnx.backend.test.case import node  # noqa: E402
from onnx.backend.test.case.node import attention  # noqa: E402, F401

CASES = {
    case.name.removeprefix("test_attention_"): case
    for case in node._NodeTestCases
    if case.name.startswith("test_attention_") and not case.name.endswith("_expanded")  # the same in smaller operators
}
STAGES = "scaled", "capped", "biased", "weights"  # by qk_matmul_output_mode; ONNX scales query and key first


def our_call(inputs, *, is_causal=0, softcap=0.0, scale=None, left_window_size=-1, right_window_size=-1,
             q_num_heads=None, kv_num_heads=None, qk_matmul_output_mode=0, softmax_precision=None):  # fmt: skip
    """Return the arrays and keywords of `sdpa` for a node's inputs by name and its attributes.

    Our softmax is at least as precise as any `softmax_precision` asks for.
    """
    q, k, v = inputs["Q"], inputs["K"], inputs["V"]
    if q.ndim == 3:
        heads = (q_num_heads, kv_num_heads, kv_num_heads)
        q, k, v = (x.reshape(*x.shape[:2], n, -1).swapaxes(1, 2) for x, n in zip((q, k, v), heads, strict=True))
    options, masks, offset = {"scale": scale, "softcap": softcap or None}, [], 0
    if "past_key" in inputs:
        offset = inputs["past_key"].shape[2]
        k, v = (np.concatenate([inputs[past], x], 2) for past, x in (("past_key", k), ("past_value", v)))
    if "nonpad_kv_seqlen" in inputs:
        offset = "end"
        masks.append(KeyLengths(inputs["nonpad_kv_seqlen"]))
    if is_causal:
        masks.append(Causal())
    if max(left_window_size, right_window_size) >= 0:
        masks.append(Window(*(None if size < 0 else size for size in (left_window_size, right_window_size))))
    if "attn_mask" in inputs:
        given = inputs["attn_mask"]
        missing = [(0, 0)] * (given.ndim - 1) + [(0, k.shape[2] - given.shape[-1])]  # a short mask drops the last keys
        if given.dtype == bool:
            masks.append(np.pad(given, missing))
        else:
            options["bias"] = np.pad(given, missing, constant_values=-np.inf)
    for mask in masks:
        options["mask"] = options["mask"] & mask if "mask" in options else mask
    return (q, k, v), options | {"query_offset": offset}


def read(case):
    """Return the node's inputs and expected outputs by name, and its attributes."""
    (operator,), ((inputs, outputs),) = case.model.graph.node, case.data_sets
    names = [name for name in operator.input if name]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in operator.attribute}
    given = dict(zip(names, inputs, strict=True))
    return given, dict(zip(filter(None, operator.output), outputs, strict=True)), attributes


def test_all_opsets_are_there():
    versions = {entry.version for case in CASES.values() for entry in case.model.opset_import}
    assert versions == {23, 24, 25}
    assert len(CASES) >= 80


@pytest.mark.parametrize("name", CASES)
def test_node(backend, name):
    inputs, expected, attributes = read(CASES[name])
    arrays, options = our_call(inputs, **attributes)
    output = sdpa(*arrays, backend=backend, **options)
    if inputs["Q"].ndim == 3:
        output = output.swapaxes(1, 2).reshape(expected["Y"].shape)
    assert output.dtype == expected["Y"].dtype
    # The expected numbers are those of the straight formula in the inputs' type, with an error of its own.
    close = {"rtol": CASES[name].rtol, "atol": CASES[name].atol + error_budget(*arrays, **options).empirical}
    np.testing.assert_allclose(output.astype(np.float64), expected["Y"].astype(np.float64), **close)
    for present, array in (("present_key", arrays[1]), ("present_value", arrays[2])):
        if present in expected:
            np.testing.assert_array_equal(array, expected[present])
    if "qk_matmul_output" in expected and backend == "reference":
        stage = getattr(sdpa_stages(*arrays, **options), STAGES[attributes.get("qk_matmul_output_mode", 0)])
        np.testing.assert_allclose(stage, expected["qk_matmul_output"].astype(np.float64), **close)
