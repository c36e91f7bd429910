"""Rules 18 to 22 of the semantics: the same bits, errors before work, backends, foreign arrays, out."""

import array
import threading
import tracemalloc

import loopback_backend
import ml_dtypes
import numpy as np
import pytest
from naive import agree, qkv

import sdpa_ref
from sdpa_ref import (
    Causal,
    Dropout,
    KeyLengths,
    Window,
    sdpa,
    sdpa_stages,
    sdpa_state,
    sdpa_vjp,
    sdpa_weights,
    sdpa_with_vjp,
)

DTYPES = [np.float16, np.float32, np.float64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("L", [1, 5, 70])
def test_rule_18_row_does_not_depend_on_batch_or_heads(backend, dtype, L):
    q, k, v = qkv(dtype, L=L, S=77, B=5)
    lengths = np.array([77, 0, 13, 77, 1])
    keep = np.random.default_rng(1).random((5, 6, L, 77)) < 0.7
    output = sdpa(q, k, v, mask=KeyLengths(lengths) & keep, backend=backend)
    for b in range(5):
        alone = sdpa(q[b], k[b], v[b], mask=KeyLengths(int(lengths[b])) & keep[b], backend=backend)
        np.testing.assert_array_equal(alone, output[b])
        for h in (0, 3, 5):
            arrays = q[b, h], k[b, h // 2], v[b, h // 2]
            alone = sdpa(*arrays, mask=KeyLengths(int(lengths[b])) & keep[b, h], backend=backend)
            np.testing.assert_array_equal(alone, output[b, h])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rule_18_row_does_not_depend_on_other_rows(backend, dtype):
    q, k, v = qkv(dtype, L=70)
    output = sdpa(q, k, v, backend=backend)
    changed = q.copy()
    changed[:, :, 1::2] = np.nan
    changed[:, :, 2::4] = 1e3
    np.testing.assert_array_equal(sdpa(changed, k, v, backend=backend)[:, :, ::4], output[:, :, ::4])


def test_rule_18_run_after_run(backend):
    q, k, v = qkv(np.float32, L=70, S=99)
    output = sdpa(q, k, v, backend=backend)
    for _ in range(5):
        np.testing.assert_array_equal(sdpa(q, k, v, backend=backend), output)


def test_rule_18_gradients_run_after_run(gradient_backend):
    q, k, v = qkv(np.float32, L=20, S=99)
    grad = np.random.default_rng(2).standard_normal((2, 6, 20, 8)).astype(np.float32)
    gradients = sdpa_vjp(q, k, v, grad, backend=gradient_backend)
    for _ in range(5):
        for first, again in zip(gradients[:3], sdpa_vjp(q, k, v, grad, backend=gradient_backend), strict=False):
            np.testing.assert_array_equal(first, again)


def test_rule_18_calls_from_several_threads(backend):
    q, k, v = qkv(np.float32, L=70, S=77)
    expected, results = sdpa(q, k, v, backend=backend), []
    calls = [threading.Thread(target=lambda: results.append(sdpa(q, k, v, backend=backend))) for _ in range(8)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert len(results) == 8
    for result in results:
        np.testing.assert_array_equal(result, expected)


def test_rule_18_all_ways_of_asking_agree(backend):
    q, k, v = qkv(np.float32)
    options = {"mask": Causal() & Window(3, 0), "query_offset": "end", "dropout": Dropout(0.2, 1), "backend": backend}
    output = sdpa(q, k, v, **options)
    np.testing.assert_array_equal(sdpa_state(q, k, v, **options).output, output)
    np.testing.assert_array_equal(sdpa_ref.scaled_dot_product_attention(q, k, v, **options), output)
    np.testing.assert_array_equal(sdpa(q, k, v, out=np.empty_like(output), **options), output)


WRONG = [
    {"softcap": 0.0}, {"mask": np.ones((5, 7))}, {"bias": np.ones((5, 7), bool)}, {"scale": "1"}, {"layout": "BHLE"},
    {"query_offset": "middle"}, {"query_offset": None, "mask": Causal()}, {"is_causal": True}, {"dropout": 0.1},
    {"score_mod": 3}, {"sink": np.zeros(3)},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
def test_rule_19_errors_do_not_depend_on_the_backend_and_come_before_work(backend, wrong):
    q, k, v = qkv(np.float32, S=7)
    k, v = (np.broadcast_to(x[:, :, :1], (*x.shape[:2], 7, x.shape[3])) for x in (k, v))
    errors = []
    for name in (backend, "reference"):
        for call in (
            lambda name=name: sdpa(q, k, v, backend=name, **wrong),
            lambda name=name: sdpa_weights(q, k, backend=name, **wrong),
            lambda name=name: sdpa_vjp(q, k, v, np.ones((2, 6, 5, 8), np.float32), backend=name, **wrong),
            lambda name=name: sdpa_with_vjp(q, k, v, backend=name, **wrong),
        ):
            with pytest.raises((TypeError, ValueError)) as caught:
                call()
            errors.append((caught.type, str(caught.value)))
    assert len(set(errors)) == 1
    assert next(iter(wrong)) in errors[0][1]


def test_rule_19_a_huge_wrong_call_costs_nothing(backend):
    q = np.broadcast_to(np.float32(0), (4, 8, 100_000, 64))
    tracemalloc.start()
    try:
        with pytest.raises(TypeError, match="mask"):
            sdpa(q, q, q, mask=np.broadcast_to(1, (100_000, 100_000)), backend=backend)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_rule_20_unknown_backend_lists_the_names():
    with pytest.raises(ValueError, match=r"unknown backend 'tpu'; there are 'reference', .*'loopback'"):
        sdpa(*qkv(), backend="tpu")
    with pytest.raises(ValueError, match="unknown backend"):
        sdpa_ref.load("tpu")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "a machine that does not exist; install one: pip install machine"),
        ("missing", "no_such_module.*pip install"),
    ],
)
def test_rule_20_unusable_backend_says_why_and_what_to_install(name, reason):
    assert name in sdpa_ref.names()
    with pytest.raises(sdpa_ref.BackendUnavailable, match=rf"backend '{name}' .*{reason}"):
        sdpa(*qkv(), backend=name)


def test_rule_20_unsupported_problem_says_why():
    with pytest.raises(
        NotImplementedError, match="backend 'picky' does not support this problem: L = 5 is not its taste"
    ):
        sdpa(*qkv(), backend="picky")
    with pytest.raises(NotImplementedError, match=r"'picky'.*no gradients"):
        sdpa_vjp(*qkv(), np.ones((2, 6, 5, 8)), backend="picky")
    with pytest.raises(NotImplementedError, match=r"'picky'.*no gradients"):
        sdpa_with_vjp(*qkv(), backend="picky")


def test_rule_20_named_backend_is_never_replaced(monkeypatch):
    calls = []
    forward = loopback_backend.forward
    monkeypatch.setattr(loopback_backend, "forward", lambda problem, want: calls.append(want) or forward(problem, want))
    sdpa(*qkv(), backend="loopback")
    assert calls == [{"output"}]
    sdpa_state(*qkv(), backend="loopback")
    sdpa_weights(*qkv()[:2], backend="loopback")
    assert calls[1:] == [{"output", "lse", "m", "z"}, {"weights"}]
    sdpa(*qkv(), backend="reference")
    sdpa(*qkv())
    assert len(calls) == 3
    monkeypatch.setattr(loopback_backend, "ARRAYS", "cupy")
    with pytest.raises(TypeError, match="'loopback' takes cupy arrays, got numpy arrays; nothing is moved"):
        sdpa(*qkv(), backend="loopback")


def test_rule_20_default_is_the_fast_one_where_it_is_usable():
    try:
        sdpa_ref.load("numba")
        name = "numba"
    except (ValueError, sdpa_ref.BackendUnavailable):
        name = "reference"
    q, k, v = qkv(np.float32, L=70, S=77, E=64)
    np.testing.assert_array_equal(sdpa(q, k, v), sdpa(q, k, v, backend=name))


def test_rule_20_stages_are_of_the_reference():
    with pytest.raises(NotImplementedError, match=r'picky.*the stages come from the reference: backend="reference"'):
        sdpa_stages(*qkv(), backend="picky")


class Foreign:
    """An array of another library: nothing but DLPack."""

    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.values.__dlpack_device__()


class OnDevice(Foreign):
    def __dlpack_device__(self):
        return (8, 0)  # Metal


def test_rule_21_arrays_of_other_libraries(backend, monkeypatch):
    q, k, v = qkv(np.float32)
    expected = sdpa(q, k, v, backend=backend)
    np.testing.assert_array_equal(sdpa(Foreign(q), Foreign(k), Foreign(v), backend=backend), expected)
    np.testing.assert_array_equal(sdpa(q, memoryview(k), v, backend=backend), expected)
    assert type(sdpa(Foreign(q), k, v, backend=backend)) is np.ndarray
    keep = np.random.default_rng(0).random((5, 7)) < 0.5
    agree(sdpa(q, k, v, mask=Foreign(keep), backend=backend), sdpa(q, k, v, mask=keep, backend=backend))
    row = array.array("d", [0.25, 0.5])
    agree(sdpa(np.ones((1, 2)), np.asarray([row, row]), [[1.0], [3.0]], backend=backend), [[2.0]])


def test_rule_21_memory_is_not_copied(monkeypatch):
    seen, forward = [], loopback_backend.forward
    monkeypatch.setattr(
        loopback_backend, "forward", lambda problem, want: seen.append(problem) or forward(problem, want)
    )
    q, k, v = qkv(np.float32)
    sdpa(
        Foreign(q),
        memoryview(k),
        v.swapaxes(0, 1).copy().swapaxes(0, 1)[::-1],
        bias=Foreign(np.ones((5, 7))),
        backend="loopback",
    )
    assert np.shares_memory(seen[0].query, q)
    assert np.shares_memory(seen[0].key, k)


def test_rule_21_memory_of_a_device_is_not_fetched(backend):
    q, k, v = qkv(np.float32)
    with pytest.raises(TypeError, match=r"key.*device"):
        sdpa(q, OnDevice(k), v, backend=backend)


def test_rule_21_torch_tensors(backend):
    torch = pytest.importorskip("torch")
    q, k, v = qkv(np.float32)
    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    np.testing.assert_array_equal(sdpa(*tensors, backend=backend), sdpa(q, k, v, backend=backend))
    halves = [x.to(torch.bfloat16) for x in tensors]
    as_numpy = [x.float().numpy().astype(ml_dtypes.bfloat16) for x in halves]
    result = sdpa(*halves, backend=backend)
    assert result.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(result, sdpa(*as_numpy, backend=backend))
    with pytest.raises(TypeError, match=r"query must be an array .*torch.Tensor, .*tensor.detach\(\)"):
        sdpa(tensors[0].requires_grad_(), *tensors[1:], backend=backend)


def test_rule_22_out_receives_the_result(backend):
    q, k, v = qkv(np.float32)
    expected = sdpa(q, k, v, backend=backend)
    room = np.full((2, 8, 6, 9, 16), np.nan, np.float32)
    for out in (
        np.empty_like(expected),
        room[0, :2, :, 2:7, ::2],
        room[0, :2, :, 2:7, 8:][..., ::-1],
        np.empty((2, 5, 6, 8), np.float32).swapaxes(1, 2),
        np.empty(expected.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(expected.shape),
    ):
        assert sdpa(q, k, v, out=out, backend=backend) is out
        np.testing.assert_array_equal(out, expected)
    assert np.isnan(room[:, 2:]).all()  # nothing beside it was written
    flipped = np.empty((2, 5, 6, 8), np.float32)
    sdpa(*(x.swapaxes(1, 2) for x in (q, k, v)), out=flipped, layout="LHE", backend=backend)
    np.testing.assert_array_equal(flipped.swapaxes(1, 2), expected)
    single = np.empty((5, 8), np.float32)
    assert sdpa(q[0, 0], k[0, 0], v[0, 0], out=single, backend=backend) is single
    np.testing.assert_array_equal(single, expected[0, 0])
    weights = np.empty((2, 6, 5, 7), np.float32)
    assert sdpa_weights(q, k, out=weights, backend=backend) is weights
    state = sdpa_state(q, k, v, out=flipped.swapaxes(1, 2), backend=backend)
    np.testing.assert_array_equal(state.output, expected)


def test_rule_22_the_result_is_new(backend):
    q, k, v = qkv(np.float32)
    first, second = sdpa(q, k, v, backend=backend), sdpa(q, k, v, backend=backend)
    assert not np.shares_memory(first, second)
    assert first.flags.writeable


def test_rule_22_memory_shared_with_an_input(backend):
    _, k, v = qkv(np.float32, Ev=4)
    room = np.random.default_rng(0).standard_normal(600).astype(np.float32)
    q, out = room[:240].reshape(2, 6, 5, 4), room[100:340].reshape(2, 6, 5, 4)
    apart = np.ones((2, 6, 5, 4), np.float32)
    for arrays, options in (
        ((q, k, v), {}),
        ((apart, room[300:468].reshape(2, 3, 7, 4), v), {}),
        ((apart, k, room[:168].reshape(2, 3, 7, 4)), {}),
        ((apart, k, v), {"bias": room[:420].reshape(2, 6, 5, 7)}),
        ((apart, k, v), {"mask": room.view(bool)[420:840].reshape(2, 6, 5, 7)}),
        ((apart, k, v), {"sink": room[100:106]}),
    ):
        with pytest.raises(ValueError, match="out must not share memory"):
            sdpa(*arrays, out=out, backend=backend, **options)
    woven = np.random.default_rng(1).standard_normal((2, 6, 5, 8)).astype(np.float32)
    query, out = woven[..., ::2], woven[..., 1::2]  # neighbours in memory that share none of it
    np.testing.assert_array_equal(
        sdpa(query, k, v, out=out, backend=backend), sdpa(query.copy(), k, v, backend=backend)
    )
