"""Bugs of the kinds that users of other libraries have reported, a section a kind. What a rule's own tests hold is not repeated."""

import multiprocessing
import sys
import tracemalloc
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from naive import agree, attention, qkv, visible

from sdpa_ref import (
    ALiBi,
    AttentionState,
    Causal,
    Dropout,
    KeyLengths,
    KeyStarts,
    Packed,
    Segments,
    Window,
    sdpa,
    sdpa_state,
    sdpa_vjp,
    sdpa_weights,
)
from sdpa_ref.testing import assert_close

HALF, BF16, SINGLE, DOUBLE = map(np.dtype, (np.float16, ml_dtypes.bfloat16, np.float32, np.float64))
same = np.testing.assert_array_equal


def head(L, S, E, dtype=SINGLE, Ev=None):
    """Return query, key and value of one head."""
    return [x[0, 0] for x in qkv(dtype, B=1, Hq=1, Hkv=1, L=L, S=S, E=E, Ev=Ev or E)]


# Rows that see nothing


@pytest.mark.parametrize("dtype", [HALF, BF16, SINGLE, DOUBLE], ids=str)
def test_empty_rows_beside_full_ones(backend, dtype):
    q, k, v = qkv(dtype, L=8, S=8)
    keep = np.zeros((8, 8), bool)
    keep[:4, :4] = True
    state = sdpa_state(q, k, v, mask=keep, backend=backend)
    same(state.output[:, :, 4:], np.zeros((2, 6, 4, 8), dtype))
    assert (state.lse[:, :, 4:] == -np.inf).all()
    assert_close(state.output[:, :, :4], q[:, :, :4], k[:, :, :4], v[:, :, :4])


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("L", [129, 300])
def test_whole_blocks_that_a_row_does_not_see(backend, L, dtype):
    q, k, v = head(L, L, 4, dtype)
    i, j = np.ogrid[:L, :L]
    for keep in ((j <= i) & (j >= i - 10), np.broadcast_to(j < 10, (L, L)), np.broadcast_to(j >= L - 10, (L, L))):
        by_bias = sdpa(q, k, v, bias=np.where(keep, np.float32(0), -np.inf).astype(SINGLE), backend=backend)
        assert np.isfinite(by_bias).all()
        assert_close(by_bias, q, k, v, mask=keep)
        assert_close(sdpa(q, k, v, mask=keep, backend=backend), q, k, v, mask=keep)
    assert_close(sdpa(q, k, v, mask=Window(10, 0), backend=backend), q, k, v, mask=(j <= i) & (j >= i - 10))


def test_empty_row_is_zero_and_not_the_mean_of_v(backend):
    q, k, v = head(2, 4, 4)
    seen = np.array([[0, 0, 1, 1], [1, 1, 0, 0]], bool)  # row 0 may see what is not there yet
    for options in ({"mask": Causal() & seen}, {"mask": Causal(), "bias": np.where(seen, 0, -np.inf)}):
        for held in (np.full_like(v, 7), np.where(np.arange(4)[:, None] < 2, v, np.nan)):
            output = sdpa(q, k, held, query_offset=0, backend=backend, **options)
            same(output[0], np.zeros(4))
            assert np.isfinite(output[1]).all()


def test_dead_sample_of_a_batch_does_no_harm_in_later_layers(backend):
    q, k, v = qkv(SINGLE, Hkv=6, S=5, Ev=4)
    alive = np.array([True, False])[:, None, None, None]
    once = sdpa(q, k, v, mask=alive, backend=backend)
    twice = sdpa(once, once, once, mask=alive, backend=backend)
    same(twice[0], sdpa(*[sdpa(q[0], k[0], v[0], backend=backend)] * 3, backend=backend))
    assert not twice[1].any()


# Causal alignment


