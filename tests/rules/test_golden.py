"""The golden vectors: computed in another arithmetic, by another program, from the specification alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import sdpa_ref
from sdpa_ref.testing import assert_same_bits, assert_within, error_budget, golden, gradient_budget
from sdpa_ref.testing.bounds import gamma, unit
from sdpa_ref.testing.golden import collection, make, stored

CASES = golden.load()
STORED = golden.load("stored")
SAMPLE = list(collection.recipes())[::9]


def within(actual, budget, expected, what):
    """Assert that a result lies within the budget around the golden vector, which the reference must reach, too."""
    assert_within(actual, replace(budget, expected=expected), what=what)


def test_there_are_some_two_hundred_in_less_than_five_mebibytes():
    assert len(CASES) >= 200
    folder = Path(golden.__file__).parent
    assert sum(path.stat().st_size for path in folder.glob("v*")) < 5 * 2**20


def test_every_type_and_option_is_among_them():
    assert {str(case.query.dtype) for case in CASES.values()} == {"float16", "bfloat16", "float32", "float64"}
    assert set().union(*(case.options for case in CASES.values())) == {
        "mask", "bias", "scale", "softcap", "sink", "query_offset", "dropout"
    }  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_backend(backend, case):
    arrays, options = (case.query, case.key, case.value), case.options
    output = sdpa_ref.sdpa(*arrays, backend=backend, **options)
    within(output, error_budget(*arrays, **options), case.expected["output"], "output")
    weights = sdpa_ref.sdpa_weights(case.query, case.key, backend=backend, **options)
    within(weights, error_budget(*arrays, what="weights", **options), case.expected["weights"], "weights")
    if "sink" not in options:
        lse = sdpa_ref.sdpa_state(*arrays, backend=backend, **options).lse
        within(lse, error_budget(*arrays, what="lse", **options), case.expected["lse"], "lse")


@pytest.mark.parametrize("case", STORED.values(), ids=STORED)
def test_stored_keys(backend, case):
    arrays, options = (case.query, case.key, case.value), case.options
    output = sdpa_ref.sdpa(*arrays, backend=backend, **options)
    within(output, error_budget(*arrays, **options), case.expected["output"], "output")
    state = sdpa_ref.sdpa_state(*arrays, backend=backend, **options)
    within(state.lse, error_budget(*arrays, what="lse", **options), case.expected["lse"], "lse")
    weights = sdpa_ref.sdpa_weights(case.query, case.key, backend=backend, **options)
    if isinstance(case.key, sdpa_ref.Paged) or not isinstance(case.value, sdpa_ref.Paged):  # else its lengths are there
        within(weights, error_budget(*arrays, what="weights", **options), case.expected["weights"], "weights")


def test_every_kind_of_storage_is_among_them():
    assert len(STORED) >= 40
    sides = [side for case in STORED.values() for side in (case.key, case.value)]
    pages = [side.pages for side in sides if isinstance(side, sdpa_ref.Paged)]
    codes = [part for part in (*sides, *pages) if isinstance(part, sdpa_ref.Quantized)]
    assert {str(part.codes.dtype) for part in codes} == {"int8", "uint8", "float8_e4m3fn", "float8_e5m2"}
    assert {part.bits for part in codes} == {4, 8}
    assert {part.offset is None for part in codes} == {True, False}
    assert any("key_positions" in case.options for case in STORED.values())


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.grad_output is not None], ids=repr)
def test_gradients(gradient_backend, case):
    arguments, options = (case.query, case.key, case.value, case.grad_output), case.options
    got = sdpa_ref.sdpa_vjp(*arguments, grad_lse=case.grad_lse, backend=gradient_backend, **options)
    budgets = gradient_budget(*arguments, grad_lse=case.grad_lse, **options)
    for name in ("query", "key", "value", "bias", "sink"):
        if f"d_{name}" in case.expected:
            gradient, budget = (
                x[0] if isinstance(x, tuple) else x for x in (getattr(got, name), getattr(budgets, name))
            )
            within(gradient, budget, case.expected[f"d_{name}"], f"gradient of {name}")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_stages_of_the_reference(case):
    wide = [array.astype(np.float64) for array in (case.query, case.key, case.value)]
    stages = sdpa_ref.sdpa_stages(*wide, **case.options)
    np.testing.assert_array_equal(stages.keep, case.expected["keep"])
    budget = error_budget(*wide, what="weights", **case.options)
    within(stages.weights, budget, case.expected["weights"], "weights")
    scale = abs(case.options.get("scale", 1))
    with np.errstate(all="ignore"):
        key = np.repeat(abs(wide[1]), stages.raw.shape[1] // max(1, wide[1].shape[1]), axis=1)
        products = abs(wide[0]) @ key.swapaxes(-1, -2)
        added = abs(case.expected["biased"] - case.expected["capped"])
        for name, size in {
            "raw": products,
            "scaled": scale * products,
            "capped": scale * products,
            "biased": scale * products + added,
        }.items():
            error = abs(getattr(stages, name) - case.expected[name])
            known = np.isfinite(case.expected[name])
            assert (error <= gamma(key.shape[-1] + 16, unit(np.dtype(np.float64))) * size)[known].all()
            np.testing.assert_array_equal(getattr(stages, name)[~known], case.expected[name][~known])


@pytest.mark.parametrize("recipe", SAMPLE, ids=lambda recipe: recipe.name)
def test_made_again_they_have_the_same_bits(recipe):
    tensors, entry = make.made(recipe)
    case = CASES[recipe.name]
    assert entry["about"] == case.about
    for name in ("query", "key", "value"):
        assert_same_bits(tensors[name], getattr(case, name))
    for name, tensor in case.expected.items():
        assert_same_bits(tensors[name], tensor)


@pytest.mark.parametrize("recipe", list(stored.recipes())[::5], ids=lambda recipe: recipe.name)
def test_stored_ones_made_again_have_the_same_bits(recipe):
    tensors, entry = stored.made(recipe)
    case = STORED[recipe.name]
    assert entry["about"] == case.about
    for name, tensor in case.expected.items():
        assert_same_bits(tensors[name], tensor)
