"""Keys that are stored, on a device: pages and codes in the fused kernels, and by whole arrays where those refuse."""

import numpy as np
import pytest
from days import NIGHTLY, crossed
from sdpa_cupy.launch import forward
from sdpa_cupy.plan import fused

import sdpa_ref as sr
from sdpa_ref.testing import check, problem_of

ALL = frozenset({"output", "lse", "weights"})
STORES = {
    "pages": {"page": 4},
    "int8": {"store": sr.Int8()},
    "pages of int8": {"page": 3, "store": sr.Int8(4)},
    "pages of int4": {"page": 4, "store": sr.Int4(4)},
    "pages of float8": {"page": 4, "store": sr.Float8()},
}
CENTERED = {"int8 with a center": {"page": 4, "store": sr.Int8(center=np.ones((2, 16), np.float16))}}


@pytest.fixture(params=["fused", "by arrays"])
def way(request, monkeypatch):
    """Let the fused kernels solve what they can, or nothing."""
    if request.param == "fused":
        request.getfixturevalue("by_fibers")
    else:
        monkeypatch.setattr("sdpa_cupy.launch.fused", lambda problem, want, arch: "a test wants it so")
    return request.param


@pytest.mark.parametrize("window", [{}, {"window": 5, "first": 1}], ids=["all", "window"])
@pytest.mark.parametrize("how", STORES.values(), ids=STORES)
def test_a_cache_on_a_device_attends_as_one_on_the_host(machine, way, how, window):
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
def test_the_laws_of_stored_keys_hold_on_a_device(machine, way, law):
    machine()
    rounds, claims = 8 if NIGHTLY else 3, {"dtypes": ["float32", "float64"]}
    run = check("cupy", rounds=rounds, seconds=float("inf"), laws=[law], capabilities=claims)
    assert [f"{o.found.case}\n{o.failure.message}" for o in run.failures] == []
    assert run.passed


def stored(rng, dtype, how, batch=2, heads=2, S=70, E=16):
    """Return key and value as they are stored, with NaN in what no row needs, and the query."""
    query = rng.standard_normal((batch, 2 * heads, 5, E)).astype(dtype)
    dense = rng.standard_normal((2, batch, heads, S, E)).astype(dtype)
    recipe = how.get("store")
    if "page" not in how:
        return query, *(recipe.encode(part) for part in dense)
    P, M = how["page"], -(-S // how["page"])
    table = rng.permutation(3 * batch * M)[: batch * M].reshape(batch, M)
    wide = np.zeros((2, batch, heads, M * P, E), dtype)
    wide[..., :S, :] = dense
    pages = np.full((2, 3 * batch * M, heads, P, E), 0 if recipe else np.nan, dtype)
    pages[:, table] = wide.reshape(2, batch, heads, M, P, E).transpose(0, 1, 3, 2, 4, 5)
    wrong = np.concatenate([table, np.full((batch, 3), -7)], 1).astype(np.int32)  # entries that nothing needs
    return query, *(sr.Paged(recipe.encode(part) if recipe else part, wrong, S) for part in pages)


@pytest.mark.parametrize("emulation", ["fibers", "ptx"])
@pytest.mark.parametrize(("how", "dtype"), crossed(STORES | CENTERED, [np.float16, np.float32, np.float64]))
def test_both_emulations_read_stored_keys_where_they_lie(emulation, dtype, how):
    how = (STORES | CENTERED)[how]
    query, key, value = stored(np.random.default_rng(1), dtype, how)
    options = dict(mask=sr.Causal() & sr.KeyLengths(70), query_offset="end", softcap=3.0)
    problem = problem_of(query, key, value, **options)
    assert fused(problem, ALL, 80) is None
    result = forward(problem, ALL, 80, emulated(emulation))
    dense = [part.dense().astype(np.float64 if "store" in how else dtype) for part in (key, value)]
    exact = sr.sdpa(
        query.astype(np.float64), *(part.astype(np.float64) for part in dense), backend="reference", **options
    )
    assert abs(result.output - exact).max() <= 20 * np.finfo(dtype).eps
    assert abs(result.weights.sum(-1, dtype=np.float64) - 1).max() <= 70 * np.finfo(dtype).eps
    if "store" not in how:  # the same bits as the keys in one array
        gathered = forward(problem_of(query, *dense, **options), ALL, 80, emulated(emulation))
        for got, wanted in zip(result, gathered, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("offset", [None, (1, 1, 8), (2, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("scale", [(1,), (2, 1, 1), (1, 14, 1), (2, 2, 7, 4), (70, 8)], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_and_offsets_serve_blocks_of_numbers(bits, scale, offset):
    rng = np.random.default_rng(2)
    query, value = rng.standard_normal((2, 4, 3, 8)), rng.standard_normal((2, 2, 70, 5))
    codes = rng.integers(0, 256, (2, 2, 70, 8 * bits // 8), np.uint8)
    key = sr.Quantized(
        codes, rng.random(scale, np.float32) / 100, None if offset is None else rng.random(offset), zero=3, bits=bits
    )
    problem = problem_of(query, key, value)
    assert fused(problem, ALL, 80) is None
    output = forward(problem, ALL, 80, emulated("fibers")).output
    assert abs(output - sr.sdpa(query, key.dense(), value, backend="reference")).max() <= 1e-14


def test_what_the_kernels_cannot_find_is_named():
    x = np.ones((1, 4, 6, 8), np.float32)
    for scale in (np.ones(1), np.ones((2, 1, 1), np.float32)):
        key = sr.Quantized(np.ones((1, 4, 6, 8), np.int8), scale)
        assert "scales" in fused(problem_of(x, key, x), ALL, 80)


def emulated(name):
    """Return a launcher that runs the kernels' source, or their PTX."""
    if name == "fibers":
        module = pytest.importorskip("sdpa_cupy.launch.fibers")
        if module.unavailable():
            pytest.skip(module.unavailable())
        return module.Fibers(80)
    from sdpa_cupy import nvrtc

    if nvrtc.missing():
        pytest.skip(nvrtc.missing())
    from sdpa_cupy.launch.ptx import Interpreter

    return Interpreter(80)
