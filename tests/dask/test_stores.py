"""Keys and values in stores: read piece by piece, within a limit, and only what some row sees."""

import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from sdpa_ref import (
    ALiBi,
    Causal,
    Dropout,
    FirstTokens,
    MaskFunction,
    Window,
    reading,
    sdpa,
    sdpa_stages,
    sdpa_state,
    sdpa_vjp,
    sdpa_weights,
    sdpa_with_vjp,
)
from sdpa_ref.sources import Source, pieces
from sdpa_ref.testing import assert_same_bits


def draw(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


class Store:
    """An array of which only slices can be read or written, as those of a store; it remembers which keys were read."""

    def __init__(self, array, chunk=64, axis=-2):
        self.array, self.axis, self.read = array, axis, []
        self.shape, self.dtype = array.shape, array.dtype
        chunks = list(array.shape)
        chunks[axis] = chunk
        self.chunks = tuple(chunks)

    def __getitem__(self, index):
        self.read.append(index[self.axis])
        return self.array[index]

    def __setitem__(self, index, numbers):
        self.array[index] = numbers


CALLS = {
    "full": {},
    "causal": {"mask": Causal(), "query_offset": "end"},
    "window": {"mask": Window(1000, 0) | FirstTokens(4), "query_offset": "end"},
    "bias": {"bias": (np.random.default_rng(0).standard_normal((4, 20, 3000)), ALiBi(0.1)), "query_offset": 3},
    "options": {"dropout": Dropout(0.2, 1), "sink": 0.3, "softcap": 3.0},
    "function": {"mask": MaskFunction(lambda b, h, i, j: (b + h + i + j) % 3 > 0)},
}


@pytest.mark.parametrize("call", CALLS)
def test_stores_give_what_arrays_give(backend, call):
    q, k, v, g = draw(0, (2, 4, 20, 16), (2, 2, 3000, 16), (2, 2, 3000, 8), (2, 4, 20, 8))
    options = CALLS[call] | {"backend": backend}
    d_key, d_value = Store(np.empty_like(k)), Store(np.empty_like(v))
    told = []
    with reading(limit=1_000_000, progress=lambda done, total: told.append((done, total))):
        got = sdpa(q, Store(k), Store(v), **options)
    with reading(limit=1_000_000, grad_key=d_key, grad_value=d_value):
        gradients = sdpa_vjp(q, Store(k), Store(v), g, **options)
    one, whole = sdpa(q, k, v, **options), sdpa_vjp(q, k, v, g, **options)
    assert [done for done, _ in told] == [*range(1, told[-1][1] + 1)]
    assert len(told) > 2
    if backend == "numba":
        assert_same_bits(got, one)
    np.testing.assert_allclose(got, one, atol=1e-6)
    assert gradients.key is d_key
    for found, expected in ((gradients.query, whole.query), (d_key.array, whole.key), (d_value.array, whole.value)):
        np.testing.assert_allclose(found, expected, atol=2e-6)
    if "sink" in options:
        np.testing.assert_allclose(gradients.sink, whole.sink, atol=1e-6)
    if "bias" in options:
        np.testing.assert_allclose(gradients.bias[0], whole.bias[0], atol=1e-6)


def test_other_shapes_and_layouts():
    q, k, v = draw(1, (20, 16), (300, 16), (300, 8))
    with reading(limit=4000):
        np.testing.assert_allclose(sdpa(q, Store(k), Store(v)), sdpa(q, k, v), atol=1e-6)
        q, k, v = draw(2, (2, 20, 4, 16), (1, 300, 2, 16), (2, 300, 2, 8), dtype="float16")
        got = sdpa(q, Store(k, axis=-3), Store(v, axis=-3), layout="LHE")
        np.testing.assert_allclose(got, sdpa(q, k, v, layout="LHE"), atol=2e-3)
        q, k, g = draw(3, (2, 3, 4, 16), (1, 300, 4, 16), (2, 3, 4, 16))
        target = Store(np.empty_like(k), axis=-3)
        with reading(limit=4000, grad_value=target):
            sdpa_vjp(q, k, Store(k, axis=-3), g, layout="LHE")
        np.testing.assert_allclose(target.array, sdpa_vjp(q, k, k, g, layout="LHE").value, atol=1e-6)


def test_the_other_functions():
    q, k, v, g = draw(4, (2, 20, 16), (2, 300, 16), (2, 300, 8), (2, 20, 8))
    with reading(limit=4000):
        state, whole = sdpa_state(q, Store(k), Store(v)), sdpa_state(q, k, v)
        np.testing.assert_allclose(state.lse, whole.lse, atol=1e-6)
        np.testing.assert_allclose((state + whole).output, whole.output, atol=1e-6)
        np.testing.assert_allclose(sdpa_weights(q, Store(k)), sdpa_weights(q, k), atol=1e-6)
        np.testing.assert_allclose(sdpa_stages(q, Store(k), Store(v)).lse, whole.lse, atol=1e-6)
        output, vjp = sdpa_with_vjp(q, Store(k), Store(v))
        np.testing.assert_allclose(vjp(g).key, sdpa_vjp(q, k, v, g).key, atol=1e-6)
        out = np.empty_like(output)
        assert sdpa(q, Store(k), Store(v), out=out) is out
        np.testing.assert_allclose(out, output, atol=1e-6)


def test_only_what_a_row_sees_is_read_and_no_piece_is_larger_than_the_limit():
    q, k = draw(5, (2, 20, 16), (2, 10_000, 16))
    key, value = Store(k), Store(k)
    with reading(limit=2**20):
        sdpa(q, key, value, mask=Window(100, 0), query_offset=6000)
    spans = [(s.start, s.stop) for s in key.read]
    assert all((stop - start) * 2 * 16 * 4 * 4 <= 2**20 for start, stop in spans)
    assert min(spans)[0] > 3000
    assert max(spans)[1] < 9000
    assert value.read == key.read


def test_nothing_is_read_before_the_errors():
    (q,) = draw(6, (20, 16))
    key = Store(np.zeros((300, 16), "float32"))
    with pytest.raises(ValueError, match="query_offset must say"):
        sdpa(q, key, key, mask=Causal())
    with pytest.raises(ValueError, match="same width"):
        sdpa(q, Store(np.zeros((300, 8), "float32")), key)
    with reading(grad_key=Store(np.zeros((3, 16)))), pytest.raises(ValueError, match="grad_key must have the shape"):
        sdpa_vjp(q, key, key, q)
    assert not key.read


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"limit": 0}, ValueError, "limit"),
        ({"limit": 1.5}, TypeError, "limit"),
        ({"progress": 1}, TypeError, "progress"),
    ],
)
def test_wrong_settings_are_an_error(options, kind, words):
    with pytest.raises(kind, match=words), reading(**options):
        pass


