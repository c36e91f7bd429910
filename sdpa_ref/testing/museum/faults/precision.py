"""Types: results in the wrong one, sums in one that is too narrow."""

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import kernel
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.kernel import Stages, State
from sdpa_ref.testing.museum.sums import product


@fault("scores")
def scores_in_sixteen_bits(call: Call, query: Array, key: Array, keys: slice) -> Stages:
    """Scores are stored in the type of the inputs before the softmax, and overflow in float16.

    https://github.com/pytorch/pytorch/issues/60939
    """
    return Stages(*(x.astype(call.dtype).astype(call.acc) for x in kernel.scores(call, query, key, keys)))


@fault("scores")
def products_not_yet_scaled(call: Call, query: Array, key: Array, keys: slice) -> Stages:
    """The product of query and key is stored in the type of the inputs, and scaled after that.

    https://github.com/microsoft/onnxruntime/issues/28195
    """
    narrow = product(query, key[:, :, keys]).astype(call.dtype).astype(call.acc)
    exact = product(query, key[:, :, keys])
    stages = kernel.scores(call, query, key, keys)
    moved = call.acc.type(kernel.scale(call)) * (narrow - exact)
    return stages if call.softcap or call.score_mod else stages._replace(final=stages.final + moved)


@fault("fold")
def softmax_in_sixteen_bits(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """The sum of the weights is kept in the type of the inputs.

    https://github.com/pytorch/pytorch/pull/165961
    """
    folded = kernel.fold(call, state, s, keep, values, kept)
    return folded._replace(z=folded.z.astype(call.dtype).astype(call.acc))


@fault("fold")
def values_summed_in_sixteen_bits(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """The sum of the weighted values is kept in the type of the inputs from tile to tile.

    https://github.com/vllm-project/vllm/pull/68
    """
    folded = kernel.fold(call, state, s, keep, values, kept)
    return folded._replace(o=folded.o.astype(call.dtype).astype(call.acc))


@fault("fold")
def softmax_always_in_float32(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """The softmax is computed in float32, for float64 as well.

    https://github.com/jax-ml/jax/issues/37422
    """
    folded = kernel.fold(call, state, s.astype(np.float32).astype(s.dtype), keep, values, kept)
    return folded._replace(z=folded.z.astype(np.float32).astype(s.dtype))


@fault("rounded")
def output_in_float32(call: Call, array: Array) -> Array:
    """The output is float32, whatever came in.

    https://github.com/lucidrains/flash-attention-jax/pull/13
    """
    return array.astype(np.float32)


@fault("rounded")
def output_in_the_wrong_sixteen_bits(call: Call, array: Array) -> Array:
    """The output is float16 for bfloat16 inputs.

    https://github.com/PaddlePaddle/PaddleMIX/pull/1141
    """
    return array.astype(np.float16 if call.dtype.itemsize == 2 else call.dtype)


@fault("rounded_lse")
def lse_in_sixteen_bits(call: Call, lse: Array) -> Array:
    """The lse is returned in the type of the key.

    https://github.com/jax-ml/jax/issues/32484
    """
    return lse.astype(call.dtype)


@fault("rounded")
def weak_weights_flushed(call: Call, array: Array) -> Array:
    """Numbers below the normal range of the type are flushed to 0.

    https://github.com/data-apis/array-api-tests/issues/42
    """
    result = array.astype(call.dtype)
    limits = np.finfo(np.float16) if call.dtype == np.float16 else np.finfo(np.float32)
    return np.where(abs(array) < float(limits.tiny), result.dtype.type(0), result)
