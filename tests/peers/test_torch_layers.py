"""The layers against the same layers written in PyTorch, weights carried over through a mapping and through a file."""

import numpy as np
import pytest
from naive import agree

from sdpa_ref import AttentionHead, Causal, Embedding, KeyLengths, Linear, MultiHeadAttention, SpatialAttention
from sdpa_ref.layers import Conv1x1
from sdpa_ref.testing import Budget, assert_within
from sdpa_ref.testing.budget import empirical

torch = pytest.importorskip("torch", reason="PyTorch is the peer: pip install 'sdpa-ref[peers]'")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="pip install 'sdpa-ref[weights]'")
nn, functional = torch.nn, torch.nn.functional

ASKED_FOR = 1e-12  # agreement in float64


class Head(nn.Module):
    """An attention head: output and probabilities."""

    def __init__(self, hidden_size, attention_head_size, bias=True):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(hidden_size, attention_head_size, bias) for _ in range(3))

    def forward(self, x, context=None, keep=None):
        context = x if context is None else context
        query, key, value = self.query(x), self.key(context), self.value(context)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        scores = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
        probs = functional.softmax(scores, dim=-1)
        return probs @ value, probs


class Heads(nn.Module):
    """Several heads by their own smaller projections of one matrix each, concatenated, and an output projection."""

    def __init__(self, hidden_size, num_heads, bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.key, self.value, self.output = (nn.Linear(hidden_size, hidden_size, bias) for _ in range(4))

    def forward(self, x, context=None, keep=None):
        context = x if context is None else context
        query, key, value = (
            part(tokens).unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)
            for part, tokens in ((self.query, x), (self.key, context), (self.value, context))
        )
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        scores = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
        probs = functional.softmax(scores, dim=-1)
        return self.output((probs @ value).transpose(-2, -3).flatten(-2)), probs


class Grouped(nn.Module):
    """Heads of their own width that share keys and values, and a bias for some of the projections, as in Qwen2."""

    def __init__(self, hidden_size, num_heads, num_kv_heads, head_size, bias=("query", "key", "value")):
        super().__init__()
        self.heads, self.kv_heads = num_heads, num_kv_heads
        self.query = nn.Linear(hidden_size, num_heads * head_size, "query" in bias)
        self.key, self.value = (nn.Linear(hidden_size, num_kv_heads * head_size, n in bias) for n in ("key", "value"))
        self.output = nn.Linear(num_heads * head_size, hidden_size, "output" in bias)

    def forward(self, x, context=None, keep=None):
        context = x if context is None else context
        query, key, value = (
            part(tokens).unflatten(-1, (heads, -1)).transpose(-2, -3)
            for part, tokens, heads in (
                (self.query, x, self.heads), (self.key, context, self.kv_heads), (self.value, context, self.kv_heads))
        )  # fmt: skip
        key, value = (part.repeat_interleave(self.heads // self.kv_heads, -3) for part in (key, value))
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        scores = scores if keep is None else scores.masked_fill(~keep, -torch.inf)
        probs = functional.softmax(scores, dim=-1)
        return self.output((probs @ value).transpose(-2, -3).flatten(-2)), probs


class Fused(nn.MultiheadAttention):
    """PyTorch's own module, whose mask is True where a key is dropped."""

    def __init__(self, hidden_size, num_heads, bias=True):
        super().__init__(hidden_size, num_heads, bias=bias, batch_first=True)

    def forward(self, x, context=None, keep=None):
        context = x if context is None else context
        dropped = None if keep is None else ~keep
        return super().forward(x, context, context, attn_mask=dropped, average_attn_weights=False)


class Spatial(nn.Module):
    """The attention of a U-Net: bias-free 1x1 convolution, scaled q, softmax over positions, 1x1 convolution."""

    def __init__(self, dim, heads=4, dim_head=32):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_qkv = nn.Conv2d(dim, 3 * heads * dim_head, 1, bias=False)
        self.to_out = nn.Conv2d(heads * dim_head, dim, 1)

    def forward(self, x):
        b, _, h, w = x.shape
        q, k, v = (part.reshape(b, self.heads, -1, h * w) for part in self.to_qkv(x).chunk(3, dim=1))
        probs = torch.einsum("bhdi,bhdj->bhij", q * self.scale, k).softmax(dim=-1)
        out = torch.einsum("bhij,bhdj->bhid", probs, v)
        return self.to_out(out.permute(0, 1, 3, 2).reshape(b, -1, h, w)), probs


CASES = {
    "head": (lambda: Head(48, 12), AttentionHead, {}, [(2, 17, 48)]),
    "head without bias, context": (lambda: Head(48, 12, bias=False), AttentionHead, {}, [(2, 9, 48), (2, 17, 48)]),
    "heads": (lambda: Heads(48, 4), MultiHeadAttention, {"num_heads": 4}, [(2, 17, 48)]),
    "heads, context": (lambda: Heads(48, 3), MultiHeadAttention, {"num_heads": 3}, [(2, 9, 48), (2, 17, 48)]),
    "grouped": (lambda: Grouped(48, 6, 2, 10), MultiHeadAttention, {"num_heads": 6}, [(2, 17, 48)]),
    "grouped, context": (
        lambda: Grouped(48, 6, 1, 10, ("output",)), MultiHeadAttention, {"num_heads": 6}, [(2, 9, 48), (2, 17, 48)]),
    "fused": (lambda: Fused(48, 4), MultiHeadAttention, {"num_heads": 4}, [(2, 17, 48)]),
    "fused without bias, context": (
        lambda: Fused(48, 6, bias=False), MultiHeadAttention, {"num_heads": 6}, [(2, 9, 48), (2, 17, 48)]),
    "spatial": (lambda: Spatial(20), SpatialAttention, {"heads": 4}, [(2, 20, 6, 8)]),
    "spatial, other heads": (lambda: Spatial(12, 2, 40), SpatialAttention, {"heads": 2}, [(3, 12, 5, 7)]),
}  # fmt: skip


def module_of(make):
    torch.manual_seed(7)
    module = make().eval()
    with torch.no_grad():
        for parameter in module.parameters():  # biases begin as 0 in some modules, which would hide them
            parameter.copy_(torch.empty_like(parameter).uniform_(-0.5, 0.5))
    return module


def inputs_of(shapes):
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape) for shape in shapes]


