"""Keys that are lost, counted twice, padded, or read from the wrong page."""

from collections.abc import Iterator

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import kernel
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.kernel import TILE, State

PAGE = 16


@fault("tiles")
def last_tile_dropped(call: Call) -> Iterator[slice]:
    """A partial last tile is left out where there is a whole one before it.

    https://github.com/facebookexperimental/triton/pull/2304
    """
    return (keys for keys in kernel.tiles(call) if keys.stop - keys.start == TILE or keys.start == 0)


@fault("fold")
def half_of_the_values_lost(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """There are more values in a whole tile than threads to add them, and the second half is left out.

    https://github.com/vllm-project/vllm/pull/438
    """
    added = np.arange(s.shape[-1]) < (TILE // 2 if s.shape[-1] == TILE else TILE)
    return kernel.fold(call, state, s, keep, values, kept * added.astype(s.dtype))


@fault("tiles")
def tiles_overlap(call: Call) -> Iterator[slice]:
    """The last tile begins early enough to be whole, and counts keys twice, which a loose tolerance does not see.

    https://github.com/Xilinx/mlir-air/issues/1427
    """
    S = call.shape[3]
    return (slice(min(k.start, max(0, S - TILE)), k.stop) for k in kernel.tiles(call))


@fault("tiles")
def one_block_of_a_long_row_lost(call: Call) -> Iterator[slice]:
    """Beyond 512 keys one tile in the middle is skipped.

    https://github.com/ml-explore/mlx-lm/pull/1673
    """
    skipped = call.shape[3] // 2 // TILE * TILE if call.shape[3] > 512 else -1
    return (keys for keys in kernel.tiles(call) if keys.start != skipped)


@fault("fold")
def padding_scores_zero(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """The padding of the last tile has a score of 0 and counts in the denominator.

    https://github.com/flashinfer-ai/flashinfer/pull/5090
    """
    pad = -(-s.shape[-1] // 16) * 16 - s.shape[-1]
    folded = kernel.fold(call, state, s, keep, values, kept)
    return folded._replace(z=folded.z + np.where(folded.m > -np.inf, pad * np.exp(-folded.m), 0).astype(s.dtype))


@fault("fold")
def padding_capped(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """The padding of the last tile is masked before the soft cap and comes back as minus the cap.

    https://github.com/ggml-org/llama.cpp/pull/29034
    """
    folded = kernel.fold(call, state, s, keep, values, kept)
    if call.softcap is None or call.mask is not None:
        return folded
    extra = (-s.shape[-1] % TILE) * np.exp(-call.softcap - np.where(folded.m == -np.inf, 0, folded.m))
    return folded._replace(z=(folded.z + extra).astype(s.dtype))


@fault("fold")
def tail_read_past_the_end(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """Where the number of keys is no multiple of 32 the tail holds what lies behind, here the last key again.

    https://github.com/pytorch/pytorch/pull/169222
    """
    if s.shape[-1] % TILE == 0 or call.shape[3] < TILE:
        return kernel.fold(call, state, s, keep, values, kept)
    s, keep, kept = (np.concatenate([x, x[..., -1:]], -1) for x in (s, keep, kept))
    return kernel.fold(call, state, s, keep, np.concatenate([values, values[..., -1:, :]], -2), kept)


def _pages(array: Array, first: int, second: int) -> Array:
    """Return keys or values with two pages exchanged."""
    order = np.arange(array.shape[-2])
    a, b = slice(first * PAGE, (first + 1) * PAGE), slice(second * PAGE, (second + 1) * PAGE)
    order[a], order[b] = order[b].copy(), order[a].copy()
    return array[..., order, :]


@fault("of_heads")
def pages_of_keys_swapped(call: Call, array: Array, name: str) -> Array:
    """Two pages of keys are copied in the order of their addresses, while those of the values are not.

    https://github.com/vllm-project/vllm-ascend/pull/14039
    """
    array = kernel.of_heads(call, array, name)
    return _pages(array, 0, 1) if name == "key" and array.shape[-2] >= 2 * PAGE else array


@fault("of_heads")
def page_table_ignored(call: Call, array: Array, name: str) -> Array:
    """Pages are read in the order in which they are stored, which shows as soon as positions matter.

    https://github.com/tanishqkumar/ssd/pull/22
    """
    array = kernel.of_heads(call, array, name)
    return _pages(array, 0, array.shape[-2] // PAGE - 1) if array.shape[-2] >= 2 * PAGE else array


@fault("of_heads")
def cache_of_the_first_entry(call: Call, array: Array, name: str) -> Array:
    """All batch entries read the keys and values of the first.

    https://github.com/gittensor-ai-lab/sparkinfer/pull/144
    """
    array = kernel.of_heads(call, array, name)
    return np.broadcast_to(array[:1], array.shape).copy() if len(array) else array
