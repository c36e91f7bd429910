"""Arrays that begin or end beside a page of memory that must not be touched: a read past them ends the process."""

import ctypes
import mmap

import numpy as np

PAGE = mmap.PAGESIZE


def guarded(values, at_end):
    """Return a copy that ends, or begins, at such a page."""
    values = np.ascontiguousarray(values)
    libc, pages = ctypes.CDLL(None, use_errno=True), -(-values.nbytes // PAGE)
    area = mmap.mmap(-1, (pages + 2) * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for guard in (0, pages + 1):
        assert libc.mprotect(ctypes.c_void_p(start + guard * PAGE), PAGE, 0) == 0
    first = PAGE + (pages * PAGE - values.nbytes if at_end else 0)
    array = np.frombuffer(area, values.dtype, values.size, first).reshape(values.shape)
    array[...] = values
    return array
