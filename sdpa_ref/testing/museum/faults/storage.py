"""Stored keys: pages, codes, and positions of keys that were kept."""

from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.arrays import Array
from sdpa_ref.stored import Paged, Quantized
from sdpa_ref.testing.museum import kernel, storage, visibility
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.kernel import State
from sdpa_ref.testing.museum.sums import mixed
from sdpa_ref.testing.museum.visibility import At


def _listed(given: Paged) -> Array:
    """Return how many entries of each row name a page before the first that does not."""
    named = (given.table >= 0) & (given.table < given.pages.shape[0])
    return np.cumprod(named, -1).sum(-1)


@fault("stored_lengths")
def stale_tail_of_a_table_row(given: Paged) -> Array:
    """Where a row of the table lists more pages than it needs, left from before, their keys count as well.

    https://github.com/gittensor-ai-lab/sparkinfer/pull/185
    """
    more = _listed(given) * given.page
    return np.where(more >= given.lengths + given.page, more, given.lengths)


@fault("stored_lengths")
def stale_key_behind_a_full_page(given: Paged) -> Array:
    """Where the last page is full and another one is listed, a stale key is read from that.

    https://github.com/pegainfer-project/pegainfer/issues/291
    """
    n, P = given.lengths, given.page
    return n + ((n % P == 0) & (_listed(given) * P > n))


def _within(given: Paged, lengths: Array) -> Array:
    """Return lengths that are no longer than the pages that are listed."""
    return np.maximum(given.lengths, np.minimum(lengths, _listed(given) * given.page))


@fault("stored_lengths")
def capacity_taken_for_the_length(given: Paged) -> Array:
    """All slots of the pages count as keys.

    https://github.com/ROCm/hip-ep/pull/989
    """
    return _within(given, np.full(given.lengths.shape, given.shape[-2 if given.layout == "HLE" else -3]))