def run(module, inputs, dtype, **options):
    """Return the module's output and weights, computed in this type, as float64."""
    with torch.no_grad():
        results = module.to(dtype)(*(torch.from_numpy(x).to(dtype) for x in inputs), **options)
    return [y.double().numpy() for y in results]


def pair(layer, inputs, **options):
    """Return the layer's output and weights."""
    return (layer if isinstance(layer, AttentionHead) else layer.with_weights)(*inputs, **options)


def assert_within_budget(result, module, inputs, dtype):
    """The budget is that of `sdpa_ref.testing`, with the module in the result's own type as the straight formula."""
    straight, exact = run(module, inputs, dtype), run(module, inputs, torch.float64)
    for actual, own, expected in zip(result, straight, exact, strict=True):
        allowed = empirical(own, expected, expected, actual.dtype)
        assert_within(actual, Budget(expected, actual.dtype, np.full(expected.shape, np.inf), allowed, modest=True))


@pytest.mark.parametrize("name", CASES)
def test_float64_through_a_mapping(name, backend):
    make, layer_type, given, shapes = CASES[name]
    module, inputs = module_of(make).double(), inputs_of(shapes)
    layer = layer_type.from_state_dict(module.state_dict(), **given)
    for actual, expected in zip(pair(layer, inputs, backend=backend), run(module, inputs, torch.float64), strict=True):
        assert actual.dtype == np.float64
        agree(actual, expected, error=ASKED_FOR)


@pytest.mark.parametrize("name", CASES)
def test_float32_through_a_file(name, backend, tmp_path):
    make, layer_type, given, shapes = CASES[name]
    module, inputs = module_of(make), [x.astype(np.float32) for x in inputs_of(shapes)]
    safetensors_torch.save_file(module.state_dict(), tmp_path / "weights.safetensors")
    result = pair(layer_type.load(tmp_path / "weights.safetensors", **given), inputs, backend=backend)
    assert {array.dtype for array in result} == {np.dtype(np.float32)}
    assert_within_budget(result, module, inputs, torch.float32)


def test_bfloat16_through_a_file(backend, tmp_path):
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="pip install 'sdpa-ref[half]'")
    module, (x,) = module_of(lambda: Heads(48, 4)).bfloat16(), inputs_of([(2, 17, 48)])
    x = x.astype(ml_dtypes.bfloat16)
    safetensors_torch.save_file(module.state_dict(), tmp_path / "weights.safetensors")
    result = MultiHeadAttention.load(tmp_path / "weights.safetensors", num_heads=4).with_weights(x, backend=backend)
    assert {array.dtype for array in result} == {x.dtype}
    assert_within_budget(result, module, [x.astype(np.float32)], torch.bfloat16)


