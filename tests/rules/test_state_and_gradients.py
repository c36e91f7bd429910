"""Rules 23 and 24 of the semantics: partial results and gradients, against finite differences."""

import functools
import itertools
import operator

import numpy as np
import pytest
from naive import agree, attention, qkv

from sdpa_ref import (
    ALiBi,
    AttentionState,
    Causal,
    Dropout,
    KeyLengths,
    MaskFunction,
    QueryLengths,
    Segments,
    Window,
    sdpa,
    sdpa_state,
    sdpa_vjp,
    sdpa_with_vjp,
)


def parts(q, k, v, cuts, **options):
    """Return the states of the keys between the cuts."""
    edges = [0, *cuts, k.shape[2]]
    return [sdpa_state(q, k[:, :, a:b], v[:, :, a:b], **options) for a, b in itertools.pairwise(edges)]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("cuts", [[3], [0], [7], [1, 1, 4], [1, 2, 3, 4, 5, 6]])
def test_rule_23_any_split_in_any_order_is_the_whole(backend, dtype, cuts):
    q, k, v = qkv(dtype)
    output, lse, _ = attention(q, k, v)
    states = parts(q, k, v, cuts, backend=backend)
    for order in itertools.islice(itertools.permutations(states), 24):
        whole = functools.reduce(operator.add, order)
        assert whole.output.dtype == dtype
        assert whole.lse.dtype == (np.float64 if dtype == np.float64 else np.float32)
        agree(whole.output, output)
        agree(whole.lse, lse)
    first, second, third = parts(q, k, v, [2, 5], backend=backend)
    np.testing.assert_array_equal((first + second).output, (second + first).output)
    agree(((first + second) + third).output, (first + (second + third)).output)


def test_rule_23_empty_is_the_identity(backend):
    state = sdpa_state(*qkv(), backend=backend)
    nothing = AttentionState.empty((2, 6, 5), 8, dtype=np.float64)
    for merged in (state + nothing, nothing + state):
        np.testing.assert_array_equal(merged.output, state.output)
        np.testing.assert_array_equal(merged.lse, state.lse)
    for both in (nothing + nothing, nothing + sdpa_state(*qkv(), mask=KeyLengths(0), backend=backend)):
        np.testing.assert_array_equal(both.output, np.zeros((2, 6, 5, 8)))
        np.testing.assert_array_equal(both.lse, np.full((2, 6, 5), -np.inf))
    assert AttentionState.empty((3,), 2).lse.dtype == np.float32


def test_rule_23_rows_that_are_empty_in_one_part(backend):
    q, k, v = qkv()
    keep = np.random.default_rng(0).random((2, 6, 5, 7)) < 0.3
    halves = [
        sdpa_state(q, k[:, :, s], v[:, :, s], mask=keep[..., s], backend=backend) for s in (slice(4), slice(4, 7))
    ]
    output, lse, _ = attention(q, k, v, keep=keep)
    assert (lse == -np.inf).any()
    agree(sum(halves, AttentionState.empty((2, 6, 5), 8, dtype=np.float64)).output, output)
    agree((halves[0] + halves[1]).lse, lse)


def test_rule_23_sink_is_added_once(backend):
    q, k, v = qkv()
    sink = np.linspace(-2, 2, 6)
    first, second = parts(q, k, v, [3], backend=backend)
    whole = (first + second).with_sink(sink)
    output, lse, _ = attention(q, k, v, sink=sink)
    agree(whole.output, output)
    agree(whole.lse, lse)
    agree((first + second).with_sink(0.5).output, sdpa(q, k, v, sink=0.5, backend=backend))
    with pytest.raises(ValueError, match="merge first, then add the sink once"):
        first.with_sink(sink) + second
    with pytest.raises(ValueError, match="added once"):
        whole.with_sink(sink)
    with pytest.raises(ValueError, match=r"sink must be a number or have shape \(Hq,\) = \(6,\), got \(5,\)"):
        first.with_sink(np.zeros(5))


def test_rule_23_states_remember_their_layout(backend):
    q, k, v = qkv()
    sink = np.linspace(-2, 2, 6)
    flipped = sdpa_state(*(x.swapaxes(1, 2) for x in (q, k, v)), layout="LHE", backend=backend)
    assert flipped.layout == "LHE"
    assert flipped.lse.shape == (2, 5, 6)
    agree(flipped.with_sink(sink).output.swapaxes(1, 2), sdpa(q, k, v, sink=sink, backend=backend))
    with pytest.raises(ValueError, match="agree in layout and shape"):
        flipped + sdpa_state(q, k, v, backend=backend)
    headless = sdpa_state(q[0, 0], k[0, 0], v[0, 0], backend=backend).with_sink(1.0)
    agree(headless.output, sdpa(q[0, 0], k[0, 0], v[0, 0], sink=1.0, backend=backend))


STEP = 1e-3


