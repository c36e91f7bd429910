"""Scores of every size: weights of the backward pass, shares of merged states and sinks, against independent values."""

import copy
import pickle
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import sdpa_ref as sr
from sdpa_ref import ALiBi, AttentionState, Causal, Dropout, KeyLengths, sdpa_state, sdpa_vjp, sdpa_with_vjp
from sdpa_ref.testing import gradient_budget

LEVELS = [-1e4, -65504.0, -1e6, -1e9, float(np.finfo(np.float32).min), 1e5, 1e12, 1e30]
WIDE = [-1e15, 1e17, -1e30, 1e300, float(np.finfo(np.float64).min)]
DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
F = np.float32


def inputs(*shapes, seed=0, dtype=F):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def straight(q, k, v, g, bias, scale):
    """Return the gradients by query, key and value, of one head, in the widest float that there is."""
    q, k, v, g, bias = (np.asarray(x).astype(np.longdouble) for x in (q, k, v, g, bias))
    s = scale * (q @ k.T) + bias
    p = np.exp(s - s.max(-1, keepdims=True))
    w = p / p.sum(-1, keepdims=True)
    d = g @ v.T
    d = w * (d - (w * d).sum(-1, keepdims=True))
    return scale * d @ k, scale * d.T @ q, w.T @ g


def shares(gradients, g):
    """Return, of each column, what the gradients of the values add up to, by what flows in, which is positive."""
    got, flows = (x.astype(np.float64).sum(tuple(range(x.ndim - 1))) for x in (gradients.value, g))
    return got / flows


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("level", LEVELS)
def test_rule_24_a_bias_on_all_keys_changes_no_gradient(gradient_backend, level, dtype):
    q, k, v, g = inputs(*[(1, 128, 16)] * 4, dtype=dtype)
    bias, k = np.full((128, 128), level, F), 0 * k  # the level alone: the scores are exact in every type
    expected = straight(q[0], k[0], v[0], g[0], 0 * bias, 0.25)
    got = sdpa_vjp(q, k, v, g, bias=bias, backend=gradient_backend)
    error = {2: 0.02, 4: 1e-5, 8: 1e-13}[np.dtype(dtype).itemsize]
    for gradient, exact in zip(got[:3], expected, strict=True):
        np.testing.assert_allclose(gradient[0].astype(float), exact.astype(float), atol=error * abs(exact).max())


@pytest.mark.parametrize("level", [*LEVELS, *WIDE])
def test_rule_24_weights_of_the_backward_pass_sum_to_1(gradient_backend, level):
    for dtype in DTYPES:
        if level in WIDE and dtype != np.float64:
            continue
        q, k, v = inputs((4, 40, 8), (2, 130, 8), (2, 130, 8), dtype=dtype)
        g = np.random.default_rng(1).uniform(0.5, 2, q.shape).astype(dtype)
        bias, few = np.full((40, 130), float(level)), 0.02 if np.dtype(dtype).itemsize == 2 else 3e-6
        for options in ({}, {"mask": Causal(), "query_offset": "end"}, {"mask": KeyLengths(77)}, {"softcap": 5.0}):
            got = sdpa_vjp(q, k, v, g, bias=bias, **options, backend=gradient_backend)
            np.testing.assert_allclose(shares(got, g), 1, rtol=few)
        got = sdpa_vjp(q, k, v, g, bias=(bias[:1], bias[:, :1]), backend=gradient_backend)  # in strips
        np.testing.assert_allclose(shares(got, g), 1, rtol=few)
        _, vjp = sdpa_with_vjp(q, k, v, bias=bias[:, :1], backend=gradient_backend)
        np.testing.assert_allclose(shares(vjp(g), g), 1, rtol=few)