@pytest.mark.parametrize("name", ["head", "heads", "grouped", "fused"])
def test_masks(name, backend):
    make, layer_type, given, shapes = CASES[name]
    module, inputs = module_of(make).double(), inputs_of(shapes)
    layer, keep = layer_type.from_state_dict(module.state_dict(), **given), torch.ones(17, 17, dtype=torch.bool).tril()
    expected = run(module, inputs, torch.float64, keep=keep)
    for mask in (Causal(), keep.numpy()):
        for actual, right in zip(pair(layer, inputs, mask=mask, backend=backend), expected, strict=True):
            agree(actual, right, error=ASKED_FOR)


@pytest.mark.parametrize("name", CASES)
def test_gradients(name, gradient_backend):
    make, layer_type, given, shapes = CASES[name]
    module, inputs = module_of(make).double(), inputs_of(shapes)
    tensors = [torch.from_numpy(x).requires_grad_() for x in inputs]
    output, _ = module(*tensors)
    grad = torch.from_numpy(np.random.default_rng(4).standard_normal(output.shape))
    output.backward(grad)
    theirs = {name: parameter.grad for name, parameter in module.named_parameters()}
    expected = layer_type.from_state_dict(theirs, **given).state_dict()  # the fused ones by our names

    layer = layer_type.from_state_dict(module.state_dict(), **given)
    _, vjp = layer.value_and_vjp(*inputs, backend=gradient_backend)
    gradients = vjp(grad)
    for tensor, ours in zip(tensors, (gradients.x, gradients.context), strict=False):
        agree(ours, tensor.grad, error=ASKED_FOR)
    assert set(gradients.weights) == set(expected)
    for weight, ours in gradients.weights.items():
        agree(ours, expected[weight], error=ASKED_FOR)


@pytest.mark.parametrize("name", ["head", "heads", "grouped", "fused"])
def test_gradients_under_a_mask(name, gradient_backend):
    make, layer_type, given, ((B, L, width),) = CASES[name]
    module, x = module_of(make).double(), np.random.default_rng(5).standard_normal((B, L, width))
    tensor = torch.from_numpy(x).requires_grad_()
    output, _ = module(tensor, keep=torch.ones(L, L, dtype=torch.bool).tril())
    output.square().sum().backward()
    value, vjp = layer_type.from_state_dict(module.state_dict(), **given).value_and_vjp(
        x, mask=Causal(), backend=gradient_backend
    )
    agree(vjp(2 * value).x, tensor.grad, error=ASKED_FOR)


@pytest.mark.parametrize(
    ("module", "layer_type", "shape"),
    [
        (nn.Linear(5, 7), Linear, (3, 4, 5)),
        (nn.Conv2d(5, 7, 1), Conv1x1, (3, 5, 2, 4)),
        (nn.Embedding(5, 7), Embedding, None),
    ],
)
def test_gradients_of_affine_maps(module, layer_type, shape):
    module, rng = module.double(), np.random.default_rng(6)
    x = torch.tensor([[4, 0, 4], [1, 3, 4]]) if shape is None else torch.from_numpy(rng.standard_normal(shape))
    output = module(x if shape is None else x.requires_grad_())
    grad = torch.from_numpy(rng.standard_normal(output.shape))
    output.backward(grad)
    gradients = layer_type.from_state_dict(module.state_dict()).value_and_vjp(x.detach())[1](grad)
    assert (gradients.x is None) == (shape is None)
    if shape is not None:
        agree(gradients.x, x.grad, error=ASKED_FOR)
    for name, parameter in module.named_parameters():
        agree(gradients.weights[name], parameter.grad, error=ASKED_FOR)


def test_padding(backend):
    """What is `key_padding_mask` there is a length here."""
    module, (x,) = module_of(lambda: Fused(48, 4)).double(), inputs_of([(3, 17, 48)])
    lengths, tensor = [17, 4, 1], torch.from_numpy(x)
    padding = torch.arange(17) >= torch.tensor(lengths)[:, None]
    with torch.no_grad():
        expected, _ = nn.MultiheadAttention.forward(module, tensor, tensor, tensor, key_padding_mask=padding)
    layer = MultiHeadAttention.from_state_dict(module.state_dict(), num_heads=4)
    agree(layer(x, mask=KeyLengths(lengths), backend=backend), expected.numpy(), error=ASKED_FOR)


def test_stacked_layers_with_an_entry_that_sees_nothing(backend):
    """PyTorch makes it NaN, which spreads in the next layer; here it is 0, and the other entry as if alone."""
    module, (x,) = module_of(lambda: Heads(48, 4)).double(), inputs_of([(2, 17, 48)])
    layer = MultiHeadAttention.from_state_dict(module.state_dict(), num_heads=4)
    mask = KeyLengths([17, 0])
    twice = layer(layer(x, mask=mask, backend=backend), mask=mask, backend=backend)
    assert np.isfinite(twice).all()
    once, _ = run(module, [x[:1]], torch.float64)
    agree(twice[:1], run(module, [once], torch.float64)[0], error=ASKED_FOR)


