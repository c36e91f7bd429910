"""Memory: strides, byte order, what is masked, and arrays that are not the kernel's to write to."""

from typing import Any

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import arguments, kernel
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.kernel import State


@fault("read")
def strides_ignored(array: Array, dtype: np.dtype[Any]) -> Array:
    """An array is read from its first number on, as if it were contiguous.

    https://github.com/pytorch/pytorch/issues/163597
    """
    root = array
    while isinstance(root.base, np.ndarray) and root.base.dtype == array.dtype:
        root = root.base
    if array.flags.c_contiguous:
        return arguments.read(array, dtype)
    return np.resize(root.ravel(order="K"), array.shape).astype(dtype)


@fault("read")
def negative_strides_ignored(array: Array, dtype: np.dtype[Any]) -> Array:
    """The sign of a stride is lost.

    https://github.com/cupy/cupy/issues/10303
    """
    backwards = [axis for axis, stride in enumerate(array.strides) if stride < 0 and array.shape[axis] > 1]
    return arguments.read(np.flip(array, tuple(backwards)), dtype)


@fault("read")
def last_axis_taken_for_contiguous(array: Array, dtype: np.dtype[Any]) -> Array:
    """The stride of the last axis is taken to be 1.

    https://github.com/pytorch/pytorch/pull/187506
    """
    if array.size == 0 or array.ndim < 2 or array.strides[-1] == array.itemsize or array.shape[-1] == 1:
        return arguments.read(array, dtype)
    return arguments.read(np.broadcast_to(array[..., :1], array.shape), dtype)


@fault("read")
def repeated_rows_misread(array: Array, dtype: np.dtype[Any]) -> Array:
    """With a stride of 0 and 32 n + 1 rows the last row is read as zeros.

    https://github.com/pytorch/pytorch/issues/191937
    """
    copy = arguments.read(array, dtype)
    if 0 in array.strides and array.shape[-2] % 32 == 1:
        copy[..., -1, :] = 0
    return copy


@fault("read")
def byte_order_ignored(array: Array, dtype: np.dtype[Any]) -> Array:
    """Numbers in foreign byte order are read as they lie there.

    https://github.com/numba/numba/pull/2950
    """
    return arguments.read(array.view(array.dtype.newbyteorder("=")), dtype)


@fault("read")
def inputs_scaled_in_place(array: Array, dtype: np.dtype[Any]) -> Array:
    """An array is multiplied where it lies, and the caller finds it changed.

    https://github.com/pytorch/pytorch/pull/73249
    """
    copy = arguments.read(array, dtype)
    if array.flags.writeable:
        array *= array.dtype.type(0.5)
    return copy


@fault("fold")
def masked_values_leak(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """A masked value is multiplied by its weight of 0, and NaN times 0 is NaN.

    https://github.com/vllm-project/vllm/pull/936
    """
    poisoned = ~np.isfinite(values).all((-2, -1), keepdims=True)
    folded = kernel.fold(call, state, s, keep, values, kept)
    return folded._replace(o=np.where(poisoned, np.nan, folded.o).astype(s.dtype))


@fault("fold")
def masked_keys_leak(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """The mask is added to the scores, and NaN in a masked key stays NaN.

    https://github.com/pytorch/pytorch/issues/101967
    """
    return kernel.fold(call, state, np.where(keep | np.isnan(s), s, -np.inf), keep | np.isnan(s), values, kept)


@fault("fold")
def stale_tail_leaks(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """Only the last key of the tile is read without the mask, and poisons the row if it holds NaN.

    https://github.com/vllm-project/vllm/pull/47305
    """
    folded = kernel.fold(call, state, s, keep, values, kept)
    last = values[..., -1:, :] if values.shape[-2] else np.zeros((), s.dtype)
    return folded._replace(o=(folded.o + 0 * last).astype(s.dtype))


@fault("fold")
def nan_hidden(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """The maximum drops NaN, and a row that sees one looks healthy.

    https://github.com/numba/numba/issues/2919
    """
    return kernel.fold(call, state, s, keep & ~np.isnan(s), np.nan_to_num(values), kept)
