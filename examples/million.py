"""Attends from 2048 queries to a million keys that lie in a store, and shows which parts of the store were read.

Run it with ``python examples/million.py``. Keys and values take half a gigabyte in a temporary folder, and a piece of
them at a time in memory. ``--quick`` takes 65 536 keys; ``--dask`` cuts the queries into four blocks, which Dask
computes, and gives the same bits.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from training import needed

from sdpa_ref import Causal, FirstTokens, KeyLengths, KeyStarts, Window, reading, sdpa

with needed():
    import zarr
    from matplotlib.figure import Figure
    from rich.progress import Progress

HEADS, WIDTH, CHUNK, LIMIT = 2, 64, 16_384, 2**25


class Recorded:
    """A store that remembers which chunks of keys were read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.chunks = array, array.shape, array.dtype, array.chunks
        self.read = np.zeros(-(-array.shape[1] // CHUNK), int)

    def __getitem__(self, index):
        keys = index[1]
        self.read[keys.start // CHUNK : -(-keys.stop // CHUNK)] += 1
        return self.array[index]


def store(folder, name, keys, rng):
    """Return a new zarr array, ``(HEADS, keys, WIDTH)``, of random numbers."""
    shape, chunks = (HEADS, keys, WIDTH), (HEADS, CHUNK, WIDTH)
    array = zarr.create_array(folder / name, shape=shape, chunks=chunks, dtype="float16", compressors=None)
    for j in range(0, keys, CHUNK):
        array[:, j : j + CHUNK] = rng.standard_normal((HEADS, min(CHUNK, keys - j), WIDTH), np.float32)
    return array


def peak():
    """Return the most megabytes that the process has had in memory, where the system says so."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def tries(keys):
    """Return what is tried: a name, and the mask and its alignment."""
    window = Window(keys // 16, 0) | FirstTokens(4) & Causal()
    return {
        "every key": {},
        f"a window of {keys // 16} keys, and the first four": {"mask": window, "query_offset": keys * 2 // 3},
        "the third of eight documents": {"mask": KeyStarts(keys // 4) & KeyLengths(keys * 3 // 8)},
    }


def attended(query, key, value, options, bar, title, dask):
    """Return the output, while a bar shows how much was read."""
    task = bar.add_task(title, total=None)
    with reading(limit=LIMIT, progress=lambda done, total: bar.update(task, completed=done, total=total)):
        if not dask:
            return sdpa(query, key, value, **options)
        import dask.array as da

        blocks = da.from_array(query, chunks=(HEADS, -(-query.shape[1] // 4), WIDTH))
        return sdpa(blocks, key, value, **options).compute(scheduler="threads")


def picture(read):
    """Return a figure: a line for each call, a mark for each chunk of keys, dark where it was read."""
    figure = Figure(figsize=(8, 1 + 0.5 * len(read)), layout="constrained")
    axes = figure.subplots()
    axes.imshow([chunks > 0 for chunks in read.values()], aspect="auto", cmap="Greys", vmin=0, vmax=1.4)
    axes.set_yticks(range(len(read)), [name.replace(", ", ",\n") for name in read])
    axes.set_xlabel(f"chunks of {CHUNK} keys")
    axes.set_xticks(np.arange(len(next(iter(read.values()))) + 1) - 0.5, minor=True)
    axes.grid(which="minor", axis="x", color="white", linewidth=1)
    axes.set_xticks([])
    return figure


def main():
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer queries and keys")
    parser.add_argument("--dask", action="store_true", help="let Dask compute blocks of queries")
    parser.add_argument("--out", type=Path, default=Path(), metavar="FOLDER", help="for the picture")
    chosen = parser.parse_args()
    queries, keys = (256, 2**16) if chosen.quick else (2048, 2**20)
    rng = np.random.default_rng(0)
    query = rng.standard_normal((HEADS, queries, WIDTH), np.float32).astype(np.float16)
    read = {}
    with tempfile.TemporaryDirectory() as folder, Progress() as bar:
        key, value = (store(Path(folder), name, keys, rng) for name in ("keys", "values"))
        small = sdpa(query[:, :64], key[:, :64], value[:, :64])  # kernels are compiled, and libraries loaded
        assert small.shape == (HEADS, 64, WIDTH)
        before = peak()
        for title, options in tries(keys).items():
            recorded = Recorded(key)
            output = attended(query, recorded, value, options, bar, title, chosen.dask)
            read[title] = recorded.read
            assert np.isfinite(output).all()
    for title, chunks in read.items():
        print(f"{title}: {(chunks > 0).sum()} of {len(chunks)} chunks of keys were read")
    if before is not None:
        stored = 2 * HEADS * keys * WIDTH * 2 / 2**20
        print(f"keys and values take {stored:.0f} MB, the calls took {peak() - before:.0f} MB of memory more")
    chosen.out.mkdir(parents=True, exist_ok=True)
    place = chosen.out / "million.png"
    picture(read).savefig(place, dpi=120)
    print(f"which chunks were read: {place}")


if __name__ == "__main__":
    main()
