"""Masks that are read the wrong way round, in part, or not at all."""

from typing import Any

import numpy as np

import sdpa_ref as sr
from sdpa_ref.arrays import Array
from sdpa_ref.masks.algebra import All, BooleanArray
from sdpa_ref.testing.museum import kernel, visibility
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.visibility import At

ARRAYS = (np.ndarray, BooleanArray)


@fault("rule")
def mask_inverted(mask: Any, at: At, call: Call) -> Array:
    """A boolean array is read as True = masked out.

    https://github.com/pytorch/pytorch/issues/170400
    """
    keep = visibility.rule(mask, at, call)
    return ~keep if isinstance(mask, ARRAYS) else keep


@fault("fold")
def mask_multiplied_in(
    call: Call, state: kernel.State, s: Array, keep: Array, values: Array, kept: Array
) -> kernel.State:
    """Scores are multiplied by the mask, so that a masked key keeps the weight of a score of 0.

    https://github.com/openxla/xla/pull/11444
    """
    return kernel.fold(call, state, s * keep, np.ones_like(keep), values, kept)


@fault("scores")
def mask_added(call: Call, query: Array, key: Array, keys: slice) -> kernel.Stages:
    """A boolean array is turned into 0 and 1 and added to the scores as well.

    https://github.com/ml-explore/mlx/issues/2626
    """
    stages = kernel.scores(call, query, key, keys)
    if not isinstance(call.mask, ARRAYS):
        return stages
    return stages._replace(final=stages.final + call.kernel.visible(call)[..., keys].astype(call.acc))


@fault("visible")
def mask_of_the_first_entry(call: Call) -> Array:
    """The mask of the first batch entry is used for all.

    https://github.com/Tencent-Hunyuan/HunyuanVideo/pull/310
    """
    keep = visibility.visible(call)
    return np.broadcast_to(keep[:1], keep.shape) if keep.size else keep


@fault("visible")
def mask_of_the_first_head(call: Call) -> Array:
    """The mask of the first head is used for all heads.

    https://github.com/pytorch/pytorch/issues/177482
    """
    keep = visibility.visible(call)
    return np.broadcast_to(keep[:, :1], keep.shape) if keep.size else keep


@fault("rule")
def mask_dropped_when_causal(mask: Any, at: At, call: Call) -> Array:
    """A boolean array beside a causal mask is ignored.

    https://github.com/openvinotoolkit/openvino/pull/20492
    """
    if isinstance(mask, All) and any(isinstance(part, sr.Causal) for part in mask.parts):
        mask = All(tuple(part for part in mask.parts if not isinstance(part, ARRAYS)))
    return visibility.rule(mask, at, call)


@fault("rule")
def causal_lost_on_the_slow_path(mask: Any, at: At, call: Call) -> Array:
    """Where the fast path does not fit, here for lengths that are no multiple of 16, the causal mask is not applied.

    https://github.com/NVIDIA/TransformerEngine/issues/1524
    """
    keep = visibility.rule(mask, at, call)
    return np.ones_like(keep) if isinstance(mask, sr.Causal) and call.shape[2] % 16 else keep


@fault("visible")
def mask_summed_to_a_length(call: Call) -> Array:
    """A mask over keys is summed and taken as the number of valid keys, so that holes move to the end.

    https://github.com/NVIDIA/TransformerEngine/issues/614
    """
    keep = visibility.visible(call)
    return np.arange(keep.shape[-1]) < keep.sum(-1, keepdims=True) if isinstance(call.mask, ARRAYS) else keep


@fault("rule")
def causal_once_in_four_rows(mask: Any, at: At, call: Call) -> Array:
    """The causal mask is evaluated once for four rows, and three of them see the future.

    https://github.com/pytorch/pytorch/issues/195910
    """
    if isinstance(mask, sr.Causal):
        at = at._replace(p=at.p + 3 - at.i % 4)
    return visibility.rule(mask, at, call)


@fault("rule")
def causal_lost_with_dropout(mask: Any, at: At, call: Call) -> Array:
    """The path that dropout takes forgets the causal mask.

    https://github.com/keras-team/keras/issues/23038
    """
    keep = visibility.rule(mask, at, call)
    return keep if call.dropout is None or not isinstance(mask, sr.Causal) else np.ones_like(keep)


@fault("rule")
def key_lengths_ignored(mask: Any, at: At, call: Call) -> Array:
    """The valid key lengths are taken and not used.

    https://github.com/jax-ml/jax/issues/23349
    """
    keep = visibility.rule(mask, at, call)
    return np.ones_like(keep) if type(mask) is sr.KeyLengths else keep


@fault("rule")
def one_stale_key(mask: Any, at: At, call: Call) -> Array:
    """One key more than the valid length is read from the cache.

    https://github.com/pegainfer-project/pegainfer/issues/291
    """
    if type(mask) is sr.KeyLengths:
        return at.j <= call.per_entry(mask.n)[:, None, None, None]
    return visibility.rule(mask, at, call)


@fault("rule")
def left_padding_seen(mask: Any, at: At, call: Call) -> Array:
    """Padding before the first valid key is attended to.

    https://github.com/ml-explore/mlx-lm/issues/1906
    """
    keep = visibility.rule(mask, at, call)
    return np.ones_like(keep) if isinstance(mask, sr.KeyStarts) else keep


@fault("rule")
def prefix_off_by_one(mask: Any, at: At, call: Call) -> Array:
    """The last token of the prefix is not part of it.

    https://github.com/bigscience-workshop/Megatron-DeepSpeed/pull/167
    """
    if isinstance(mask, sr.Prefix):
        mask = sr.Prefix(np.maximum(mask.n - 1, 0))
    return visibility.rule(mask, at, call)


@fault("rule")
def chunks_begin_at_the_window(mask: Any, at: At, call: Call) -> Array:
    """Chunked attention is computed as a window of the chunk's size.

    https://github.com/huggingface/transformers/issues/37351
    """
    if isinstance(mask, sr.Chunked):
        mask = sr.Window(mask.size - 1, 0)
    return visibility.rule(mask, at, call)


@fault("rule")
def chunks_shifted_by_padding(mask: Any, at: At, call: Call) -> Array:
    """Chunks are counted from the first query instead of from the first key.

    https://github.com/huggingface/transformers/issues/40214
    """
    if isinstance(mask, sr.Chunked):
        first = at.p[:, :, :1]
        return (at.j <= at.p) & ((at.j - first) // mask.size == (at.p - first) // mask.size)
    return visibility.rule(mask, at, call)


@fault("rule")
def tree_taken_as_causal(mask: Any, at: At, call: Call) -> Array:
    """Below the diagonal a tree mask is not looked at, so that a node sees its siblings.

    https://github.com/PaddlePaddle/FastDeploy/pull/3514
    """
    return (
        at.j <= at.i + call.shape[3] - call.shape[2] if isinstance(mask, sr.Tree) else visibility.rule(mask, at, call)
    )


@fault("rule")
def documents_leak(mask: Any, at: At, call: Call) -> Array:
    """Packed documents start their positions anew, but attend to one another.

    https://github.com/huggingface/nanoVLM/pull/204
    """
    keep = visibility.rule(mask, at, call)
    return np.ones_like(keep) if isinstance(mask, sr.Packed) else keep
