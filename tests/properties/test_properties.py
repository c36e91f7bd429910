"""What must hold for any attention, on every backend: identities between problems, most of them exact to the last bit.

A transformed problem is held against the error budget of the one that it equals, or to the same bits.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from transform import assert_near, attend, generator, kept, part

import sdpa_ref as sr
from sdpa_ref.testing import assert_close, assert_same_bits, assert_within, error_budget, resolve
from sdpa_ref.testing.cases import edge
from sdpa_ref.testing.properties import PROPERTIES
from sdpa_ref.testing.recipes import fitted, seeded
from sdpa_ref.testing.strategies import cases, lengths, masks

SOME = lengths(minimum=1)
HEADS = st.sampled_from([(2, 2), (2, 1), (6, 2), (1, 1)])
BATCH = st.sampled_from([(2,), (3, 2)])
ARRAYS = st.lists(st.sampled_from(["array", "row", "holes"]), max_size=2, unique=True).map(tuple)
# what a property about single keys, rows or heads leaves out: the rest goes by plain indices, or is tested elsewhere
CUT = {
    "score_mod": False,
    "dropout": 0.0,
    "layout": "HLE",
    "bias": ARRAYS,
    "batch": st.sampled_from([(), (2,), (2, 3)]),
}
SIX = st.lists(st.integers(-50, 50), min_size=6, max_size=6)
WIDE = st.sampled_from(["float32", "float64"])


# ---- the laws of the suite


@pytest.mark.parametrize(
    "law", [law for law in PROPERTIES if law.check.__module__ != "sdpa_ref.testing.memories"], ids=str
)
@settings(max_examples=max(1, settings.default.max_examples // 4))
@given(seed=st.integers(0, 2**32 - 1))
def test_law(fast_backend, law, seed):
    """Hypothesis drives the one list of laws; `test_conformance.py` has it by rounds, and the laws of state."""
    target = resolve(fast_backend)
    words, number = law.draw(np.random.default_rng(seed), target.capabilities)
    failure = law.check(target, fitted(seeded(words, number), target.capabilities))
    assert failure is None, f"{failure.case}\n{failure.message}"


@given(case=cases())
def test_out_receives_the_bits_of_the_result(backend, case):
    output = attend(backend, case)
    out = np.full_like(output, np.nan)
    assert attend(backend, case, out=out) is out
    assert_same_bits(out, output)


# ---- weights and values


@given(case=cases(dropout=0.0))
def test_rows_of_weights_sum_to_1_to_0_or_to_less_with_a_sink(backend, case):
    total = attend(backend, case, sr.sdpa_weights).astype(np.float64).sum(-1)
    budget = error_budget(case.query, case.key, None, what="weights", **case.options)
    seen = (budget.expected > 0).any(-1)
    assert (abs(total) <= np.where(seen, np.inf, 0)).all()
    if "sink" not in case.options:
        assert (abs(total - seen) <= budget.bound.sum(-1)).all()
    assert (total <= 1 + budget.bound.sum(-1)).all()
    assert (abs(total - budget.expected.sum(-1)) <= budget.bound.sum(-1)).all()


@given(case=cases(**CUT | {"batch": BATCH}))
def test_output_lies_within_the_range_of_the_visible_values(backend, case):
    (query, key, value), options = part(case)
    value = np.repeat(value, query.shape[-3] // max(1, key.shape[-3]), -3)[..., None, :, :].astype(np.float64)
    visible = np.broadcast_to(options["mask"][..., None], (*options["mask"].shape, value.shape[-1]))
    value, empty, end = np.broadcast_to(value, visible.shape), ~visible.any(-2), 0 if "sink" in options else np.inf
    low = np.where(empty, 0, np.min(value, -2, where=visible, initial=end))
    high = np.where(empty, 0, np.max(value, -2, where=visible, initial=-end))
    output = attend(backend, case)
    assert_near(output, np.clip(output.astype(np.float64), low, high), error_budget(*case.arrays, **case.options))


@given(case=cases(numbers=st.sampled_from(["integers", "needles", "huge"]), poison=False))
def test_output_is_linear_in_the_values(backend, case):
    one = np.round(4 * np.sin(np.arange(case.value.size))).reshape(case.value.shape)  # sums of these are exact
    two = np.round(4 * np.cos(np.arange(case.value.size))).reshape(case.value.shape)
    values = [value.astype(case.value.dtype) for value in (one, two, 2 * one - two)]
    a, b, c = (attend(backend, case, value=value) for value in values)
    of_a, of_b, of_c = (error_budget(case.query, case.key, value, **case.options) for value in values)
    assert_near(c, 2 * a.astype(np.float64) - b.astype(np.float64), of_a, of_a, of_b, of_c)


UNIFORM = {"E": 2, "sink": None, "softcap": None, "bias": (), "score_mod": False, "poison": False, "layout": "HLE"}


@given(case=cases(S=SOME, **UNIFORM), p=st.sampled_from([0.1, 0.5, 0.9]))
def test_an_identity_as_value_shows_the_keep_bits_of_dropout(backend, case, p):
    shape = kept(case).shape
    dropout = sr.Dropout(p, seed=shape[-1])
    value = np.eye(shape[-1], dtype=case.value.dtype)
    value = value if case.query.ndim == 2 else np.broadcast_to(value, (*case.key.shape[:-2], *value.shape))
    output = attend(backend, case, query=np.zeros_like(case.query), value=value, dropout=dropout)
    assert (output.astype(bool) == (dropout.keep(shape) & kept(case))).all()


@given(case=cases(sink=None, dropout=st.sampled_from([0.3, 0.9])))
def test_dropout_leaves_the_lse_alone(backend, case):
    lse = attend(backend, case, sr.sdpa_state).lse
    assert_same_bits(lse, attend(backend, case, sr.sdpa_state, dropout=None).lse)


# ---- scale, bias, sink


@given(case=cases(dtype=WIDE, scale=None))
def test_the_default_scale_is_a_query_scaled_before(backend, case):
    E = case.query.shape[-1]
    query = case.query * case.query.dtype.type(1 / np.sqrt(E) if E else 1)
    assert_close(attend(backend, case, query=query, scale=1), *case.arrays, **case.options)


@given(case=cases(dtype=WIDE, scale=st.floats(-4, 4, width=32), poison=False))
def test_any_scale_is_a_scaled_query_or_key(backend, case):
    scale = case.query.dtype.type(case.options["scale"])
    for name in ("query", "key"):
        scaled = attend(backend, case, **{name: getattr(case, name) * scale}, scale=1)
        assert_close(scaled, *case.arrays, **case.options)


@given(case=cases(bias=(), sink=None, score_mod=False), shift=st.integers(-1000, 1000))
def test_a_shift_of_all_scores_shifts_the_lse_and_nothing_else(backend, case, shift):
    before = attend(backend, case, sr.sdpa_state)
    after = attend(backend, case, sr.sdpa_state, bias=np.float32(shift))
    shifted = {**case.options, "bias": np.float32(shift)}
    for what, moved in (("output", 0), ("lse", shift)):
        budgets = [error_budget(*case.arrays, what=what, **options) for options in (case.options, shifted)]
        assert_near(getattr(after, what), getattr(before, what).astype(np.float64) + moved, *budgets)


@given(case=cases(**CUT))
def test_a_bias_of_minus_infinity_is_a_mask_of_false(backend, case):
    arrays, options = part(case)
    dropped = np.where(options["mask"], 0, -np.inf).astype(np.float32)
    by_bias = sr.sdpa(*arrays, **options | {"mask": None, "bias": (*options["bias"], dropped)}, backend=backend)
    by_mask = sr.sdpa(*arrays, **options | {"bias": (*options["bias"], np.zeros_like(dropped))}, backend=backend)
    assert_same_bits(by_bias, by_mask)
    assert_same_bits(by_mask, sr.sdpa(*arrays, **options, backend=backend))


@given(case=cases(**CUT | {"sink": None, "poison": False}), logits=SIX)
def test_a_sink_is_a_key_whose_value_is_0(backend, case, logits):
    (query, key, value), options = part(case)
    sink = np.array(logits[: query.shape[-3]], np.float64)
    with_sink = sr.sdpa(query, key, value, **options, sink=sink, backend=backend)
    key, value = (np.concatenate([x, np.zeros_like(x[..., :1, :])], -2) for x in (np.array(key), np.array(value)))
    shape = (*options["mask"].shape[:-1], 1)
    options["mask"] = np.concatenate([options["mask"], np.ones(shape, bool)], -1)
    zeros = [np.concatenate([bias, np.zeros(shape)], -1) for bias in options["bias"]]
    only_it = np.where(np.arange(key.shape[-2]) == key.shape[-2] - 1, sink[:, None, None], 0)
    assert_close(with_sink, query, key, value, **options | {"bias": (*zeros, only_it)})


# ---- keys


@given(case=cases(**CUT))
def test_keys_may_be_permuted(backend, case):
    order = generator(case).permutation(case.key.shape[-2])
    arrays, options = part(case, j=order)
    assert_close(sr.sdpa(*arrays, **options, backend=backend), *case.arrays, **case.options)


@given(case=cases(S=SOME, **CUT))
def test_a_key_twice_is_a_bias_of_log_2(backend, case):
    S = case.key.shape[-2]
    twice = int(edge(generator(case), S, ()))
    arrays, options = part(case, j=[*range(S), twice])
    bias = np.where(np.arange(S) == twice, np.log(2), 0)
    _, single = part(case)
    single["bias"] = (*single["bias"], bias)
    assert_close(sr.sdpa(*arrays, **options, backend=backend), *case.arrays, **single)


@given(case=cases(**CUT | {"sink": None}), n=st.integers(1, 4))
def test_keys_may_be_split_anywhere_and_merged_in_any_order(backend, case, n):
    rng, S = generator(case), case.key.shape[-2]
    cuts = np.sort(rng.integers(S + 1, size=n - 1))
    states = []
    for keys in np.split(rng.permutation(S), cuts):
        arrays, options = part(case, j=keys)
        states.append(sr.sdpa_state(*arrays, **options, backend=backend))
    whole = sum(states[1:], states[0])
    for what in ("output", "lse"):
        budget = error_budget(*case.arrays, what=what, merges=n - 1, **case.options)
        assert_within(getattr(whole, what), budget, what=what)


@given(case=cases(L=SOME, S=SOME, **CUT | {"poison": False}), bad=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_what_a_row_drops_changes_no_bit_of_it(backend, case, bad):
    arrays, options = part(case)
    query, key, value = map(np.array, arrays)
    row = int(generator(case).integers(query.shape[-2]))
    expected = sr.sdpa(query, key, value, **options, backend=backend)
    weights = sr.sdpa_weights(query, key, **options, backend=backend)
    seen = options["mask"][..., row, :]
    seen = seen.reshape(*seen.shape[:-2], key.shape[-3], -1 if seen.size else 1, seen.shape[-1]).any(-2)
    with np.errstate(over="ignore"):
        key[~seen], value[~seen] = bad, bad
    options["bias"] = tuple(np.where(options["mask"], bias, np.nan) for bias in options["bias"])
    output = sr.sdpa(query, key, value, **options, backend=backend)
    assert_same_bits(output[..., row, :], expected[..., row, :])
    assert_same_bits(sr.sdpa_weights(query, key, **options, backend=backend)[..., row, :], weights[..., row, :])


@given(case=cases(L=SOME, S=SOME, mask=masks(("window", "key lengths", "array")).map(lambda words: ("causal", *words)),
                  **CUT | {"numbers": "normal", "poison": False}))  # fmt: skip
def test_changing_the_future_changes_no_bit_of_the_past(backend, case):
    offset, now = case.options["query_offset"], int(generator(case).integers(case.query.shape[-2]))
    places = now + np.asarray(0 if isinstance(offset, str) else offset)
    case.options.update(
        query_offset="start" if isinstance(offset, str) else offset, mask=sr.Causal() & case.options["mask"]
    )
    future = (np.arange(case.key.shape[-2]) > places[..., None])[..., None, :, None]
    changed = {name: np.where(future, bad, array).astype(array.dtype)
               for name, array, bad in (("key", case.key, -3 * case.key), ("value", case.value, np.nan))}  # fmt: skip
    before, after = attend(backend, case), attend(backend, case, **changed)
    assert_same_bits(after[..., : now + 1, :], before[..., : now + 1, :])


# ---- batch, heads, rows


@given(case=cases(heads=HEADS, layout="HLE", batch=st.sampled_from([(), (2,)])))
def test_grouped_heads_are_repeated_heads(backend, case):
    group = case.query.shape[-3] // case.key.shape[-3]
    key, value = (np.repeat(array, group, -3) for array in (case.key, case.value))
    assert_same_bits(attend(backend, case, key=key, value=value), attend(backend, case))


@given(seed=st.integers(0, 2**32 - 1), H=st.integers(1, 4), L=SOME, E=st.integers(1, 9), dtype=WIDE)
def test_one_wide_projection_split_into_heads_is_a_projection_a_head(backend, seed, H, L, E, dtype):
    rng = np.random.default_rng(seed)
    x, *matrices = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((2, L, 6), *[(6, H * E)] * 3))
    wide = [(x @ matrix).reshape(2, L, H, E) for matrix in matrices]
    output = sr.sdpa(*wide, layout="LHE", backend=backend).reshape(2, L, H * E)
    for h in range(H):
        columns = slice(h * E, (h + 1) * E)
        alone = [(x @ matrix[:, columns])[:, None] for matrix in matrices]
        assert_same_bits(sr.sdpa(*alone, backend=backend)[:, 0], output[..., columns])


@given(case=cases(**CUT), n=st.integers(1, 4))
def test_queries_in_chunks_are_all_queries_at_once(backend, case, n):
    cuts = np.sort(generator(case).integers(case.query.shape[-2] + 1, size=n - 1))
    chunks = []
    for rows in np.split(np.arange(case.query.shape[-2]), cuts):
        arrays, options = part(case, i=rows)
        chunks.append(sr.sdpa(*arrays, **options, backend=backend))
    assert_close(np.concatenate(chunks, -2), *case.arrays, **case.options)


@given(case=cases(L=5, S=st.one_of(SOME, st.just(5)), mask=("causal",), offset="end", **CUT | {"bias": ()}))
def test_a_decode_step_is_the_last_row(backend, case):
    last = attend(backend, case, query=case.query[..., -1:, :])
    assert_within(last, error_budget(*case.arrays, **case.options)[..., -1:, :])


# ---- memory


@given(case=cases(memory="repeated", layout="HLE"))
def test_a_stride_of_0_changes_no_bit(backend, case):
    arrays = {name: np.array(getattr(case, name), order="C") for name in ("query", "key", "value")}
    assert_same_bits(attend(backend, case, **arrays), attend(backend, case))


@given(case=cases(layout="HLE", sink=None))
def test_layouts_agree_to_the_bit(backend, case):
    arrays = case.arrays if case.query.ndim == 2 else [array.swapaxes(-2, -3) for array in case.arrays]
    options = {**case.options, "layout": "LHE", "backend": backend}
    here, there = attend(backend, case, sr.sdpa_state), sr.sdpa_state(*arrays, **options)
    flat = case.query.ndim == 2
    assert_same_bits(there.output if flat else there.output.swapaxes(-2, -3), here.output)
    assert_same_bits(there.lse if flat else there.lse.swapaxes(-1, -2), here.lse)
