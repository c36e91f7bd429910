"""Gradients of CuPy arrays, through the public functions: on the stand-in for CuPy, its kernels run on the fibers."""

import numpy as np
import pytest
import strict_cupy
from days import crossed
from strict_cupy import plain, qkv

import sdpa_ref as sr
from sdpa_ref.testing import assert_same_bits, assert_within, check, device, gradient_budget, resolve
from sdpa_ref.testing.cases import case
from sdpa_ref.testing.properties import PROPERTIES

RNG = np.random.default_rng(7)
LAWS = [law for law in PROPERTIES if "gradient" in law.name]
ARCHS = (75, 80, 90)
BASE = {"L": 40, "S": 70, "E": 16, "Ev": 16, "dtype": "float16"}
CASES = [
    {},
    dict(numbers="needles", L=70, S=140, mask=("causal",), offset="end"),
    dict(mask=("causal",), offset="number", S=40, heads=(4, 2), poison=True),
    dict(mask=("causal",), L=70, S=40, offset="end", sink="heads", poison=True),  # the first rows see nothing
    dict(mask=("window",), offset="end", dtype="float32", heads=(6, 2), batch=(2,)),
    dict(mask=("key lengths", "&query lengths"), batch=(3,), poison=True, memory="sliced"),
    dict(mask=("packed",), dtype="float32", layout="LHE", heads=(2, 1)),
    dict(bias=("array",), heads=(2, 2), batch=(2,), dtype="float32"),
    dict(bias=("holes",), mask=("array",), poison=True),
    dict(bias=("row",), softcap=2.0, dtype="float64"),
    dict(bias=("alibi",), offset="number", heads=(2, 2), dropout=0.4),
    dict(dtype="bfloat16", E=40, Ev=24, heads=(2, 1), memory="transposed"),
    dict(dtype="float32", E=8, Ev=70, numbers="huge", scale=3.0),
    dict(mask=("segments",), heads=(4, 2), L=140),  # a rule, in strips of rows
    dict(L=1, S=1100, heads=(4, 1), mask=("key lengths",)),  # whose forward pass is split by keys
]


def flows(given, rng=RNG):
    """Return random gradients by output and lse."""
    output = sr.sdpa(*given.arrays, backend="reference", **given.options)
    grad = rng.standard_normal(output.shape).astype(output.dtype)
    return grad, rng.standard_normal(output.shape[:-1]).astype(np.float32)


def found(arrays, grad, **options):
    """Return the gradients of NumPy arrays that were moved, computed on the device."""
    return device.over(sr.sdpa_vjp, "cupy")(*arrays, grad, **options)


def assert_right(gradients, arrays, grad, **options):
    budgets = gradient_budget(*arrays, grad, **options)
    for name, gradient, budget in zip(budgets._fields, gradients, budgets, strict=True):
        pairs = zip(gradient, budget, strict=True) if isinstance(budget, tuple) else [(gradient, budget)]
        for one, allowed in pairs:
            assert (one is None) == (allowed is None)
            if allowed is not None:
                assert_within(one, allowed, what=f"gradient of {name}")


def assert_all_same(gradients, expected):
    for gradient, other in zip(gradients, expected, strict=True):
        assert (gradient is None) == (other is None)
        if gradient is not None:
            assert_same_bits(gradient, other)


@pytest.mark.parametrize("words", CASES, ids=str)
def test_gradients_are_within_their_budget(machine, by_fibers, words):
    machine(arch=ARCHS[CASES.index(words) % 3])
    given = case(3, **BASE | words)
    grad, grad_lse = flows(given)
    options = given.options | {"grad_lse": grad_lse}
    assert_right(found(given.arrays, grad, **options), given.arrays, grad, **options)


@pytest.mark.parametrize(("arch", "dtype"), crossed(ARCHS, ["float16", "float32"]))
def test_plain_causal_windowed_grouped_and_biased_on_each_device(machine, by_fibers, arch, dtype):
    machine(arch=arch)
    q, k, v = qkv(L=40, S=40, Ev=16, dtype=dtype)
    grad = RNG.standard_normal((2, 4, 40, 16)).astype(dtype)
    bias = RNG.standard_normal((2, 4, 40, 40)).astype(dtype)
    for options in ({}, {"mask": sr.Causal()}, {"mask": sr.Window(5, 2)}, {"mask": sr.Causal(), "bias": bias}):
        assert_right(found((q, k, v), grad, **options), (q, k, v), grad, **options)