def check_slope(gradient, f, x):
    """Assert that the gradient gives the slopes of the scalar f in four directions; differences err by STEP**4."""
    rng = np.random.default_rng(8)
    for _ in range(4):
        way = rng.standard_normal(x.shape)
        steps = {n: f(x + n * STEP * way) for n in (-2, -1, 1, 2)}
        agree(
            (gradient * way).sum(), (steps[-2] - 8 * steps[-1] + 8 * steps[1] - steps[2]) / (12 * STEP), error=STEP**3
        )


def squared(s, b, h, i, j):
    return s + 0.3 * s * s - 0.1 * abs(i - j)


squared.derivative = lambda s, b, h, i, j: 1 + 0.6 * s

KEEP = np.random.default_rng(4).random((2, 6, 5, 7)) < 0.6
KEEP[1, :, 2] = False
BIAS = np.where(np.random.default_rng(5).random((2, 6, 5, 7)) < 0.2, -np.inf, 0.5)
CASES = {
    "plain": {},
    "mask with an empty row": {"mask": KEEP},
    "causal": {"mask": Causal(), "query_offset": "end"},
    "window and lengths": {"mask": Window(2, 1) & KeyLengths([7, 2]) & QueryLengths([5, 3]), "query_offset": 0},
    "function": {"mask": MaskFunction(lambda b, h, i, j: (b + h + i * j) % 3 > 0)},
    "scale": {"scale": -0.8},
    "softcap": {"softcap": 0.9},
    "alibi": {"bias": ALiBi([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), "query_offset": 2},
    "bias of minus infinity": {"bias": BIAS},
    "sink": {"sink": np.linspace(-1, 1, 6), "mask": KEEP},
    "dropout": {"dropout": Dropout(0.3, 11)},
    "score_mod": {"score_mod": squared, "mask": KEEP},
    "all": {"mask": KEEP, "softcap": 2.0, "bias": BIAS, "sink": np.zeros(6), "dropout": Dropout(0.2, 3), "scale": 0.6},
}


@pytest.mark.parametrize("case", CASES)
def test_rule_24_gradients_against_finite_differences(gradient_backend, case):
    options, (q, k, v) = CASES[case], qkv()
    rng = np.random.default_rng(6)
    d_output, d_lse = rng.standard_normal((2, 6, 5, 8)), rng.standard_normal((2, 6, 5))

    def objective(q, k, v, **changed):
        """Return what `grad_output` and `grad_lse` are the gradient of."""
        output = (sdpa(q, k, v, backend="reference", **options | changed) * d_output).sum()
        given = {key: value for key, value in (options | changed).items() if key != "sink"}
        state = sdpa_state(q, k, v, backend="reference", **given)
        state = state.with_sink((options | changed)["sink"]) if "sink" in options else state
        return output + (np.where(state.lse > -np.inf, state.lse, 0) * d_lse).sum()

    gradients = sdpa_vjp(q, k, v, d_output, grad_lse=d_lse, backend=gradient_backend, **options)
    check_slope(gradients.query, lambda x: objective(x, k, v), q)
    check_slope(gradients.key, lambda x: objective(q, x, v), k)
    check_slope(gradients.value, lambda x: objective(q, k, x), v)
    if isinstance(bias := options.get("bias"), np.ndarray):
        check_slope(gradients.bias, lambda x: objective(q, k, v, bias=x), bias)
    else:
        assert gradients.bias is None
    if "sink" in options:
        check_slope(gradients.sink, lambda x: objective(q, k, v, sink=x), options["sink"])
    else:
        assert gradients.sink is None


@pytest.mark.parametrize("shape", [(7,), (5, 1), (1, 6, 1, 7), (6, 1, 1), (2, 1, 5, 7), (2, 6, 5, 7), ()])
def test_rule_24_broadcast_bias_gets_the_sum(gradient_backend, shape):
    q, k, v = qkv()
    bias, d_output = (
        np.random.default_rng(1).standard_normal(shape),
        np.random.default_rng(2).standard_normal((2, 6, 5, 8)),
    )
    got = sdpa_vjp(q, k, v, d_output, bias=bias, backend=gradient_backend).bias
    full = sdpa_vjp(q, k, v, d_output, bias=np.broadcast_to(bias, (2, 6, 5, 7)), backend=gradient_backend).bias
    lead = full.ndim - len(shape)
    axes = (*range(lead), *(lead + n for n, size in enumerate(shape) if size == 1))
    agree(got, full.sum(axes, keepdims=True).reshape(shape))
    check_slope(got, lambda x: (sdpa(q, k, v, bias=x, backend="reference") * d_output).sum(), bias)


def test_rule_24_tuple_of_biases(gradient_backend):
    q, k, v = qkv()
    d_output = np.random.default_rng(2).standard_normal((2, 6, 5, 8))
    parts = np.zeros((5, 7)), ALiBi(0.0), np.full((6, 1, 7), 0.5, np.float32)
    first, alibi, last = sdpa_vjp(q, k, v, d_output, bias=parts, query_offset=0, backend=gradient_backend).bias
    whole = sdpa_vjp(q, k, v, d_output, bias=np.full((6, 5, 7), 0.5), backend=gradient_backend).bias
    assert alibi is None
    assert (first.dtype, last.dtype) == (np.float64, np.float32)
    agree(first, whole.sum(0))
    agree(last, whole.sum(1, keepdims=True))


def test_rule_24_broadcast_inputs_and_groups_get_the_sum(gradient_backend):
    rng = np.random.default_rng(3)
    q, k = rng.standard_normal((3, 1, 6, 5, 4)), rng.standard_normal((1, 2, 3, 7, 4))
    v, d_output = rng.standard_normal((3, 7, 8)), rng.standard_normal((3, 2, 6, 5, 8))
    gradients = sdpa_vjp(q, k, v, d_output, backend=gradient_backend)
    full = [np.broadcast_to(q, (3, 2, 6, 5, 4)), np.repeat(np.broadcast_to(k, (3, 2, 3, 7, 4)), 2, 2),
            np.repeat(np.broadcast_to(v, (3, 2, 3, 7, 8)), 2, 2)]  # fmt: skip
    spread = sdpa_vjp(*full, d_output, backend=gradient_backend)
    agree(gradients.query, spread.query.sum(1, keepdims=True))
    agree(gradients.key, spread.key.reshape(3, 2, 3, 2, 7, 4).sum((0, 3))[None])
    agree(gradients.value, spread.value.reshape(3, 2, 3, 2, 7, 8).sum((0, 1, 3)))


def test_rule_24_layouts(gradient_backend):
    q, k, v = qkv()
    d_output, d_lse = np.random.default_rng(2).standard_normal((2, 6, 5, 8)), np.ones((2, 6, 5))
    plain = sdpa_vjp(q, k, v, d_output, grad_lse=d_lse, mask=KEEP, backend=gradient_backend)
    flip = [x.swapaxes(1, 2) for x in (q, k, v, d_output, d_lse)]
    flipped = sdpa_vjp(*flip[:4], grad_lse=flip[4], mask=KEEP, layout="LHE", backend=gradient_backend)
    for a, b in zip(plain[:3], flipped[:3], strict=True):
        np.testing.assert_array_equal(a, b.swapaxes(1, 2))
    single = sdpa_vjp(q[0, 0], k[0, 0], v[0, 0], d_output[0, 0], backend=gradient_backend)
    assert [g.shape for g in single[:3]] == [(5, 4), (7, 4), (7, 8)]


def test_rule_24_empty_rows_and_dropped_positions_influence_nothing(gradient_backend):
    q, k, v = qkv()
    d_output = np.random.default_rng(2).standard_normal((2, 6, 5, 8))
    mask = KeyLengths([4, 7]) & Segments([0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0])  # rows 3 and 4 see no key
    clean = sdpa_vjp(q, k, v, d_output, mask=mask, backend=gradient_backend)
    q[:, :, 3:], d_output[:, :, 3:], k[0, :, 4:], v[0, :, 4:] = np.nan, np.nan, np.inf, np.nan
    dirty = sdpa_vjp(q, k, v, d_output, mask=mask, backend=gradient_backend)
    for a, b in zip(clean[:3], dirty[:3], strict=True):
        np.testing.assert_array_equal(a, b)
    assert not clean.query[:, :, 3:].any()
    assert not clean.key[0, :, 4:].any()
    assert not clean.value[0, :, 4:].any()


def test_rule_24_other_gradients_do_not_depend_on_what_else_is_asked(gradient_backend):
    q, k, v = qkv()
    d_output = np.random.default_rng(2).standard_normal((2, 6, 5, 8))
    plain = sdpa_vjp(q, k, v, d_output, backend=gradient_backend)
    for options in ({"bias": np.zeros((5, 7))}, {"sink": np.full(6, -np.inf)}, {"grad_lse": np.zeros((2, 6, 5))}):
        for a, b in zip(plain[:3], sdpa_vjp(q, k, v, d_output, backend=gradient_backend, **options)[:3], strict=True):
            np.testing.assert_array_equal(a, b)
    for gradient in sdpa_vjp(q, k, v, 0 * d_output, mask=KEEP, bias=BIAS, sink=np.zeros(6), backend=gradient_backend):
        assert not gradient.any()


def test_rule_24_one_visible_key(gradient_backend):
    q, k, v = qkv(S=1)
    d_output = np.random.default_rng(2).standard_normal((2, 6, 5, 8))
    gradients = sdpa_vjp(q, k, v, d_output, backend=gradient_backend)
    agree(gradients.query, np.zeros_like(q))
    agree(gradients.key, np.zeros_like(k))
    agree(gradients.value, d_output.reshape(2, 3, 2, 5, 8).sum((2, 3))[:, :, None])


def test_rule_24_score_mod_needs_its_derivative(gradient_backend):
    with pytest.raises(NotImplementedError, match=r"score_mod\.derivative"):
        sdpa_vjp(*qkv(), np.ones((2, 6, 5, 8)), score_mod=lambda s, b, h, i, j: s, backend=gradient_backend)
    with pytest.raises(NotImplementedError, match=r"score_mod\.derivative"):
        sdpa_with_vjp(*qkv(), score_mod=lambda s, b, h, i, j: s, backend=gradient_backend)
