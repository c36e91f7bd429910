"""The kernels for few and for many rows where bfloat16 is multiplied by pairs, by the model of an instruction."""

import os
import sys

import numpy as np
import pytest

if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")

import dropped
import ml_dtypes
from hypothesis import settings
from sdpa_numba import plan
from sdpa_numba.compile import products as choice

import sdpa_ref
from sdpa_ref import ALiBi, Causal, Dropout, KeyLengths, Paged, Quantized, Window, sdpa, sdpa_state
from sdpa_ref.testing import error_budget

BF16 = np.dtype(ml_dtypes.bfloat16)
NIGHTLY = settings.default.max_examples >= 1000
OURS = os.environ.get(choice.VARIABLE) or "vdpbf16ps model"  # "hardware", say


def forget():
    choice.products.cache_clear()
    plan.plan_for.cache_clear()


@pytest.fixture
def paired(monkeypatch):
    """Let bfloat16 inputs be multiplied by pairs."""
    monkeypatch.setenv(choice.VARIABLE, OURS)
    forget()
    yield
    monkeypatch.undo()
    forget()


def draw(rng, *shape):
    return rng.standard_normal(shape, dtype=np.float32).astype(BF16)


def bits(state):
    return state.output.tobytes(), state.lse.tobytes()


OPTIONS = {
    "none": {},
    "causal": {"mask": Causal(), "query_offset": "end"},
    "window": {"mask": Window(20, 3) & Causal(), "query_offset": "end"},
    "lengths": {"mask": KeyLengths(np.array([37, 70]))},
    "bias": {"bias": "drawn"},
    "a bias that drops": {"bias": "dropping"},
    "boolean": {"mask": "drawn"},
    "ALiBi": {"bias": ALiBi([0.5, 0.25, 0.1, 0.0]), "query_offset": "end"},
    "softcap and sink": {"softcap": 2.0, "sink": np.linspace(-1, 1, 4)},
    "dropout": {"dropout": Dropout(0.4, 5)},
    "score_mod": {"score_mod": lambda s, b, h, i, j: s - 0.1 * abs(i - j)},
    "scale": {"scale": -1.5},
}


def options_for(name, rng, L, S):
    options = dict(OPTIONS[name])
    if options.get("mask") == "drawn":
        options["mask"] = rng.random((2, 1, L, S)) < 0.6
    if isinstance(options.get("bias"), str):
        bias = rng.standard_normal((4, L, S))
        options["bias"] = bias if options["bias"] == "drawn" else np.where(rng.random((4, L, S)) < 0.4, -np.inf, bias)
    return options


@pytest.mark.usefixtures("paired")
@pytest.mark.parametrize("L", [1, 3, 40])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_within_its_budget(option, L):
    rng = np.random.default_rng(L)
    for S, E, Ev in ((70, 24, 32), (71, 7, 9)):
        S += option == "lengths" and S % 2 == 0
        q, k, v = draw(rng, 2, 4, L, E), draw(rng, 2, 2, S, E), draw(rng, 2, 2, S, Ev)
        options = options_for(option, rng, L, S)
        got = sdpa(q, k, v, **options, backend="numba")
        budget = error_budget(q, k, v, precision="bfloat16 products", **options)
        assert (abs(got.astype(float) - budget.expected) <= budget.bound).all()


@pytest.mark.usefixtures("paired")
def test_pairs_are_used_and_only_for_bfloat16():
    rng = np.random.default_rng(0)
    for dtype, L in (("bfloat16", 2), ("bfloat16", 40), ("float16", 2)):
        q, k, v = (draw(rng, 1, n, 32).astype(dtype) for n in (L, 200, 200))
        got = sdpa(q, k, v, backend="numba")
        wide = sdpa(*(x.astype(np.float32) for x in (q, k, v)), backend="numba").astype(dtype)
        assert (got != wide).any() == (dtype == "bfloat16")  # weights are rounded