@pytest.mark.parametrize("dtype", [HALF, BF16, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("L", [5, 64, 65])
def test_the_future_does_not_leak(backend, dtype, L):
    q, k, v = qkv(dtype, B=1, L=L, S=L)
    expected = sdpa(q, k, v, mask=Causal(), backend=backend)
    for i in {0, 2, L // 2, L - 2}:
        for new in (100, np.nan):
            k2, v2 = k.copy(), v.copy()
            k2[:, :, i + 1 :] = v2[:, :, i + 1 :] = new
            same(sdpa(q, k2, v2, mask=Causal(), backend=backend)[:, :, : i + 1], expected[:, :, : i + 1])


@pytest.mark.parametrize(("L", "S"), [(1, 4), (1, 16), (2, 4), (4, 4), (5, 4), (16, 8), (32, 1024)])
def test_alignment_is_the_one_that_was_asked_for(backend, L, S):
    q, k, v = head(L, S, 8)
    start, end = (sdpa(q, k, v, mask=Causal(), query_offset=name, backend=backend) for name in ("start", "end"))
    assert_close(start, q, k, v, mask=np.tri(L, S, dtype=bool))
    assert_close(end, q, k, v, mask=np.tri(L, S, S - L, dtype=bool))
    assert np.array_equal(start, end) == (L == S)
    if L > S:
        assert not end[: L - S].any()
        same(end[L - S], v[0])


def test_cache_with_a_count_of_valid_keys(backend):
    q, k, v = qkv(SINGLE, B=3, L=2, S=8)
    lengths = [2, 4, 5]
    for garbage in (1e30, np.nan):
        for b, n in enumerate(lengths):
            k[b, :, n:] = v[b, :, n:] = garbage
        output = sdpa(q, k, v, mask=Causal() & KeyLengths(lengths), query_offset="end", backend=backend)
        for b, n in enumerate(lengths):
            assert_close(output[b], q[b], k[b, :, :n], v[b, :, :n], mask=Causal(), query_offset="end")


# Masks and biases


def test_masked_keys_have_no_weight_however_low_the_others_lie(backend):
    q, k = np.full((3, 4), 5, SINGLE), np.full((6, 4), -5, SINGLE)  # all scores are -50
    keep = np.arange(6) % 2 == 0
    weights = sdpa_weights(q, k, mask=keep, backend=backend)
    same(weights[:, ~keep], np.zeros((3, 3)))
    agree(weights.sum(-1), np.ones(3))


def test_batch_of_as_many_entries_as_heads(backend):
    q, k, v = qkv(SINGLE, B=4, Hq=4, Hkv=4, L=3, S=3)
    padding, square = np.random.default_rng(1).random((4, 1, 1, 3)) < 0.7, np.tri(3, dtype=bool)
    for mask, keep in ((padding, padding), (square, square), (Causal() & padding, square & padding)):
        keep = np.broadcast_to(keep, (4, 4, 3, 3))
        agree(sdpa(q, k, v, mask=mask, backend=backend), attention(q, k, v, keep=keep)[0])


def test_mask_with_holes_is_not_taken_for_a_length(backend):
    q, k, v = qkv(SINGLE)
    holes = np.array([1, 0, 1, 1, 0, 1, 0], bool)
    agree(sdpa(q, k, v, mask=holes, backend=backend), attention(q, k, v, keep=np.broadcast_to(holes, (2, 6, 5, 7)))[0])


@pytest.mark.parametrize("dtype", [HALF, BF16, SINGLE, DOUBLE], ids=str)
@pytest.mark.parametrize("n", [1, 4, 0])
def test_triangle_of_minus_infinity_is_the_causal_mask(backend, dtype, n):
    q, k, v = qkv(SINGLE, L=n, S=n)
    triangle = np.tri(n, dtype=bool)
    same(Causal().dense(n, n), triangle)
    output = sdpa(q, k, v, bias=np.where(triangle, 0, -np.inf).astype(dtype), backend=backend)
    assert_close(output, q, k, v, mask=triangle)
    agree(output, sdpa(q, k, v, mask=Causal(), backend=backend))


def test_every_backend_takes_the_same_pairs_of_types(backend):
    def outcome(name, dtype, biased):
        q, k, v = qkv(SINGLE)
        try:
            return sdpa(q.astype(dtype), k, v, bias=np.zeros((5, 7)).astype(biased), backend=name).dtype
        except TypeError as error:
            return str(error)

    for dtype in (HALF, BF16, SINGLE, DOUBLE, np.dtype(int), np.dtype(complex)):
        for biased in (HALF, BF16, SINGLE, DOUBLE, np.dtype(bool), np.dtype(np.int8)):
            assert outcome(backend, dtype, biased) == outcome("reference", dtype, biased)


# Memory beyond the arrays, and their layout


@pytest.mark.parametrize("S", [1, 15, 16, 17, 63, 65])
def test_what_lies_behind_the_last_key_is_not_read(backend, S):
    q, k, v = qkv(SINGLE, S=S, E=16, Ev=16)
    room = [np.pad(x, ((0, 0), (0, 0), (0, 40), (0, 0)), constant_values=np.nan) for x in (k, v)]
    expected = sdpa(q, k, v, backend=backend)
    same(sdpa(q, *(x[:, :, :S] for x in room), backend=backend), expected)
    assert_close(sdpa(q, *room, mask=KeyLengths(S), backend=backend), q, k, v)


@pytest.mark.parametrize("L", [1, 9])
def test_views_of_one_packed_projection(backend, L):
    packed = np.random.default_rng(0).standard_normal((2, L, 3, 6, 8)).astype(SINGLE)
    parts = [packed[:, :, n] for n in range(3)]
    expected = sdpa(*(x.swapaxes(1, 2).copy() for x in parts), backend=backend)
    same(sdpa(*(x.swapaxes(1, 2) for x in parts), backend=backend), expected)
    same(sdpa(*parts, layout="LHE", backend=backend).swapaxes(1, 2), expected)


def test_one_call_leaves_no_trace_in_the_next(backend):
    plain = qkv(SINGLE, L=7)
    masks = [np.tri(7, dtype=bool), np.tri(7, dtype=bool).T, np.broadcast_to(np.arange(7) < 4, (7, 7)), np.ones((7, 14), bool)[:, ::2]]
    alone = {n: sdpa(*plain, mask=mask.copy(), backend=backend) for n, mask in enumerate(masks)}
    odd = [x.astype(">f4") for x in plain]
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        for n in order:
            same(sdpa(*plain, mask=masks[n], backend=backend), alone[n])
            same(sdpa(*odd, mask=masks[n], backend=backend), alone[n])


# Sizes that fit no block


@pytest.mark.parametrize("E", [1, 2, 3, 5, 7, 9, 17, 31, 33, 37, 48, 80, 96, 127, 160, 257, 512])
def test_any_width(backend, E):
    q, k, v = head(9, 11, E)
    output = sdpa(q, k, v, backend=backend)
    assert_close(output, q, k, v)
    same(output, sdpa(q, k, v, scale=E**-0.5, backend=backend))  # of the width itself, not of a padded one


@pytest.mark.parametrize("S", [1, 2, 7, 15, 16, 17, 31, 32, 33, 38, 39, 63, 64, 65, 70, 127, 128, 129, 139])
@pytest.mark.parametrize("L", [1, 8, 9])
def test_any_length(backend, L, S):
    q, k, v = head(L, S, 64)
    output = sdpa(q, k, v, backend=backend)
    assert_close(output, q, k, v)
    same(output, sdpa(q, k, v, backend=backend))
    assert_close(sdpa(q, k, v, softcap=2.0, backend=backend), q, k, v, softcap=2.0)


def test_value_width_of_another_size(backend):
    q, k, v = head(200, 200, 128, BF16, Ev=64)
    assert_close(sdpa(q, k, v, backend=backend), q, k, v)


@pytest.mark.parametrize("shape", [(65535, 1), (65536, 1), (1, 65536), (10001, 7)])
def test_more_entries_or_heads_than_a_grid_has(backend, shape):
    B, Hq = shape
    q, k, v = qkv(SINGLE, B=B, Hq=Hq, Hkv=Hq, L=2, S=2, E=4, Ev=4)
    output = sdpa(q, k, v, backend=backend)
    same(output[-1, -1], sdpa(q[-1, -1], k[-1, -1], v[-1, -1], backend=backend))
    same(output[0, 0], sdpa(q[0, 0], k[0, 0], v[0, 0], backend=backend))


# The same bits


def test_few_queries_over_many_keys_alone_and_in_a_batch(backend):
    q, k, v = qkv(SINGLE, B=4, Hq=1, Hkv=1, L=5, S=20_000)
    output = sdpa(q, k, v, backend=backend)
    same(output[2:3], sdpa(q[2:3], k[2:3], v[2:3], backend=backend))
    assert_close(output, q, k, v)


def test_padding_does_not_change_what_is_computed(backend):
    """Right padding keeps the order of the keys; left padding moves them: both stay within the budget."""
    q, k, v = qkv(SINGLE, L=5, S=96)
    short = k[:, :, :50], v[:, :, :50]
    right = sdpa(q, k, v, mask=KeyLengths(50), backend=backend)
    left = sdpa(q, np.roll(k, 46, 2), np.roll(v, 46, 2), mask=KeyStarts(46), backend=backend)
    for padded in (right, left, sdpa(q, k, v, mask=np.arange(96) < 50, backend=backend)):
        assert_close(padded, q, *short)


def test_empty_sequences_leave_their_neighbours_alone(backend):
    q, k, v = qkv(SINGLE, B=5, S=128)
    lengths = [96, 0, 0, 128, 5]
    output = sdpa(q, k, v, mask=KeyLengths(lengths), backend=backend)
    assert not output[1:3].any()
    for b in (0, 3, 4):
        same(output[b], sdpa(q[b], k[b], v[b], mask=KeyLengths(lengths[b]), backend=backend))


# Windows


def test_number_of_visible_keys_is_the_documented_one(backend):
    q, k, _ = head(8, 8, 4)
    for w in range(1, 10):
        seen = (sdpa_weights(q, k, mask=Window(w - 1, 0), backend=backend) > 0).sum(-1)
        same(seen, np.minimum(np.arange(1, 9), w))
    both = Window(2, 2)
    same((sdpa_weights(q, k, mask=both, backend=backend) > 0).sum(-1), [3, 4, 5, 5, 5, 5, 4, 3])
    same(sdpa_weights(q, k, mask=both & Causal(), backend=backend), sdpa_weights(q, k, mask=Window(2, 0), backend=backend))


def test_wide_windows_are_the_causal_mask_bit_for_bit(backend):
    q, k, v = qkv(HALF, L=200, S=200)
    expected = sdpa(q, k, v, mask=Causal(), backend=backend)
    for left in (199, 200, 10**9, 10**30, None):
        same(sdpa(q, k, v, mask=Window(left, 0), backend=backend), expected)


def test_zero_is_a_bound_and_not_its_absence(backend):
    q, k, v = head(5, 5, 4)
    same(sdpa(q, k, v, mask=Window(0, 0), backend=backend), v)
    same(sdpa(q, k, v, mask=Window(0, 4), backend=backend)[4], v[4])
    same(sdpa(q, k, v, mask=Window(4, 0), backend=backend)[0], v[0])


def test_window_beyond_the_keys_gives_empty_rows(backend):
    q, k, v = head(12, 4, 4)
    state = sdpa_state(q, k, v, mask=Window(2, 3), query_offset="end", backend=backend)
    keep = np.array([[i - 8 - 2 <= j <= i - 8 + 3 for j in range(4)] for i in range(12)])
    assert not keep[:5].any()
    same(state.lse == -np.inf, ~keep.any(-1))
    assert not state.output[:5].any()
    assert_close(state.output, q, k, v, mask=keep)


# Caches


@pytest.mark.parametrize("L", [1, 2])
def test_decode_step_forgets_no_option(backend, L):
    q, k, v = qkv(SINGLE, L=L, S=10)
    keep = visible(lambda b, h, i, j: i + 10 - L - 2 <= j <= i + 10 - L, 2, 6, L, 10)
    bias = np.random.default_rng(0).standard_normal((6, L, 10)).astype(SINGLE)
    for options in ({}, {"softcap": 0.5}, {"bias": bias}, {"scale": 2.0}):
        full = options | ({"bias": np.broadcast_to(bias, (2, 6, L, 10))} if "bias" in options else {})
        output = sdpa(q, k, v, mask=Window(2, 0), query_offset="end", backend=backend, **options)
        agree(output, attention(q, k, v, keep=keep, **full)[0])


def test_cache_that_grows_from_nothing(backend):
    q, k, v = qkv(DOUBLE, L=9, S=9)
    whole, rows, states = sdpa(q, k, v, mask=Causal(), backend=backend), [], []
    for start, stop in ((0, 5), (5, 6), (6, 9)):
        chunk = slice(start, stop)
        rows.append(sdpa(q[:, :, chunk], k[:, :, :stop], v[:, :, :stop], mask=Causal(), query_offset="end", backend=backend))
        past = sdpa_state(q[:, :, chunk], k[:, :, :start], v[:, :, :start], backend=backend)
        own = sdpa_state(q[:, :, chunk], k[:, :, chunk], v[:, :, chunk], mask=Causal(), backend=backend)
        states.append((past + own).output)
    agree(np.concatenate(rows, 2), whole)
    agree(np.concatenate(states, 2), whole)


def test_lengths_of_any_integer_type(backend):
    q, k, v = qkv(SINGLE, B=8, S=128, E=16)
    lengths = np.array([24, 125, 53, 28, 77, 96, 0, 128])
    expected = sdpa(q, k, v, mask=KeyLengths(lengths), backend=backend)
    for dtype in (np.uint8, np.int16, np.uint64):
        same(sdpa(q, k, v, mask=KeyLengths(lengths.astype(dtype)), backend=backend), expected)
    for b, n in enumerate(lengths):
        k[b, :, n:] = v[b, :, n:] = np.nan
    same(sdpa(q, k, v, mask=KeyLengths(lengths), backend=backend), expected)


# Packed rows


def test_spare_tokens_of_a_packed_row(gradient_backend):
    q, k, v = (x[0] for x in qkv(SINGLE, L=20, S=20))
    ids = np.repeat([0, 1], [7, 8])
    mask = Segments(np.r_[ids, [-1] * 5], np.r_[ids, [-2] * 5])
    grad = np.ones((6, 20, 8), SINGLE)
    for x in (q, k, v, grad):
        x[:, 15:] = np.nan
    output, gradients = sdpa(q, k, v, mask=mask, backend=gradient_backend), sdpa_vjp(q, k, v, grad, mask=mask, backend=gradient_backend)
    for x in (output, *gradients[:3]):
        assert not x[:, 15:].any()
        assert np.isfinite(x).all()


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [((1, 0, 1), (3, 0, 5)), ((1, 0, 2), (3, 0, 5)), ((0, 2, 0, 1, 0), (0, 3, 0, 4, 0)), ((0, 0), (0, 0)), ((2, 0), (0, 3)), ((), ())],
)
def test_documents_of_no_length(backend, q_lengths, k_lengths):
    L, S = sum(q_lengths), sum(k_lengths)
    q, k, v = qkv(SINGLE, Hq=9, L=L, S=S, E=8)
    ids = [np.repeat(np.arange(len(lengths)), lengths) for lengths in (q_lengths, k_lengths)]
    for mask in (Segments(*ids), Packed(q_lengths, k_lengths)):
        output = sdpa(q, k, v, mask=mask, backend=backend)
        for d in range(len(q_lengths)):
            rows, keys = np.flatnonzero(ids[0] == d), np.flatnonzero(ids[1] == d)
            agree(output[:, :, rows], attention(q[:, :, rows], k[:, :, keys], v[:, :, keys])[0])


def test_windows_of_unequal_size_as_segments(backend):
    """A picture of 5 x 7 cut into windows of 3 x 3, those at the edge smaller: as segments, and window by window."""
    q, k, v = qkv(SINGLE, L=35, S=35)
    row, column = np.divmod(np.arange(35), 7)
    ids = row // 3 * 3 + column // 3
    output = sdpa(q, k, v, mask=Segments(ids), backend=backend)
    assert_close(output, q, k, v, mask=ids[:, None] == ids)
    for window in range(6):
        inside = ids == window
        agree(output[:, :, inside], attention(q[:, :, inside], k[:, :, inside], v[:, :, inside])[0])


# Gradients


def test_dead_row_does_not_poison_shared_gradients(gradient_backend):
    q, k, v = qkv(DOUBLE, Hq=1, Hkv=1, L=4, S=4, E=1, Ev=1)
    band = np.where(np.tri(4, dtype=bool) & ~np.tri(4, k=-2, dtype=bool), 0, -np.inf)
    options = {"mask": KeyLengths([4, 2]), "bias": band, "backend": gradient_backend}
    grad = np.ones((2, 1, 4, 1))
    gradients = sdpa_vjp(q, k, v, grad, **options)
    same(gradients.query[1, 0, 3], [0.0])
    rest = sdpa_vjp(q[:, :, :3], k, v, grad[:, :, :3], **options | {"bias": band[:3]})
    same(gradients.key[1], rest.key[1])
    same(gradients.value[1], rest.value[1])


@pytest.mark.parametrize("L", [127, 128, 129])
@pytest.mark.parametrize("dtype", [BF16, SINGLE], ids=str)
def test_relative_bias_under_a_causal_mask_has_finite_gradients(gradient_backend, L, dtype):
    q, k, v = head(L, L, 16, dtype)
    bias = np.subtract.outer(np.arange(L), np.arange(L)).astype(SINGLE)
    grad = np.random.default_rng(1).standard_normal((L, 16)).astype(dtype)
    options = {"mask": Causal(), "bias": bias}
    exact = sdpa_vjp(*(x.astype(DOUBLE) for x in (q, k, v, grad)), backend="reference", **options)
    for got, want in zip(sdpa_vjp(q, k, v, grad, backend=gradient_backend, **options), exact, strict=True):
        assert got is want is None or np.isfinite(got.astype(DOUBLE)).all()
        assert got is None or got.shape == want.shape
        if got is not None:
            agree(got, want)


def test_gradients_are_linear_and_quiet(gradient_backend):
    q, k, v = qkv(DOUBLE)
    one, two = np.random.default_rng(2).standard_normal((2, 2, 6, 5, 8))
    options = {"mask": np.random.default_rng(3).random((2, 6, 5, 7)) < 0.7, "backend": gradient_backend}
    options["bias"] = np.where(np.random.default_rng(4).random((5, 7)) < 0.3, -1e300, 0)  # finite, but as good as a mask
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second, both = (sdpa_vjp(q, k, v, g, **options) for g in (one, two, 2 * one - 3 * two))
    for a, b, c in zip(first[:4], second[:4], both[:4], strict=True):
        agree(c, 2 * a - 3 * b)


# Memory


def test_memory_does_not_grow_with_pairs(backend):
    if backend in ("reference", "loopback"):
        pytest.skip("the reference makes every array of the formula")
    q, k, v = qkv(SINGLE, B=1, Hq=16, Hkv=2, L=1024, S=1024)
    for options in (
        *({"mask": mask} for mask in (None, Causal(), Window(100, 0), KeyLengths(900), np.tri(1024, dtype=bool))),
        {"mask": Causal() & KeyLengths(3) | KeyStarts(1000)},
        {"softcap": 3.0, "sink": 1.0},
        {"bias": ALiBi(0.1)},
        {"bias": np.zeros((1024, 1024), SINGLE)},
        {"dropout": Dropout(0.1, 1)},
        {"score_mod": lambda s, b, h, i, j: s - 0.01 * abs(i - j)},
    ):
        sdpa(q, k, v, backend=backend, **options)
        tracemalloc.start()
        try:
            sdpa(q, k, v, backend=backend, **options)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 16 * 1024 * 1024 * 4 / 4, options  # a quarter of the scores


# Processes


def _in_child(backend, queue):
    queue.put(sdpa(*qkv(SINGLE, L=70, S=70), backend=backend))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_child_of_a_process_that_has_computed(backend):
    expected = sdpa(*qkv(SINGLE, L=70, S=70), backend=backend)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_in_child, args=(backend, queue))
    child.start()
    child.join(60)
    hung = child.is_alive()
    child.kill()
    assert not hung
    assert child.exitcode == 0
    same(queue.get(), expected)


# The interface


def test_weights_are_those_that_the_output_was_made_with(backend):
    q, k, v = qkv(DOUBLE, L=7)
    for options in ({}, {"mask": Causal()}, {"softcap": 1.0, "sink": 0.5}, {"mask": Window(1, 1), "dropout": Dropout(0.2, 3)}):
        weights = sdpa_weights(q, k, backend=backend, **options)
        agree(sdpa(q, k, v, backend=backend, **options), weights @ np.repeat(v, 2, 1))


def test_sum_of_states_in_any_partition(backend):
    q, k, v = qkv(SINGLE, S=12)
    rng = np.random.default_rng(5)
    for _ in range(10):
        owner = rng.integers(0, 5, 12)  # some parts may be empty
        states = [sdpa_state(q, k, v, mask=owner == part, backend=backend) for part in rng.permutation(6)]
        assert_close(sum(states, AttentionState.empty((2, 6, 5), 8)).output, q, k, v)


def test_first_lines_of_the_description_say_how_heads_lie():
    assert 'layout="LHE"' in "\n".join(sdpa.__doc__.splitlines()[:4])


def test_no_deadline_for_code_that_is_compiled_at_first_use():
    assert settings().deadline is None