@fault("stored_lengths")
def last_page_always_whole(given: Paged) -> Array:
    """Lengths are those after padding, here to whole pages, and what is in free slots counts.

    https://github.com/EricLBuehler/mistral.rs/pull/1746
    """
    return np.minimum(-(-given.lengths // given.page) * given.page, given.table.shape[-1] * given.page)


@fault("stored_lengths")
def length_zero_reads_a_key(given: Paged) -> Array:
    """An entry without keys reads the first slot of its first page.

    https://github.com/deepseek-ai/FlashMLA/issues/11
    """
    return _within(given, np.maximum(given.lengths, 1))


@fault("fold")
def free_slots_multiplied(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """Free slots have a weight of 0, but the NaN in them is multiplied by it.

    https://github.com/Dao-AILab/flash-attention/issues/2374
    """
    folded = kernel.fold(call, state, s, keep, values, kept)
    with np.errstate(invalid="ignore"):
        return folded._replace(o=folded.o + mixed(np.zeros_like(s), np.ones_like(keep), values))


@fault("slots")
def heads_and_slots_exchanged(pages: Array, layout: str) -> Array:
    """The order of heads and slots is guessed, wrongly where a page has as many slots as heads.

    https://github.com/vllm-project/vllm/issues/49012
    """
    return storage.slots(pages, "LHE" if layout == "HLE" and pages.shape[1] == pages.shape[2] else layout)


@fault("entries")
def pages_in_the_order_of_memory(table: Array, lengths: Array, N: int, P: int) -> tuple[Array, Array]:
    """The pages of an entry are read in the order in which they lie in memory.

    https://github.com/tanishqkumar/ssd/pull/22
    """
    _, needed = storage.entries(table, lengths, N, P)
    return np.sort(np.where(needed, table, np.iinfo(table.dtype).max), -1), needed


@fault("entries")
def table_of_the_first_entry(table: Array, lengths: Array, N: int, P: int) -> tuple[Array, Array]:
    """The stride of the table is lost, and all entries read the pages of the first one that names some.

    https://github.com/gittensor-ai-lab/sparkinfer/pull/144
    """
    ids, needed = storage.entries(table, lengths, N, P)
    rows = np.where(needed, ids, 0).reshape(-1, table.shape[-1])
    return np.broadcast_to(rows[:1], rows.shape).reshape(table.shape) if len(rows) else ids, needed


@fault("weights_over")
def weights_end_with_the_longest_entry(given: Any, weights: Array) -> Array:
    """The weights over pages are as wide as the longest entry, and not as the pages; often these are the same.

    https://github.com/flashinfer-ai/flashinfer/pull/4365
    """
    return weights[..., : given.lengths.max(initial=0)] if isinstance(given, Paged) else weights


@fault("scaled")
def scale_inverted(codes: Array, scale: Array, acc: np.dtype[Any]) -> Array:
    """Codes are divided by their scale.

    https://github.com/vllm-project/vllm-xpu-kernels/pull/475
    """
    return codes.astype(acc) / scale.astype(acc)


@fault("decoded")
def constant_group_is_nan(kernel: Any, given: Quantized, acc: np.dtype[Any]) -> Array:
    """The offset is turned into a zero point by the scale, which is 0 for a group of equal numbers.

    https://github.com/openvinotoolkit/openvino/pull/37095
    """
    if given.offset is None:
        return storage.decoded(kernel, given, acc)
    scale, offset = (storage.blocks(x, given.shape).astype(np.float64) for x in (given.scale, given.offset))
    with np.errstate(all="ignore"):
        return np.array(scale * (storage.unpacked(given) - given.zero + offset / scale), acc)


@fault("blocks")
def scale_of_the_first_groups(part: Array, shape: tuple[int, ...]) -> Array:
    """The group comes from the lane, of which there are 64: wider keys take the scales of the first groups again.

    https://github.com/timtoole02/Camelid/pull/714
    """
    wide = storage.blocks(part, shape)
    return wide[..., np.arange(wide.shape[-1]) % 64]


@fault("blocks")
def scales_of_the_first_entry(part: Array, shape: tuple[int, ...]) -> Array:
    """The offset of the scales has no term for the batch entry, and all take those of the first.

    https://github.com/ROCm/rocm-libraries/pull/10474
    """
    return storage.blocks(part[:1] if part.ndim > 3 else part, shape)


@fault("unpacked")
def nibbles_by_halves(given: Quantized) -> Array:
    """The low halves of the bytes are taken for the first numbers and the high ones for the last, and not in turn.

    https://github.com/1bit-MONSTER/1bit-MONSTER/pull/572
    """
    if given.bits == 8:
        return storage.unpacked(given)
    return np.concatenate([given.codes & 15, given.codes >> 4], -1).astype(np.float64)


@fault("unpacked")
def nibbles_in_another_order(given: Quantized) -> Array:
    """Eight numbers are unpacked as if they had been packed in the order of AWQ.

    https://github.com/amd/Quark/pull/30
    """
    codes = storage.unpacked(given)
    if given.bits == 8 or codes.shape[-1] % 8:
        return codes
    return codes.reshape(*codes.shape[:-1], -1, 8)[..., [0, 4, 1, 5, 2, 6, 3, 7]].reshape(codes.shape)


@fault("unpacked")
def nibbles_borrow(given: Quantized) -> Array:
    """The zero point is subtracted from whole words, and what is below it borrows from the next number.

    https://github.com/gittensor-ai-lab/sparkinfer/pull/761
    """
    codes = storage.unpacked(given)
    if given.bits == 4 and codes.size:
        codes[..., 1:] -= codes[..., :-1] < given.zero
    return codes


@fault("zero")
def zero_point_ignored(given: Quantized) -> int:
    """The zero point is not subtracted.

    https://github.com/hatchetProject/QuEST/issues/18
    """
    return 0


@fault("decoded")
def zero_point_subtracted_unsigned(kernel: Any, given: Quantized, acc: np.dtype[Any]) -> Array:
    """The zero point is subtracted in the unsigned type of the codes, where smaller codes wrap around.

    https://github.com/tile-ai/tilelang/issues/2947
    """
    if given.codes.dtype != np.uint8:
        return storage.decoded(kernel, given, acc)
    numbers = (storage.unpacked(given) - given.zero) % 256 * storage.blocks(given.scale, given.shape)
    return np.array(numbers if given.offset is None else numbers + storage.blocks(given.offset, given.shape), acc)


@fault("unpacked")
def float8_nan_is_480(given: Quantized) -> Array:
    """The codes of NaN in float8_e4m3fn are read as numbers beyond the largest, 480.

    https://github.com/ml-explore/mlx/issues/4135
    """
    codes = storage.unpacked(given)
    return np.where(np.isnan(codes) & (given.codes.dtype.name == "float8_e4m3fn"), 480, codes)


@fault("rule")
def window_counts_slots(mask: Any, at: At, call: Call) -> Array:
    """After an eviction the window is laid over the slots of the cache, not over the positions of the text.

    https://github.com/huggingface/transformers/issues/35350
    """
    return visibility.rule(mask, at._replace(k=at.j) if isinstance(mask, sr.Window) else at, call)


@fault("rule")
def causal_after_eviction(mask: Any, at: At, call: Call) -> Array:
    """After an eviction "causal" aligns the last query with the last slot, as if no key were missing.

    https://github.com/rajveer43/VeloxQuant-MLX/issues/370
    """
    if call.key_positions is None or not isinstance(mask, sr.Causal):
        return visibility.rule(mask, at, call)
    return np.asarray(at.j <= at.i + call.shape[3] - call.shape[2])


@fault("rule")
def window_lost_for_one_query_after_eviction(mask: Any, at: At, call: Call) -> Array:
    """After an eviction a single query sees all keys that are left, whatever the window.

    https://github.com/rajveer43/VeloxQuant-MLX/pull/463
    """
    lost = call.key_positions is not None and call.shape[2] == 1 and isinstance(mask, sr.Window)
    return np.ones((1, 1, 1, 1), bool) if lost else visibility.rule(mask, at, call)
