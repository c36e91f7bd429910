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


class Block(torch.nn.Module):
    """A block of Llama: norm, grouped attention with rotary positions, norm, and a gated layer with SiLU."""

    def __init__(self, width, heads, kv_heads, size, inner):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        linear = [(width, heads * size), (width, kv_heads * size), (width, kv_heads * size), (heads * size, width)]
        self.query, self.key, self.value, self.output = (torch.nn.Linear(*sizes, bias=False) for sizes in linear)
        self.gate, self.up = (torch.nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, width, bias=False)
        self.before, self.after = (torch.nn.RMSNorm(width, eps=1e-5) for _ in range(2))

    def forward(self, x):
        normed = self.before(x)
        query, key, value = (
            part(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in ((self.query, self.heads), (self.key, self.kv_heads), (self.value, self.kv_heads))
        )
        size = query.shape[-1]
        frequencies = 1.0 / (10000.0 ** (torch.arange(0, size, 2).double() / size))
        angles = torch.arange(x.shape[1])[:, None] * torch.cat((frequencies, frequencies))
        query, key = (of_halves(each, angles.cos(), angles.sin()) for each in (query, key))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.output(attended.transpose(1, 2).flatten(-2))
        normed = self.after(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


def test_a_block_of_llama_token_by_token():
    block, x = Block(12, 4, 2, 6, 20).double(), normal(2, 5, 12)
    with torch.no_grad():
        expected = block(torch.from_numpy(x)).numpy()
    entries = block.state_dict()
    layers = {
        name: (sr.RMSNorm if name in ("before", "after") else sr.Linear).from_state_dict(
            {"weight": entries[f"{name}.weight"]}, **({"eps": 1e-5} if name in ("before", "after") else {}))
        for name in ("before", "after", "gate", "up", "down", "query", "key", "value", "output")
    }  # fmt: skip
    cache = sr.KVCache(2, 2, 6, dtype=np.float64, layout="LHE")
    parts = []
    for at in (slice(0, 3), slice(3, 4), slice(4, 5)):
        tokens = x[:, at]
        normed = layers["before"](tokens)
        heads = [layers[name](normed).reshape(2, -1, n, 6) for name, n in (("query", 4), ("key", 2), ("value", 2))]
        places = cache.lengths[:, None] + np.arange(tokens.shape[1])
        query, key = (sr.rotary(each, places, layout="LHE") for each in heads[:2])
        cache.append(key, heads[2])
        tokens = tokens + layers["output"](cache.attend(query).reshape(2, -1, 24))
        normed = layers["after"](tokens)
        parts.append(tokens + layers["down"](sr.silu(layers["gate"](normed)) * layers["up"](normed)))
    agree(np.concatenate(parts, 1), expected, error=1e-13)