@pytest.mark.parametrize("scale", [1.0, 1e3, 1e5, 1e7, 1e12, 1e30])
@pytest.mark.parametrize("sizes", [(1, 5), (8, 2100), (70, 130), (100, 1100)])
def test_rule_24_scores_of_the_backward_pass_are_those_of_the_forward_pass(gradient_backend, scale, sizes):
    L, S = sizes
    q, k, v = inputs((2, L, 16), (1, S, 16), (1, S, 5))
    k = np.where(np.random.default_rng(2).random((1, S, 1)) < 0.3, k, k[:, :1])  # many ties
    g = np.random.default_rng(1).uniform(0.5, 2, (2, L, 5)).astype(F)
    for options in ({}, {"softcap": 3 * scale}, {"bias": ALiBi([min(scale, 1e20), 1.0]), "query_offset": 7}):
        _, vjp = sdpa_with_vjp(q, k, v, scale=scale, **options, backend=gradient_backend)
        np.testing.assert_allclose(shares(vjp(g), g), 1, rtol=5e-6)


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e6, 1e9])
def test_rule_24_score_mod_of_large_scores(gradient_backend, scale):
    tilted = pytest.importorskip("tilted", reason="Numba is not installed")
    q, k, v = inputs((2, 150, 16), (2, 300, 16), (2, 300, 5))
    k = np.where(np.random.default_rng(2).random((2, 300, 1)) < 0.3, k, k[:, :1])
    g = np.random.default_rng(1).uniform(0.5, 2, (2, 150, 5)).astype(F)
    plain = lambda *a: tilted.tilt(*a)  # noqa: E731  # an attribute is set
    plain.derivative = tilted.slope
    for function in (plain, tilted.compiled):
        _, vjp = sdpa_with_vjp(q, k, v, scale=scale, score_mod=function, backend=gradient_backend)
        np.testing.assert_allclose(shares(vjp(g), g), 1, rtol=5e-6)
        got = sdpa_vjp(q, k, v, g, scale=scale, score_mod=function, backend=gradient_backend)
        np.testing.assert_array_equal(got.value, vjp(g).value)


def test_rule_24_alibi_of_positions_far_away(gradient_backend):
    q, k, v, g = inputs(*[(1, 64, 8)] * 4)
    options = {"bias": ALiBi(0.5), "query_offset": 32_000_000}
    gradients = sdpa_vjp(q, k, v, abs(g), **options, backend=gradient_backend)
    np.testing.assert_allclose(shares(gradients, abs(g)), 1, rtol=5e-6)


@pytest.mark.parametrize("idiom", [-1e4, -65504, -1e9, float(np.finfo(F).min), -np.inf])
def test_rule_24_padded_rows_of_a_layer(gradient_backend, idiom):
    """Padding of both sides by a bias: rows that are all padding have a mean of 1 like any other, or are empty."""
    pad = np.arange(64) >= 40
    bias = np.where(pad[:, None] | pad, idiom, 0).astype(F)
    q, k, v = inputs(*[(2, 64, 16)] * 3)
    g = np.random.default_rng(1).uniform(0.5, 2, q.shape).astype(F)
    got = sdpa_vjp(q, k, v, g, bias=bias, backend=gradient_backend)
    live = g[:, ~pad] if idiom == -np.inf else g
    np.testing.assert_allclose(shares(got, live), 1, rtol=5e-6)
    assert abs(got.value).max() < 20 * 64 / 24  # of any key, whatever rows are padding


@pytest.mark.parametrize("sink", [0.0, 100.0, -1e9, 1e9 + 33, 1e30, -1e30, 1e38])
def test_rule_24_gradient_by_a_sink_of_any_size(gradient_backend, sink):
    q, k, v, g = inputs(*[(1, 4, 8)] * 4)
    q = 0 * q
    for level, share in ((0.0, None), (sink, 0.2), (2 * sink, None)):
        bias = np.full((4, 4), level).clip(-3e38, 3e38).astype(F)
        if float(F(sink)) != sink:
            bias, share = 0 * bias, 1.0 if sink > 0 else 0.0
        elif share is None:
            share = float(np.exp(-np.logaddexp(0, np.log(4) + float(bias[0, 0]) - sink)))
        got = sdpa_vjp(q, k, v, g, grad_lse=np.ones((1, 4)), sink=sink, bias=bias, backend=gradient_backend)
        inner = (1 - share) * (g * v.mean(-2)).sum()
        np.testing.assert_allclose(got.sink, share * (4 - inner), rtol=1e-5, atol=1e-30)


def test_rule_24_the_budget_knows_that_weights_sum_to_1():
    q, k, v, g = inputs(*[(1, 128, 16)] * 4)
    for level in (-1e9, -1e30):
        budgets = gradient_budget(q, k, v, g, bias=np.full((128, 128), level, F))
        assert (budgets.value.bound <= 1.001 * abs(g).sum(-2)).all()
        assert (abs(budgets.value.expected) <= 1.001 * abs(g).sum(-2)).all()