def test_the_laws_of_gradients_hold(machine, by_fibers):
    machine()
    run = check(resolve("cupy"), rounds=1, seconds=float("inf"), laws=LAWS)
    assert [f"{o.law.name}: {o.found.case}\n{o.failure.message}" for o in run.failures] == []
    assert {outcome.status for outcome in run.outcomes} == {"passed"}
    assert len(LAWS) >= 4


@pytest.mark.parametrize("shape", [(), (70,), (40, 1), (4, 1, 70), (2, 1, 40, 70), (1, 4, 40, 70), (2, 4, 40, 70)])
def test_biases_that_broadcast_get_the_sum(machine, by_fibers, shape, monkeypatch):
    machine()
    monkeypatch.setattr("sdpa_cupy.gradients.PAIRS_AT_ONCE", 1)
    monkeypatch.setattr("sdpa_cupy.gradients.ROWS", 16)  # so that 40 rows are several strips
    arrays = qkv(L=40, S=70, Ev=16, dtype=np.float16)
    grad = RNG.standard_normal((2, 4, 40, 16)).astype(np.float16)
    bias = RNG.standard_normal(shape).astype(np.float32)
    for given in (bias, (bias, RNG.standard_normal((40, 70)), sr.ALiBi(0.25))):
        options = {"bias": given, "mask": sr.Causal(), "query_offset": "end"}
        assert_right(found(arrays, grad, **options), arrays, grad, **options)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_forward_pass_is_used_and_every_run_has_the_same_bits(machine, by_fibers, dtype):
    machine()
    arrays = device.moved(qkv(L=70, S=140, dtype=dtype))
    grad = device.moved(RNG.standard_normal((2, 4, 70, 24)).astype(dtype))
    options = {"mask": sr.Window(60, 0), "query_offset": "end", "dropout": sr.Dropout(0.2, 1)}
    expected = device.back(sr.sdpa_vjp(*arrays, grad, **options))
    output, vjp = sr.sdpa_with_vjp(*arrays, **options)
    for _ in range(2):
        assert_all_same(device.back(vjp(grad)), expected)
    assert_right(expected, device.back(arrays), grad.get(), **options)
    assert type(output) is strict_cupy.ndarray


def test_a_key_head_alone_has_the_bits_that_it_has_in_a_batch(machine, by_fibers):
    machine()
    q, k, v = qkv(L=70, S=140, Hq=6, Hkv=2, dtype=np.float16)
    grad = RNG.standard_normal((2, 6, 70, 24)).astype(np.float16)
    together = found((q, k, v), grad, mask=sr.Causal(), query_offset=30)
    alone = found((q[1:, 3:], k[1:, 1:], v[1:, 1:]), grad[1:, 3:], mask=sr.Causal(), query_offset=30)
    for one, many, heads in zip(alone[:3], together[:3], (3, 1, 1), strict=True):
        assert_same_bits(one, many[1:, heads:])


@pytest.mark.parametrize(("poison", "dtype"), crossed([np.nan, np.inf], [np.float16, np.float32, np.float64]))
def test_what_rows_drop_changes_no_bit(machine, by_fibers, poison, dtype):
    machine()
    q, k, v = qkv(L=40, S=70, dtype=dtype)
    grad = RNG.standard_normal((2, 4, 40, 24)).astype(dtype)
    lengths = np.array([33, 60])
    options = {"mask": sr.KeyLengths(lengths) & sr.QueryLengths([20, 40])}
    clean = found((q, k, v), grad, **options)
    k[0, :, 33:], v[0, :, 33:], k[1, :, 60:], v[1, :, 60:] = (poison,) * 4
    q[0, :, 20:], grad[0, :, 20:] = poison, poison
    assert_all_same(found((q, k, v), grad, **options), clean)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_visible_values_and_gradients_spread_as_in_the_reference(machine, by_fibers, bad, softcap):
    machine()
    q, k, v = qkv(L=40, S=70, Ev=16, dtype=np.float32)
    grad, options = RNG.standard_normal((2, 4, 40, 16)).astype(np.float32), {"softcap": softcap, "query_offset": 20}
    for array, place in ((v, (0, 1, 50, 3)), (grad, (0, 1, 25, 3))):
        clean, array[place] = array[place], bad
        gradients = found((q, k, v), grad, mask=sr.Causal(), **options)
        expected = sr.sdpa_vjp(q, k, v, grad, mask=sr.Causal(), **options, backend="reference")
        for own, right in zip(gradients[:3], expected[:3], strict=True):
            np.testing.assert_array_equal(np.isfinite(own), np.isfinite(right))
        assert not np.isfinite(expected.query).all()
        array[place] = clean


