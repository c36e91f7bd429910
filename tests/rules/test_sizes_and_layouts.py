"""Bugs that users of other libraries have reported: layout, sizes, bits, gradients, memory, a section for each kind.

What the tests of a rule hold already is not repeated; what is visible to whom is in `test_visibility.py`.
"""

import multiprocessing
import sys
import tracemalloc
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import settings
from naive import agree, qkv

from sdpa_ref import (
    ALiBi,
    AttentionState,
    Causal,
    Dropout,
    KeyLengths,
    KeyStarts,
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
    masks = [
        np.tri(7, dtype=bool),
        np.tri(7, dtype=bool).T,
        np.broadcast_to(np.arange(7) < 4, (7, 7)),
        np.ones((7, 14), bool)[:, ::2],
    ]
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
    options["bias"] = np.where(
        np.random.default_rng(4).random((5, 7)) < 0.3, -1e300, 0
    )  # finite, but as good as a mask
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
    child.join(600)
    hung = child.is_alive()
    child.kill()
    assert not hung
    assert child.exitcode == 0
    same(queue.get(), expected)


# The interface


def test_weights_are_those_that_the_output_was_made_with(backend):
    q, k, v = qkv(DOUBLE, L=7)
    for options in (
        {},
        {"mask": Causal()},
        {"softcap": 1.0, "sink": 0.5},
        {"mask": Window(1, 1), "dropout": Dropout(0.2, 3)},
    ):
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
