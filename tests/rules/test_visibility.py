"""Bugs that users of other libraries have reported: which keys a row sees, a section for each kind."""

import ml_dtypes
import numpy as np
import pytest
from naive import agree, attention, qkv, visible

from sdpa_ref import (
    Causal,
    KeyLengths,
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


# Windows


def test_number_of_visible_keys_is_the_documented_one(backend):
    q, k, _ = head(8, 8, 4)
    for w in range(1, 10):
        seen = (sdpa_weights(q, k, mask=Window(w - 1, 0), backend=backend) > 0).sum(-1)
        same(seen, np.minimum(np.arange(1, 9), w))
    both = Window(2, 2)
    same((sdpa_weights(q, k, mask=both, backend=backend) > 0).sum(-1), [3, 4, 5, 5, 5, 5, 4, 3])
    same(
        sdpa_weights(q, k, mask=both & Causal(), backend=backend),
        sdpa_weights(q, k, mask=Window(2, 0), backend=backend),
    )


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
        rows.append(
            sdpa(q[:, :, chunk], k[:, :, :stop], v[:, :, :stop], mask=Causal(), query_offset="end", backend=backend)
        )
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
    output, gradients = (
        sdpa(q, k, v, mask=mask, backend=gradient_backend),
        sdpa_vjp(q, k, v, grad, mask=mask, backend=gradient_backend),
    )
    for x in (output, *gradients[:3]):
        assert not x[:, 15:].any()
        assert np.isfinite(x).all()


@pytest.mark.parametrize(
    ("q_lengths", "k_lengths"),
    [
        ((1, 0, 1), (3, 0, 5)),
        ((1, 0, 2), (3, 0, 5)),
        ((0, 2, 0, 1, 0), (0, 3, 0, 4, 0)),
        ((0, 0), (0, 0)),
        ((2, 0), (0, 3)),
        ((), ()),
    ],
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
