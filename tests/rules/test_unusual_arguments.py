"""Arguments at the ends of what is legal, and of kinds that are not, and what a call does with them."""

import ml_dtypes
import numpy as np
import pytest

import sdpa_ref as sr

X = np.ones((2, 3, 4), np.float32)


@pytest.mark.parametrize("function", [sr.sdpa, sr.sdpa_state, sr.sdpa_stages], ids=lambda f: f.__name__)
def test_value_is_needed(function):
    with pytest.raises(TypeError, match="value must be an array"):
        function(X, X, None)


@pytest.mark.parametrize("huge", [[2**62] * 4, [2**63 - 1, 2]])
def test_lengths_whose_sum_leaves_int64(huge):
    with pytest.raises(ValueError, match="more than L = 3"):
        sr.Packed(huge).dense(3, 3)


@pytest.mark.parametrize("sink", [1e300, -1e300])
def test_a_sink_beyond_float32_stays_finite(sink, backend):
    direct = sr.sdpa(X, X, X, sink=sink, backend=backend)
    merged = sr.sdpa_state(X, X, X, backend=backend).with_sink(sink)
    np.testing.assert_allclose(merged.output, direct, rtol=1e-6)
    assert np.isfinite(merged.lse).all()


@pytest.mark.parametrize(
    ("score_mod", "error", "message"),
    [
        (lambda s, b, h, i, j: None, TypeError, "result of score_mod"),
        (lambda s, b, h, i, j: "high", TypeError, "real numbers"),
        (lambda s, b, h, i, j: s + 1j, TypeError, "real numbers"),
        (lambda s, b, h, i, j: s[..., None] * np.ones(3), ValueError, "elementwise"),
    ],
)
def test_score_mod_that_returns_no_scores(score_mod, error, message, backend):
    with pytest.raises(error, match=message):
        sr.sdpa(X, X, X, score_mod=score_mod, backend=backend)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"layout": ["HLE"]}, ValueError, "layout must be"),
        ({"backend": ["reference"]}, TypeError, "backend must be a name"),
        ({"scale": [[1], [1, 2]]}, TypeError, "scale must be"),
        ({"scale": 10**400}, ValueError, "scale must be finite"),
        ({"scale": "1"}, TypeError, "scale must be a real number"),
        ({"query_offset": 2**70}, ValueError, "query_offset must be within"),
        ({"query_offset": [[1], [1, 2]]}, TypeError, "query_offset must be"),
        ({"mask": sr.Packed([0, 0, 0], [2, 1, 0]) & sr.Causal()}, ValueError, "query_offset must say"),
        ({"out": np.ma.masked_array(X.copy())}, TypeError, "out must be a numpy array"),
        ({"out": np.lib.stride_tricks.as_strided(X.copy(), X.shape, (4, 4, 4))}, ValueError, "overlap itself"),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind(options, error, message):
    with pytest.raises(error, match=message):
        sr.sdpa(X, X, X, **options)


def test_out_in_the_memory_of_a_bias_of_another_byte_order():
    bias = np.zeros((2, 3, 4), ">f4")
    with pytest.raises(ValueError, match="share memory"):
        sr.sdpa(X, X, X, bias=bias[..., :3], out=bias.view("<f4"))


