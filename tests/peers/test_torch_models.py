"""What models have between their attentions, against PyTorch: values and gradients."""

import numpy as np
import pytest
from naive import agree

import sdpa_ref as sr

torch = pytest.importorskip("torch", reason="PyTorch is the peer: pip install 'sdpa-ref[peers]'")
functional = torch.nn.functional


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize(
    ("ours", "derivative", "theirs"),
    [
        (sr.gelu, sr.gelu_derivative, functional.gelu),
        (lambda x: sr.gelu(x, "tanh"), lambda x: sr.gelu_derivative(x, "tanh"),
         lambda x: functional.gelu(x, approximate="tanh")),
        (sr.silu, sr.silu_derivative, functional.silu),
    ],
    ids=["gelu", "gelu of tanh", "silu"],
)  # fmt: skip
def test_activations(ours, derivative, theirs):
    x = normal(5, 700) * 3
    tensor = torch.from_numpy(x).requires_grad_()
    value = theirs(tensor)
    value.sum().backward()
    agree(ours(x), value.detach().numpy(), error=1e-14)
    agree(derivative(x), tensor.grad.numpy(), error=1e-14)
    agree(ours(x.astype(np.float32)), theirs(tensor.detach().float()).numpy())
