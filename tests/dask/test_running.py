"""While a graph runs: delays change no bit, and few states are alive at a time, counted by their finalisers."""

import contextlib
import threading
import time
import weakref

import numpy as np
import pytest

pytest.importorskip("dask.array", reason="Dask is not installed")
import dask
import dask.array as da
from sdpa_dask import tasks

from sdpa_ref import Causal, reading, sdpa, sdpa_vjp, sdpa_weights
from sdpa_ref.testing import assert_same_bits


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


class Store:
    """Keys that lie somewhere, of which a part is returned after `wait`."""

    def __init__(self, array, chunk, wait=lambda: None):
        self.array, self.wait = array, wait
        self.shape, self.dtype, self.chunks = array.shape, array.dtype, (*array.shape[:-2], chunk, array.shape[-1])

    def __getitem__(self, index):
        self.wait()
        return self.array[index]


@contextlib.contextmanager
def computing(how, workers):
    """Let Dask compute with so many threads, or workers of one thread each."""
    if how == "threads":
        with dask.config.set(scheduler="threads", num_workers=workers):
            yield
        return
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    with (
        dask.config.set({"distributed.admin.system-monitor.gil.enabled": False}),
        distributed.LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=False, dashboard_address=None, memory_limit=0
        ) as cluster,
        distributed.Client(cluster),
    ):
        yield


def randomly():
    """Wait for up to five milliseconds."""
    time.sleep(np.random.default_rng().random() * 0.005)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["threads", "distributed"])
def test_random_delays_change_no_bit(how, monkeypatch):
    """Of chunks, of a store, and of each kernel; in a chain, in a tree, and in gradients."""
    q, k, v, g = draw(0, (2, 4, 60, 16), (2, 2, 300, 16), (2, 2, 300, 8), (2, 4, 60, 8))

    def late(chunk):
        randomly()
        return chunk

    def graphs(wait):
        x, y, z, d = (da.from_array(a, chunks=(1, 2, 32, -1)) for a in (q, k, v, g))
        if wait is randomly:
            x, y, z = (a.map_blocks(late, dtype=a.dtype) for a in (x, y, z))
        options = {"mask": Causal(), "query_offset": "end", "sink": np.arange(4.0)}
        with reading(limit=2 * 16 * 8 * 64):
            lazy = [sdpa(x, y, z, **options), sdpa(x, Store(k, 64, wait), Store(v, 64, wait), **options)]
        with dask.config.set({"sdpa-ref.order": "tree"}):
            lazy.append(sdpa(x, y, z, **options))
        return [*lazy, sdpa_weights(x, y, **options), *sdpa_vjp(x, y, z, d, **options)[:3]]

    expected = dask.compute(*graphs(lambda: None), scheduler="synchronous")
    for name in ("state", "result", "total"):
        made = getattr(tasks, name)
        monkeypatch.setattr(
            tasks, name, lambda *inputs, made=made, **options: (randomly(), made(*inputs, **options))[1]
        )
    with computing(how, 3):
        found = dask.compute(*graphs(randomly))
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


class Alive:
    """How many sums there are, and were at most."""

    def __init__(self):
        self.now, self.most, self.made, self.lock = 0, 0, 0, threading.Lock()

    def watch(self, sums):
        with self.lock:
            self.made, self.now = self.made + 1, self.now + 1
            self.most = max(self.most, self.now)
        weakref.finalize(sums.m, self.gone)
        return sums

    def gone(self):
        with self.lock:
            self.now -= 1


ALIVE, STATE = Alive(), tasks.state


def watched(*inputs):
    """Return a state that is counted; a function that is sent by its name, as workers are in this process."""
    return ALIVE.watch(STATE(*inputs))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("how", "order", "most"),
    [("threads", "chain", 6), ("threads", "tree", 32), ("distributed", "chain", 128), ("distributed", "tree", 128)],
)
def test_few_states_are_alive_at_a_time(how, order, most, monkeypatch):
    """Of the 512 that eight blocks of rows make.

    A worker of a cluster begins another block while it is not told to go on, so how many there are depends on how fast
    messages are: 8 in a chain, 21 to 46 in a tree. A quarter is the bound there; all at once would be 512.
    """
    monkeypatch.setattr(tasks, "state", watched)
    ALIVE.__init__()
    q, k = draw(1, (2, 512, 16), (2, 4096, 16))
    with dask.config.set({"sdpa-ref.order": order}), reading(limit=2 * 16 * 2 * 8 * 64):
        lazy = sdpa(da.from_array(q, chunks=(2, 64, 16)), Store(k, 64), Store(k, 64))
    with computing(how, 2):
        got = lazy.compute()
    np.testing.assert_allclose(got, sdpa(q, k, k), atol=1e-6)
    assert ALIVE.made == 512
    assert ALIVE.most <= most
