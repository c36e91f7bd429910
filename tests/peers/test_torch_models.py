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


def of_halves(x, cos, sin):
    """The rotation as models on Hugging Face write it."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def of_complex_numbers(x, angles):
    """The rotation as Llama's own code has it: neighbours are a complex number."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(interleaved):
    x, grad, positions = normal(2, 3, 5, 8), normal(2, 3, 5, 8, seed=1), np.array([[0, 1, 2, 3, 4], [70, 71, 2, 0, 9]])
    tensor = torch.from_numpy(x).requires_grad_()
    frequencies = 1.0 / (500.0 ** (torch.arange(0, 8, 2).double() / 8))
    angles = torch.from_numpy(positions)[:, None, :, None] * frequencies
    if interleaved:
        value = of_complex_numbers(tensor, angles)
    else:
        value = of_halves(tensor, torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin())
    value.backward(torch.from_numpy(grad))
    agree(sr.rotary(x, positions, base=500, interleaved=interleaved), value.detach().numpy(), error=1e-14)
    agree(sr.rotary_vjp(grad, positions, base=500, interleaved=interleaved), tensor.grad.numpy(), error=1e-14)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(sr.LayerNorm, torch.nn.LayerNorm(12, eps=1e-3)), (sr.RMSNorm, torch.nn.RMSNorm(12, eps=1e-3)),
     (sr.LayerNorm, torch.nn.LayerNorm(12, eps=1e-3, bias=False))],
)  # fmt: skip
def test_norms(ours, theirs):
    theirs = theirs.double()
    with torch.no_grad():
        for parameter in theirs.parameters():  # ones and zeros would hide them
            parameter.uniform_(-1, 1)
    x, grad = normal(2, 5, 12), normal(2, 5, 12, seed=1)
    tensor = torch.from_numpy(x).requires_grad_()
    expected = theirs(tensor)
    expected.backward(torch.from_numpy(grad))
    value, vjp = ours.from_state_dict(theirs.state_dict(), eps=1e-3).value_and_vjp(x)
    gradients = vjp(grad)
    agree(value, expected.detach().numpy(), error=1e-14)
    agree(gradients.x, tensor.grad.numpy(), error=1e-13)
    assert gradients.weights.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        agree(gradients.weights[name], parameter.grad.numpy(), error=1e-13)