@pytest.mark.parametrize("scale", [10**30, ml_dtypes.bfloat16(0.5), np.float32(0.5), np.int64(2)], ids=repr)
def test_any_real_number_is_a_scale(scale, backend):
    np.testing.assert_array_equal(sr.sdpa(X, X, X, scale=scale, backend=backend), X)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: sr.ALiBi(1e308), ValueError, "slopes must be finite and within"),
        (lambda: sr.ALiBi([[1], [1, 2]]), ValueError, "one shape"),
        (lambda: sr.KeyLengths(np.uint64(2**64 - 1)), ValueError, "below 2\\*\\*63"),
        (lambda: sr.Dropout(1 - 1e-17, 0), ValueError, "p must be in"),
        (lambda: sr.Dropout(0.5, 0).keep((2.0, 3)), ValueError, "sizes"),
        (lambda: sr.Causal().dense(2.5, 2), TypeError, "L must be an integer"),
        (lambda: sr.Causal().dense(-1, 2), ValueError, "L must be at least 0"),
        (lambda: sr.Causal().explain(0, 0, 2, 2, b=5), ValueError, "b must be in"),
        (lambda: sr.Segments(np.zeros((2, 3), int), np.zeros((3, 3), int)).dense(3, 3), ValueError, "must broadcast"),
        (lambda: sr.Causal() and sr.Window(1, 1), TypeError, "instead of and, or and not"),
    ],
)
def test_objects_of_the_wrong_kind(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_sum_of_states(backend):
    x = np.random.default_rng(0).standard_normal((2, 6, 4)).astype(np.float32)
    parts = [sr.sdpa_state(x, x[:, j : j + 2], x[:, j : j + 2], backend=backend) for j in (0, 2, 4)]
    whole = sr.sdpa_state(x, x, x, backend=backend)
    np.testing.assert_allclose(sum(parts).output, whole.output, rtol=1e-5, atol=1e-6)


def test_a_visible_nan_is_not_hidden_by_dropout(backend):
    key = X.copy()
    key[0, 0] = np.nan
    output = sr.sdpa(X, key, X, dropout=sr.Dropout(0.99, 3), backend=backend)
    assert np.isnan(output[0]).all()
    assert np.isfinite(output[1]).all()


def test_score_mod_sees_what_it_reads_as_it_is_now(backend):
    table = np.zeros(2)
    score_mod = lambda s, b, h, i, j: s + np.where(j == 0, table[0], 0)  # noqa: E731
    sr.sdpa_weights(X, X, score_mod=score_mod, backend=backend)
    table[0] = 100
    weights = sr.sdpa_weights(X, X, score_mod=score_mod, backend=backend)
    np.testing.assert_array_equal(weights[..., 0], 1)


def test_out_is_whole_or_untouched_when_a_rule_fails(backend):
    x = np.ones((1, 3000, 4), np.float32)
    out = np.full_like(x, 7)

    def rule(b, h, i, j):
        if (i >= 2999).any():
            raise RuntimeError("no rule for the last row")
        return i >= j

    with pytest.raises(RuntimeError, match="last row"):
        sr.sdpa(x, x, x, mask=sr.MaskFunction(rule), out=out, backend=backend)
    np.testing.assert_array_equal(out, 7)
    with pytest.raises(TypeError, match="must return booleans"):
        sr.sdpa(x, x, x, mask=sr.MaskFunction(lambda b, h, i, j: i - j), out=out, backend=backend)


def test_segments_of_many_batch_entries(backend):
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 4, (50, 3))
    ids = np.stack([np.r_[np.repeat([5, -2, 9], n), np.full(12 - n.sum(), 7 + 100 * e)] for e, n in enumerate(lengths)])
    x = rng.standard_normal((50, 2, 12, 4)).astype(np.float32)
    together = sr.sdpa(x, x, x, mask=sr.Segments(ids), backend=backend)
    for e in range(50):
        np.testing.assert_array_equal(together[e], sr.sdpa(x[e], x[e], x[e], mask=sr.Segments(ids[e]), backend=backend))
    np.testing.assert_array_equal(sr.Segments(ids).dense(12, 12)[:, 0], ids[:, :, None] == ids[:, None, :])


def test_biases_of_several_shapes_are_summed(backend):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 3, 5, 4))
    biases = [rng.standard_normal(shape) for shape in ((5, 5), (5,), (3, 1, 1), (2, 1, 5, 1))]
    biases[1][2] = -np.inf
    summed = sum(np.broadcast_to(bias, (2, 3, 5, 5)) for bias in biases)
    np.testing.assert_allclose(
        sr.sdpa(x, x, x, bias=tuple(biases), backend=backend),
        sr.sdpa(x, x, x, bias=summed, backend=backend),
        rtol=1e-12,
    )


@pytest.mark.parametrize(
    "options", [{"softcap": 1e39}, {"softcap": 1e300}, {"softcap": 1e-46}, {"scale": 1e39}], ids=str
)
def test_numbers_outside_float32(options, backend):
    x = np.zeros((1, 3, 4), np.float32) if "scale" in options else X[:1]
    for score_mod in (None, lambda s, b, h, i, j: s):
        output = sr.sdpa(x, x, X[:1], score_mod=score_mod, backend=backend, **options)
        np.testing.assert_allclose(output, X[:1], rtol=1e-6)


def test_states_of_infinities_merge_silently():
    loud = sr.AttentionState(np.full((1, 2, 4), np.inf, np.float32), np.array([[-200, 0]], np.float32))
    calm = sr.AttentionState(np.ones((1, 2, 4), np.float32), np.zeros((1, 2), np.float32))
    assert np.isnan((loud + calm).output[0, 0]).all()
    assert (loud + calm).output[0, 1, 0] == np.inf


def test_plain_score_mod_gives_a_row_the_same_bits_in_any_batch(backend):
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, 9, 4, 37, 24)).astype(np.float32)
    score_mod = lambda s, b, h, i, j: s - 0.1 * abs(i - j)  # noqa: E731
    together = sr.sdpa(q, k, v, score_mod=score_mod, backend=backend)
    for b in (0, 8):
        alone = sr.sdpa(q[b : b + 1], k[b : b + 1], v[b : b + 1], score_mod=score_mod, backend=backend)
        np.testing.assert_array_equal(together[b : b + 1], alone)
        head = sr.sdpa(q[b, 2:3], k[b, 2:3], v[b, 2:3], score_mod=score_mod, backend=backend)
        np.testing.assert_array_equal(together[b, 2:3], head)
