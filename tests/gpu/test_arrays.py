"""The array-level path over NumPy: every law, in memory that does not grow with pairs of query and key."""

import tracemalloc
from functools import partial

import numpy as np
from days import NIGHTLY
from sdpa_cupy import arrays
from sdpa_cupy.strips import in_strips

import sdpa_ref as sr
from sdpa_ref.testing import assert_close, assert_same_bits, check, problem_of, resolve

RNG = np.random.default_rng(3)


def whole_arrays(query, key, value, keys=arrays.KEYS, **options):
    problem = problem_of(query, key, value, **options)
    return in_strips(problem, frozenset({"output"}), np.empty, partial(arrays.attend, xp=np, keys=keys)).output


def test_every_law_holds():
    rounds = 20 if NIGHTLY else 2
    run = check(resolve("arrays"), rounds=rounds, seconds=float("inf"))
    assert [f"{o.law.name}: {o.found.case}\n{o.failure.message}" for o in run.failures] == []
    assert run.rounds == rounds
    assert {outcome.status for outcome in run.outcomes} <= {"passed", "not claimed"}


def test_rows_of_several_strips_and_keys_of_several_tiles():
    q, k, v = (RNG.standard_normal((2, n, w), np.float32) for n, w in ((300, 24), (500, 24), (500, 7)))
    options = {"mask": sr.Window(200, 3), "query_offset": "end", "dropout": sr.Dropout(0.4, 6), "sink": 0.5}
    for keys in (8, 128, 512):
        assert_close(whole_arrays(q, k, v, keys, **options), q, k, v, **options)


def test_a_row_does_not_depend_on_other_heads_and_entries():
    q, k, v = (RNG.standard_normal((5, 6, n, 33), np.float32) for n in (130, 70, 70))
    assert_same_bits(whole_arrays(q, k, v)[3:4, 2:3], whole_arrays(q[3:4, 2:3], k[3:4, 2:3], v[3:4, 2:3]))


def test_memory_does_not_grow_with_pairs():
    q, k = RNG.standard_normal((1, 1024, 8), np.float32), RNG.standard_normal((1, 16384, 8), np.float32)
    tracemalloc.start()
    whole_arrays(q, k, k)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1024 * 16384
