"""Rules 1 to 5 of the semantics: shapes, broadcasting, grouped heads, layouts, zero-size axes."""

import itertools
import tracemalloc

import numpy as np
import pytest
from naive import agree, attention, qkv

from sdpa_ref import Causal, sdpa, sdpa_state, sdpa_vjp, sdpa_weights


@pytest.mark.parametrize("rank", [3, 4, 5, 6])
def test_rule_01_shape_of_any_rank(backend, rank):
    q, k, v = qkv()
    expected = attention(q, k, v)[0]
    lead = (1,) * (rank - 4)
    q, k, v, expected = (x[0] if rank == 3 else x.reshape(*lead, *x.shape) for x in (q, k, v, expected))
    agree(sdpa(q, k, v, backend=backend), expected)


def test_rule_01_two_axes_are_one_head_without_a_head_axis(backend):
    q, k, v = (x[0, 0] for x in qkv())
    output, lse, weights = (x[0, 0] for x in attention(q[None, None], k[None, None], v[None, None]))
    agree(sdpa(q, k, v, backend=backend), output)
    agree(sdpa_state(q, k, v, backend=backend).lse, lse)
    agree(sdpa_weights(q, k, backend=backend), weights)
    assert sdpa(q, k[None], v[None], backend=backend).shape == (1, 5, 8)  # one of them has a head axis


def test_rule_01_axis_3_from_the_end_is_the_head_axis(backend):
    q, k, v = (x[0] for x in qkv())
    assert sdpa(q, k, v, backend=backend).shape == (6, 5, 8)
    np.testing.assert_array_equal(sdpa(q, k, v, backend=backend)[4], sdpa(q[4], k[2], v[2], backend=backend))


