"""Attention over stored keys: pages and codes beside dense arrays, here and in PyTorch, and what a cache adds."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

import sdpa_ref
from sdpa_ref import Causal, Float8, Int4, Int8, KVCache, Paged
from sdpa_ref.bench.clock import by_turns

Found = dict[str, Any]
Run = Callable[[], Any]
_HALF, _TORCH = "torch float16", ("torch", "torch float16")


class Store(NamedTuple):
    """A problem whose keys are stored in all ways, or, without keys, the steps of a cache."""

    name: str
    B: int = 1
    Hq: int = 8
    Hkv: int = 8
    L: int = 1
    S: int = 0
    E: int = 128


STORES = (
    *(Store(f"caches-{B}x-{S}", B, 32, 8, 1, S) for B in (1, 8) for S in (1024, 4096, 16384)),
    Store("caches-ungrouped-4096", 1, 32, 32, 1, 4096),
    Store("caches-prefill-2048", 1, 8, 8, 2048, 2048),
    Store("caches-token"),
)
LONG = 65536  # tokens, behind which one more should cost what it costs behind 16


def measure(store: Store, backend: str, peers: list[str], threads: int, seconds: float) -> Found:
    """Return the seconds that each way of storing takes, ready for JSON.

    Parameters
    ----------
    store : Store
    backend : str
    peers : list of str
        Of which only PyTorch is asked.
    threads : int
    seconds : float
        How long to measure, for each way.
    """
    runs = _token(backend) if store.S == 0 else _ways(store, backend)
    if store.S and "torch" in peers and find_spec("torch") is not None:
        runs |= _in_torch(store, threads)
    for run in runs.values():
        run()
    found = {}
    for way, samples in by_turns(runs, seconds).items():
        low, median, high = np.quantile(samples, (0.25, 0.5, 0.75)).tolist()
        found[way] = {"median": median, "quartiles": [low, high]}
    return {"stored": store.name, "shape": list(store[1:]), "contenders": found}


def compared(row: Found) -> Found:
    """Return the measurements with the time of dense keys, and of PyTorch in float16, by that of each way."""
    times = {way: found["median"] for way, found in row["contenders"].items()}
    for way, found in row["contenders"].items():
        if "dense" in times:
            found["by_dense"] = times["dense"] / times[way]
        if _HALF in times and way not in _TORCH:
            found["by_half"] = times[_HALF] / times[way]
    return row


def table(rows: list[Found]) -> Any:
    """Return the rows as a table of `rich`."""
    from rich import box
    from rich.table import Table

    shown = Table(box=box.MARKDOWN)
    for i, heading in enumerate(("case", "B, Hq, Hkv, L, S, E", "way", "us", "dense / way", f"{_HALF} / way")):
        shown.add_column(heading, justify="left" if i < 3 else "right", no_wrap=True)
    for row in rows:
        for way, found in row["contenders"].items():
            ratios = (found.get(name) for name in ("by_dense", "by_half"))
            shown.add_row(
                row["stored"],
                ", ".join(map(str, row["shape"])) if row["shape"][-2] else "",
                way,
                f"{1e6 * found['median']:.1f}",
                *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
            )
    return shown


def _ways(store: Store, backend: str) -> dict[str, Run]:
    """Return a call for each way of storing the same keys."""
    _, B, Hq, Hkv, L, S, E = store
    rng = np.random.default_rng(0)
    query = rng.standard_normal((B, Hq, L, E), np.float32)
    dense = [rng.standard_normal((B, Hkv, S, E), np.float32) for _ in range(2)]
    options: Found = {"backend": backend} | ({"mask": Causal()} if L > 1 else {})

    def call(key: Any, value: Any, **more: Any) -> Run:
        return lambda: sdpa_ref.sdpa(query, key, value, **options, **more)

    ways = {"dense": call(*dense)}
    for P in (16, 128):
        table = rng.permutation(B * S // P).reshape(B, -1)
        pages = [_in_pages(x, table, P) for x in dense]
        ways[f"pages of {P}"] = call(*(Paged(x, table, S) for x in pages))
    if B > 1:
        lengths = np.linspace(S // B, S, B).astype(np.int64)
        ways[f"lengths {lengths[0]} to {S}"] = call(*(Paged(x, table, lengths) for x in pages))
    for recipe in (Int8(), Int4(), Float8()) if find_spec("ml_dtypes") is not None else (Int8(), Int4()):
        ways[repr(recipe)] = call(*(recipe.encode(x) for x in dense))
    return ways


def _in_pages(dense: Any, table: Any, P: int) -> Any:
    B, heads, S, E = dense.shape
    pages = np.empty((B * S // P, heads, P, E), dense.dtype)
    pages[table] = dense.reshape(B, heads, -1, P, E).swapaxes(1, 2)
    return pages


def _in_torch(store: Store, threads: int) -> dict[str, Run]:
    """Return the call of PyTorch over dense keys, in float32 and float16."""
    import torch

    torch.set_num_threads(threads)
    _, B, Hq, Hkv, L, S, E = store
    rng = np.random.default_rng(0)
    shapes = (B, Hq, L, E), (B, Hkv, S, E), (B, Hkv, S, E)
    arrays = [torch.from_numpy(rng.standard_normal(shape, np.float32)) for shape in shapes]
    attend = torch.nn.functional.scaled_dot_product_attention

    def call(query: Any, key: Any, value: Any) -> Run:
        def run() -> Any:
            with torch.inference_mode():
                return attend(query, key, value, enable_gqa=Hq != Hkv, is_causal=L > 1)

        return run

    return {"torch": call(*arrays), _HALF: call(*(x.half() for x in arrays))}


def _token(backend: str) -> dict[str, Run]:
    """Return the steps of a cache: a token that is added, whatever there is, and attention beside the same `sdpa`."""
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 1, 8, 1, 128), np.float32)
    runs: dict[str, Run] = {}
    for n in (16, LONG):
        cache = KVCache(1, 8, 128, capacity=n + 1)
        cache.append(np.repeat(key, n, -2), np.repeat(value, n, -2))

        def append(cache: KVCache = cache, n: int = n) -> None:
            cache.crop(n)
            cache.append(key, value)

        runs[f"crop and append behind {n}"] = append
    small = KVCache(1, 8, 128, capacity=17)
    small.append(np.repeat(key, 16, -2), np.repeat(value, 16, -2))
    runs["attend over 16"] = lambda: small.attend(query, backend=backend)
    keys, values, mask = small.key, small.value, small.mask
    runs["the same sdpa"] = lambda: sdpa_ref.sdpa(query, keys, values, mask=mask, query_offset="end", backend=backend)
    return runs
