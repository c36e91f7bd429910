"""Equal bits: whatever the scheduler, the workers and the cuts, and those of one call at borders of 1024 keys."""

import os
import signal
import time

import numpy as np
import pytest

pytest.importorskip("dask.array", reason="Dask is not installed")
if "numba" not in os.environ.get("SDPA_TEST_REQUIRE", ""):
    pytest.importorskip("numba")
import dask
import dask.array as da

from sdpa_ref import (
    ALiBi,
    Causal,
    Chunked,
    Dropout,
    FirstTokens,
    KeyLengths,
    Packed,
    Window,
    sdpa,
    sdpa_state,
    sdpa_vjp,
    sdpa_weights,
)
from sdpa_ref.testing import assert_same_bits


def draw(seed, *shapes, dtype="float32"):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def compute(lazy, scheduler="synchronous", **options):
    return dask.compute(lazy, scheduler=scheduler, **options)[0]


RNG = np.random.default_rng(7)
CALLS = {
    "full": {},
    "causal": {"mask": Causal(), "query_offset": "end"},
    "window": {"mask": Window(1500, 0) | FirstTokens(4) & Causal(), "query_offset": "end"},
    "chunks": {"mask": Chunked(1000), "query_offset": 2900},
    "lengths": {"mask": KeyLengths([2500, 3900])},
    "documents": {"mask": Packed([100, 150], [2000, 1500]) & Causal(), "query_offset": "end"},
    "mask": {"mask": RNG.random((250, 3900)) < 0.3},
    "bias": {"bias": (RNG.standard_normal((250, 3900)).astype("float32"), ALiBi(0.01)), "query_offset": 3000},
    "options": {"softcap": 4.0, "sink": np.array([0.5, -1, 2, 0]), "dropout": Dropout(0.3, 5)},
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("call", CALLS)
def test_bits_of_one_call_where_borders_are_multiples_of_1024(call, dtype):
    q, k, v = draw(0, (2, 4, 250, 24), (2, 2, 3900, 24), (2, 2, 3900, 16), dtype=dtype)
    options = CALLS[call]
    one = sdpa(q, k, v, **options, backend="numba")
    for rows, keys in ((250, 1024), (77, (2048, 1024, 828)), (31, 3900)):
        x = da.from_array(q, chunks=(1, 2, rows, 24))
        y, z = (da.from_array(a, chunks=(2, 1, keys, -1)) for a in (k, v))
        assert_same_bits(compute(sdpa(x, y, z, **options, backend="numba")), one)


def test_compiled_functions_of_scores_count_from_the_whole():
    score = pytest.importorskip("tilted").compiled
    q, k, v, g = draw(6, (3, 4, 60, 24), (3, 2, 1500, 24), (3, 2, 1500, 16), (3, 4, 60, 16))
    x = da.from_array(q, chunks=(1, 2, 33, 24))
    y, z = (da.from_array(a, chunks=(2, 1, 1024, -1)) for a in (k, v))
    assert_same_bits(compute(sdpa(x, y, z, score_mod=score)), sdpa(q, k, v, score_mod=score, backend="numba"))
    found, one = sdpa_vjp(x, y, z, g, score_mod=score), sdpa_vjp(q, k, v, g, score_mod=score)
    for a, b in zip(compute(list(found[:3])), one[:3], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_states_and_a_single_row_have_the_bits_of_one_call():
    for L in (1, 40):
        q, k, v = draw(1, (4, L, 24), (2, 3900, 24), (2, 3900, 16))
        one = sdpa_state(q, k, v, backend="numba")
        x, y, z = (da.from_array(a, chunks=(2, 1024, -1)) for a in (q, k, v))
        with dask.config.set({"sdpa-ref.order": "chain"}):
            got = sdpa_state(x, y, z, backend="numba")
        assert_same_bits(compute(got.output), one.output)
        assert_same_bits(compute(got.lse), one.lse)


@pytest.mark.parametrize("order", ["chain", "tree"])
@pytest.mark.parametrize("call", ["full", "causal", "window", "options"])
def test_bits_do_not_depend_on_cuts_of_rows_heads_and_batch(call, order):
    q, k, v = draw(0, (2, 4, 250, 24), (2, 2, 3900, 24), (2, 2, 3900, 16))
    keys = (2, 1, (300, 500, 100, 1000, 4, 996, 1000), -1)
    found = []
    with dask.config.set({"sdpa-ref.order": order}):
        for batch, heads, rows in ((2, 4, 250), (1, 2, 33), (1, 4, 5), (2, 2, (1, 200, 49))):
            x = da.from_array(q, chunks=(batch, heads, rows, 24))
            y, z = (da.from_array(a, chunks=keys) for a in (k, v))
            found.append(compute(sdpa(x, y, z, **CALLS[call], backend="numba")))
    for other in found[1:]:
        assert_same_bits(other, found[0])


def test_a_tree_over_the_states_that_are_there_would_have_other_bits():
    """What makes the test above see a tree that goes by anything else than the index of the keys."""
    from sdpa_dask import graph as forward

    def compact(graph, name, index, leaves, how):
        return forward_tree(graph, name, index, dict(enumerate(leaves.values())), how)

    forward_tree = forward.tree
    q, k, v = draw(0, (250, 24), (3900, 24), (3900, 16))
    found = []
    with pytest.MonkeyPatch.context() as patch, dask.config.set({"sdpa-ref.order": "tree"}):
        patch.setattr(forward, "tree", compact)
        for rows in (250, 50):
            x, y, z = (da.from_array(a, chunks=(n, -1)) for a, n in ((q, rows), (k, 150), (v, 150)))
            mask = Window(1200, 0)
            found.append(compute(sdpa(x, y, z, mask=mask, query_offset=3650, backend="numba")))
    assert not np.array_equal(*found)


def graph_of_everything():
    q, k, v = draw(3, (2, 4, 120, 24), (2, 2, 600, 24), (2, 2, 600, 16))
    x, y, z = (da.from_array(a, chunks=(1, 2, 64, -1)) for a in (q, k, v))
    options = {"mask": Causal(), "query_offset": "end", "sink": np.arange(4.0)}
    with dask.config.set({"sdpa-ref.order": "tree"}):
        tree = sdpa(x, y, z, **options)
    output = sdpa(x, y, z, **options)
    gradients = sdpa_vjp(x, y, z, output, **options)
    return [
        output,
        tree,
        sdpa_weights(x, y, **options),
        gradients.query,
        gradients.key,
        gradients.value,
        gradients.sink,
    ]


def test_bits_do_not_depend_on_the_scheduler():
    one = compute(graph_of_everything())
    for threads in (1, 2, 4):
        for a, b in zip(compute(graph_of_everything(), "threads", num_workers=threads), one, strict=True):
            assert_same_bits(a, b)


@pytest.fixture(scope="module")
def cluster():
    """Two worker processes on this machine."""
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    with dask.config.set({"distributed.admin.system-monitor.gil.enabled": False}):
        cluster = distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit=0
        )
        with cluster, distributed.Client(cluster) as client:
            yield client


@pytest.mark.filterwarnings("ignore")
def test_bits_do_not_depend_on_workers(cluster):
    one = compute(graph_of_everything())
    for a, b in zip(cluster.gather(cluster.compute(graph_of_everything())), one, strict=True):
        assert_same_bits(a, b)


def slowly(x):
    time.sleep(0.02)
    return x


@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_changes_no_bit(cluster):
    q, k, v = draw(4, (1, 2, 256, 24), (1, 2, 2048, 24), (1, 2, 2048, 24))
    arrays = [da.from_array(a, chunks=(1, 1, 64, -1)).map_blocks(slowly, dtype=a.dtype) for a in (q, k, v)]
    lazy = sdpa(*arrays, mask=Causal(), query_offset="end", backend="numba")
    future = cluster.compute(lazy)
    seen = {pid for _ in range(1) for pid in cluster.run(os.getpid).values()}
    while not any(name.startswith("sdpa-state") for names in cluster.has_what().values() for name in map(str, names)):
        time.sleep(0.01)
        if future.done():
            break
    os.kill(min(seen), getattr(signal, "SIGKILL", signal.SIGTERM))
    assert_same_bits(future.result(timeout=600), compute(lazy))


@pytest.mark.filterwarnings("ignore")
def test_a_decode_step_moves_little(cluster, monkeypatch):
    """States, and a key of which the value is the same array: a shard that lies apart from its value would be moved."""
    distributed = pytest.importorskip("distributed")
    scheduler = type(cluster.cluster.scheduler)
    cost = scheduler.get_comm_cost  # a shard of a megabyte is moved to a worker that may be free half a second earlier
    monkeypatch.setattr(scheduler, "get_comm_cost", lambda *tried: 1e6 * cost(*tried))
    q, k = draw(5, (1, 8, 1, 64), (1, 2, 8192, 64))
    key = cluster.persist(da.from_array(k, chunks=(1, 2, 2048, 64)))
    distributed.wait(key)

    def moved():
        return sum(cluster.run(lambda dask_worker: dask_worker.transfer_outgoing_bytes_total).values())

    before = moved()
    lazy = sdpa(da.from_array(q), key, key, mask=Causal(), query_offset="end")
    got = cluster.compute(lazy).result(timeout=600)
    np.testing.assert_allclose(got, sdpa(q, k, k), atol=1e-6)
    assert moved() - before < 500_000  # a shard is a megabyte, and the query 2 kB
    with dask.config.set({"sdpa-ref.order": "chain"}):
        chain = sdpa(da.from_array(q), key, key, mask=Causal(), query_offset="end")
    assert_same_bits(cluster.compute(chain).result(timeout=600), sdpa(q, k, k, backend="numba"))
