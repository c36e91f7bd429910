"""Chunks, stores and shapes as odd as they come, and those that are not what their array says."""

import multiprocessing
import os

import numpy as np
import pytest

pytest.importorskip("dask.array", reason="Dask is not installed")
import dask
import dask.array as da

from sdpa_ref import ALiBi, Causal, Int8, Paged, Quantized, Window, reading, sdpa, sdpa_state, sdpa_vjp, sdpa_weights

RNG = np.random.default_rng(0)
Q, K, V = (RNG.standard_normal(shape).astype("float32") for shape in ((2, 4, 9, 8), (2, 2, 21, 8), (2, 2, 21, 6)))
pytestmark = pytest.mark.usefixtures("sync")


def lazy(array, chunks=None):
    return da.from_array(array, chunks=chunks or tuple(max(1, n // 2) for n in array.shape))


def close(got, expected):
    (got,) = dask.compute(got)
    assert np.shape(got) == np.shape(expected)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-6)


# ---- chunks that are not what their array says, which kernels would read as if they were


def twisted(array, change):
    """Return a Dask array whose chunks are changed behind its back."""
    whole = lazy(array)
    return whole.map_blocks(change, dtype=array.dtype, meta=np.empty((0,) * array.ndim, array.dtype))


CHANGES = {
    "float64": lambda x: x.astype("float64"),
    "integers": lambda x: (10 * x).astype("int32"),
    "objects": lambda x: x.astype(object),
    "masked": lambda x: np.ma.masked_greater(x, 0.5),
    "too few": lambda x: x[..., :-1, :],
    "a single one": lambda x: x[..., :1, :],
    "too many": lambda x: np.concatenate([x, x], -2),
    "other heads": lambda x: np.concatenate([x, x], -3),
    "narrow": lambda x: x[..., :-1],
    "fewer axes": lambda x: x[0],
    "lists": lambda x: x.tolist(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_chunks_that_are_not_what_their_array_says_are_an_error(change):
    change = CHANGES[change]
    q, k, v = lazy(Q), lazy(K), lazy(V)
    calls = {
        "query": lambda: sdpa(twisted(Q, change), k, v),
        "key": lambda: sdpa(q, twisted(K, change), v),
        "value": lambda: sdpa_vjp(q, k, twisted(V, change), da.ones((2, 4, 9, 6), dtype="float32")).query,
        "grad_output": lambda: sdpa_vjp(q, k, v, twisted(np.ones((2, 4, 9, 6)), change)).query,
        "mask or bias": lambda: sdpa_weights(q, k, mask=twisted(np.ones((2, 4, 9, 21), bool), change)),
    }
    for name, call in calls.items():
        if change is CHANGES["float64"] and name == "grad_output":
            continue  # that is what it is
        with pytest.raises((TypeError, IndexError), match=rf"a chunk of {name} must be a numpy array|out of range"):
            call().compute()


def test_subclasses_of_arrays_are_arrays():
    class Own(np.ndarray):
        pass

    close(sdpa(lazy(Q), twisted(K, lambda x: x.view(Own)), lazy(V)), sdpa(Q, K, V))


class Store:
    """A store that returns what it wants."""

    chunks, dtype = (1, 1, 4, 8), np.dtype("float32")

    def __init__(self, array, change):
        self.array, self.change, self.shape = array, change, array.shape

    def __getitem__(self, index):
        return self.change(self.array[index])


@pytest.mark.parametrize("change", ["objects", "masked", "too few", "a single one", "too many", "narrow", "fewer axes"])
def test_stores_that_return_something_else_are_an_error(change):
    for query in (Q, lazy(Q)):
        with pytest.raises((TypeError, ValueError), match=r"the store (must return|returned)"), reading(limit=10_000):
            dask.compute(sdpa(query, Store(K, CHANGES[change]), Store(K, lambda x: x)))


# ---- what is not computed yet cannot be stored


def test_dask_arrays_are_no_pages_codes_or_scales():
    pages, table, codes = RNG.standard_normal((8, 2, 4, 8)), np.arange(8).reshape(2, 4), np.ones((2, 8), np.int8)
    calls = {
        "pages": lambda: Paged(lazy(pages), table, [9, 9]),
        "table": lambda: Paged(pages, lazy(table), [9, 9]),
        "codes": lambda: Quantized(lazy(codes), 1.0),
        "scale": lambda: Quantized(codes, da.ones((2, 1))),
        "x": lambda: Int8().encode(lazy(K)),
        "center": lambda: Int8(center=da.ones((2, 8))),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"{name} must be .*, got a dask array: pass it with \.compute\(\)"):
            call()


# ---- sizes and chunks of nothing


@pytest.mark.parametrize("axis", ["B", "H", "L", "S", "E", "Ev"])
def test_axes_without_entries(axis):
    n = {"B": 2, "H": 4, "L": 9, "S": 21, "E": 8, "Ev": 6} | {axis: 0}
    heads = 2 if n["H"] else 0
    shapes = (n["B"], n["H"], n["L"], n["E"]), (n["B"], heads, n["S"], n["E"]), (n["B"], heads, n["S"], n["Ev"])
    q, k, v = (np.ones(shape, "float32") for shape in shapes)
    x, y, z = (da.from_array(a, chunks=-1) for a in (q, k, v))
    for options in ({}, {"mask": Causal(), "query_offset": 0}, {"sink": 0.5}):
        output, sunk = sdpa(q, k, v, **options), {"sink"} & {*options}
        close(sdpa(x, y, z, **options), output)
        close(sdpa_weights(x, y, **options), sdpa_weights(q, k, **options))
        if not sunk:
            close(sdpa_state(x, y, z, **options).lse, sdpa_state(q, k, v, **options).lse)
        for got, expected in zip(
            sdpa_vjp(x, y, z, output, **options)[:3], sdpa_vjp(q, k, v, output, **options)[:3], strict=True
        ):
            close(got, expected)


def test_chunks_without_entries():
    x = lazy(Q, ((0, 1, 0, 1), (2, 0, 2), (0, 4, 5, 0), (8,)))
    y, z = (lazy(a, ((0, 2), (0, 1, 1), (0, 10, 0, 11), a.shape[-1:])) for a in (K, V))
    options = {"mask": Causal(), "query_offset": 3}
    output = sdpa(Q, K, V, **options)
    close(sdpa(x, y, z, **options), output)
    close(sdpa_weights(x, y, **options), sdpa_weights(Q, K, **options))
    for got, expected in zip(
        sdpa_vjp(x, y, z, output, **options)[:3], sdpa_vjp(Q, K, V, output, **options)[:3], strict=True
    ):
        close(got, expected)


# ---- biases, masks and positions


@pytest.mark.parametrize("shape", [(9, 21), (21,), (1, 21), (9, 1), (4, 1, 1), (2, 1, 1, 21), (1, 1), ()], ids=str)
def test_biases_of_one_chunk_and_their_gradients(shape):
    bias = RNG.standard_normal(shape)
    output = sdpa(Q, K, V, bias=bias)
    for given in (bias, da.from_array(bias, chunks=-1)):
        close(sdpa(lazy(Q), lazy(K), lazy(V), bias=given), output)
        close(sdpa_vjp(lazy(Q), lazy(K), lazy(V), output, bias=given).bias, sdpa_vjp(Q, K, V, output, bias=bias).bias)


def test_masks_of_delayed_functions():
    keep = RNG.random((9, 21)) < 0.5
    mask = da.from_delayed(dask.delayed(lambda: keep)(), keep.shape, bool)
    for own, given in ((keep, mask), (keep & ~keep, mask & ~mask), (Causal() & keep, Causal() & mask)):
        options = {"query_offset": 2}
        close(sdpa(lazy(Q), lazy(K), lazy(V), mask=given, **options), sdpa(Q, K, V, mask=own, **options))


def test_key_positions():
    for positions in (np.cumsum(RNG.integers(1, 3, 21)), np.cumsum(RNG.integers(1, 3, (2, 21)), -1)):
        options = {"mask": Window(6, 0), "query_offset": 20, "key_positions": positions, "bias": ALiBi(0.1)}
        close(sdpa(lazy(Q), lazy(K), lazy(V), **options), sdpa(Q, K, V, **options))
    with pytest.raises(TypeError, match=r"key_positions must be readable by the host, got a dask array"):
        sdpa(lazy(Q), lazy(K), lazy(V), mask=Causal(), query_offset=5, key_positions=da.arange(21))


# ---- inside of other things


def test_calls_within_tasks_persisted_results_and_results_that_are_written_to():
    def inner(block):
        return sdpa(lazy(Q), lazy(K), lazy(V)).compute(scheduler="threads")

    with dask.config.set(scheduler="threads", num_workers=2):
        nested = da.map_blocks(inner, da.zeros((6, 4, 9, 6), chunks=(2, 4, 9, 6)), dtype="float32").compute()
    np.testing.assert_array_equal(nested[:2], nested[4:])
    kept = sdpa(lazy(Q), lazy(K), lazy(V)).persist()
    kept.compute()[...] = 0
    close(kept, sdpa(Q, K, V))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_of_a_fork_computes_too():
    graph = sdpa(lazy(Q), lazy(K), lazy(V))
    graph.compute(scheduler="threads")
    process = multiprocessing.get_context("fork").Process(target=lambda: close(graph, sdpa(Q, K, V)))
    process.start()
    process.join(60)
    assert process.exitcode == 0
