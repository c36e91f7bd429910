"""The recipes of docs/bridges.md, run as they stand there, against numerical derivatives."""

import numpy as np
import pytest
from recipes import recipe

from sdpa_ref import Causal, Dropout, KeyLengths, Window, sdpa, sdpa_vjp
from sdpa_ref.testing import assert_same_bits

BIAS, SINK = np.random.default_rng(1).standard_normal((4, 1, 5)), np.random.default_rng(2).standard_normal(4)
CASES = {  # options, and what is differentiated by beside query, key and value
    "full": ({}, {}),
    "mask": ({"mask": Causal() & Window(2, 0), "query_offset": "end"}, {"sink": SINK}),
    "nothing seen": ({"mask": KeyLengths([0, 4]), "softcap": 2.0}, {"bias": BIAS}),
    "dropout": ({"dropout": Dropout(0.4, 3), "scale": 0.7}, {"bias": BIAS, "sink": SINK}),
}


def arrays(dtype=np.float64):
    """Return query, key and value, with two key heads for four query heads."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape).astype(dtype) for shape in ((2, 4, 3, 2), (2, 2, 5, 2), (2, 2, 5, 1))]


@pytest.mark.parametrize("name", CASES)
def test_gradcheck_of_pytorch(name, gradient_backend):
    attention = recipe("torch").attention
    import torch

    options, extras = CASES[name]

    def call(query, key, value, *given):
        named = dict(zip(extras, given, strict=True))
        return attention(query, key, value, **named, **options, backend=gradient_backend)

    assert torch.autograd.gradcheck(call, [torch.from_numpy(x).requires_grad_() for x in (*arrays(), *extras.values())])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_types_of_pytorch(dtype, gradient_backend):
    bridge = recipe("torch")
    import torch

    options = {"mask": Causal(), "query_offset": "end", "backend": gradient_backend}
    given = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in arrays()]
    tensors = [x.clone().requires_grad_() for x in given]
    output = bridge.attention(*tensors, **options)
    output.sum().backward()
    assert output.dtype == getattr(torch, dtype)
    for x, gradient in zip(tensors, sdpa_vjp(*given, torch.ones_like(output), **options), strict=False):
        assert torch.equal(x.grad, bridge.tensor(gradient))


def test_pytorch_notices_what_was_written_to():
    attention = recipe("torch").attention
    import torch

    tensors = [torch.from_numpy(x).requires_grad_() for x in arrays()]
    output = attention(*tensors, backend="reference")
    (first,) = torch.autograd.grad(output.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    output = attention(*tensors, backend="reference")
    output.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("name", CASES)
def test_check_grads_of_jax(name, gradient_backend):
    attention = recipe("jax").attention
    import jax
    from jax.test_util import check_grads

    options, extras = CASES[name]

    def call(query, key, value, *given):
        named = dict(zip(extras, given, strict=True))
        return attention(query, key, value, **named, **options, backend=gradient_backend)

    with jax.enable_x64(True):
        given = [jax.numpy.asarray(x) for x in (*arrays(), *extras.values())]
        check_grads(jax.jit(call), given, order=1, modes=["rev"])


def test_jax_inside_transformations():
    attention = recipe("jax").attention
    import jax

    query, key, value = map(jax.numpy.asarray, arrays(np.float32))
    expected = sdpa(query, key, value, backend="reference")
    assert_same_bits(np.asarray(jax.jit(lambda *x: attention(*x, backend="reference"))(query, key, value)), expected)
    mapped = jax.vmap(lambda *x: attention(*x, backend="reference"))(query, key, value)
    assert_same_bits(np.asarray(mapped), expected)
    gradient = jax.jit(jax.grad(lambda q: attention(q, key, value, backend="reference").sum()))(query)
    ours = sdpa_vjp(query, key, value, np.ones_like(expected), backend="reference").query
    assert_same_bits(np.asarray(gradient), ours)
