"""Keys and values that lie in a store, such as a zarr array or a file that is mapped, and are read piece by piece."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from sdpa_ref.arrays import Array, as_integer, is_float

CHUNK = 1024  # pieces of multiples of this have the bits of one call
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class Source:
    """Keys or values in a store, in canonical order.

    Attributes
    ----------
    array : array-like
        What has a shape and a dtype, and returns a NumPy array for a tuple of slices.
    shape : tuple of int
        ``(..., Hkv, S, E)``.
    axes : tuple of int or None
        Where each canonical axis lies in the array; None where there is none.
    """

    array: Any
    shape: tuple[int, ...] = field(init=False)
    axes: tuple[int | None, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(map(int, self.array.shape)))
        object.__setattr__(self, "axes", tuple(range(len(self.shape))))

    @property
    def ndim(self) -> int:
        """Number of canonical axes."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the numbers, in the byte order of the store."""
        dtype: np.dtype[Any] = np.dtype(self.array.dtype)
        return dtype

    def heads_first(self, layout: str) -> "Source":
        """Return the same in canonical order: heads before lengths, and always a head axis."""
        shape, axes = list(self.shape), list(self.axes)
        if len(shape) == 2:
            shape, axes = [1, *shape], [None, *axes]
        elif layout == "LHE":
            shape[-3], shape[-2], axes[-3], axes[-2] = shape[-2], shape[-3], axes[-2], axes[-3]
        turned = replace(self)
        object.__setattr__(turned, "shape", tuple(shape))
        object.__setattr__(turned, "axes", tuple(axes))
        return turned

    def chunk(self) -> int:
        """Return how many keys lie together in the store, 1 where it does not say."""
        chunks, axis = getattr(self.array, "chunks", None), self.axes[-2]
        return int(chunks[axis]) if chunks is not None and axis is not None else 1

    def index(self, batch: Spans, heads: tuple[int, int], keys: tuple[int, int]) -> tuple[slice, ...]:
        """Return where a part lies in the array; repeated batch axes are read once."""
        lead = self.shape[:-3]
        own = [(0, 1) if n == 1 else span for n, span in zip(lead, batch[len(batch) - len(lead) :], strict=True)]
        places = dict(zip(self.axes, (*own, heads, keys, (0, self.shape[-1])), strict=True))
        return tuple(slice(*places[axis]) for axis in range(len(self.array.shape)))

    def read(self, batch: Spans, heads: tuple[int, int], keys: tuple[int, int], dtype: np.dtype[Any]) -> Array:
        """Return a part, ``(..., heads, keys, E)``, in this type."""
        index = self.index(batch, heads, keys)
        part = self.array[index]
        if np.ma.is_masked(part):
            raise TypeError(f"the store returned numbers that are masked for {index}: drop these keys by a mask")
        numbers, shape = np.asarray(part), tuple(place.stop - place.start for place in index)
        if numbers.shape != shape or not is_float(numbers.dtype):
            of = f"{shape} and {self.dtype}"
            raise ValueError(f"the store must return {of} for {index}, got {numbers.shape} and {numbers.dtype}")
        return self.turned(numbers).astype(dtype, copy=False)

    def write(self, batch: Spans, heads: tuple[int, int], keys: tuple[int, int], numbers: Array) -> None:
        """Write a part that `read` would return."""
        if self.axes[-3] is None:
            numbers = numbers[..., 0, :, :]
        elif self.axes[-3] > self.axes[-2]:  # type: ignore[operator]
            numbers = numbers.swapaxes(-2, -3)
        self.array[self.index(batch, heads, keys)] = numbers.astype(self.dtype, copy=False)

    def turned(self, numbers: Array) -> Array:
        """Return an array of the store's axes in canonical order."""
        if self.axes[-3] is None:
            return numbers[None]
        return numbers.swapaxes(-2, -3) if self.axes[-3] > self.axes[-2] else numbers  # type: ignore[operator]

    def __reduce__(self) -> Any:
        named = _is_mapped(self.array) and self.array.filename
        state = Mapped.of(self.array) if named else self.array
        return _restored, (state, self.shape, self.axes)

    def __dask_tokenize__(self) -> Any:
        from dask.base import normalize_token

        array = self.array
        if _is_mapped(array):
            return ("Source", *Mapped.of(array))
        token = getattr(array, "store", None), getattr(array, "path", None), array.shape, str(array.dtype)
        return "Source", normalize_token(token if token[0] is not None else array), self.axes


