"""The arguments of the forward kernels: one record a call, and what fills in which part of it.

Python writes the addresses of arrays and the options. Lengths, and how the work is cut up, are settled in compiled
code, which reads the shapes from the arrays themselves: no plan depends on a length.
"""

from typing import NamedTuple

import numpy as np

from sdpa_numba.compile.parts import linked, part
from sdpa_numba.runtime.call import ARGUMENTS, HELPERS, MEMORY
from sdpa_numba.vector.simd import allocate, load_int64, record_reader, storer, tuple_reader

from .views import batch, size

SMALL = 2**17  # multiplications that take less time than to share them
MIDDLE = 2**19  # multiplications that take less time than to wake a helper
STRIP = 8  # tiles, at most, that share a pass over the keys
ROOM = 2**19  # bytes of states of a head, at most, for which all its tiles share one: its keys need no memory then
TURNS = 4  # tasks a thread, at least, where there are few heads and tiles enough: the last ones end at different times
APART = 128  # bytes between what two threads write at a time: cache lines are fetched in pairs
FAR = 2**41  # as in the bands of masks: no limit
ALL, BAND, INTERVALS = range(3)  # how the visible keys of a row are known


class Sizes(NamedTuple):
    """How a processor is served: lanes of a register, shape of a tile, keys of a panel, a block and a chunk.

    `products` is "", or how pairs of bfloat16 numbers are multiplied. A product has half the steps then.
    """

    acc: str
    lanes: int
    tile_rows: int
    panel: int
    tile_vectors: int = 3
    block: int = 128
    chunk: int = 1024
    products: str = ""

    @property
    def half(self) -> int:
        """1 where a step of a product takes a pair of numbers: by how much numbers of steps are shifted."""
        return int(self.products != "")


class Arrays(NamedTuple):
    """The arrays of a call, each by the address of its object; 0 for what is absent."""

    query: int
    key: int
    value: int
    out: int
    lse: int
    m: int
    z: int
    weights: int
    prefix: int
    start: int
    stop: int
    keep: int
    bias: int
    slopes: int
    positions: int
    key_positions: int
    sink: int
    sums: int


class Bounds(NamedTuple):
    """The numbers of a band for one batch entry."""

    offset: int
    start: int
    stop: int
    left: int
    right: int
    floor: int
    chunk: int
    first: int
    reach: int
    rows: int


class Source(NamedTuple):
    """Where keys or values lie that may be stored: arrays by their address, types as `stored.CODES` counts them.

    One of them is described by: how many keys and numbers there are; whether a kernel reads the numbers as they are;
    their type and the code that means 0; pages, keys of a page, and bytes of an entry of the table; and of scale and
    offset the types, and how many numbers, keys and pages one of theirs serves.
    """

    numbers: int
    table: int
    scale: int
    offset: int
    length: int
    width: int
    direct: int
    code: int
    zero: int
    pages: int
    page: int
    table_item: int
    scale_code: int
    scale_run: int
    scale_keys: int
    scale_pages: int
    offset_code: int
    offset_run: int
    offset_keys: int
    offset_pages: int


OPTIONS = (
    "visible",  # how the visible keys are known
    "entries",  # which of the band's numbers differ between batch entries, a bit for each
    "bias_code", "bias_drops", "first_row", "first_key", "first_head", "first_entry", "dropout_threshold", "seed_low",
    "seed_high",
)  # fmt: skip
BAND_NUMBERS = tuple(f"band_{name}" for name in Bounds._fields)  # or addresses of arrays that broadcast to the batch
SHAPE = ("B", "Hq", "Hkv", "L", "S", "E", "Ev", "group")  # as in the problem
_ALWAYS = ("query", "key", "value", "out", "sizes")  # what every call writes; `scale` follows
_RARELY = (
    *Arrays._fields[4:],
    *OPTIONS,
    *BAND_NUMBERS,
    "stored",  # address of two `Source`, of key and value, for the kernels of stored keys
)
_SETTLED = (
    *SHAPE,
    "fold", "units", "regular",  # heads whose rows share tiles, groups of such heads, whether rows are equidistant
    "tiles", "strip", "strips",  # tiles of a unit, tiles of a strip, strips of a unit
    "block_bytes", "packed", "counters", "memory",  # size of a packed block, whether all are packed beforehand, ...
)  # fmt: skip
FORWARD = np.dtype(
    [(name, np.int64) for name in _ALWAYS]
    + [("scale", np.float64)]
    + [(name, np.int64) for name in _RARELY]
    + [("softcap", np.float64), ("dropout_factor", np.float64)]
    + [(name, np.int64) for name in _SETTLED]
)
SOURCE = np.dtype([(name, np.int64) for name in Source._fields])
SIZES = np.dtype([(name, np.int64) for name in ("acc_bytes", *Sizes._fields[1:-1], "half")])

SOURCE_BYTES, LENGTH, WIDTH = SOURCE.itemsize, SOURCE.fields["length"][1], SOURCE.fields["width"][1]  # type: ignore[index]

read_record, read_arrays, read_sizes = record_reader(FORWARD), tuple_reader(Arrays, FORWARD), record_reader(SIZES)
read_source = tuple_reader(Source, SOURCE)
_store = storer("int64")


