"""The formula and rules 6 to 9 of the semantics, against numbers by hand and against one scalar at a time."""

import itertools
from math import atanh, log

import numpy as np
import pytest
from naive import agree, attention, qkv

from sdpa_ref import (
    ALiBi,
    Causal,
    Chunked,
    Dropout,
    FirstTokens,
    KeyLengths,
    KeyStarts,
    MaskFunction,
    Packed,
    Prefix,
    QueryLengths,
    Segments,
    Tree,
    Window,
    sdpa,
    sdpa_stages,
    sdpa_state,
    sdpa_vjp,
    sdpa_weights,
)

# One query [1, 0] and keys [log w, 0] with scale 1: the weights are w / sum(w) for w = 1, 2, 5.
QUERY, KEY, VALUE = (
    np.array([[1.0, 0.0]]),
    np.array([[log(1), 7], [log(2), 8], [log(5), 9]]),
    np.array([[8.0], [16], [24]]),
)
BY_HAND = {
    "plain": ({}, [1 / 8, 2 / 8, 5 / 8], log(8), 20),
    "negative scale": ({"scale": -1.0}, [10 / 17, 5 / 17, 2 / 17], log(1.7), 208 / 17),
    "scale 0": ({"scale": 0.0}, [1 / 3, 1 / 3, 1 / 3], log(3), 16),
    "bias": ({"bias": np.array([log(3), 0, 0])}, [3 / 10, 2 / 10, 5 / 10], log(10), 17.6),
    "two biases": (
        {"bias": (np.array([log(3), 0, 0]), np.array([[0, 0, -log(5)]]))},
        [3 / 6, 2 / 6, 1 / 6],
        log(6),
        40 / 3,
    ),
    "alibi": ({"bias": ALiBi(log(2)), "query_offset": 1}, [1 / 10, 4 / 10, 5 / 10], log(5), 19.2),  # w = 1/2, 2, 5/2
    "mask": ({"mask": np.array([True, False, True])}, [1 / 6, 0, 5 / 6], log(6), 64 / 3),
    "sink": ({"sink": log(2)}, [1 / 10, 2 / 10, 5 / 10], log(10), 16),
    "score_mod": ({"score_mod": lambda s, b, h, i, j: 2 * s}, [1 / 30, 4 / 30, 25 / 30], log(30), 672 / 30),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_formula_by_hand(backend, case):
    options, weights, lse, output = BY_HAND[case]
    options = {"scale": 1.0, "backend": backend} | options
    agree(sdpa_weights(QUERY, KEY, **options), [weights])
    agree(sdpa(QUERY, KEY, VALUE, **options), [[output]])
    sink = options.pop("sink", None)
    state = sdpa_state(QUERY, KEY, VALUE, **options)
    agree((state if sink is None else state.with_sink(sink)).lse, [lse])


def test_formula_by_hand_softcap(backend):
    key = np.array([[2 * atanh(log(w) / 2), 0] for w in (1, 2, 5)])
    agree(sdpa(QUERY, key, VALUE, scale=1.0, softcap=2.0, backend=backend), [[20.0]])
    key = np.array([[1e6, 0], [-1e6, 0]])  # far beyond the cap the scores are +-cap
    agree(sdpa_weights(QUERY, key, softcap=log(3) / 2, backend=backend), [[0.75, 0.25]])


def test_formula_by_hand_dropout(backend):
    dropout = Dropout(0.75, 1)
    assert dropout.keep((1, 3)).tolist() == [[True, True, False]]
    agree(sdpa_weights(QUERY, KEY, scale=1.0, dropout=dropout, backend=backend), [[4 / 8, 4 * 2 / 8, 0]])
    agree(sdpa(QUERY, KEY, VALUE, scale=1.0, dropout=dropout, backend=backend), [[20.0]])
    agree(sdpa_state(QUERY, KEY, VALUE, scale=1.0, dropout=dropout, backend=backend).lse, [log(8)])


def some_options():
    """Return the options by name, as they are passed to us and as they are passed to the loop."""
    rng = np.random.default_rng(3)
    keep, bias = rng.random((2, 6, 5, 7)) < 0.6, rng.standard_normal((2, 6, 5, 7))
    bias[rng.random(bias.shape) < 0.2] = -np.inf
    sink = rng.standard_normal(6)

    def score_mod(s, b, h, i, j):
        return s * (1 + 0.1 * h) - 0.2 * abs(i - j) + 0.05 * b

    return {
        "keep": ({"mask": keep}, {"keep": keep}),
        "bias": ({"bias": bias}, {"bias": bias}),
        "scale": ({"scale": -0.7}, {"scale": -0.7}),
        "softcap": ({"softcap": 0.8}, {"softcap": 0.8}),
        "sink": ({"sink": sink}, {"sink": sink}),
        "score_mod": ({"score_mod": score_mod}, {"score_mod": score_mod}),
        "dropout": ({"dropout": Dropout(0.3, 2**40 + 7)}, {"dropout": (0.3, 2**40 + 7)}),
    }


OPTIONS = some_options()
SETS = [(), *((name,) for name in OPTIONS), *itertools.combinations(OPTIONS, 2), tuple(OPTIONS)]


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_formula_against_the_triple_loop(backend, names):
    q, k, v = qkv()
    ours, theirs = ({key: value for name in names for key, value in OPTIONS[name][side].items()} for side in (0, 1))
    output, lse, weights = attention(q, k, v, **theirs)
    agree(sdpa(q, k, v, backend=backend, **ours), output)
    agree(sdpa_weights(q, k, backend=backend, **ours), weights)
    sink = ours.pop("sink", None)
    state = sdpa_state(q, k, v, backend=backend, **ours)
    agree((state if sink is None else state.with_sink(sink)).lse, lse)


def test_stages_are_the_lines_of_the_formula():
    q, k, v = qkv()
    options = {key: value for ours, _ in OPTIONS.values() for key, value in ours.items()}
    keep, bias, sink = options["mask"], options["bias"], options["sink"]
    stages = sdpa_stages(q, k, v, **options)
    key = np.repeat(k, 2, 1)
    agree(stages.raw, (q[..., None, :] * key[:, :, None]).sum(-1))
    agree(stages.scaled, -0.7 * stages.raw)
    agree(stages.capped, 0.8 * np.tanh(stages.scaled / 0.8))
    b, h, i, j = np.ix_(range(2), range(6), range(5), range(7))
    seen = keep & (bias > -np.inf)
    np.testing.assert_array_equal(stages.keep, seen)
    changed = options["score_mod"](stages.capped + np.where(seen, bias, 0), b, h, i, j)
    agree(stages.biased, np.where(seen, changed, -np.inf))
    z = np.exp(stages.biased).sum(-1) + np.exp(sink)[:, None]
    agree(stages.lse, np.log(z))
    agree(stages.weights, np.exp(stages.biased) / z[..., None] * Dropout(0.3, 2**40 + 7).keep(keep.shape) / 0.7)
    agree(stages.output, stages.weights @ np.repeat(v, 2, 1))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rule_06_row_without_a_key(backend, dtype):
    q, k, v = qkv(dtype)
    keep = np.random.default_rng(5).random((2, 6, 5, 7)) < 0.5
    keep[0, :, 1] = keep[1, 4] = False
    for options in (
        {"mask": keep},
        {"bias": np.where(keep, 0, -np.inf)},
        {"score_mod": lambda s, b, h, i, j: np.where(keep[b, h, i, j], s, -np.inf)},  # kept, but of score -inf
    ):
        output, weights = (
            sdpa(q, k, v, backend=backend, **options),
            sdpa_weights(q, k, backend=backend, **options),
        )
        state = sdpa_state(q, k, v, backend=backend, **options)
        for empty in ((0, slice(None), 1), (1, 4)):
            assert not output[empty].any()
            assert not weights[empty].any()
            assert (state.lse[empty] == -np.inf).all()
        assert np.isfinite(output).all()
        np.testing.assert_array_equal(np.isfinite(state.lse), keep.any(-1))
        sinks = np.arange(6, dtype=dtype)
        with_sink = state.with_sink(sinks)
        np.testing.assert_array_equal(with_sink.lse[0, :, 1], sinks)
        assert not sdpa(q, k, v, sink=sinks, backend=backend, **options)[1, 4].any()


MASKS = {
    "bool": np.random.default_rng(6).random((2, 6, 5, 7)) < 0.5,
    "key padding": np.array([[1, 1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 0, 0, 0]], bool)[:, None, None],
    "causal": Causal(),
    "window": Window(1, 1),
    "key lengths": KeyLengths([3, 5]),
    "key starts": KeyStarts([3, 5]),
    "query lengths": QueryLengths([3, 5]),
    "segments": Segments([0, 0, 1, 1, 2], [0, 0, 1, 1, 1, 3, 3]),
    "packed": Packed([2, 2], [3, 2]),
    "prefix": Prefix([1, 2]) & KeyLengths(6),
    "chunked": Chunked(3),
    "first tokens": FirstTokens(2) | Window(0, 0),
    "tree": Tree([-1, 0, 0, 1, 2]),
    "function": MaskFunction(lambda b, h, i, j: (i + j + h + b) % 3 > 0),
    "not": ~Window(1, 1),
    "three intervals": FirstTokens(1) | Window(0, 0) | KeyStarts(6),
}


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rule_07_dropped_nan_changes_no_bit(backend, dtype, name, poison):
    q, k, v = qkv(dtype)
    mask, options = MASKS[name], {"query_offset": "start", "backend": backend}
    keep = mask if isinstance(mask, np.ndarray) else mask.dense(5, 7, batch=(2,), heads=6, query_offset="start")
    keep = np.broadcast_to(keep, (2, 6, 5, 7))
    clean = sdpa(q, k, v, mask=mask, **options)
    agree(clean, attention(q, k, v, keep=keep)[0])
    for j in range(7):  # the rows that drop key j must not notice what it holds
        for held in ("key", "value", "bias"):
            bad_key, bad_value, bias = k.copy(), v.copy(), np.zeros((2, 6, 5, 7), dtype)
            {"key": bad_key, "value": bad_value}.get(held, bias.swapaxes(-1, -2))[:, :, j] = poison
            got = sdpa(q, bad_key, bad_value, mask=mask, bias=bias, **options)
            want = sdpa(q, k, v, mask=mask, bias=np.zeros_like(bias), **options)
            unseen = ~keep[..., j]
            np.testing.assert_array_equal(got[unseen], want[unseen])


def test_rule_07_visible_nan_spreads_to_exactly_the_rows_that_see_it(backend):
    q, k, v = qkv(np.float32)
    keep = np.random.default_rng(7).random((2, 6, 5, 7)) < 0.5
    clean = sdpa_state(q, k, v, mask=keep, backend=backend)
    for held in (k, v):
        bad = held.copy()
        bad[1, 2, 3] = np.nan
        arguments = (q, bad, v) if held is k else (q, k, bad)
        state = sdpa_state(*arguments, mask=keep, backend=backend)
        sees = np.zeros((2, 6, 5), bool)
        sees[1, 4:] = keep[1, 4:, :, 3]  # heads 4 and 5 read key head 2
        np.testing.assert_array_equal(np.isnan(state.output).all(-1), sees)
        np.testing.assert_array_equal(state.output[~sees], clean.output[~sees])
        np.testing.assert_array_equal(np.isnan(state.lse), sees & (held is k))


def test_rule_07_score_of_plus_infinity_makes_the_row_nan(backend):
    q, k, v = qkv(np.float32)
    bias = np.zeros((2, 6, 5, 7), np.float32)
    bias[1, 2, 3, 4] = np.inf
    state = sdpa_state(q, k, v, bias=bias, backend=backend)
    rows = np.zeros((2, 6, 5), bool)
    rows[1, 2, 3] = True
    np.testing.assert_array_equal(np.isnan(state.lse), rows)
    np.testing.assert_array_equal(np.isnan(state.output).all(-1), rows)


@pytest.mark.parametrize("wide", [1e300, 1e39])
def test_rule_07_finite_bias_stays_finite(backend, wide):
    q, k, v = qkv(np.float32)
    most = np.finfo(np.float32).max
    bias = np.full((5, 7), -wide)
    state = sdpa_state(q, k, v, bias=bias, backend=backend)  # every key is at the lowest score: kept, not dropped
    np.testing.assert_array_equal(state.lse, np.full((2, 6, 5), -most))
    agree(state.output, np.broadcast_to(np.repeat(v, 2, 1).mean(2, keepdims=True), (2, 6, 5, 8)))
    bias[:, 2] = wide
    state = sdpa_state(q, k, v, bias=bias, backend=backend)
    np.testing.assert_array_equal(state.lse, np.full((2, 6, 5), most))
    agree(state.output, np.broadcast_to(np.repeat(v, 2, 1)[:, :, 2:3], (2, 6, 5, 8)))
    agree(sdpa(q, k, v, bias=(bias / 2, bias / 2), backend=backend), state.output)


def test_rule_07_bias_of_minus_infinity_cannot_be_revived(backend):
    q, k, _ = qkv()
    bias = np.where(np.arange(7) == 3, -np.inf, 0.0)
    for score_mod in (lambda s, b, h, i, j: 0 * s + 1, lambda s, b, h, i, j: np.where(j == 3, np.nan, s)):
        weights = sdpa_weights(q, k, bias=bias, score_mod=score_mod, backend=backend)
        assert not weights[..., 3].any()
        agree(weights.sum(-1), np.ones((2, 6, 5)))


def test_rule_08_sink_is_a_raw_logit_a_head(backend):
    q, k, v = qkv()
    sink = np.array([-2.0, 0, 1, 3, 50, -50])
    for options in ({}, {"scale": 3.0}, {"softcap": 0.5}, {"mask": Causal(), "query_offset": "end"}):
        plain = sdpa_state(q, k, v, backend=backend, **options)
        share = np.exp(plain.lse) / (np.exp(plain.lse) + np.exp(sink)[:, None])
        agree(sdpa(q, k, v, sink=sink, backend=backend, **options), plain.output * share[..., None])
    plus_one = sdpa_weights(q, k, scale=1.0, sink=0, backend=backend)
    scores = np.exp(np.einsum("bhle,bhse->bhls", q, np.repeat(k, 2, 1)))
    agree(plus_one, scores / (1 + scores.sum(-1, keepdims=True)))
    np.testing.assert_array_equal(
        sdpa(q, k, v, sink=2.0, backend=backend), sdpa(q, k, v, sink=np.full(6, 2), backend=backend)
    )


def test_rule_09_sums_of_rows(backend):
    q, k, _ = qkv()
    keep = np.random.default_rng(9).random((2, 6, 5, 7)) < 0.3
    sums = sdpa_weights(q, k, mask=keep, backend=backend).sum(-1)
    agree(sums, keep.any(-1).astype(float))
    assert not keep.any(-1).all()
    with_sink = sdpa_weights(q, k, mask=keep, sink=0.0, backend=backend).sum(-1)
    assert (with_sink < 1).all()
    assert (with_sink[keep.any(-1)] > 0).all()


@pytest.mark.parametrize("L", [1, 3, 40])
def test_alibi_slopes_of_each_batch_entry(backend, L):
    """As FlashAttention has them: each entry is what it is alone with its own slopes."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 3, H, n, 8)).astype(np.float32) for H, n in ((4, L), (2, 70), (2, 70)))
    slopes, more = rng.uniform(-1, 1, (2, 3, 4)), rng.uniform(-1, 1, (3, 1))
    options = {"query_offset": "end", "backend": backend}
    whole = sdpa(q, k, v, bias=ALiBi(slopes), **options)
    both = sdpa(q, k, v, bias=(ALiBi(slopes), ALiBi(np.repeat(more, 4, -1))), **options)
    for b in np.ndindex(2, 3):
        np.testing.assert_array_equal(whole[b], sdpa(q[b], k[b], v[b], bias=ALiBi(slopes[b]), **options))
        alone = sdpa(q[b], k[b], v[b], bias=ALiBi(slopes[b] + more[b[1]]), **options)
        np.testing.assert_array_equal(both[b], alone)
    np.testing.assert_allclose(
        whole, sdpa(q, k, v, bias=ALiBi(slopes), **options | {"backend": "reference"}), atol=1e-5
    )
    with pytest.raises(ValueError, match=r"shape \(Hq,\) = \(4,\) or \(\*batch, Hq\) = \(2, 3, 4\), got \(3, 3, 4\)"):
        sdpa(q, k, v, bias=ALiBi(np.ones((3, 3, 4))), **options)


def test_gradients_under_alibi_slopes_of_each_batch_entry(gradient_backend):
    rng = np.random.default_rng(0)
    q, k, v, grad = rng.standard_normal((4, 3, 2, 9, 8))
    slopes, options = rng.uniform(-1, 1, (3, 2)), {"mask": Causal(), "backend": gradient_backend}
    whole = sdpa_vjp(q, k, v, grad, bias=ALiBi(slopes), **options)
    for b in range(3):
        alone = sdpa_vjp(q[b], k[b], v[b], grad[b], bias=ALiBi(slopes[b]), **options)
        for one, other in zip(whole[:3], alone[:3], strict=True):
            np.testing.assert_allclose(one[b], other, rtol=1e-12, atol=1e-12)