@pytest.mark.parametrize(
    ("softcap", "bad", "dtype"), crossed([None, 2.0], [np.nan, np.inf], [np.float16, np.float32, np.float64])
)
def test_visible_queries_and_keys_spread_to_no_row_that_has_no_part_in_them(machine, by_fibers, dtype, bad, softcap):
    machine()
    q, k, v = qkv(L=40, S=70, Ev=16, dtype=dtype)
    grad = RNG.standard_normal((2, 4, 40, 16)).astype(dtype)
    options = {"mask": sr.Window(9, 0), "query_offset": 20, "softcap": softcap}
    clean = found((q, k, v), grad, **options)
    q[0, 1, 30, 3] = k[1, 0, 40, 3] = bad  # which sees the keys 41 to 50, and which the rows 20 to 29 of two heads see
    dirty = found((q, k, v), grad, **options)
    rows, keys = np.ones((2, 4, 40), bool), np.ones((2, 2, 70), bool)
    rows[0, 1, 30], rows[1, :2, 20:30] = False, False
    keys[0, 0, 41:51], keys[1, 0, 31:50] = False, False
    for own, right, unmoved in zip(dirty[:3], clean[:3], (rows, keys, keys), strict=True):
        assert_same_bits(own[unmoved], right[unmoved])
    if np.isnan(bad):
        assert np.isnan(dirty[0][0, 1, 30]).all()
        assert np.isnan(dirty[0][1, :2, 20:30]).all()
        assert np.isnan(dirty[1][0, 0, 41:51]).all()


def test_gradients_of_scores_beyond_the_range_of_half(machine, by_fibers):
    machine()
    q, k, v = (x * np.float16(40) if n == 2 else x for n, x in enumerate(qkv(L=40, S=70, Ev=16, dtype=np.float16)))
    q, k = q * np.float16(1e-3), k * np.float16(1e-3)
    grad = (RNG.standard_normal((2, 4, 40, 16)) * 3000).astype(np.float16)
    options = {"scale": 1.0}
    gradients = found((q, k, v), grad, **options)
    assert np.isfinite(gradients[0]).all()
    assert_right(gradients, (q, k, v), grad, **options)


def test_functions_of_scores_and_wide_heads_take_whole_arrays(machine, by_fibers):
    machine()

    def f(s, b, h, i, j):
        return plain(s, b, h, i, j) * 1.5

    f.derivative = lambda s, b, h, i, j: np.full_like(s, 1.5) if isinstance(s, np.ndarray) else s * 0 + 1.5
    for arrays, options in (
        (qkv(L=150, S=7), {"score_mod": f, "softcap": 3.0, "sink": np.array([0.1, 0.2, 0.3, 0.4])}),
        (qkv(batch=(1,) * 8 + (2,)), {"mask": sr.Causal(), "query_offset": 3}),
        (qkv(E=300), {"bias": RNG.standard_normal((4, 1, 7)).astype(np.float32), "dropout": sr.Dropout(0.3, 2)}),
    ):
        grad = RNG.standard_normal((*arrays[0].shape[:-1], 24)).astype(np.float32)
        assert_right(found(arrays, grad, **options), arrays, grad, **options)
        _, vjp = sr.sdpa_with_vjp(*device.moved(arrays), **{n: device.moved(x) for n, x in options.items()})
        assert_right(device.back(vjp(device.moved(grad))), arrays, grad, **options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_flows_in_may_have_another_type(machine, by_fibers, dtype):
    machine()
    arrays = qkv(L=20, S=30, Ev=16, dtype=np.float16)
    grad = RNG.standard_normal((2, 4, 20, 16)).astype(dtype)
    gradients = found(arrays, grad)
    assert gradients[0].dtype == np.float16
    assert_right(gradients, arrays, grad)


def test_nothing_to_sum(machine, launches):
    machine()
    for sizes in ({"L": 0}, {"S": 0}, {"batch": (0,)}):
        arrays = qkv(**sizes)
        grad = np.ones((*arrays[0].shape[:-1], 24), np.float32)
        options = {"sink": np.zeros(4), "bias": np.zeros((1, 1), np.float32), "grad_lse": np.ones(grad.shape[:-1])}
        assert_right(found(arrays, grad, **options), arrays, grad, **options)
    assert not launches


def test_gradients_cannot_be_captured(machine, launches):
    cupy = machine()
    arrays = device.moved(qkv())
    cupy.stream.ptr, cupy.stream.capturing = 77, True
    with pytest.raises(RuntimeError, match="gradients cannot be captured"):
        sr.sdpa_vjp(*arrays, device.moved(np.ones((2, 4, 5, 24), np.float32)))