@part
def shape_up(p):
    """Fill in the sizes of the problem."""
    p.B = 1
    for axis in range(size(p.query, 0), 3, -1):
        p.B *= size(p.query, axis)
    p.Hq, p.L, p.E = size(p.query, 3), size(p.query, 2), size(p.query, 1)
    p.Hkv = size(p.key, 3)
    if p.stored:
        p.S, p.Ev = load_int64(p.stored + LENGTH), load_int64(p.stored + SOURCE_BYTES + WIDTH)
    else:
        p.S, p.Ev = size(p.key, 2), size(p.value, 1) if p.value else 0
    p.group = p.Hq // p.Hkv if p.Hkv else 1


@part
def most_seen(p):
    """Return how many keys a row sees at most, as far as numbers that all batch entries share say so."""
    if p.visible != BAND or p.entries != 0 or p.band_floor != 0:
        return p.S
    return min(p.S, p.band_first + min(p.band_left + p.band_right + 1, p.band_chunk))


@part
def work_of(p):
    """Return how many multiplications a call takes, about."""
    seen = most_seen(p)
    return (p.Hq * p.L * seen + p.Hkv * min(p.S, seen + p.L)) * p.B * (p.E + p.Ev)


@part
def share(call, p, work, tasks, shared):
    """Decide how many helpers to invite, and allocate what the tasks share: counters of each key head, and the rest."""
    helpers = 0 if work <= SMALL else min(load_int64(call + HELPERS), tasks - 1)
    _store(call + HELPERS, np.int64(helpers if work > MIDDLE else -helpers))
    if shared == 0:
        return
    p.counters = (8 * p.B * p.Hkv + 63) & -64
    memory = allocate(p.counters + shared + 64)
    _store(call + MEMORY, memory)
    p.memory = (memory + 63) & -64
    for to in range(p.memory, p.memory + p.counters, 8):
        _store(to, np.int64(0))


@linked
def settle_few_rows(call: int) -> None:
    """Settle how the kernel for few rows works: a task is a chunk of keys of a key head."""
    p = read_record(call + ARGUMENTS)
    s = read_sizes(p.sizes)
    shape_up(p)
    chunks = max(np.int64(1), (p.S + s.chunk - 1) // s.chunk)
    tasks = p.B * p.Hkv * chunks
    state = (p.group * p.L * (p.Ev + s.panel + 2) * s.acc_bytes + APART - 1) & -APART
    share(call, p, work_of(p), tasks, tasks * state if chunks > 1 else np.int64(0))


@linked
def settle_many_rows(call: int) -> None:
    """Settle how the kernel for many rows works: a task is a block of keys to pack, or a strip of tiles."""
    p = read_record(call + ARGUMENTS)
    s = read_sizes(p.sizes)
    shape_up(p)
    lanes, blocks = s.lanes * s.tile_vectors, (p.S + s.block - 1) // s.block
    p.fold = p.group if lanes > p.L and p.group else 1
    p.units, p.tiles = p.B * (p.Hq // p.fold), (p.fold * p.L + lanes - 1) // lanes
    p.regular = p.fold == 1 or p.L == 1
    work, threads, p.strips = work_of(p), load_int64(call + HELPERS) + 1, (p.tiles + STRIP - 1) // STRIP
    if p.units >= 2 * TURNS * threads and p.tiles * lanes * (p.E + 2 * p.Ev) * s.acc_bytes <= ROOM:
        p.strips = min(p.strips, np.int64(1))
    if work > MIDDLE and 0 < p.units < 2 * threads and threads > 1:
        p.strips = max(p.strips, min(p.tiles, (TURNS * threads + p.units - 1) // p.units))
    p.strip = (p.tiles + p.strips - 1) // p.strips if p.strips else 0
    p.strips = (p.tiles + p.strip - 1) // p.strip if p.strip else 0
    seen = min(p.S, most_seen(p) + p.strip * lanes)  # by all rows of a strip
    p.packed = p.stored == 0 and p.strips * (p.group // p.fold) * seen > (1 if seen == p.S else 4) * p.S
    keys, values = (p.E + s.half) >> s.half, (p.Ev + s.tile_rows - 1) // s.tile_rows * s.tile_rows
    p.block_bytes = (s.block * keys + (s.block >> s.half) * values) * s.acc_bytes
    p.block_bytes = ((p.block_bytes + 63) & -64) + 64
    packing = p.B * p.Hkv * blocks if p.packed else 0
    share(call, p, work, p.units * p.strips + packing, packing * p.block_bytes)


@part
def _own(p, place, number, query, b):
    """Return the number at this place of a band, or a batch entry's own where it is an array."""
    return load_int64(batch(number, 0, query, b)) if p.entries >> place & 1 else number


@part
def bounds_of(p, query, b):
    """Return the band's numbers for a batch entry."""
    return Bounds(
        _own(p, 0, p.band_offset, query, b), _own(p, 1, p.band_start, query, b), _own(p, 2, p.band_stop, query, b),
        _own(p, 3, p.band_left, query, b), _own(p, 4, p.band_right, query, b), _own(p, 5, p.band_floor, query, b),
        _own(p, 6, p.band_chunk, query, b), _own(p, 7, p.band_first, query, b), _own(p, 8, p.band_reach, query, b),
        _own(p, 9, p.band_rows, query, b),
    )  # fmt: skip


@part
def seen_by(x, i, S):
    """Return prefix, start and stop of row i in the band of these numbers."""
    if i >= x.rows:
        return 0, 0, 0
    p = i + x.offset
    start = max(x.start, p - x.left, 0)
    if x.chunk < FAR:
        start = max(start, p - p % x.chunk)
    stop = min(x.stop, max(x.floor, p + x.right + 1), S)
    prefix = max(min(x.first, p + x.reach + 1, S), 0)
    return (prefix, start, stop) if start < stop else (prefix, 0, 0)
