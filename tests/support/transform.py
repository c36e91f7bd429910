"""Attention with something changed, and parts of a case, for the tests of what must then hold."""

from dataclasses import replace

import numpy as np

import sdpa_ref as sr
from sdpa_ref.testing import assert_within

ALL = slice(None)


def attend(backend, case, function=sr.sdpa, **changes):
    """Return what the backend makes of the case with some arguments changed."""
    query, key, value = (changes.pop(name, getattr(case, name)) for name in ("query", "key", "value"))
    arrays = (query, key) if function is sr.sdpa_weights else (query, key, value)
    return function(*arrays, **{**case.options, **changes}, backend=backend)


def kept(case):
    """Return which keys a row keeps, (..., Hq, L, S)."""
    return sr.sdpa_stages(*case.arrays, **case.options).keep


def part(case, b=ALL, h=None, i=ALL, j=ALL):
    """Return arrays and options of some batch entries, heads, rows and keys, with mask and bias as arrays."""
    keep = kept(case)
    lead, Hq, (query, key, value) = keep.shape[:-3], keep.shape[-3], case.arrays
    heads = np.arange(Hq)[ALL if h is None else h]
    of_key = ALL if h is None else heads // max(1, Hq // max(1, key.shape[-3]))

    def cut(array, *index):
        array = np.broadcast_to(array, (*lead, *array.shape[-3:]))
        for axis, at in zip((-3, -2, -1), index, strict=True):
            array = array[(..., at, *(ALL,) * (-1 - axis))]
        return array[b] if lead else array

    options = {name: case.options[name] for name in ("scale", "softcap", "sink") if name in case.options}
    if np.ndim(options.get("sink")):
        options["sink"] = options["sink"][heads]
    biases = case.options.get("bias", ())
    biases = biases if isinstance(biases, tuple) else (biases,)
    biases = tuple(cut(np.broadcast_to(bias, keep.shape), heads, i, j) for bias in biases)
    arrays = cut(query, heads, i, ALL), cut(key, of_key, j, ALL), cut(value, of_key, j, ALL)
    return arrays, {**options, "mask": cut(keep, heads, i, j), "bias": biases}


def assert_near(actual, expected, *budgets):
    """Raise unless `actual` is no further from `expected` than the bounds together allow."""
    bound = sum(budget.bound for budget in budgets)
    assert_within(actual, replace(budgets[0], expected=expected, bound=bound, modest=False))


def generator(case):
    """Return random numbers that depend on the case alone."""
    return np.random.default_rng(list(case.recipe.encode()))