def pieces(backend, level, cuts, *, S=4096, dtype=F, layout="HLE", **options):
    """Return the states over pieces of keys that all have the same score; the value is 1 from key 4000 on."""
    q, k, v = np.zeros((2, 3, 8), dtype), *inputs((2, S, 8), dtype=dtype), np.zeros((2, S, 1), dtype)
    v[:, 4000:] = 1
    flip = (lambda x: x.swapaxes(0, 1)) if layout == "LHE" else (lambda x: x)
    edges = zip([0, *cuts], [*cuts, S], strict=True)
    options |= {"layout": layout, "backend": backend}
    return [
        sdpa_state(*map(flip, (q, k[:, a:b], v[:, a:b])), bias=np.full((3, b - a), level), **options) for a, b in edges
    ]


@pytest.mark.parametrize("level", [0.0, *LEVELS])
def test_rule_23_states_merge_in_the_right_shares_at_every_size(backend, level):
    few, level = {"rtol": 2e-5, "atol": 0}, float(F(level))
    for cuts in ([4000], list(range(64, 4096, 64)), [1, 4095]):
        states = pieces(backend, level, cuts)
        for order in (states, states[::-1]):
            total = sum(order)
            np.testing.assert_allclose(total.output, 96 / 4096, **few)
            np.testing.assert_allclose(total.lse, level + np.log(4096), rtol=1e-6)
            np.testing.assert_allclose(total.with_sink(level).output, 96 / 4097, **few)
    left, right = pieces(backend, level, [4000], layout="LHE")
    np.testing.assert_allclose((left + right).output, 96 / 4096, **few)
    left, right = pieces(backend, level, [4000], dtype=np.float16)
    assert (left + right).output.dtype == np.float16
    np.testing.assert_allclose((left + right).output, 96 / 4096, rtol=1e-3)
    left, right = pieces(backend, level, [4000], dtype=np.float64)
    np.testing.assert_allclose((left + right).output, 96 / 4096, rtol=1e-12)
    nothing = AttentionState.empty((2, 3), 1)
    left, right = pieces(backend, level, [4000])
    np.testing.assert_allclose((nothing + left + (right + nothing)).output, 96 / 4096, **few)


def test_rule_23_copies_of_states_merge_alike(backend):
    left, right = pieces(backend, -1e9, [4000])
    for same in (copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))):
        np.testing.assert_allclose((same(left) + same(right)).output, 96 / 4096, rtol=2e-5)


def test_rule_23_states_made_by_hand_are_what_they_say(backend):
    left, right = pieces(backend, 0.0, [4000])
    by_hand = [AttentionState(state.output, state.lse) for state in (left, right)]
    np.testing.assert_allclose(sum(by_hand).output, 96 / 4096, rtol=2e-5)
    np.testing.assert_allclose((by_hand[0] + right).output, 96 / 4096, rtol=2e-5)
    left, right = pieces(backend, -1e9, [4000])
    by_hand = [AttentionState(state.output, state.lse) for state in (left, right)]
    np.testing.assert_allclose(sum(by_hand).output, 0.5, rtol=1e-5)  # their lse is the same number
    quiet = replace(right, lse=np.full_like(right.lse, -np.inf))
    np.testing.assert_array_equal((left + quiet).output, left.output)
    right.lse[...] = -np.inf  # written to
    np.testing.assert_array_equal((left + right).output, left.output)


def test_rule_23_dropout_and_masks_keep_the_shares(backend):
    for options in ({"dropout": Dropout(0.5, 1)}, {"mask": KeyLengths(4096 - 4000)}):
        left, right = pieces(backend, -1e9, [4000], **({} if "mask" in options else options))
        calm = pieces(backend, 0.0, [4000], **({} if "mask" in options else options))
        np.testing.assert_allclose((left + right).output, sum(calm).output, rtol=2e-5)


def test_rule_8_a_sink_beside_large_scores(backend):
    q, k, v = np.zeros((1, 2, 8), F), *inputs((1, 4, 8)), np.ones((1, 4, 1), F)
    for level in LEVELS:
        level = float(F(level))
        got = sr.sdpa(q, k, v, bias=np.full((2, 4), level, F), sink=level, backend=backend)
        np.testing.assert_allclose(got, 0.8, rtol=1e-6)
