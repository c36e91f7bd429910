"""What the museum's kernel is called with, brought into one order: batch, head, length, width.

It reads the meaning of the arguments on its own, from the documented rules: nothing is shared with `sdpa_ref._problem`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.biases import ALiBi
from sdpa_ref.dropout import Dropout
from sdpa_ref.masks import KeyLengths, Packed, QueryLengths
from sdpa_ref.masks.algebra import All
from sdpa_ref.stored import Paged, Quantized
from sdpa_ref.testing.museum import storage

if TYPE_CHECKING:
    from sdpa_ref.testing.museum.kernel import Kernel


@dataclass(frozen=True)
class Call:
    """One call, checked by nobody.

    Attributes
    ----------
    kernel : Kernel
        Whose steps compute it.
    query, key, value : array
        ``(B, Hq, L, E)``, ``(B, Hkv, S, E)``, ``(B, Hkv, S, Ev)`` in C order, of type `dtype`.
    batch : tuple of int
        The leading axes that B stands for.
    headless : bool
        Whether the caller's arrays have no head axis.
    dtype, acc : numpy.dtype
        Of the result, and of the sums.
    layout, mask, biases, scale, softcap, sink, query_offset, key_positions, score_mod, dropout
        As in `sdpa`, the bias as a tuple.
    """

    kernel: "Kernel"
    query: Array
    key: Array
    value: Array
    batch: tuple[int, ...]
    headless: bool
    dtype: np.dtype[Any]
    acc: np.dtype[Any]
    layout: str = "HLE"
    mask: Any = None
    biases: tuple[Any, ...] = ()
    scale: float | None = None
    softcap: float | None = None
    sink: Any = None
    query_offset: Any = None
    key_positions: Any = None
    score_mod: Any = None
    dropout: Dropout | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the scores, ``(B, Hq, L, S)``."""
        return (*self.query.shape[:3], self.key.shape[-2])

    @property
    def key_heads(self) -> int:
        """The number of key heads."""
        return int(self.key.shape[1])

    def per_entry(self, given: Any, *axes: int) -> Array:
        """Return an array over the batch, and these more axes, as ``(B, *axes)``."""
        given = np.asarray(given)
        return np.broadcast_to(given, (*self.batch, *axes)).reshape(self.query.shape[0], *axes)

    def to_caller(self, result: Array, *, lengths_last: bool = False) -> Array:
        """Return an output, or an lse (`lengths_last`), with the caller's axes."""
        if self.headless:
            return result[0, 0]
        if self.layout == "LHE":
            result = result.swapaxes(-1, -2) if lengths_last else result.swapaxes(-2, -3)
        return result.reshape(*self.batch, *result.shape[1:])

    def from_caller(self, given: Any, *, lengths_last: bool = False) -> Array:
        """Return what has the shape of the output, or of the lse, as ``(B, Hq, L, ...)`` in the type of the sums."""
        given = np.asarray(given).astype(self.acc)
        given = given[None] if self.headless else given
        if self.layout == "LHE":
            given = given.swapaxes(-1, -2) if lengths_last else given.swapaxes(-2, -3)
        return given.reshape(self.query.shape[0], *given.shape[len(self.batch) :])


def arranged(kernel: "Kernel", query: Any, key: Any, value: Any, options: dict[str, Any]) -> Call:
    """Return the call with its arrays copied into one order, type and batch."""
    options = dict(options)
    layout, bias = options.pop("layout", "HLE"), options.pop("bias", ())
    given = (query, key, value)
    headless = query.ndim == 2
    codes = [isinstance(getattr(array, "pages", array), Quantized) for array in given]
    types = (array.dtype for array, coded in zip(given, codes, strict=True) if not coded)
    dtype = kernel.result_type(*types).newbyteorder("=")
    acc = np.dtype(np.float64 if dtype == np.float64 else np.float32)
    views = [
        storage.numbers_of(kernel, array, acc, layout)
        if isinstance(array, Paged | Quantized)
        else kernel.heads_first(kernel.read(array, dtype), layout)
        for array in given
    ]
    if isinstance(key, Paged):
        valid = KeyLengths(kernel.stored_lengths(key))
        options["mask"] = valid if options.get("mask") is None else valid & options["mask"]
    batch = np.broadcast_shapes(*(view.shape[:-3] for view in views))
    B = int(np.prod(batch, dtype=int))
    flat = [np.array(np.broadcast_to(view, (*batch, *view.shape[-3:]))).reshape(B, *view.shape[-3:]) for view in views]
    biases = bias if isinstance(bias, tuple) else (bias,)
    query, key, value = flat
    return Call(kernel, query, key, value, batch, headless, dtype, acc, layout, biases=biases, **options)