def test_pieces_are_multiples_of_1024_and_of_chunks():
    assert pieces(5000, 1, 2500, 1) == [(0, 2048), (2048, 4096), (4096, 5000)]
    assert pieces(10_000, 1, 7000, 1536)[0] == (0, 6144 - 6144 % 3072)
    assert pieces(100, 1, 10, 1) == [(j, min(j + 8, 100)) for j in range(0, 100, 8)]
    assert pieces(0, 1, 10, 1) == []
    assert pieces(9, 100, 10, 1) == [(0, 4), (4, 8), (8, 9)]
    assert pieces(90, 1, 50, 6)[0] == (0, 48)


def test_bits_of_dropout_do_not_depend_on_pieces(backend):
    q, k = draw(12, (2, 20, 16), (2, 300, 16))
    options = {"dropout": Dropout(0.5, 1), "backend": backend}
    expected = sdpa(q, k, k, **options)
    for limit, chunk in ((1, 1), (5000, 7), (9000, 30)):
        with reading(limit=limit):
            np.testing.assert_allclose(sdpa(q, Store(k, chunk), Store(k, chunk), **options), expected, atol=1e-6)


def test_a_mapped_file_is_sent_as_its_place(tmp_path):
    (numbers,) = draw(7, (3, 4000, 16))
    np.save(tmp_path / "keys.npy", numbers)
    mapped = np.load(tmp_path / "keys.npy", mmap_mode="r")
    views = (mapped, mapped[1:, ::-2], mapped.swapaxes(0, 1), mapped[2:, 1000:, 3:5])
    for view in views:
        sent = pickle.dumps(Source(view))
        again = pickle.dumps(pickle.loads(sent))  # by the scheduler of a cluster
        assert max(len(sent), len(again)) < 1000
        assert_same_bits(np.asarray(pickle.loads(again).array), np.asarray(view))


def test_zarr_arrays_and_mapped_files(tmp_path):
    zarr = pytest.importorskip("zarr", reason="zarr is not installed")
    q, k = draw(8, (2, 40, 16), (2, 3000, 16))
    stored = zarr.create_array(tmp_path / "keys.zarr", shape=k.shape, chunks=(1, 512, 16), dtype=k.dtype)
    stored[...] = k
    np.save(tmp_path / "keys.npy", k)
    mapped = np.load(tmp_path / "keys.npy", mmap_mode="r")
    expected = sdpa(q, k, k, mask=Causal(), query_offset="end")
    with reading(limit=300_000):
        for key in (stored, mapped):
            np.testing.assert_allclose(sdpa(q, key, key, mask=Causal(), query_offset="end"), expected, atol=1e-6)