class Mapped(NamedTuple):
    """An array in a file that is mapped into memory: what another process needs to map it, instead of its numbers."""

    file: str
    start: int
    reach: int
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @staticmethod
    def of(array: Any) -> "Mapped":
        """Return the description of a `numpy.memmap`, or of a view of one."""
        buffer = np.frombuffer(array._mmap, np.uint8)
        file_start = array.offset - array.offset % _granularity()
        first = array.ctypes.data - buffer.ctypes.data
        return Mapped(str(array.filename), file_start, buffer.size, first, array.shape, array.strides, array.dtype.str)

    def open(self) -> Any:
        """Return the array, read-only."""
        bytes_ = np.memmap(self.file, np.uint8, "r", self.start, (self.reach,))
        whole: Any = np.ndarray(self.shape, self.dtype, bytes_, self.first, self.strides)
        return whole


def _granularity() -> int:
    import mmap

    return mmap.ALLOCATIONGRANULARITY


def _restored(state: Any, shape: tuple[int, ...], axes: tuple[int | None, ...]) -> Source:
    source = Source(state.open() if isinstance(state, Mapped) else state)
    object.__setattr__(source, "shape", shape)
    object.__setattr__(source, "axes", axes)
    return source


def _is_mapped(array: Any) -> bool:
    return isinstance(array, np.memmap) and getattr(array, "_mmap", None) is not None


def source_of(value: Any) -> Source | None:
    """Return the source that a value is, None for what is none: an array in memory, or a file below the limit."""
    if isinstance(value, np.ndarray):
        return Source(value) if _is_mapped(value) and value.nbytes > settings().limit else None
    if hasattr(value, "__dask_graph__") or hasattr(value, "__array_interface__") or hasattr(value, "__dlpack__"):
        return None
    wanted = "shape", "dtype", "chunks", "__getitem__"
    return Source(value) if all(hasattr(value, name) for name in wanted) else None


class Reading(NamedTuple):
    """How stores are read: the most bytes at a time, what is called with the progress, and where gradients go."""

    limit: int = 2**28
    progress: Callable[[int, int], None] | None = None
    grad_key: Any = None
    grad_value: Any = None


_reading: ContextVar[Reading] = ContextVar("reading", default=Reading())  # noqa: B039  # it never changes


def settings() -> Reading:
    """Return how stores are read at the moment."""
    return _reading.get()


@contextmanager
def reading(
    limit: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    grad_key: Any = None,
    grad_value: Any = None,
) -> Iterator[None]:
    """Say how the calls in this block read keys and values that lie in stores.

    Parameters
    ----------
    limit : int, optional
        The most bytes that a piece of keys and values, and what a kernel packs of it, may take. By default 256 MiB.
    progress : callable, optional
        ``progress(done, total)`` is called after each piece, with the number of pieces. The tasks of a graph do not
        call it: Dask has bars of its own.
    grad_key, grad_value : array-like, optional
        Where `sdpa_vjp` writes the gradients by key and value, a piece at a time: of their shapes, and writeable by
        slices. Left out, these gradients are arrays in memory.

    Examples
    --------
    >>> import numpy as np
    >>> from sdpa_ref import sdpa
    >>> with reading(limit=2**20):
    ...     sdpa(np.ones((4, 8)), np.ones((6, 8)), np.ones((6, 8))).shape  # with zarr arrays as key and value
    (4, 8)
    """
    if limit is not None:
        limit = as_integer("limit", limit)
        if limit < 1:
            raise ValueError(f"limit must be a number of bytes above 0, got {limit}")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be a function f(done, total), got {type(progress).__name__}")
    before = settings()
    token = _reading.set(Reading(before.limit if limit is None else limit, progress, grad_key, grad_value))
    try:
        yield
    finally:
        _reading.reset(token)


def pieces(S: int, bytes_of_key: int, limit: int, chunk: int) -> list[tuple[int, int]]:
    """Return where pieces of the keys begin and end, each within the limit or four keys long.

    They are multiples of four keys, as the bits of dropout are, and of 1024 keys and the store's chunks where the limit
    leaves room for these.
    """
    n = max(4, limit // max(1, bytes_of_key))
    for step in (math.lcm(CHUNK, chunk), CHUNK, math.lcm(4, chunk), 4):
        if step <= n:
            n -= n % step
            break
    return [(j, min(j + n, S)) for j in range(0, S, n)]