def read(array: Array, dtype: np.dtype[Any]) -> Array:
    """Return the numbers of an array, however they lie in memory, as a new array in C order."""
    return np.array(array, dtype, order="C")


def heads_first(array: Array, layout: str) -> Array:
    """Return the array as ``(..., H, length, width)``."""
    if array.ndim == 2:
        return array[None]
    return array.swapaxes(-2, -3) if layout == "LHE" else array


def joined(mask: Any) -> Iterator[Any]:
    """Yield the masks that ``&`` joins at the top."""
    yield from mask.parts if isinstance(mask, All) else (mask,)


def valid_lengths(call: Call) -> tuple[Any, Any]:
    """Return the valid queries and keys, numbers or ``(B, 1)``, as masks that are joined by ``&`` say."""
    L, S = call.shape[2:]
    given = {
        type(part): call.per_entry(part.n)[:, None]
        for part in joined(call.mask)
        if isinstance(part, KeyLengths | QueryLengths)
    }
    return given.get(QueryLengths, L), given.get(KeyLengths, S)


def documents(call: Call, packed: Packed) -> tuple[Array, Array, Array, Array]:
    """Return of each row's document the first query, the first key and the two lengths, each ``(B, L)``."""
    B, L = call.query.shape[0], call.shape[2]
    found = np.zeros((4, B, L), np.int64)
    lengths = [call.per_entry(n, np.shape(n)[-1]) for n in np.broadcast_arrays(packed.q_lengths, packed.k_lengths)]
    for b in range(B):
        first_query = first_key = 0
        for queries, keys in zip(lengths[0][b], lengths[1][b], strict=True):
            rows = slice(first_query, first_query + queries)
            found[:, b, rows] = np.reshape((first_query, first_key, queries, keys), (4, 1))
            first_query, first_key = first_query + queries, first_key + keys
    return tuple(found)


def positions(call: Call) -> tuple[Array, Array]:
    """Return the position of each query and that of its document's first key, in units of key indices, ``(B, L)``."""
    B, L = call.query.shape[0], call.shape[2]
    packed = next((part for part in joined(call.mask) if isinstance(part, Packed)), None)
    first_query = first_key = np.zeros((B, L), np.int64)
    if packed is None:
        queries, keys = call.kernel.valid_lengths(call)
    else:
        first_query, first_key, queries, keys = documents(call, packed)
    offset = call.query_offset
    if isinstance(offset, str):
        if call.key_positions is not None:  # the last valid key's position, and one
            last = np.broadcast_to(np.maximum(np.asarray(keys) - 1, 0), (B, 1))
            keys = np.take_along_axis(call.kernel.places(call), last, 1) + 1
        offset = keys - queries if offset == "end" else 0
    elif offset is not None:
        offset = call.per_entry(offset)[:, None]
    return np.arange(L) - first_query + first_key + (0 if offset is None else offset), first_key


def places(call: Call) -> Array:
    """Return the position of each key, ``(B, S)``: its index, unless positions are given."""
    S = call.shape[3]
    return np.arange(S)[None] if call.key_positions is None else call.per_entry(call.key_positions, S)


def arrays_of(biases: tuple[Any, ...]) -> list[Array]:
    """Return the biases that are arrays."""
    return [np.asarray(bias) for bias in biases if not isinstance(bias, ALiBi)]
