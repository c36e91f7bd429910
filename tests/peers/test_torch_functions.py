"""`sdpa` and its gradients against PyTorch in float64, over seeded random problems."""

import functools
import operator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import settings
from naive import agree

from sdpa_ref import (
    ALiBi,
    Causal,
    Chunked,
    Dropout,
    KeyLengths,
    Prefix,
    QueryLengths,
    Segments,
    Window,
    sdpa,
    sdpa_state,
    sdpa_vjp,
    sdpa_weights,
)

torch = pytest.importorskip("torch", reason="PyTorch is the peer: pip install 'sdpa-ref[peers]'")

ASKED_FOR = 1e-12  # agreement in float64
BATCHES = [  # leading axes of query, key and value
    ((), (), ()),
    ((2,), (2,), (2,)),
    ((2,), (1,), (2,)),
    ((), (2,), (1,)),
    ((3, 1), (2,), (3, 2)),
]


def arrays_of(rng, lead):
    """Return query, key, value, and the sizes B, Hq, L, S."""
    Hkv, group, E, Ev = rng.integers(1, 4), rng.integers(1, 4), rng.integers(1, 7), rng.integers(1, 6)
    L, S = rng.integers(1, 10, 2)
    S = L if rng.random() < 0.25 else S
    shapes = (group * Hkv, L, E), (Hkv, S, E), (Hkv, S, Ev)
    arrays = [rng.standard_normal((*axes, *shape)) for axes, shape in zip(lead, shapes, strict=True)]
    return arrays, np.broadcast_shapes(*lead), group * Hkv, L, S


def one_of(rng, *choices):
    return choices[rng.integers(len(choices))]


class Solved(NamedTuple):
    """A problem and what PyTorch computes for it, in NumPy; None for what there is not."""

    arrays: list  # query, key, value
    options: dict  # of `sdpa`
    output: Any
    lse: Any
    weights: Any
    incoming: dict  # gradients by output and lse
    gradients: list  # by query, key, value, bias and sink


def solved(rng, arrays, options, leaves, output, lse=None, weights=None):
    """Return the problem with the gradients by the leaves, for random incoming gradients."""
    incoming = {"grad_output": rng.standard_normal(output.shape)}
    loss = (output * torch.from_numpy(incoming["grad_output"])).sum()
    if lse is not None:
        incoming["grad_lse"] = rng.standard_normal(lse.shape)
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0.0) * torch.from_numpy(incoming["grad_lse"])).sum()
    found = iter(torch.autograd.grad(loss, [x for x in leaves if x is not None]))
    gradients = [None if x is None else next(found).numpy() for x in leaves]
    results = (None if result is None else result.detach().numpy() for result in (output, lse, weights))
    return Solved(arrays, options, *results, incoming, gradients)


def leaf(x):
    return None if x is None else torch.tensor(x, requires_grad=True)


@functools.cache
def by_its_own_function(seed):
    """Return a problem for `torch.nn.functional.scaled_dot_product_attention`: bool masks, causal, bias."""
    rng = np.random.default_rng(seed)
    arrays, (B,), Hq, L, S = arrays_of(rng, ((3,),) * 3)
    kind, theirs, bias = one_of(rng, "none", "start", "end", "mask", "bias"), {}, None
    options = {"scale": one_of(rng, None, 0.7, 0.0, -0.4)}
    if kind in ("start", "end"):
        options |= {"mask": Causal(), "query_offset": kind}
    if kind == "start":
        theirs["is_causal"] = True
        options["scale"] = one_of(rng, None, 0.7)  # its causal kernel returns NaN for a scale that is not above 0
    elif kind == "end":
        theirs["attn_mask"] = torch.ones(L, S, dtype=torch.bool).tril(int(S - L))
    elif kind == "mask":
        options["mask"] = rng.random((*one_of(rng, (), (Hq,), (B, 1), (B, Hq)), L, S)) < 0.5
        theirs["attn_mask"] = torch.from_numpy(options["mask"])
    elif kind == "bias":
        options["bias"] = rng.standard_normal((*one_of(rng, (), (Hq,), (B, 1)), L, S))
        theirs["attn_mask"] = bias = leaf(options["bias"])
    leaves = [*map(leaf, arrays)]
    output = torch.nn.functional.scaled_dot_product_attention(
        *leaves, scale=options["scale"], enable_gqa=True, **theirs
    )
    return solved(rng, arrays, options, [*leaves, bias, None], output)


