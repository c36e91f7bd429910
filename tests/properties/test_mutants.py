"""Wrong attention, a fault each: the budget, with the strategies at their default settings, must reject all of them."""

import numpy as np
import pytest
from hypothesis import Phase, given, settings

import sdpa_ref as sr
from sdpa_ref.testing import assert_close
from sdpa_ref.testing.strategies import cases


def reference(query, key, value, **options):
    return sr.sdpa(query, key, value, **options, backend="reference")


def from_scores(scores, value, dtype):
    """Return the softmax of other scores times the values, one key head a query head."""
    with np.errstate(all="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
        return (weights / weights.sum(-1, keepdims=True) @ value).astype(dtype)


def scale_off_by_1_percent(query, key, value, **options):
    return reference(query, key, value, **options, scale=1.01 / np.sqrt(max(1, query.shape[-1])))


def no_maximum_subtracted(query, key, value, **options):
    stages = sr.sdpa_stages(query, key, value, **options)
    with np.errstate(all="ignore"):
        weights = np.exp(stages.biased.astype(np.float32))
        return (weights @ value / weights.sum(-1, keepdims=True)).astype(query.dtype)


def top_left_for_bottom_right(query, key, value, **options):
    return reference(query, key, value, **options | {"query_offset": "start"})


def mask_inverted(query, key, value, mask, **options):
    return reference(query, key, value, mask=~mask, **options)


def heads_tiled_for_repeated(query, key, value, **options):
    order = np.arange(query.shape[-3]) % key.shape[-3]
    return reference(query, key[..., order, :, :], value[..., order, :, :], **options)


def softcap_after_the_bias(query, key, value, softcap, **options):
    return reference(query, key, value, **options, score_mod=lambda s, b, h, i, j: softcap * np.tanh(s / softcap))


def mean_of_the_values_for_empty_rows(query, key, value, mask, **options):
    scores = np.where(mask, sr.sdpa_stages(query, key, value, **options).biased, -1e30)
    return from_scores(scores, value, query.dtype)


def finite_sentinel(query, key, value, mask, **options):
    scores = np.where(mask, sr.sdpa_stages(query, key, value, **options).biased, -5e4)
    seen = mask.any(-1, keepdims=True)
    return np.where(seen, from_scores(scores, value, query.dtype), 0).astype(query.dtype)


def zero_times_nan(query, key, value, **options):
    with np.errstate(all="ignore"):
        return (sr.sdpa_stages(query, key, value, **options).weights @ value).astype(query.dtype)


def output_in_another_type(query, key, value, **options):
    return reference(query, key, value, **options).astype(np.float64)


def last_key_dropped(query, key, value, **options):
    last = np.arange(key.shape[-2]) == key.shape[-2] - 1
    return reference(query, key, value, **options, bias=np.where(last, -np.inf, 0))


def one_key_twice(query, key, value, **options):
    first = np.arange(key.shape[-2]) == 0
    return reference(query, key, value, **options, bias=np.where(first, np.log(2), 0))


def window_off_by_one(query, key, value, mask, **options):
    return reference(query, key, value, mask=sr.Window(mask.left and mask.left - 1, mask.right), **options)


def sink_counted_twice(query, key, value, sink, **options):
    return reference(query, key, value, sink=sink + np.log(2), **options)


def sink_scaled(query, key, value, sink, **options):
    return reference(query, key, value, sink=sink / np.sqrt(max(1, query.shape[-1])), **options)


def alibi_upside_down(query, key, value, bias, **options):
    return reference(query, key, value, bias=sr.ALiBi(-bias.slopes), **options)


def dropout_without_its_factor(query, key, value, dropout, **options):
    return (reference(query, key, value, dropout=dropout, **options) / dropout.factor).astype(query.dtype)


def keep_bits_of_another_seed(query, key, value, dropout, **options):
    return reference(query, key, value, dropout=sr.Dropout(dropout.p, dropout.seed + 1), **options)


SEARCH = settings(derandomize=True, database=None, phases=[Phase.generate], report_multiple_bugs=False)
PLAIN = {
    **{"mask": (), "bias": (), "scale": None, "softcap": None, "sink": None, "dropout": 0.0, "score_mod": False},
    **{"layout": "HLE", "memory": "plain", "poison": False, "heads": (2, 2), "batch": (), "dtype": "float32"},
}
MUTANTS = {  # where a fault shows: what a backend that claims the feature is tested with
    scale_off_by_1_percent: {},
    no_maximum_subtracted: {"numbers": "huge"},
    top_left_for_bottom_right: {"mask": ("causal",), "offset": "end"},
    mask_inverted: {"mask": ("array",)},
    heads_tiled_for_repeated: {"heads": (6, 2)},
    softcap_after_the_bias: {"softcap": 0.5, "bias": ("array",)},
    mean_of_the_values_for_empty_rows: {"mask": ("array",)},
    finite_sentinel: {"mask": ("array",), "numbers": "low"},
    zero_times_nan: {"mask": ("keys",), "poison": True},
    output_in_another_type: {},
    last_key_dropped: {},
    one_key_twice: {},
    window_off_by_one: {"mask": ("window",)},
    sink_counted_twice: {"sink": "heads"},
    sink_scaled: {"sink": "number"},
    alibi_upside_down: {"bias": ("alibi",)},
    dropout_without_its_factor: {"dropout": 0.3},
    keep_bits_of_another_seed: {"dropout": 0.3},
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_rejects(mutant):
    @SEARCH
    @given(case=cases(**PLAIN | MUTANTS[mutant]))
    def agrees(case):
        assert_close(mutant(*case.arrays, **case.options), *case.arrays, **case.options)

    with pytest.raises(AssertionError, match="output"):
        agrees()


@pytest.mark.parametrize(
    "mutant", [lambda lse: lse / np.log(2), np.negative], ids=["lse to base 2", "lse with its sign turned"]
)
def test_rejects_an_lse(mutant):
    @SEARCH
    @given(case=cases(**PLAIN))
    def agrees(case):
        lse = sr.sdpa_state(*case.arrays, **case.options).lse
        assert_close(mutant(lse).astype(lse.dtype), *case.arrays, what="lse", **case.options)

    with pytest.raises(AssertionError, match="lse is wrong"):
        agrees()
