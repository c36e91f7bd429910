"""The node tests of ONNX's `Attention` (opsets 23 to 25), through its evaluator and the operator of docs/bridges.md."""

import numpy as np
import pytest
from recipes import recipe

from sdpa_ref.testing import error_budget
from sdpa_ref.testing.onnx_model import attention_model

onnx = pytest.importorskip("onnx", minversion="1.22")
# `collect_testcases` would import the tests of all operators, which takes seconds and warns.
from onnx.backend.test.case import node  # noqa: E402
from onnx.backend.test.case.node import attention  # noqa: E402, F401
from onnx.reference import ReferenceEvaluator  # noqa: E402

CASES = {
    case.name.removeprefix("test_attention_"): case
    for case in node._NodeTestCases
    if case.name.startswith("test_attention_") and not case.name.endswith("_expanded")  # the same in smaller operators
}


def evaluated(model, inputs, backend="reference"):
    """Return the outputs by name, with our operator."""
    operator = type("Attention", (recipe("onnx").Attention,), {"options": {"backend": backend}})
    evaluator = ReferenceEvaluator(model, new_ops=[operator])
    return dict(zip(evaluator.output_names, evaluator.run(None, inputs), strict=True))


def test_all_opsets_are_there():
    versions = {entry.version for case in CASES.values() for entry in case.model.opset_import}
    assert versions == {23, 24, 25}
    assert len(CASES) >= 80


@pytest.mark.parametrize("name", CASES)
def test_node(backend, name):
    case = CASES[name]
    (operator,), ((inputs, outputs),) = case.model.graph.node, case.data_sets
    given = dict(zip(filter(None, operator.input), inputs, strict=True))
    expected = dict(zip(filter(None, operator.output), outputs, strict=True))
    got = evaluated(case.model, given, backend)
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in operator.attribute}
    attributes.pop("qk_matmul_output_mode", None)
    arrays, options = recipe("onnx").our_call(**given, **attributes)
    # The expected numbers are those of the straight formula in the inputs' type, with an error of its own.
    close = {"rtol": case.rtol, "atol": case.atol + error_budget(*arrays, **options).empirical}
    assert got.keys() == expected.keys()
    for output, right in expected.items():
        assert (got[output].dtype, got[output].shape) == (right.dtype, right.shape)
        np.testing.assert_allclose(got[output].astype(np.float64), right.astype(np.float64), **close)


def test_nodes_that_are_wrong_are_refused():
    x = np.ones((1, 2, 3, 4), np.float32)
    model, feeds = attention_model(x, x, x, opset=25, left_window_size=-2)
    with pytest.raises(ValueError, match="Window"):
        evaluated(model, feeds)
    model, feeds = attention_model(x, x, x, lengths=np.array([4]), opset=24)
    with pytest.raises(ValueError, match="KeyLengths"):
        evaluated(model, feeds)


def test_a_dropped_value_that_is_nan_is_not_read():
    """In ONNX's own operator it is: 0 * NaN. The text says that what a boolean mask excludes takes no part."""
    x = np.ones((1, 1, 2, 4), np.float32)
    value = np.array([[[[1], [np.nan]]]], np.float32)
    model, feeds = attention_model(x, x, value, mask=np.array([True, False]))
    np.testing.assert_array_equal(evaluated(model, feeds)["Y"], [[[[1], [1]]]])
    assert np.isnan(ReferenceEvaluator(model).run(None, feeds)[0]).all()