def draw(rng):
    """Return arrays, options of `sdpa`, and in PyTorch's terms the kept pairs (*batch, Hq, L, S) and ALiBi's term."""
    arrays, batch, Hq, L, S = arrays_of(rng, one_of(rng, *BATCHES))
    i, j = torch.arange(L)[:, None], torch.arange(S)
    keys, queries = torch.full(batch, S), torch.full(batch, L)
    masks, keep = [], torch.ones(*batch, Hq, L, S, dtype=torch.bool)

    if rng.random() < 0.3:
        keys = torch.from_numpy(np.array(rng.integers(0, S + 1, batch)))
        masks.append(KeyLengths(keys.numpy()))
        keep &= j < keys[..., None, None, None]
    if rng.random() < 0.15:
        queries = torch.from_numpy(np.array(rng.integers(0, L + 1, batch)))
        masks.append(QueryLengths(queries.numpy()))
        keep &= i < queries[..., None, None, None]

    offset = one_of(rng, "start", "end", int(rng.integers(-3, 4)))
    first = keys - queries if offset == "end" else torch.tensor(0 if offset == "start" else offset)
    p = i + first[..., None, None, None]
    left, right, n = (int(x) for x in rng.integers(0, 4, 3))
    chunk_of_j, chunk_of_p = (torch.div(x, n + 1, rounding_mode="floor") for x in (j, p))
    for mask, kept in (
        (Causal(), j <= p),
        (Window(left, right), (p - left <= j) & (j <= p + right)),
        (Window(left, None), p - left <= j),
        (Prefix(min(n, S)), (j < n) | (j <= p)),
        (Chunked(n + 1), (j <= p) & (chunk_of_j == chunk_of_p)),
    ):
        if rng.random() < 0.15:
            masks.append(mask)
            keep &= kept
    if rng.random() < 0.15:
        of_queries, of_keys = (torch.from_numpy(rng.integers(0, 3, (*batch, size))) for size in (L, S))
        masks.append(Segments(of_queries.numpy(), of_keys.numpy()))
        keep &= (of_queries[..., :, None] == of_keys[..., None, :])[..., None, :, :]
    if rng.random() < 0.3:
        masks.append(rng.random((*one_of(rng, (), (Hq,), (*batch, 1)), L, S)) < 0.7)
        keep &= torch.from_numpy(masks[-1])

    options = {
        "query_offset": offset,
        "scale": one_of(rng, None, 0.0, 0.7, -0.4),
        "softcap": one_of(rng, None, None, 0.5, 20.0),
    }
    options["mask"] = functools.reduce(operator.and_, masks) if masks else None
    options["sink"] = rng.standard_normal(Hq) if rng.random() < 0.3 else None
    options["dropout"] = Dropout(0.3, int(rng.integers(1000))) if rng.random() < 0.3 else None
    biases, slopes = [], np.zeros(Hq)
    if rng.random() < 0.3:
        biases.append(rng.standard_normal(one_of(rng, (L, S), (Hq, 1, S), (*batch, 1, L, 1))))
        biases[0][rng.random(biases[0].shape) < 0.1] = -np.inf
    if rng.random() < 0.2:
        slopes = rng.random(Hq)
        biases.append(ALiBi(slopes))
    options["bias"] = tuple(biases) or None
    return arrays, options, keep, torch.from_numpy(slopes)[:, None, None] * abs(p - j)


def formula(q, k, v, bias, sink, keep, distance, *, scale, softcap, dropout):
    """Return output, lse and weights of section 3 of the semantics, as operations that PyTorch differentiates."""
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3) for x in (k, v))
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    if bias is not None:
        keep = keep & (bias != -torch.inf)
        s = s + bias.masked_fill(bias == -torch.inf, 0.0)
    s = (s - distance).masked_fill(~keep, -torch.inf)
    if sink is not None:
        s = torch.cat([s, sink[:, None, None].expand(*s.shape[:-1], 1)], -1)
    empty = (s == -torch.inf).all(-1, keepdim=True)
    s = s.masked_fill(empty, 0.0)  # where PyTorch's softmax and its gradient are NaN
    weights = torch.softmax(s, -1).masked_fill(empty, 0.0)[..., : k.shape[-2]]
    lse = torch.logsumexp(s, -1).masked_fill(empty[..., 0], -torch.inf)
    if dropout is not None:
        weights = weights * torch.from_numpy(dropout.keep(tuple(weights.shape))) / (1 - dropout.p)
    return weights @ v, lse, weights


@functools.cache
def by_the_formula(seed):
    """Return a problem that PyTorch has no function for, solved by the formula."""
    rng = np.random.default_rng(seed)
    arrays, options, keep, distance = draw(rng)
    bias = next((part for part in options["bias"] or () if not isinstance(part, ALiBi)), None)
    leaves = [*map(leaf, (*arrays, bias, options["sink"]))]
    rest = {name: options[name] for name in ("scale", "softcap", "dropout")}
    return solved(rng, arrays, options, leaves, *formula(*leaves, keep, distance, **rest))


PROBLEMS = [pytest.param(by_its_own_function, seed, id=f"function-{seed}") for seed in range(100)]
PROBLEMS += [pytest.param(by_the_formula, seed, id=f"formula-{seed}") for seed in range(200)]
if settings.default.max_examples < 1000:  # all in the nightly profile
    PROBLEMS = PROBLEMS[::3]


@pytest.mark.parametrize(("solve", "seed"), PROBLEMS)
def test_results(solve, seed, backend):
    p = solve(seed)
    agree(sdpa(*p.arrays, backend=backend, **p.options), p.output, error=ASKED_FOR)
    query, key, value = p.arrays
    if p.weights is not None and value.ndim <= max(query.ndim, key.ndim):  # else they have fewer axes than the output
        weights = sdpa_weights(query, key, backend=backend, **p.options)
        agree(np.broadcast_to(weights, p.weights.shape), p.weights, error=ASKED_FOR)
    options = {name: option for name, option in p.options.items() if name != "sink"}
    if p.lse is not None and p.options["sink"] is None:
        agree(sdpa_state(*p.arrays, backend=backend, **options).lse, p.lse, error=ASKED_FOR)


@pytest.mark.parametrize(("solve", "seed"), PROBLEMS)
def test_gradients(solve, seed, gradient_backend):
    p = solve(seed)
    gradients = sdpa_vjp(*p.arrays, **p.incoming, backend=gradient_backend, **p.options)
    if isinstance(gradients.bias, tuple):
        gradients = gradients._replace(bias=gradients.bias[0])
    for actual, right in zip(gradients, p.gradients, strict=True):
        if right is not None:
            agree(actual, right, error=ASKED_FOR)