@pytest.mark.parametrize(("module_type", "layer_type"), [(nn.Linear, Linear), (nn.Embedding, Embedding)])
def test_pytorch_reads_what_is_saved(module_type, layer_type, tmp_path):
    x = np.array([[4, 0, 2, 1, 3]]) if layer_type is Embedding else inputs_of([(3, 5)])[0].astype(np.float32)
    layer, module = layer_type(5, 7, rng=1), module_type(5, 7)
    layer.save(tmp_path / "weights.safetensors")
    module.load_state_dict(safetensors_torch.load_file(tmp_path / "weights.safetensors"))
    with torch.no_grad():
        agree(layer(x), module(torch.from_numpy(x)).numpy())


@pytest.mark.parametrize("bias", [True, False])
def test_tokens_of_other_widths(bias, gradient_backend):
    """PyTorch then saves the three projections apart, and their biases in one."""
    module = module_of(lambda: nn.MultiheadAttention(48, 4, kdim=20, vdim=12, bias=bias, batch_first=True)).double()
    inputs = inputs_of([(2, 9, 48), (2, 17, 20), (2, 17, 12)])
    tensors = [torch.from_numpy(x).requires_grad_() for x in inputs]
    output, _ = module(*tensors)
    grad = torch.from_numpy(np.random.default_rng(4).standard_normal(output.shape))
    output.backward(grad)
    layer = MultiHeadAttention.from_state_dict(module.state_dict(), num_heads=4)
    x, *pair = inputs
    value, vjp = layer.value_and_vjp(x, tuple(pair), backend=gradient_backend)
    agree(value, output.detach().numpy(), error=ASKED_FOR)
    gradients = vjp(grad)
    for tensor, ours in zip(tensors, (gradients.x, *gradients.context), strict=True):
        agree(ours, tensor.grad, error=ASKED_FOR)


@pytest.mark.parametrize("kdim", [None, 12])
@pytest.mark.parametrize("masked", ["causal", "padding", None])
@pytest.mark.parametrize(("learned", "zero"), [(True, False), (False, True), (True, True)])
def test_keys_of_its_own(learned, zero, masked, kdim, gradient_backend):
    """`bias_k`, `bias_v` and `add_zero_attn`, which no mask drops: output, weights and all gradients."""
    torch.manual_seed(0)
    module = nn.MultiheadAttention(
        16, 4, add_bias_kv=learned, add_zero_attn=zero, batch_first=True, kdim=kdim, vdim=kdim, dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += torch.randn_like(parameter) / 4
    state = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
    layer = MultiHeadAttention.from_state_dict(state, num_heads=4, add_zero_attn=zero)
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    context = x if kdim is None else torch.randn(2, 5, kdim, dtype=torch.float64, requires_grad=True)
    theirs, ours = {}, {"backend": gradient_backend}
    if masked == "causal":
        theirs["attn_mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
        ours["mask"] = Causal()
    elif masked == "padding":
        theirs["key_padding_mask"] = torch.arange(5) >= torch.tensor([[0], [3]])
        ours["mask"] = KeyLengths([0, 3])
    given = (x.detach().numpy(), *(() if kdim is None else (context.detach().numpy(),)))
    expected, probs = module(x, context, context, average_attn_weights=False, **theirs)
    output, weights = layer.with_weights(*given, **ours)
    np.testing.assert_array_equal(layer(*given, **ours), output)
    np.testing.assert_allclose(output, expected.detach().numpy(), atol=ASKED_FOR)
    np.testing.assert_allclose(weights, probs.detach().numpy(), atol=ASKED_FOR)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    value, vjp = layer.value_and_vjp(*given, **ours)
    np.testing.assert_array_equal(value, output)
    gradients = vjp(grad.numpy())
    np.testing.assert_allclose(gradients.x, x.grad.numpy(), atol=1e-11)
    if kdim is not None:
        np.testing.assert_allclose(gradients.context, context.grad.numpy(), atol=1e-11)
    slopes = MultiHeadAttention.from_state_dict(
        {name: parameter.grad.numpy() for name, parameter in module.named_parameters()}, num_heads=4
    ).state_dict()
    assert gradients.weights.keys() == slopes.keys() == layer.state_dict().keys()
    for name, slope in slopes.items():
        np.testing.assert_allclose(gradients.weights[name], slope, atol=1e-11, err_msg=name)
