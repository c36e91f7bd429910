"""Scores: the scale, the soft cap, the bias, and the order of the three."""

from dataclasses import replace

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import kernel
from sdpa_ref.testing.museum.arguments import Call, arrays_of
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.sums import product


@fault("scale")
def scale_twice(call: Call) -> float:
    """The query is scaled before the call, and the scores once more in it.

    https://github.com/huggingface/transformers/pull/38290
    """
    return kernel.scale(call) ** 2


@fault("scale")
def scale_without_the_root(call: Call) -> float:
    """The default scale is 1 / E instead of 1 / sqrt(E).

    https://github.com/delzac/cntkx/issues/10
    """
    return kernel.scale(call) ** 2 if call.scale is None else call.scale


@fault("scale")
def no_default_scale(call: Call) -> float:
    """Without a scale the scores are not scaled at all.

    https://github.com/mlc-ai/mlc-llm/pull/3426
    """
    return 1.0 if call.scale is None else call.scale


@fault("scale")
def scale_ignored(call: Call) -> float:
    """The scale is taken and not used.

    https://github.com/tenstorrent/tt-metal/issues/33304
    """
    return kernel.scale(replace(call, scale=None))


@fault("scale")
def scale_of_zero_not_given(call: Call) -> float:
    """A scale of 0 counts as not given: `scale or default`.

    https://github.com/ml-explore/mlx/issues/4097
    """
    return call.scale or kernel.scale(replace(call, scale=None))


@fault("scale")
def scale_of_the_value_width(call: Call) -> float:
    """The default scale is that of the width of the values.

    https://github.com/ROCm/hip-ep/pull/621
    """
    return float(call.value.shape[-1] or 1) ** -0.5 if call.scale is None else call.scale


@fault("scale")
def scale_of_the_padded_width(call: Call) -> float:
    """The default scale is that of the width after padding to a multiple of 8.

    https://github.com/intel/ipex-llm/pull/12619
    """
    return (-(-call.query.shape[-1] // 8) * 8 or 1) ** -0.5 if call.scale is None else call.scale


@fault("scale")
def root_of_a_negative_scale(call: Call) -> float:
    """Query and key are each multiplied by the square root of the scale, which is NaN for a negative one.

    https://github.com/onnx/onnx/pull/6984
    """
    return float(np.sqrt(kernel.scale(call)) ** 2)


@fault("scores")
def scale_after_the_mask(call: Call, query: Array, key: Array, keys: slice) -> kernel.Stages:
    """Masked scores are -inf before they are scaled: NaN for a scale of 0, +inf for a negative one.

    https://github.com/NVIDIA/cudnn-frontend/pull/804
    """
    stages, factor = kernel.scores(call, query, key, keys), call.acc.type(kernel.scale(call))
    masked = np.where(call.kernel.visible(call)[..., keys], 1, -np.inf).astype(call.acc) * factor
    spoilt = np.isnan(masked) | (masked == np.inf)
    return stages._replace(final=np.where(spoilt.any(-1, keepdims=True), np.nan, stages.final).astype(call.acc))


@fault("bias")
def bias_scaled(call: Call, keys: slice) -> Array:
    """The bias is added before the scale, and multiplied by it.

    https://github.com/tenstorrent/tt-metal/pull/42891
    """
    return kernel.bias(call, keys) * call.acc.type(kernel.scale(call))


@fault("bias")
def bias_read_as_float16(call: Call, keys: slice) -> Array:
    """The bytes of a bias are read in the type of the query.

    https://github.com/pytorch/pytorch/pull/191612
    """
    if call.dtype.itemsize != 2 or all(array.dtype.itemsize == 2 for array in arrays_of(call.biases)):
        return kernel.bias(call, keys)
    bias = kernel.bias(call, keys)
    return np.ascontiguousarray(bias).view(np.float16)[..., : bias.shape[-1]].astype(call.acc)


@fault("bias")
def bias_rounded(call: Call, keys: slice) -> Array:
    """The bias is rounded to the 16 bits of the query before it is added.

    https://github.com/xlite-dev/ffpa-attn/pull/170
    """
    return kernel.bias(call, keys).astype(call.dtype).astype(call.acc)


@fault("bias")
def bias_overflows(call: Call, keys: slice) -> Array:
    """Two masks of the most negative number add up to -inf, and empty the row.

    https://github.com/huggingface/transformers/pull/27114
    """
    return sum((np.broadcast_to(np.asarray(array), (*call.batch, *call.shape[1:])).reshape(call.shape)[..., keys]
                for array in arrays_of(call.biases)), np.zeros((), call.acc)).astype(call.acc)  # fmt: skip


@fault("capped")
def softcap_ignored(call: Call, s: Array) -> Array:
    """The soft cap is taken and not applied.

    https://github.com/sgl-project/sgl-kernel-xpu/pull/491
    """
    return s


@fault("capped")
def softcap_times_the_score(call: Call, s: Array) -> Array:
    """The tangent multiplies the score instead of the cap, so that nothing is capped.

    https://github.com/unslothai/unsloth-zoo/pull/593
    """
    return s if call.softcap is None else s * np.tanh(s / call.acc.type(call.softcap))


@fault("scores")
def softcap_after_the_bias(call: Call, query: Array, key: Array, keys: slice) -> kernel.Stages:
    """The bias is capped together with the score.

    https://github.com/onnx/onnx/pull/7867
    """
    stages = kernel.scores(call, query, key, keys)
    if call.softcap is None or not call.biases:
        return stages
    raw = call.acc.type(kernel.scale(call)) * product(query, key[:, :, keys])
    extra = stages.biased - stages.capped
    return stages._replace(final=kernel.capped(call, raw + extra))


@fault("fold")
def softcap_after_the_mask(
    call: Call, state: kernel.State, s: Array, keep: Array, values: Array, kept: Array
) -> kernel.State:
    """The cap is applied after the mask: a masked score of -inf becomes minus the cap, and the key keeps a weight.

    https://github.com/onnx/onnx/issues/7865
    """
    if call.softcap is None:
        return kernel.fold(call, state, s, keep, values, kept)
    return kernel.fold(call, state, np.where(keep, s, -call.softcap).astype(s.dtype), np.ones_like(keep), values, kept)