@pytest.mark.usefixtures("paired")
@pytest.mark.parametrize("L", [1, 2, 9, 32, 48])
@pytest.mark.parametrize("S", [7, 130, 1025, 2500])
@pytest.mark.parametrize("widths", [(21, 33), (20, 32)])
def test_a_row_has_the_same_bits_however_many_rows_there_are(L, S, widths):
    rng = np.random.default_rng(S)
    E, Ev = widths
    q, k, v = draw(rng, 2, 4, L, E), draw(rng, 2, 2, S, E), draw(rng, 2, 2, S, Ev)
    whole = sdpa_state(q, k, v, mask=Causal(), query_offset="end", backend="numba")
    for b, h, i in {(0, 0, 0), (1, 3, L - 1), (1, 1, L // 2)}:
        alone = sdpa_state(
            q[b, h, i : i + 1], k[b, h // 2], v[b, h // 2], mask=Causal(), query_offset=S - L + i, backend="numba"
        )
        assert bits(alone) == (whole.output[b, h, i].tobytes(), whole.lse[b, h, i].tobytes())


@pytest.mark.usefixtures("paired")
@pytest.mark.parametrize("option", ["dropout", "bias", "boolean"])
@pytest.mark.parametrize("S", [5, 301, 1300])
def test_the_first_row_has_the_same_bits_alone(S, option):
    """Weights are dropped before they are rounded, in the kernel for few rows as in that for many."""
    rng = np.random.default_rng(S)
    q, k, v = draw(rng, 2, 4, 33, 21), draw(rng, 2, 2, S, 21), draw(rng, 2, 2, S, 16)
    options = options_for(option, rng, 33, S)
    first = {name: x[..., :1, :] if name in ("bias", "mask") else x for name, x in options.items()}
    whole = sdpa_state(q, k, v, **options, backend="numba")
    alone = sdpa_state(q[:, :, :1], k, v, **first, backend="numba")
    assert bits(alone) == (whole.output[:, :, :1].tobytes(), whole.lse[:, :, :1].tobytes())


@pytest.mark.usefixtures("paired")
def test_small_sums_have_the_same_bits_however_many_rows_there_are():
    """Beside a growing maximum sums become subnormal, which products take for 0, also those of rows without a key."""
    rng = np.random.default_rng(8)
    L, S = 40, 600
    q, k = np.ones((1, L, 2), BF16), np.sort(rng.uniform(0, 90, (1, S, 2)), 1).astype(BF16)
    v = (draw(rng, 1, S, 16).astype(np.float32) * 1e-30).astype(BF16)
    whole = sdpa_state(q, k, v, mask=Window(150, 0), query_offset="end", scale=1.0, backend="numba")
    for i in range(L):
        row, last = q[:, i : i + 1], S - L + i
        alone = sdpa_state(row, k, v, mask=Window(150, 0), query_offset=last, scale=1.0, backend="numba")
        assert bits(alone) == (whole.output[:, i].tobytes(), whole.lse[:, i].tobytes())


@pytest.mark.usefixtures("paired")
def test_a_decode_step_is_the_last_row_of_a_prefill():
    rng = np.random.default_rng(1)
    q, k, v = draw(rng, 4, 1100, 64), draw(rng, 2, 1100, 64), draw(rng, 2, 1100, 64)
    prefill = sdpa(q, k, v, mask=Causal(), backend="numba")
    for n in (1, 2, 63, 64, 1025, 1100):
        step = sdpa(q[:, n - 1 : n], k[:, :n], v[:, :n], backend="numba")
        assert step.tobytes() == prefill[:, n - 1 : n].tobytes()
        few = sdpa(q[:, max(0, n - 3) : n], k[:, :n], v[:, :n], mask=Causal(), query_offset="end", backend="numba")
        assert few.tobytes() == prefill[:, max(0, n - 3) : n].tobytes()


@pytest.mark.usefixtures("paired")
@pytest.mark.parametrize("L", [2, 70])
@pytest.mark.parametrize("kind", dropped.KINDS)
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_dropped_key_does_not_change_a_bit(L, kind, poison):
    (q, k, v), seen, options = dropped.problem(kind, L, BF16)
    clean = sdpa_state(q, k, v, **options, backend="numba")
    for key in (0, 91, 101, 102, 103, 120, 171, 299):
        dirty_k, dirty_v = k.copy(), v.copy()
        dirty_k[:, :, key], dirty_v[:, :, key] = poison, poison
        dirty = sdpa_state(q, dirty_k, dirty_v, **options, backend="numba")
        unaware = np.broadcast_to(~seen[:, None, :, key], clean.lse.shape)
        assert clean.lse[unaware].tobytes() == dirty.lse[unaware].tobytes()
        assert clean.output[unaware].tobytes() == dirty.output[unaware].tobytes()
        assert np.isnan(dirty.output[~unaware].astype(np.float32)).all()


@pytest.mark.usefixtures("paired")
@pytest.mark.parametrize("L", [2, 40])
def test_layout_and_strides_change_no_bit(L):
    rng = np.random.default_rng(4)
    q, k, v = draw(rng, 2, 3, L, 21), draw(rng, 2, 3, 75, 21), draw(rng, 2, 3, 75, 19)
    expected = sdpa(q, k, v, backend="numba")
    views = {
        "transposed": lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
        "spread": lambda x: np.repeat(np.repeat(x, 2, -1), 3, -2)[..., ::3, ::2],
        "reversed": lambda x: np.ascontiguousarray(x[..., ::-1, ::-1])[..., ::-1, ::-1],
    }
    for view in views.values():
        assert sdpa(*map(view, (q, k, v)), backend="numba").tobytes() == expected.tobytes()
    turned = sdpa(*(x.swapaxes(-2, -3) for x in (q, k, v)), layout="LHE", backend="numba")
    assert np.ascontiguousarray(turned.swapaxes(-2, -3)).tobytes() == expected.tobytes()


def pages_of(rng, array, page, lengths):
    """Return pages in random order that hold keys or values of two batch entries."""
    B, H, S, width = array.shape
    table = rng.permutation(B * -(-S // page)).reshape(B, -1)
    pages = np.full((table.size, H, page, width), np.nan, array.dtype)
    for b, m in np.ndindex(table.shape):
        rows = array[b, :, m * page : (m + 1) * page]
        pages[table[b, m], :, : rows.shape[1]] = rows
    return Paged(pages, table, lengths)


@pytest.mark.usefixtures("paired")
@pytest.mark.parametrize("L", [2, 40] if NIGHTLY else [2])  # the others have a kernel of their own
@pytest.mark.parametrize("page", [3, 16, 32])
def test_pages_have_the_bits_of_a_dense_array(L, page):
    rng = np.random.default_rng(page)
    q, k, v = draw(rng, 2, 4, L, 21), draw(rng, 2, 2, 301, 21), draw(rng, 2, 2, 301, 24)
    lengths = np.array([301, 150])
    expected = sdpa(q, k, v, mask=KeyLengths(lengths) & Causal(), query_offset="end", backend="numba")
    keys, values = (pages_of(rng, array, page, lengths) for array in (k, v))
    got = sdpa(q, keys, values, mask=Causal(), query_offset="end", backend="numba")
    assert got.tobytes() == expected.tobytes()


@pytest.mark.usefixtures("paired")
@pytest.mark.parametrize("L", [2, 40] if NIGHTLY else [2])  # the others have a kernel of their own
def test_codes_are_widened_as_ever(monkeypatch, L):
    rng = np.random.default_rng(6)
    q, v = draw(rng, 1, 2, L, 16), draw(rng, 1, 2, 90, 16)
    keys = Quantized(rng.integers(-128, 128, (1, 2, 90, 16), np.int8), np.full((1, 2, 90, 1), 0.01, np.float32))
    got = sdpa(q, keys, v, backend="numba")
    monkeypatch.setenv(choice.VARIABLE, "widen")
    forget()
    assert got.tobytes() == sdpa(q, keys, v, backend="numba").tobytes()


@pytest.mark.usefixtures("paired")
def test_needles_and_huge_scores_are_within_their_budget():
    rng = np.random.default_rng(7)
    for L, size in ((1, 30.0), (40, 30.0), (3, 1e4), (40, 1e4), (40, 1e18)):
        k, v = draw(rng, 2, 133, 23), draw(rng, 2, 133, 9)
        targets = rng.integers(0, 133, L)
        q = (k[:, targets].astype(np.float32) * size).astype(BF16)
        state = sdpa_state(q, k, v, backend="numba")
        budget = error_budget(q, k, v, precision="bfloat16 products")
        assert (abs(state.output.astype(float) - budget.expected) <= budget.bound).all()
        lse = error_budget(q, k, v, what="lse", precision="bfloat16 products")
        assert (abs(state.lse - lse.expected) <= lse.bound).all()


@pytest.mark.usefixtures("paired")
@pytest.mark.parametrize("L", [2, 40])
def test_subnormal_numbers_count_as_zero(L):
    """What the instructions change: a key of 2**-127 has no score, and a value of that size is lost."""
    q, k = np.full((1, L, 4), 2.0**126, BF16), np.zeros((1, 9, 4), BF16)
    k[:, 3] = 2.0**-127
    v = np.arange(9, dtype=np.float32).astype(BF16)[None, :, None]
    got = sdpa(q, k, v, scale=2.0, backend="numba")
    np.testing.assert_array_equal(got, 4.0)  # the mean, where exact scores of 4 prefer a key
    budget = error_budget(q, k, v, scale=2.0, precision="bfloat16 products")
    assert (abs(got.astype(float) - budget.expected) <= budget.bound).all()
    strict = error_budget(q, k, v, scale=2.0)
    assert (abs(got.astype(float) - strict.expected) > strict.bound).all()
    small = np.full((1, 9, 1), 2.0**-127, BF16)
    assert not sdpa(q, k, small, backend="numba").any()
    assert (sdpa(q, 0 * k, 2 * small, backend="numba") == 2.0**-126).all()


@pytest.mark.usefixtures("paired")
def test_gradients_are_those_of_float32_and_the_output_that_of_sdpa():
    rng = np.random.default_rng(9)
    q, k, v, d = (draw(rng, 2, 3, 40, 16) for _ in range(4))
    output, vjp = sdpa_ref.sdpa_with_vjp(q, k, v, mask=Causal(), backend="numba")
    assert output.tobytes() == sdpa(q, k, v, mask=Causal(), backend="numba").tobytes()
    wide = sdpa_ref.sdpa_vjp(*(x.astype(np.float32) for x in (q, k, v, d)), mask=Causal(), backend="numba")
    for got, exactly in zip(vjp(d)[:3], wide[:3], strict=True):
        assert got.tobytes() == exactly.astype(BF16).tobytes()


@pytest.mark.usefixtures("paired")
@pytest.mark.skipif(not NIGHTLY, reason="compiles for a minute: pytest --hypothesis-profile=nightly")
def test_tiles_of_other_processors_are_right(monkeypatch):
    """The kernels with the registers of AVX-512, which LLVM makes of shorter ones here."""
    monkeypatch.setattr(plan, "host_registers", lambda: (64, 32))
    forget()
    rng = np.random.default_rng(11)
    q, k, v = draw(rng, 2, 4, 60, 37), draw(rng, 2, 2, 333, 37), draw(rng, 2, 2, 333, 43)
    options = {"mask": Causal(), "query_offset": "end"}
    whole = sdpa_state(q, k, v, **options, backend="numba")
    budget = error_budget(q, k, v, precision="bfloat16 products", **options)
    assert (abs(whole.output.astype(float) - budget.expected) <= budget.bound).all()
    for i in (0, 1, 30, 59):
        dirty = v.copy()
        dirty[:, :, 274 + i :] = np.nan
        alone = sdpa_state(q[:, :, i : i + 1], k, dirty, mask=Causal(), query_offset=273 + i, backend="numba")
        assert bits(alone) == (whole.output[:, :, i].tobytes(), whole.lse[:, :, i].tobytes())
    dirty = v.copy()
    dirty[:, :, 300] = np.nan
    poisoned = sdpa(q, k, dirty, **options, backend="numba")
    assert poisoned[:, :, :27].tobytes() == whole.output[:, :, :27].tobytes()
    assert np.isnan(poisoned[:, :, 27:].astype(np.float32)).all()


@pytest.mark.usefixtures("paired")
@pytest.mark.skipif(sys.platform == "win32", reason="guard pages are made with mprotect")
def test_nothing_outside_of_the_arrays_is_touched():
    from guard_pages import guarded

    rng = np.random.default_rng(10)
    for length in range(1, 70):
        L, S, E, Ev = [(3, length, 16, 16), (length, 5, 7, 16), (length, 33, length, 3), (2, 41, 9, length)][length % 4]
        for at_end in (False, True):
            q, k, v = (guarded(draw(rng, 2, *shape), at_end) for shape in ((L, E), (S, E), (S, Ev)))
            sdpa(q, k, v, backend="numba")
