"""The online softmax: its maximum, its sums, and rows that see nothing."""

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import kernel
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.kernel import State
from sdpa_ref.testing.museum.sums import mixed


@fault("fold")
def no_maximum(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """Scores are exponentiated without the maximum, and overflow at 89.

    https://github.com/pytorch/executorch/pull/18407
    """
    e = np.where(keep, np.exp(s), 0)
    seen = np.where((keep & (s > -np.inf)).any(-1), 0, -np.inf).astype(s.dtype)
    return State(np.maximum(state.m, seen), state.z + e.sum(-1), state.o + mixed(e * kept, keep, values))


@fault("start")
def maximum_begins_at_a_number(call: Call) -> State:
    """The running maximum begins at -50000, and rows whose scores all lie below give 0.

    https://github.com/flashinfer-ai/flashinfer/issues/4267
    """
    return kernel.start(call)._replace(m=np.full(call.shape[:3], -5e4, call.acc))


@fault("fold")
def masked_with_a_number(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """Masked scores are -10000 instead of absent: real scores below lose, and empty rows give the mean of V.

    https://github.com/microsoft/onnxruntime/issues/28904
    """
    masked = np.where(keep, s, -1e4).astype(s.dtype)
    return kernel.fold(call, state, masked, np.ones_like(keep), np.where(np.isfinite(values), values, 0), kept)


@fault("fold")
def empty_row_is_nan(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """A row that sees no key subtracts -inf from -inf.

    https://github.com/pytorch/pytorch/issues/103963
    """
    folded = kernel.fold(call, state, s, keep, values, kept)
    empty = ~keep.any(-1) & (keep.shape[-1] == call.shape[3])
    return folded._replace(m=np.where(empty, np.nan, folded.m).astype(s.dtype), z=np.where(empty, np.nan, folded.z))


@fault("finish")
def empty_row_is_the_mean(call: Call, state: State, seen: Array) -> tuple[Array, Array]:
    """A row that sees no key attends to all alike, padding included.

    https://github.com/ml-explore/mlx/issues/2395
    """
    output, lse = kernel.finish(call, state, seen)
    value = call.kernel.operands(call)[2]
    mean = value.mean(-2, keepdims=True) if value.shape[-2] else np.zeros((), call.acc)
    return np.where((state.z == 0)[..., None], mean, output), lse


@fault("finish")
def empty_row_left_as_it_was(call: Call, state: State, seen: Array) -> tuple[Array, Array]:
    """Rows that see no key are never written, and hold what was in memory.

    https://github.com/Dao-AILab/flash-attention/issues/1228
    """
    output, lse = kernel.finish(call, state, seen)
    return np.where(seen[..., None], output, 7).astype(call.acc), lse


@fault("fold")
def masked_tile_breaks_the_row(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """A first tile without visible keys leaves -inf minus -inf in rows that see later ones.

    https://github.com/pytorch/pytorch/issues/127055
    """
    folded = kernel.fold(call, state, s, keep, values, kept)
    broken = ~keep.any(-1) & (state.m == -np.inf) & (keep.shape[-1] < call.shape[3])
    return folded._replace(z=np.where(broken, np.nan, folded.z).astype(s.dtype))


@fault("fold")
def maximum_of_zero_after_a_masked_tile(
    call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array
) -> State:
    """After a tile without visible keys the maximum is 0, and a row of very negative scores underflows to 0.

    https://github.com/Dao-AILab/flash-attention/issues/2082
    """
    folded = kernel.fold(call, state, s, keep, values, kept)
    return folded._replace(m=np.where((folded.m == -np.inf) & (keep.shape[-1] < call.shape[3]), 0, folded.m))


@fault("fold")
def masked_row_counts_as_one(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """While no key was visible, masked scores are the most negative number and so is the maximum: exp(0) = 1.

    https://github.com/NVIDIA/TensorRT-LLM/issues/17477
    """
    masked = np.where(keep, s, np.finfo(call.acc).min)
    return kernel.fold(call, state, masked, np.ones_like(keep), np.where(np.isfinite(values), values, 0), kept)


@fault("fold")
def values_not_rescaled(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """When the maximum moves, the sum of the weights is rescaled and that of the values is not.

    https://github.com/tile-ai/tilelang/pull/1148
    """
    folded = kernel.fold(call, state, s, keep, values, kept)
    shrink = np.exp(state.m - np.where(folded.m == -np.inf, 0, folded.m))[..., None]
    return folded._replace(o=folded.o + np.where(state.m[..., None] == -np.inf, 0, (1 - shrink) * state.o))


@fault("fold")
def weights_not_rescaled(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """When the maximum moves, the sum of the values is rescaled and that of the weights is not.

    https://github.com/PaddleJitLab/CUDATutorial/issues/69
    """
    folded = kernel.fold(call, state, s, keep, values, kept)
    shrink = np.exp(state.m - np.where(folded.m == -np.inf, 0, folded.m))
    return folded._replace(z=folded.z + np.where(state.m == -np.inf, 0, (1 - shrink) * state.z))


@fault("fold")
def rescaled_the_wrong_way(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """The factor for what came before is exp(new - old) instead of exp(old - new).

    https://github.com/deepseek-ai/FlashMLA/pull/177
    """
    folded = kernel.fold(call, state, s, keep, values, kept)
    moved = np.where(state.m == -np.inf, 0, folded.m - state.m)
    return kernel.fold(call, state._replace(m=folded.m + moved), s, keep, values, kept)._replace(m=folded.m)


@fault("fold")
def maximum_of_masked_scores(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """The maximum is taken before the mask is applied, and one large masked score drowns the row.

    https://github.com/hw-native-sys/simpler/pull/72
    """
    m = np.maximum(state.m, s.max(-1, initial=-np.inf))
    e = np.where(keep, np.exp(s - m[..., None]), 0).astype(s.dtype)
    shrink = np.exp(state.m - m)
    return State(m, state.z * shrink + e.sum(-1), state.o * shrink[..., None] + mixed(e * kept, keep, values))


@fault("finish")
def epsilon_in_the_denominator(call: Call, state: State, seen: Array) -> tuple[Array, Array]:
    """A small number guards the division by the sum, and every row is a little too small.

    https://github.com/vllm-project/vllm/pull/39148
    """
    return kernel.finish(call, state._replace(z=state.z + call.acc.type(1e-10)), seen)
