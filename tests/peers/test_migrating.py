"""What "Coming from another library" says of PyTorch, JAX and ONNX, held against them."""

import numpy as np
import pytest
from naive import agree

from sdpa_ref import Causal, KeyLengths, MultiHeadAttention, QueryLengths, Window, sdpa
from sdpa_ref.testing import assert_within, error_budget

L, S = 3, 5
BOOLEAN = np.array([[[1, 0, 1, 1, 0], [0, 1, 1, 0, 1], [1, 1, 0, 0, 1]]], bool)
FLOAT = np.arange(15, dtype=np.float32).reshape(L, S) / 8
LENGTHS = np.array([4, 2], np.int32)


@pytest.fixture
def arrays():
    """Return float32 query, key and value, with two key heads for four query heads."""
    rng = np.random.default_rng(0)
    shapes = (2, 4, L, 6), (2, 2, S, 6), (2, 2, S, 6)
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"attn_mask": BOOLEAN}, {"mask": BOOLEAN}),
        ({"attn_mask": FLOAT}, {"bias": FLOAT}),
        ({"is_causal": True}, {"mask": Causal(), "query_offset": "start"}),
        ({"attn_mask": "lower right"}, {"mask": Causal(), "query_offset": "end"}),
        ({"scale": 0.7}, {"scale": 0.7}),
        ({"attn_mask": np.zeros((L, S), bool)}, {"mask": np.zeros((L, S), bool)}),
    ],
)
def test_pytorch(arrays, theirs, ours):
    torch = pytest.importorskip("torch", reason="PyTorch is the peer: pip install 'sdpa-ref[peers]'")
    from torch.nn.attention.bias import causal_lower_right

    mask = theirs.get("attn_mask")
    if mask is not None:
        lower_right = isinstance(mask, str)
        theirs = {"attn_mask": causal_lower_right(L, S) if lower_right else torch.from_numpy(mask)}
    tensors = map(torch.from_numpy, arrays)
    output = torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True, **theirs)
    assert_within(output.numpy(), error_budget(*arrays, **ours))


def test_masks_of_pytorch_layers_are_the_other_way_round():
    torch = pytest.importorskip("torch", reason="PyTorch is the peer: pip install 'sdpa-ref[peers]'")
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((2, S, 8)))
    padding = np.arange(S) >= LENGTHS[:, None]
    expected, _ = module(x, x, x, key_padding_mask=torch.from_numpy(padding))
    layer = MultiHeadAttention.from_state_dict(module.state_dict(), num_heads=2)
    for mask in (~padding[:, None, None, :], KeyLengths(LENGTHS)):
        agree(layer(x, mask=mask), expected.detach())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"mask": BOOLEAN[None]}, {"mask": BOOLEAN}),
        ({"bias": FLOAT[None, None]}, {"bias": FLOAT}),
        ({"is_causal": True}, {"mask": Causal(), "query_offset": "start"}),
        ({"local_window_size": 1}, {"mask": Window(1, 1), "query_offset": "start"}),
        ({"local_window_size": (2, 0)}, {"mask": Window(2, 0), "query_offset": "start"}),
        ({"key_value_seq_lengths": LENGTHS}, {"mask": KeyLengths(LENGTHS)}),
        ({"query_seq_lengths": LENGTHS - 1}, {"mask": QueryLengths(LENGTHS - 1)}),
    ],
)
def test_jax(arrays, theirs, ours):
    jax = pytest.importorskip("jax", reason="JAX is the peer")
    arrays = [array.swapaxes(1, 2).copy() for array in arrays]
    output = np.asarray(jax.nn.dot_product_attention(*arrays, **theirs))
    assert_within(output, error_budget(*arrays, layout="LHE", **ours))


def test_jax_gives_the_mean_of_all_values_where_nothing_is_seen(arrays):
    jax = pytest.importorskip("jax", reason="JAX is the peer")
    query, key, value = (array.swapaxes(1, 2).copy() for array in arrays)
    nothing = np.zeros((1, 1, L, S), bool)
    output = np.asarray(jax.nn.dot_product_attention(query, key, value, mask=nothing))
    same_score = error_budget(query, key, value, layout="LHE", scale=0.0)
    assert_within(output, same_score)
    assert not sdpa(query, key, value, layout="LHE", mask=nothing).any()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"mask": BOOLEAN}, {"mask": BOOLEAN}),
        ({"mask": FLOAT}, {"bias": FLOAT}),
        ({"mask": (FLOAT > 1).astype(np.int64)}, {"bias": (FLOAT > 1).astype(np.float32)}),
        ({"is_causal": 1}, {"mask": Causal(), "query_offset": "start"}),
        ({"mask": np.zeros((L, S), bool)}, {"mask": np.zeros((L, S), bool)}),
    ],
)
def test_onnx(arrays, theirs, ours):
    pytest.importorskip("onnx", reason="ONNX is the peer")
    from onnx.reference import ReferenceEvaluator

    from sdpa_ref.testing.onnx_model import attention_model

    model, feeds = attention_model(*arrays, **{"mask": None, **theirs})
    (output,) = ReferenceEvaluator(model).run(None, feeds)
    assert_within(output, error_budget(*arrays, **ours))
