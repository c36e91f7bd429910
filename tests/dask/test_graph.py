"""What is in the graph and what is not: counts of nodes, nothing read too early or in vain, errors before work."""

import pickle
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("dask.array", reason="Dask is not installed")
import dask
import dask.array as da

import sdpa_ref
from sdpa_ref import (
    ALiBi,
    Causal,
    Chunked,
    Dropout,
    FirstTokens,
    KeyLengths,
    KeyStarts,
    MaskFunction,
    Packed,
    Prefix,
    QueryLengths,
    Segments,
    Tree,
    Window,
    sdpa,
    sdpa_state,
    sdpa_vjp,
    sdpa_weights,
    sdpa_with_vjp,
)

LONG = 131072


def zeros(*shape, chunks, dtype="float32"):
    return da.zeros(shape, chunks=chunks, dtype=dtype)


def draw(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def count(array, name):
    """Return how many nodes have this name, before anything is optimised away."""
    return sum(isinstance(key, tuple) and key[0].rpartition("-")[0] == name for key in array.__dask_graph__())


MASKS = {
    "full": (None, 256),
    "causal": (Causal(), 136),
    "window": (Window(4096, 0), 31),
    "window and first tokens": (Window(4096, 0) | FirstTokens(4) & Causal(), 45),
    "documents": (Packed([8192] * 16), 16),
    "documents, causal": (Packed([16384] * 8) & Causal(), 24),
    "lengths": (KeyLengths(16384), 32),
    "chunks": (Chunked(8192), 16),
    "no queries": (QueryLengths(0), 0),
}


@pytest.mark.parametrize("mask", MASKS)
def test_states_only_of_blocks_that_a_row_sees(mask):
    rule, states = MASKS[mask]
    x = zeros(1, LONG, 8, chunks=(1, 8192, 8))
    lazy = sdpa(x, x, x, mask=rule)
    assert count(lazy, "sdpa-state") == states
    assert lazy.chunks == x.chunks


def raising(name, shape, chunks, allowed=()):
    """Return an array whose chunks raise when they are computed, but for the allowed ones."""
    data = np.random.default_rng(0).standard_normal(shape).astype("float32")

    def load(block_info=None):
        place = block_info[None]["chunk-location"]
        if place not in allowed:
            raise AssertionError(f"chunk {place} of {name} was read")
        return data[tuple(slice(*span) for span in block_info[None]["array-location"])]

    return da.map_blocks(load, chunks=chunks, dtype="float32", meta=np.empty((0,) * len(shape), "float32")), data


@pytest.mark.parametrize("order", ["chain", "tree"])
def test_dropped_chunks_are_not_read_and_none_when_the_graph_is_built(sync, order):
    chunks = ((2,), (64, 64, 64, 64), (8,))
    needed = [(0, 1, 0), (0, 2, 0)]
    key, k = raising("key", (2, 256, 8), chunks, needed)
    value, v = raising("value", (2, 256, 8), chunks, needed)
    (q,) = draw(1, (2, 40, 8))
    mask = Window(60, 0)
    with dask.config.set({"sdpa-ref.order": order}):
        lazy = sdpa(da.from_array(q, chunks=(2, 20, 8)), key, value, mask=mask, query_offset=140)
        state = sdpa_state(da.from_array(q, chunks=(2, 20, 8)), key, value, mask=mask, query_offset=140)
        gradients = sdpa_vjp(da.from_array(q, chunks=(2, 20, 8)), key, value, q, mask=mask, query_offset=140)
        weights = sdpa_weights(da.from_array(q, chunks=(2, 20, 8)), key, mask=mask, query_offset=140)
    expected = sdpa(q, k, v, mask=mask, query_offset=140)
    np.testing.assert_allclose(lazy.compute(), expected, atol=1e-6)
    np.testing.assert_allclose(state.output.compute(), expected, atol=1e-6)
    assert np.isfinite(gradients.key.compute()).all()
    assert weights.compute()[..., :64].max() == 0


def test_numpy_masks_without_a_key_in_a_block_skip_it(sync):
    keep = np.zeros((40, 256), bool)
    keep[:, 64:128] = True
    chunks = ((2,), (64, 64, 64, 64), (8,))
    key, k = raising("key", (2, 256, 8), chunks, [(0, 1, 0)])
    (q,) = draw(1, (2, 40, 8))
    got = sdpa(da.from_array(q), key, key, mask=keep).compute()
    np.testing.assert_allclose(got, sdpa(q, k, k, mask=keep), atol=1e-6)


def test_shapes_types_and_chunks_are_those_computed(sync):
    for dtype in ("float16", "float32", "float64"):
        q, k, g = draw(0, (3, 4, 30, 8), (3, 2, 50, 8), (3, 4, 30, 8), dtype=dtype)
        x, y = da.from_array(q, chunks=(2, 2, 11, 3)), da.from_array(k, chunks=(1, 1, 16, 8))
        state = sdpa_state(x, y, y)
        gradients = sdpa_vjp(x, y, y, g, sink=np.zeros(4))
        arrays = [sdpa(x, y, y), state.output, state.lse, sdpa_weights(x, y), *gradients[:3], gradients.sink]
        for lazy in arrays:
            for place in np.ndindex(lazy.numblocks):
                block = lazy.blocks[place].compute()
                assert block.dtype == lazy.dtype == lazy._meta.dtype
                assert block.shape == tuple(c[n] for c, n in zip(lazy.chunks, place, strict=True))
        assert state.output.dtype == dtype
        assert state.output.chunks == ((1, 1, 1), (2, 2), (11, 11, 8), (8,))
        assert gradients.key.shape == k.shape


def test_graphs_are_small_and_pickle():
    x = zeros(1, LONG, 8, chunks=(1, 8192, 8))
    rules = [Causal(), Window(4096, 0) | FirstTokens(4), Prefix(100), Chunked(1000), KeyLengths(9), KeyStarts(9)]
    for mask in rules:
        assert len(pickle.dumps(dict(sdpa(x, x, x, mask=mask).__dask_graph__()))) < 400_000
    y = zeros(1, 512, 8, chunks=(1, 128, 8))
    trees = Tree(np.arange(512) - 1), np.tri(512, dtype=bool), Causal() & ~Window(9, 9)
    more = [Segments(np.arange(512) % 3), Packed([200, 300]) & Causal(), *trees]
    for mask in more:
        pickle.dumps(dict(sdpa(y, y, y, mask=mask, query_offset=0).__dask_graph__()))


def test_rows_of_documents_take_24_bytes_each():
    x = zeros(1, 2**16, 8, chunks=(1, 4096, 8))
    lazy = sdpa(x, x, x, mask=Packed([2**14] * 4) & Causal())
    plain = sdpa(x, x, x, mask=Causal())
    more = len(pickle.dumps(dict(lazy.__dask_graph__()))) - len(pickle.dumps(dict(plain.__dask_graph__())))
    assert more < 26 * 2**16


def test_the_forward_pass_of_output_and_gradients_is_computed_once():
    x = zeros(1, 256, 8, chunks=(1, 64, 8))
    output, vjp = sdpa_with_vjp(x, x, x)
    gradients = vjp(output)
    graphs = (x.__dask_graph__() for x in (output, gradients.query, gradients.key, gradients.value))
    whole = {key for graph in graphs for key in graph}
    assert sum(isinstance(k, tuple) and k[0].startswith("sdpa-state") for k in whole) == 16


def test_unknown_sizes_are_an_error():
    x = zeros(40, 8, chunks=(10, 8))
    unknown = x[x[:, 0] > 0]
    for arrays in ((unknown, x, x), (x, unknown, x), (x, x, unknown)):
        with pytest.raises(ValueError, match=r"compute_chunk_sizes\(\)"):
            sdpa(*arrays)


def test_arrays_of_expressions_are_an_error():
    script = (
        "import dask\ndask.config.set({'array.query-planning': True})\nimport dask.array as da, sdpa_ref\n"
        "x = da.zeros((4, 8))\ntry:\n    sdpa_ref.sdpa(x, x, x)\nexcept TypeError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if "NotImplementedError" in done.stderr or "ImportError" in done.stderr:
        pytest.skip("this Dask has no array expressions")
    assert "array.query-planning" in done.stdout, done.stderr


class Foreign:
    """A collection of Dask that is no array of chunks."""

    shape, dtype, ndim = (4, 8), np.dtype("float32"), 2

    def __dask_graph__(self):
        return {}


def test_other_collections_are_an_error():
    x = zeros(4, 8, chunks=2)
    with pytest.raises(TypeError, match=r"key is a .*Foreign, of which only Dask can compute a part"):
        sdpa(x, Foreign(), x)
    with pytest.raises(TypeError, match=r"key is a dask\.delayed"):
        sdpa(x, dask.delayed(np.zeros)((4, 8)), x)


ERRORS = {
    "out": (dict(out=np.empty((4, 8), "float32")), ValueError, "out must be None with Dask arrays"),
    "mask type": (dict(mask=zeros(4, 4, chunks=2)), TypeError, "bias="),
    "mask shape": (dict(mask=da.zeros((3, 4), dtype=bool)), ValueError, "mask must broadcast"),
    "bias shape": (dict(bias=zeros(3, 4, chunks=2)), ValueError, "bias must broadcast"),
    "lengths": (dict(mask=lambda: KeyLengths(da.from_array(np.array([1, 2])))), TypeError, r"\.compute\(\)"),
    "sink": (dict(sink=da.zeros(1)), TypeError, r"\.compute\(\)"),
    "offset": (dict(query_offset=da.zeros((), dtype=int)), TypeError, r"compute\(\)"),
    "scale": (dict(scale=da.zeros(())), TypeError, "scale must be a real number"),
    "slopes": (dict(bias=lambda: ALiBi(da.zeros(1))), TypeError, r"\.compute\(\)"),
    "backend": (dict(backend="nonsense"), ValueError, "unknown backend"),
    "kernel": (dict(backend="cupy"), (TypeError, sdpa_ref.BackendUnavailable), "cupy"),
    "keyword": (dict(is_causal=True), TypeError, "is_causal"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors_come_at_the_call(case):
    options, kind, words = ERRORS[case]
    key, _ = raising("key", (4, 8), ((2, 2), (8,)))
    with pytest.raises(kind, match=words):
        sdpa(key, key, key, **{name: o() if callable(o) else o for name, o in options.items()})


def test_shapes_that_do_not_fit_are_an_error():
    key, _ = raising("key", (4, 8), ((2, 2), (8,)))
    with pytest.raises(ValueError, match="same width"):
        sdpa(key, zeros(4, 7, chunks=2), key)
    with pytest.raises(ValueError, match="grad_output must have shape"):
        sdpa_vjp(key, key, key, zeros(4, 7, chunks=2))
    with pytest.raises(TypeError, match="one kind"):
        sdpa(*[np.zeros((4, 8), "float32")] * 3, bias=da.zeros((4, 4)))
    with pytest.raises(TypeError, match="Paged or Quantized"):
        sdpa(key, sdpa_ref.Int8().encode(np.zeros((4, 8), "float32")), key)


def test_stages_are_those_of_arrays_in_memory():
    x = zeros(4, 8, chunks=2)
    with pytest.raises(NotImplementedError, match=r"takes NumPy arrays: pass \.compute\(\)"):
        sdpa_ref.sdpa_stages(x, x, x)


def test_numpy_arrays_beside_dask_arrays_are_parts_of_the_graph(sync):
    q, k, v = draw(0, (2, 9, 8), (2, 20, 8), (2, 20, 8))
    expected = sdpa(q, k, v)
    for arrays in ((q, da.from_array(k, chunks=7), v), (da.from_array(q, chunks=4), k, v)):
        lazy = sdpa(*arrays)
        assert isinstance(lazy, da.Array)
        np.testing.assert_allclose(lazy.compute(), expected, atol=1e-6)


def test_bits_of_dropout_do_not_depend_on_chunks(sync):
    q, k, v = draw(0, (3, 2, 2, 20, 8), (3, 2, 2, 50, 8), (3, 2, 2, 50, 8))
    one = sdpa(q, k, v, dropout=Dropout(0.5, 3), backend="reference")
    for chunks in (1, 7, 13):
        arrays = (da.from_array(x, chunks=(1, 1, 1, chunks, 8)) for x in (q, k, v))
        lazy = sdpa(*arrays, dropout=Dropout(0.5, 3), backend="reference").compute()
        np.testing.assert_allclose(lazy, one, atol=1e-6)


def test_states_add_up_before_they_are_computed(sync):
    q, k, v = draw(0, (2, 4, 9, 8), (2, 4, 20, 8), (2, 4, 20, 8))
    x, y, z = (da.from_array(a, chunks=(1, 2, 7, 8)) for a in (q, k, v))
    empty = sdpa_ref.AttentionState.empty((2, 4, 9), 8, like=x)
    whole = sdpa_state(x, y[:, :, :9], z[:, :, :9]) + empty + sdpa_state(x, y[:, :, 9:], z[:, :, 9:])
    assert isinstance(whole.output, da.Array)
    expected = sdpa(q, k, v, sink=np.arange(4.0))
    np.testing.assert_allclose(whole.with_sink(np.arange(4.0)).output.compute(), expected, atol=1e-6)


def test_functions_of_indices_get_those_of_the_whole(sync):
    q, k, v = draw(0, (2, 3, 2, 20, 8), (2, 3, 2, 50, 8), (2, 3, 2, 50, 8))

    def score(s, b, h, i, j):
        return s + 0.1 * (b % 3) + 0.2 * h - 0.01 * abs(i - j)

    mask = MaskFunction(lambda b, h, i, j: (b + 2 * h + i + j) % 3 > 0)
    arrays = [da.from_array(x, chunks=(1, 2, 1, 9, 8)) for x in (q, k, v)]
    lazy = sdpa(*arrays, mask=mask, score_mod=score)
    np.testing.assert_allclose(lazy.compute(), sdpa(q, k, v, mask=mask, score_mod=score), atol=1e-6)


def test_a_worker_without_the_kernel_says_so(sync, monkeypatch):
    x = zeros(4, 8, chunks=2)
    lazy = sdpa(x, x, x, backend="reference")

    def load(name):
        raise sdpa_ref.BackendUnavailable(f"backend {name!r} cannot run here")

    monkeypatch.setattr(sdpa_ref.registry, "load", load)
    with pytest.raises(sdpa_ref.BackendUnavailable, match="the client chose backend 'reference' for the blocks"):
        lazy.compute()


def test_gradients_of_blocks_need_a_backend_that_has_them(monkeypatch):
    from sdpa_ref import reference

    x = zeros(4, 8, chunks=2)
    monkeypatch.setattr(reference, "TASKS", frozenset({"vjp"}))
    with pytest.raises(NotImplementedError, match="'reference' has no gradients of blocks"):
        sdpa_vjp(x, x, x, x, backend="reference")
    np.testing.assert_array_equal(sdpa(x, x, x, backend="reference").compute(scheduler="synchronous"), 0)


def test_masked_chunks_are_an_error():
    x = da.ma.masked_greater(zeros(4, 8, chunks=2), 1)
    with pytest.raises(TypeError, match="chunks that are NumPy or CuPy arrays"):
        sdpa(x, x, x)