def test_stores_are_read_in_the_tasks_of_a_graph(tmp_path):
    da = pytest.importorskip("dask.array", reason="Dask is not installed")
    q, k, g = draw(9, (2, 40, 16), (2, 3000, 16), (2, 40, 16))
    key, value = Store(k), Store(k)
    x = da.from_array(q, chunks=(1, 16, 16))
    with reading(limit=600_000):
        lazy = sdpa(x, key, value, mask=Window(900, 0), query_offset=2000)
        gradients = sdpa_vjp(x, key, value, g, mask=Window(900, 0), query_offset=2000)
    assert not key.read
    expected = sdpa(q, k, k, mask=Window(900, 0), query_offset=2000)
    np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), expected, atol=1e-6)
    assert all(s.start >= 1024 for s in key.read)
    one = sdpa_vjp(q, k, k, g, mask=Window(900, 0), query_offset=2000)
    np.testing.assert_allclose(gradients.key.compute(scheduler="synchronous"), one.key, atol=1e-6)


@pytest.mark.parametrize("order", ["chain", "tree"])
def test_a_task_reads_several_pieces(order, monkeypatch):
    da = pytest.importorskip("dask.array", reason="Dask is not installed")
    from dask import config
    from sdpa_dask import cuts

    monkeypatch.setattr(cuts, "MOST_TASKS", 3)
    q, k = draw(10, (2, 40, 16), (2, 12_000, 16))
    bias, keep = draw(11, (40, 12_000))[0], np.random.default_rng(0).random((40, 12_000)) < 0.5
    function = MaskFunction(lambda b, h, i, j: (i + j) % 7 > 0)
    for options in ({"mask": Window(3000, 0)}, {"mask": function & keep, "bias": bias}, {"dropout": Dropout(0.5, 1)}):
        key = Store(k)
        with reading(limit=600_000), config.set({"sdpa-ref.order": order}):
            lazy = sdpa(da.from_array(q, chunks=(1, 16, 16)), key, key, query_offset=7000, **options)
        assert sum(name[0].startswith("sdpa-state") for name in lazy.__dask_graph__() if isinstance(name, tuple)) < 20
        expected = sdpa(q, k, k, query_offset=7000, **options)
        np.testing.assert_allclose(lazy.compute(scheduler="synchronous"), expected, atol=1e-6)
        assert max(part.stop - part.start for part in key.read) <= 2048
        assert "mask" not in options or "bias" in options or min(part.start for part in key.read) >= 2048


BOUNDED = """
import resource, sys
import numpy as np
from sdpa_ref import Causal, reading, sdpa
rng = np.random.default_rng(0)
q = rng.standard_normal((2, 64, 64)).astype("float32")
path, lazy = sys.argv[1], sys.argv[2] == "dask"
key = np.lib.format.open_memmap(path, "w+", "float32", (2, 400_000, 64))
for j in range(0, 400_000, 50_000):
    key[:, j : j + 50_000] = rng.standard_normal((2, 50_000, 64))
key.flush()
sdpa(q, key[:, :2048], key[:, :2048], mask=Causal(), query_offset="end")
if lazy:
    import dask.array as da
    q = da.from_array(q, chunks=(1, 32, 64))
    with reading(limit=2**24):
        sdpa(q, key, key).blocks[0, 0].compute(scheduler="threads", num_workers=2)
used = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
limit = used + 100_000_000
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # keys and values are 410 MB
with reading(limit=2**24):
    got = sdpa(q, key, key, mask=Causal(), query_offset="end")
    if lazy:
        got = got.compute(scheduler="threads", num_workers=2)
try:
    np.ones(200_000_000, np.uint8)
except MemoryError:
    print(got.shape, np.isfinite(got).all())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limit is that of Linux")
@pytest.mark.parametrize("how", ["loop", "dask"])
def test_four_times_as_many_keys_as_the_memory_has_room_for(tmp_path, how):
    if how == "dask":
        pytest.importorskip("dask.array", reason="Dask is not installed")
    pytest.importorskip("numba", reason="the reference takes memory for all scores")
    command = [sys.executable, "-c", BOUNDED, str(tmp_path / "keys.npy"), how]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"SDPA_REF_NUM_THREADS": "1"})
    assert done.stdout.strip() == "(2, 64, 64) True", done.stderr
