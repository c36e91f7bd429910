"""A user's file, which type checkers read; `tests/tools/test_types.py` has them do so, and runs it."""

from pathlib import Path
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import sdpa_ref
from sdpa_ref import (
    ALiBi,
    AttentionState,
    Causal,
    Dropout,
    Gradients,
    KeyLengths,
    KVCache,
    Linear,
    Mask,
    MultiHeadAttention,
    PagePool,
    Quantized,
    Segments,
    Stages,
    Window,
    sdpa,
)
from sdpa_ref.testing import assert_close, error_budget

Floats = npt.NDArray[np.float32]


def attend(query: Floats, key: Floats, value: Floats) -> Floats:
    """Call each public function with the options that it has."""
    mask = Causal() & KeyLengths(8) & ~Window(2, 0)
    assert_type(mask, Mask)
    output: Floats = sdpa(query, key, value, mask=mask, scale=0.5, softcap=30.0, query_offset=0, backend="reference")
    sdpa(query, key, value, bias=ALiBi([0.5, 0.25]), query_offset=0, sink=0.0, dropout=Dropout(0.1, seed=1))
    sdpa(query, key, value, mask=Segments([0, 0, 0, 1, 1, 1, 1, 1]), layout="HLE", out=np.empty_like(query))
    assert_close(sdpa(query, key, value), query, key, value)
    error_budget(query, key, value)
    return output


def parts(query: Floats, key: Floats, value: Floats) -> AttentionState:
    """Merge the attention over two halves of the keys, and look at stages and gradients."""
    left = sdpa_ref.sdpa_state(query, key[..., :4, :], value[..., :4, :])
    right = sdpa_ref.sdpa_state(query, key[..., 4:, :], value[..., 4:, :], backend="reference")
    state = left + right
    assert_type(state, AttentionState)
    stages = sdpa_ref.sdpa_stages(query, key, value, mask=Causal())
    assert_type(stages, Stages)
    output, vjp = sdpa_ref.sdpa_with_vjp(query, key, value)
    assert_type(vjp(output), Gradients)
    assert_type(sdpa_ref.sdpa_vjp(query, key, value, output).query, Any)
    weights: Floats = sdpa_ref.sdpa_weights(query, key)
    assert weights.shape == stages.weights.shape
    return state


def decode(steps: int) -> int:
    """Generate with the caches."""
    cache = KVCache(1, 2, 4, capacity=16)
    for _ in range(steps):
        cache.append(*np.ones((2, 1, 2, 1, 4), np.float32))
        sdpa(np.ones((1, 2, 1, 4), np.float32), cache.key, cache.value, mask=cache.mask, query_offset="end")
        cache.attend(np.ones((1, 2, 1, 4), np.float32))
    pages = PagePool(4, heads=2, page=4, E=4).cache(1, window=8)
    codes = sdpa_ref.Int8().encode(np.ones((2, 3, 4), np.float32))
    assert_type(codes, Quantized)
    assert_type(cache.nbytes, int)
    assert_type(cache.capacity, int | None)
    assert_type(pages.window, int | None)
    return cache.nbytes


def layers(file: Path | None = None) -> None:
    """Make layers, or load them."""
    layer = MultiHeadAttention(8, 2, rng=0) if file is None else MultiHeadAttention.load(file, num_heads=2)
    assert_type(layer, MultiHeadAttention)
    assert_type(layer.query, Linear)
    tokens = np.ones((1, 3, 8), np.float32)
    layer(tokens, mask=Causal())
    _, weights = layer.with_weights(tokens)
    assert weights.shape == (1, 2, 3, 3)


def main() -> None:
    """Call all of it."""
    array = np.random.default_rng(0).standard_normal((1, 2, 8, 4), np.float32)
    attend(array, array, array)
    parts(array, array, array)
    decode(2)
    layers()
    try:
        sdpa_ref.load("cupy")
    except sdpa_ref.BackendUnavailable as reason:
        str(reason)


if __name__ == "__main__":
    main()
