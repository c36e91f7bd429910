"""Gradients of rows whose scores are all large, against PyTorch's formula, which keeps the weights themselves."""

import numpy as np
import pytest

from sdpa_ref import sdpa_vjp

torch = pytest.importorskip("torch")
LEVELS = [0.0, -1e9, -1e30, float(np.finfo(np.float32).min), 1e12]


@pytest.mark.parametrize("padded", [0, 24, 64])
@pytest.mark.parametrize("level", LEVELS)
def test_rows_that_are_all_padding(gradient_backend, level, padded):
    q, k, v, g = np.random.default_rng(0).standard_normal((4, 1, 2, 64, 16)).astype(np.float32)
    bias = np.zeros((64, 64), np.float32)
    bias[64 - padded :] = level
    q[:, :, 64 - padded :] = 0  # their scores are the level alone, whatever type they are added in
    tensors = [torch.from_numpy(x).requires_grad_() for x in (q, k, v)]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        output = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=torch.from_numpy(bias))
    expected = torch.autograd.grad(output, tensors, torch.from_numpy(g))
    got = sdpa_vjp(q, k, v, g, bias=bias, backend=gradient_backend)
    for one, other in zip(got[:3], expected, strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=2e-5)
