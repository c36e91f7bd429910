"""Where stored keys or values of one head of a batch entry lie: their numbers, scales, offsets and pages."""

import numpy as np

from sdpa_numba.compile.parts import part
from sdpa_numba.vector.simd import load_int32, load_int64, record_reader

from .record import read_source
from .views import HEADER, batch, data, size, stride

FACTOR = np.dtype([(name, np.int64) for name in ("first", "code", "across", "down", "leap", "run", "keys", "pages")])
"""A scale or an offset of a head: where it begins, 0 for none, its type, and the bytes between its numbers, keys and
pages; one of its numbers serves `run` numbers of `keys` keys of `pages` pages."""

HEAD = np.dtype(
    [(name, np.int64) for name in (
        "first", "across", "down", "leap",  # where the numbers begin, and the bytes between two, two keys and two pages
        "width", "direct", "code", "zero", "pages", "page", "table_item",  # as in `Source`
        "table", "table_step",  # the head's row of the table, and the bytes between two entries
        "room",  # for a panel of keys as rows
    )]
    + [("scale", FACTOR), ("offset", FACTOR)]
)  # fmt: skip
"""Stored keys or values of one head of a batch entry. It lies in memory, as so many arguments cost as much as keys."""

HEAD_BYTES = HEAD.itemsize
SCALE, OFFSET = (HEAD.fields[name][1] for name in ("scale", "offset"))  # type: ignore[index]
read_head, read_factor = record_reader(HEAD), record_reader(FACTOR)


@part
def within(array, numbers, paged, query, b, head):
    """Return the bytes to a head of batch entry b in `numbers`, or in an array that serves it in runs."""
    at, heads = np.int64(0), size(numbers, 3)
    if size(array, 0) > 2 and size(array, 3) > 1:
        at = head // (heads // size(array, 3)) * stride(array, 3)
    if paged:
        return at
    inner, shape = 3, load_int64(query + HEADER + 16)
    for axis in range(load_int32(query + HEADER + 8) - 4, -1, -1):
        n = load_int64(shape + 8 * axis)
        inner += 1
        if size(array, 0) >= inner and size(array, inner) > 1:  # and so has `numbers`
            at += b % n // (size(numbers, inner) // size(array, inner)) * stride(array, inner)
        b //= n
    return at


@part
def place_factor(f, array, code, run, keys, pages, s, query, b, head):
    """Fill in the scale or the offset of a head."""
    f.first, f.code, f.run, f.keys, f.pages = np.int64(0), code, run, keys, pages
    f.across, f.down, f.leap = np.int64(0), np.int64(0), np.int64(0)
    if array:
        f.first = data(array) + within(array, s.numbers, s.table != 0, query, b, head)
        f.across, f.down = stride(array, 1), stride(array, 2)
        f.leap = stride(array, 4) if s.table else np.int64(0)


@part
def place_head(at, source, query, b, head):
    """Fill in, and return, the head that lies at `at`, with room behind it, of the `Source` at `source`."""
    s, h = read_source(source), read_head(at)
    h.first = data(s.numbers) + within(s.numbers, s.numbers, s.table != 0, query, b, head)
    h.across, h.down, h.leap = stride(s.numbers, 1), stride(s.numbers, 2), np.int64(0)
    h.width, h.direct, h.code, h.zero, h.pages, h.page = s.width, s.direct, s.code, s.zero, s.pages, s.page
    h.table, h.table_step, h.table_item, h.room = np.int64(0), np.int64(0), s.table_item, at + HEAD_BYTES
    if s.table:
        h.leap, h.table, h.table_step = stride(s.numbers, 4), batch(s.table, 1, query, b), stride(s.table, 1)
    place_factor(
        read_factor(at + SCALE), s.scale, s.scale_code, s.scale_run, s.scale_keys, s.scale_pages, s, query, b, head
    )
    place_factor(
        read_factor(at + OFFSET), s.offset, s.offset_code, s.offset_run, s.offset_keys, s.offset_pages, s, query, b,
        head,
    )  # fmt: skip
    return h


@part
def page_at(h, j):
    """Return the page and the slot of key j; of a page that does not exist no key is needed, and any page will do."""
    if h.table == 0:
        return np.int64(0), j
    m = j // h.page
    at = h.table + m * h.table_step
    page = load_int64(at) if h.table_item == 8 else np.int64(load_int32(at))
    return (page if 0 <= page < h.pages else np.int64(0)), j - m * h.page


@part
def served(f, page, slot):
    """Return where what serves a key begins."""
    if f.first == 0:
        return np.int64(0)
    key = slot if f.keys == 1 else slot // f.keys
    return f.first + (page if f.pages == 1 else page // f.pages) * f.leap + key * f.down
