"""Caches on a device: what they store is attended over by the array-level path, here on the stand-in for CuPy."""

import numpy as np
import pytest

import sdpa_ref as sr
from sdpa_ref.testing import check

STORES = {
    "pages": {"page": 4},
    "int8": {"store": sr.Int8()},
    "pages of int8": {"page": 3, "store": sr.Int8(4)},
    "pages of int4": {"page": 4, "store": sr.Int4(4)},
}


@pytest.mark.parametrize("window", [{}, {"window": 5, "first": 1}], ids=["all", "window"])
@pytest.mark.parametrize("how", STORES.values(), ids=STORES)
def test_a_cache_on_a_device_attends_as_one_on_the_host(machine, how, window):
    cupy = machine()
    x = np.random.default_rng(0).standard_normal((3, 2, 2, 20, 8)).astype(np.float32)

    def make(like=None):
        if "page" in how:
            return sr.PagePool(40, 2, how["page"], 8, store=how.get("store"), like=like).cache(2, **window)
        return sr.KVCache(2, 2, 8, store=how["store"], like=like, **window)

    here, there = make(), make(cupy.asarray(x))
    for t in range(0, 20, 2):
        q, k, v = x[:, :, :, t : t + 2]
        here.append(k, v)
        there.append(cupy.asarray(k), cupy.asarray(v))
        wanted = here.attend(q, backend="reference")
        assert abs(there.attend(cupy.asarray(q), backend="cupy").get() - wanted).max() < 1e-5


@pytest.mark.parametrize("law", ["pages", "codes", "key positions"])
def test_the_laws_of_stored_keys_hold_on_a_device(machine, monkeypatch, law):
    machine()
    monkeypatch.setattr("sdpa_cupy.launch.fused", lambda problem, want, arch: "a test wants it so")
    run = check("cupy", rounds=8, seconds=float("inf"), laws=[law], capabilities={"dtypes": ["float32", "float64"]})
    assert [f"{o.found.case}\n{o.failure.message}" for o in run.failures] == []
    assert run.passed