@pytest.mark.parametrize("Ev", [1, 3, 4, 5, 8, 257])
def test_rule_01_value_width_is_free_and_does_not_enter_the_scale(backend, Ev):
    q, k, v = qkv(np.float32, Ev=Ev)
    agree(sdpa(q, k, v, backend=backend), attention(q, k, v, scale=0.5)[0])
    halves = [sdpa(q, k, part, backend=backend) for part in (v[..., : Ev // 2], v[..., Ev // 2 :])]
    np.testing.assert_array_equal(np.concatenate(halves, -1), sdpa(q, k, v, backend=backend))


def test_rule_02_leading_axes_broadcast(backend):
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((3, 1, 6, 5, 4)), rng.standard_normal((1, 2, 3, 7, 4))
    v = rng.standard_normal((2, 3, 7, 8))
    output = sdpa(q, k, v, backend=backend)
    assert output.shape == (3, 2, 6, 5, 8)
    for a, b in np.ndindex(3, 2):
        np.testing.assert_array_equal(output[a, b], sdpa(q[a, 0], k[0, b], v[b], backend=backend))
    assert sdpa_weights(q, k, backend=backend).shape == (3, 2, 6, 5, 7)


def as_unaligned(x):
    room = np.empty(x.nbytes + 1, np.uint8)
    view = room[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


def as_read_only(x):
    x = x.copy()
    x.setflags(write=False)
    return x


VIEWS = {
    "fortran": np.asfortranarray,
    "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
    "lengths first": lambda x: np.ascontiguousarray(x.swapaxes(-2, -3)).swapaxes(-2, -3),
    "every second": lambda x: np.repeat(x, 2, -1)[..., ::2],
    "every second row": lambda x: np.repeat(x, 2, -2)[..., ::2, :],
    "backwards": lambda x: x[..., ::-1, ::-1].copy()[..., ::-1, ::-1],
    "batch backwards": lambda x: x[::-1].copy()[::-1],
    "unaligned": as_unaligned,
    "read-only": as_read_only,
    "big endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "a slice": lambda x: np.pad(x, [(1, 2)] * x.ndim, constant_values=np.nan)[(slice(1, -2),) * x.ndim],
}


@pytest.mark.parametrize("view", VIEWS)
def test_rule_02_any_strides_give_the_same_bits(backend, view):
    inputs = qkv(np.float32)
    expected = sdpa(*inputs, backend=backend)
    for chosen in itertools.product([False, True], repeat=3):
        given = [VIEWS[view](x) if odd else x for x, odd in zip(inputs, chosen, strict=True)]
        np.testing.assert_array_equal(sdpa(*given, backend=backend), expected)
        for x, before in zip(given, inputs, strict=True):
            np.testing.assert_array_equal(x, before)  # inputs are never written to


def test_rule_02_strides_of_zero(backend):
    q, k, v = qkv(np.float32)
    k, v = (np.broadcast_to(x[:1, :1], x.shape) for x in (k, v))
    np.testing.assert_array_equal(sdpa(q, k, v, backend=backend), sdpa(q, k.copy(), v.copy(), backend=backend))
    row = np.broadcast_to(q[..., :1, :1], q.shape)
    np.testing.assert_array_equal(sdpa(row, k, v, backend=backend), sdpa(row.copy(), k, v, backend=backend))


def test_rule_02_strides_of_axes_of_one_entry_mean_nothing(backend):
    q, k, v = qkv(np.float32, B=1, Hq=1, Hkv=1, L=1)
    odd = np.lib.stride_tricks.as_strided(q, q.shape, (12344, 0, -8, q.strides[-1]))
    np.testing.assert_array_equal(sdpa(odd, k, v, backend=backend), sdpa(q, k, v, backend=backend))


def test_rule_03_query_head_h_reads_head_h_div_group(backend):
    for Hkv in (1, 2, 3, 6):
        q, k, v = qkv(Hkv=Hkv)
        v[:] = np.arange(Hkv)[:, None, None]
        output = sdpa(q, k, v, backend=backend)
        for h in range(6):
            agree(output[:, h], np.full((2, 5, 8), float(h // (6 // Hkv))))
        q, k, v = qkv(Hkv=Hkv)
        repeated = sdpa(q, np.repeat(k, 6 // Hkv, 1), np.repeat(v, 6 // Hkv, 1), backend=backend)
        np.testing.assert_array_equal(sdpa(q, k, v, backend=backend), repeated)


def test_rule_03_shared_heads_are_not_repeated_in_memory(backend):
    q, k, v = qkv(np.float32, B=1, Hq=64, Hkv=1, L=1, S=4096, E=64, Ev=64)
    sdpa(q, k, v, backend=backend)
    tracemalloc.start()
    try:
        sdpa(q, k, v, backend=backend)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * k.nbytes / 2


@pytest.mark.parametrize(("Hq", "Hkv"), [(33, 2), (3, 2), (5, 4), (2, 4), (4, 0), (9, 7)])
def test_rule_03_head_counts_that_do_not_fit(backend, Hq, Hkv):
    q, k, v = qkv(Hq=Hq, Hkv=Hkv)
    message = rf"Hq = {Hq} must be a multiple of the key heads Hkv = {Hkv}"
    for call in (
        lambda: sdpa(q, k, v, backend=backend),
        lambda: sdpa(q, k, v, backend=backend, out=np.empty((2, Hq, 5, 8))),
        lambda: sdpa_state(q, k, v, backend=backend),
        lambda: sdpa_weights(q, k, backend=backend),
        lambda: sdpa_vjp(q, k, v, np.empty((2, Hq, 5, 8)), backend=backend),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("Hkv", [0, 4])
def test_rule_03_no_query_heads_give_an_empty_result(backend, Hkv):
    q, k, v = qkv(np.float16, Hq=0, Hkv=Hkv)
    assert sdpa(q, k, v, backend=backend).shape == (2, 0, 5, 8)
    assert sdpa_state(q, k, v, backend=backend).lse.shape == (2, 0, 5)


def test_rule_04_length_before_head(backend):
    q, k, v = qkv()
    bias = np.random.default_rng(1).standard_normal((2, 6, 5, 7))
    mask = bias > -1
    options = {"mask": mask, "bias": bias, "sink": np.arange(6.0), "backend": backend}
    flipped = [x.swapaxes(1, 2) for x in (q, k, v)]
    output = sdpa(*flipped, layout="LHE", **options)
    assert output.shape == (2, 5, 6, 8)
    np.testing.assert_array_equal(output.swapaxes(1, 2), sdpa(q, k, v, **options))
    weights = sdpa_weights(*flipped[:2], layout="LHE", **options)
    np.testing.assert_array_equal(weights, sdpa_weights(q, k, **options))
    del options["sink"]
    state = sdpa_state(*flipped, layout="LHE", **options)
    assert state.lse.shape == state.output.shape[:-1]
    np.testing.assert_array_equal(state.lse.swapaxes(1, 2), sdpa_state(q, k, v, **options).lse)
    pair = [x[0, :, 0] for x in flipped]  # two axes: one head in either layout
    np.testing.assert_array_equal(sdpa(*pair, layout="LHE", backend=backend), sdpa(*pair, backend=backend))


@pytest.mark.parametrize("L", [5, 700])
def test_rule_05_no_keys(backend, L):
    q, k, v = qkv(L=L, S=0)
    for options in ({}, {"mask": Causal(), "query_offset": "end"}, {"mask": Causal(), "query_offset": "start"}):
        state = sdpa_state(q, k, v, backend=backend, **options)
        np.testing.assert_array_equal(state.output, np.zeros((2, 6, L, 8)))
        np.testing.assert_array_equal(state.lse, np.full((2, 6, L), -np.inf))
        np.testing.assert_array_equal(sdpa(q, k, v, sink=3.0, backend=backend, **options), np.zeros((2, 6, L, 8)))
    np.testing.assert_array_equal(sdpa_state(q, k, v, backend=backend).with_sink(3.0).lse, np.full((2, 6, L), 3.0))
    assert sdpa_weights(q, k, backend=backend).shape == (2, 6, L, 0)


EMPTY = [{"L": 0}, {"B": 0}, {"Hq": 0}, {"Ev": 0}, {"L": 0, "S": 0}, {"B": 0, "S": 0, "E": 0}]


@pytest.mark.parametrize("empty", EMPTY)
def test_rule_05_empty_results(backend, empty):
    q, k, v = qkv(**empty)
    shape = (q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    options = {"mask": Causal(), "query_offset": "end", "backend": backend}
    assert sdpa(q, k, v, **options).shape == shape
    assert sdpa_weights(q, k, **options).shape == (*shape[:3], k.shape[2])


@pytest.mark.parametrize("empty", [*EMPTY, {"S": 0}, {"E": 0}])
def test_rule_05_gradients_of_empty_axes(gradient_backend, empty):
    q, k, v = qkv(**empty)
    grad = np.ones((*q.shape[:3], v.shape[3]))
    gradients = sdpa_vjp(q, k, v, grad, mask=Causal(), query_offset="end", backend=gradient_backend)
    assert [gradient.shape for gradient in gradients[:3]] == [q.shape, k.shape, v.shape]
    np.testing.assert_array_equal(gradients.query, np.zeros_like(q))


def test_rule_05_no_width_makes_all_scores_zero(backend):
    q, k, v = qkv(E=0)
    agree(sdpa(q, k, v, backend=backend), np.broadcast_to(np.repeat(v, 2, 1).mean(2, keepdims=True), (2, 6, 5, 8)))
    agree(sdpa_state(q, k, v, backend=backend).lse, np.full((2, 6, 5), np.log(7)))
