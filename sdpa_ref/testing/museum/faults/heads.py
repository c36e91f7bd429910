"""Heads: which key head a query head reads, and where the heads lie."""

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import arguments, kernel
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import fault


def _tiled(call: Call, array: Array) -> Array:
    return array[:, np.arange(call.shape[1]) % max(1, array.shape[1])]


@fault("of_heads")
def heads_tiled(call: Call, array: Array, name: str) -> Array:
    """Key heads are tiled (0, 1, 0, 1) instead of repeated (0, 0, 1, 1).

    https://github.com/ekzhang/jax-js/pull/180
    """
    return _tiled(call, array)


@fault("of_heads")
def value_heads_tiled(call: Call, array: Array, name: str) -> Array:
    """Key heads are repeated, but value heads are tiled.

    https://github.com/onnx/onnx/pull/7274
    """
    return _tiled(call, array) if name == "value" else kernel.of_heads(call, array, name)


@fault("of_heads")
def last_heads_read_the_first(call: Call, array: Array, name: str) -> Array:
    """The group size is a power of two, rounded down, and the heads that are left over start anew.

    https://github.com/fla-org/flash-linear-attention/issues/1029
    """
    group = call.shape[1] // max(1, array.shape[1])
    rounded = 1 << (max(1, group).bit_length() - 1)
    return array[:, np.arange(call.shape[1]) // rounded % max(1, array.shape[1])]


@fault("heads_first")
def lengths_and_heads_reshaped(array: Array, layout: str) -> Array:
    """Heads and lengths are exchanged by a reshape instead of a transposition.

    https://github.com/ROCm/pytorch/issues/3230
    """
    if array.ndim == 2 or layout == "HLE":
        return arguments.heads_first(array, layout)
    *batch, length, heads, width = array.shape
    return array.reshape(*batch, heads, length, width)


@fault("heads_first")
def layout_ignored(array: Array, layout: str) -> Array:
    """Heads before lengths are taken for lengths before heads where there is as many of both.

    https://github.com/pytorch/pytorch/issues/133976
    """
    square = array.ndim > 2 and array.shape[-3] == array.shape[-2]
    return array if square else arguments.heads_first(array, layout)
