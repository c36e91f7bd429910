"""Queries that stand in the wrong place, and windows that end a key too early or too late."""

from collections.abc import Callable
from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import arguments, kernel, visibility
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.visibility import At

Change = Callable[[int | None, int | None], tuple[int | None, int | None]]


def _moved(mask: Any, at: At, call: Call, change: Change) -> Array:
    """Return the rule of a mask, with its bounds changed where it is a window."""
    if not isinstance(mask, sr.Window):
        return visibility.rule(mask, at, call)
    return visibility.window(at, *change(mask.left, mask.right))


def _plus(bound: int | None, n: int) -> int | None:
    return None if bound is None else bound + n


@fault("positions")
def top_left_for_bottom_right(call: Call) -> tuple[Array, Array]:
    """The first query stands on the first key, although the last was asked to stand on the last key.

    https://github.com/ml-explore/mlx/issues/2835
    """
    p, origin = arguments.positions(call)
    return (p - p[:, :1] if call.query_offset == "end" else p), origin


@fault("positions")
def bottom_right_for_top_left(call: Call) -> tuple[Array, Array]:
    """The last query stands on the last key, although the first was asked to stand on the first key.

    https://github.com/pytorch/pytorch/issues/103082
    """
    p, origin = arguments.positions(call)
    return (p + call.shape[3] - call.shape[2] if call.query_offset == "start" else p), origin


@fault("positions")
def position_taken_for_the_row(call: Call) -> tuple[Array, Array]:
    """The causal limit is the row's index, and keys in the cache before the first query are not counted.

    https://github.com/gittensor-ai-lab/sparkinfer/issues/3
    """
    _, origin = arguments.positions(call)
    return np.broadcast_to(np.arange(call.shape[2]), origin.shape), origin


@fault("valid_lengths")
def end_of_the_buffer(call: Call) -> tuple[Any, Any]:
    """The last query stands on the end of the buffer instead of on the last valid key.

    https://github.com/onnx/onnx/issues/8054
    """
    return call.shape[2:]


@fault("positions")
def no_negative_offsets(call: Call) -> tuple[Array, Array]:
    """With more queries than keys the alignment falls back to the first key, and rows see keys that should see none.

    https://github.com/ml-explore/mlx/pull/2967
    """
    p, origin = arguments.positions(call)
    return p - np.minimum(p[:, :1], 0), origin


@fault("positions")
def offset_of_the_first_entry(call: Call) -> tuple[Array, Array]:
    """All batch entries take the offset of the first.

    https://github.com/gittensor-ai-lab/sparkinfer/pull/144
    """
    p, origin = arguments.positions(call)
    return (np.broadcast_to(p[:1], p.shape) if len(p) else p), origin


@fault("rule")
def window_one_too_long(mask: Any, at: At, call: Call) -> Array:
    """A window of n keys is passed on as an inclusive bound, and keeps n + 1.

    https://github.com/huggingface/transformers/issues/29623
    """
    return _moved(mask, at, call, lambda left, right: (_plus(left, 1), right))


@fault("rule")
def window_counts_itself(mask: Any, at: At, call: Call) -> Array:
    """The left bound is read as a number of keys that includes the query's own.

    https://github.com/microsoft/onnxruntime/pull/25927
    """
    return _moved(mask, at, call, lambda left, right: (_plus(left, -1), right))


@fault("rule")
def window_one_too_far_ahead(mask: Any, at: At, call: Call) -> Array:
    """The bound to the right is a key too far as well.

    https://github.com/huggingface/transformers/issues/39408
    """
    return _moved(mask, at, call, lambda left, right: (left, _plus(right, 1)))


@fault("rule")
def window_on_both_sides(mask: Any, at: At, call: Call) -> Array:
    """A window that ends at the query reaches as far ahead as it reaches back.

    https://github.com/ModelTC/LightLLM/pull/1311
    """
    return _moved(mask, at, call, lambda left, right: (left, left if right == 0 else right))


@fault("rule")
def zero_is_not_given(mask: Any, at: At, call: Call) -> Array:
    """A right bound of 0 counts as not given: `right or open`.

    https://github.com/Dao-AILab/flash-attention/issues/2574
    """
    return _moved(mask, at, call, lambda left, right: (left, right or None))


@fault("rule")
def window_forgotten_for_one_query(mask: Any, at: At, call: Call) -> Array:
    """The shortcut for a single query looks at all keys up to it, whatever the window.

    https://github.com/karpathy/nanochat/issues/452
    """
    return _moved(mask, at, call, lambda left, right: (None if call.shape[2] == 1 else left, right))


@fault("rule")
def window_around_the_row(mask: Any, at: At, call: Call) -> Array:
    """A window is laid around the row's index instead of the query's position.

    https://github.com/onnx/onnx/issues/7914
    """
    return visibility.rule(mask, at._replace(p=at.i) if isinstance(mask, sr.Window) else at, call)


@fault("visible")
def keys_counted_by_queries(call: Call) -> Array:
    """The loop over keys ends at the number of queries.

    https://github.com/jax-ml/jax/issues/24491
    """
    return visibility.visible(call) & (np.arange(call.shape[3]) < max(call.shape[2], 2))


@fault("slope")
def alibi_of_the_other_sign(slopes: Array, ahead: Array) -> Array:
    """ALiBi is added instead of subtracted, so that far keys win.

    https://github.com/meta-pytorch/attention-gym/pull/86
    """
    return slopes * abs(ahead)


@fault("slope")
def alibi_exponent_off_by_one(slopes: Array, ahead: Array) -> Array:
    """The exponents of the slopes start at 0 instead of 1: every head has the slope of the one before.

    https://github.com/paiml/aprender/pull/2143
    """
    return -abs(ahead) * slopes * 2 ** (8 / max(1, slopes.shape[1]))


@fault("slope")
def alibi_one_key_further(slopes: Array, ahead: Array) -> Array:
    """Every distance is one too large, which leaves the weights right and only the lse wrong.

    https://github.com/vllm-project/vllm/pull/945
    """
    return -slopes * (abs(ahead) + 1)


@fault("alibi")
def alibi_of_the_last_row(call: Call, keys: slice) -> Array:
    """All rows take the distances of the last, which is right for causal attention alone.

    https://github.com/mosaicml/llm-foundry/issues/186
    """
    return _alibi(call, call.shape[3] - 1, keys)


@fault("alibi")
def alibi_lost_in_decoding(call: Call, keys: slice) -> Array:
    """The distances are those of the current queries, as if no key were in the cache before them.

    https://github.com/keras-team/keras-hub/issues/2861
    """
    return _alibi(call, visibility.indices(call).i, keys)


def _alibi(call: Call, p: Any, keys: slice) -> Array:
    """Return the linear biases for queries at other positions."""
    return np.asarray(-kernel.slopes_of(call) * abs(p - visibility.indices(call).j[..., keys]), call.acc)
