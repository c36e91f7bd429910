"""The product of rows and of weights that are read as they are stored, whose rows are shared among threads."""

from functools import cache

from sdpa_numba.compile.parts import part
from sdpa_numba.runtime.kernel import kernel as compiled
from sdpa_numba.runtime.tasks import next_task, proceed
from sdpa_numba.vector.dots import dotter, halver, prefetch_lines
from sdpa_numba.vector.emit import LINE, itemsize
from sdpa_numba.vector.simd import allocate, load_int64, loader, release, storer

from .views import data

ROWS = 4  # rows of x at a time; what is left of them goes one by one
UNIT = 48  # rows of weights of which a task has a multiple: tiles of 2, 3 and 4 fill it, and whole cache lines of y
PART, NO_PART = 768, 2**40  # numbers of rows that are multiplied at once, so that tiles stay in the first cache
TASK = 2**15  # numbers of a task's weights, which stay in a processor's own cache while rows of x pass by


@cache
def filler(code, lanes):
    """Return ``fill(n, m, x, ...)``: n rows of x times m of weights, while `length` bytes are fetched that follow."""
    few, many = (2, 1) if code.scale else (4, 3)  # rows of weights at a time: as many as fit in 16 registers
    one, one_left, four, four_left = (
        dotter(code, *tile, lanes) for tile in ((1, few), (1, 1), (ROWS, many), (ROWS, 1))
    )

    @part
    def fill(n, m, x, x_row, w, w_row, s, s_row, o, o_row, run, width, y, y_row, more, following, length):
        whole = n - n % ROWS
        # a first pass over weights would wait for them, so that the passes before it have fetched them bit by bit
        passes = max(1, m // many * (n // ROWS))
        lines = (length + LINE * passes - 1) // (LINE * passes)
        for r in range(0, whole, ROWS):
            a, to, c = x + r * x_row, y + r * y_row, 0
            while c + many <= m:
                prefetch_lines(following, lines)
                following += LINE * lines
                four(a, x_row, w + c * w_row, w_row, s + c * s_row, s_row, o + c * o_row, o_row, run, width, to + 4 * c,
                     y_row, more)  # fmt: skip
                c += many
            while many > 1 and c < m:
                four_left(a, x_row, w + c * w_row, w_row, s + c * s_row, s_row, o + c * o_row, o_row, run, width,
                          to + 4 * c, y_row, more)  # fmt: skip
                c += 1
        for r in range(whole, n):
            a, to, c = x + r * x_row, y + r * y_row, 0
            while c + few <= m:
                one(a, x_row, w + c * w_row, w_row, s + c * s_row, s_row, o + c * o_row, o_row, run, width, to + 4 * c,
                    y_row, more)  # fmt: skip
                c += few
            while c < m:
                one_left(a, x_row, w + c * w_row, w_row, s + c * s_row, s_row, o + c * o_row, o_row, run, width,
                         to + 4 * c, y_row, more)  # fmt: skip
                c += 1

    return fill


@cache
def kernel(code, lanes):
    """Return the kernel for weights that are stored so.

    Its record: the objects of x, y, weights, scale, offset and bias, 0 for what is absent; how many rows of x and of
    weights, their width, and how many numbers a scale serves; bytes between rows of weights, of scales and of offsets;
    and rows of a task.
    """
    fill, halve, nibble = filler(code, lanes), halver(lanes), code.source == "nibble"
    item, part_of = (0, NO_PART) if code.scale else (itemsize(code.source), PART)
    load, load_one, store = loader("float32", "float32", lanes), loader("float32", "float32"), storer("float32")

    @compiled
    def affine(worker, record):
        x, y, w = data(load_int64(record)), data(load_int64(record + 8)), data(load_int64(record + 16))
        scale, offset, bias = load_int64(record + 24), load_int64(record + 32), load_int64(record + 40)
        s, o, b = data(scale) if scale else 0, data(offset) if offset else 0, data(bias) if bias else 0
        n, m, width, run = (load_int64(record + 48), load_int64(record + 56), load_int64(record + 64),
                            load_int64(record + 72))  # fmt: skip
        w_row, s_row, o_row = load_int64(record + 80), load_int64(record + 88), load_int64(record + 96)
        size, scratch = load_int64(record + 104), 0
        task = next_task(worker)
        if nibble and task * size < m:
            scratch = allocate(4 * n * width)
            for at in range(0, 4 * n * width, 8 * lanes):
                halve(x + at, scratch + at)
            x = scratch
        while task * size < m:
            first = task * size
            stop = min(first + size, m)
            if not proceed(worker, n * width * (stop - first)):
                break
            for k in range(0, width, part_of):
                part, m_now, at = min(part_of, width - k), stop - first, k * item
                length = m_now * (part * item if item else w_row)
                fill(n, m_now, x + 4 * k, 4 * width, w + first * w_row + at, w_row, s + first * s_row, s_row,
                     o + first * o_row, o_row, run, part, y + 4 * first, 4 * m, k,
                     w + stop * w_row + m_now * at, length)  # fmt: skip
            if b:
                whole = stop - (stop - first) % lanes
                for r in range(n):
                    to = y + 4 * r * m
                    for c in range(4 * first, 4 * whole, 4 * lanes):
                        store(to + c, load(to + c) + load(b + c))
                    for c in range(4 * whole, 4 * stop, 4):
                        store(to + c, load_one(to + c) + load_one(b + c))
            task = next_task(worker)
        if scratch:
            release(scratch)

    return affine
