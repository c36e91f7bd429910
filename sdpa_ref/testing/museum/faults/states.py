"""The lse, and the merge of partial results."""

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import kernel
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.kernel import State

Pair = tuple[Array, Array]


@fault("finish")
def lse_of_an_empty_row_is_inf(call: Call, state: State, seen: Array) -> tuple[Array, Array]:
    """A row that sees no key has the lse +inf, which wins every merge.

    https://github.com/Dao-AILab/flash-attention/pull/978
    """
    output, lse = kernel.finish(call, state, seen)
    return output, np.where(lse == -np.inf, np.inf, lse).astype(lse.dtype)


@fault("rounded_lse")
def lse_in_base_two(call: Call, lse: Array) -> Array:
    """The lse is a logarithm to the base 2.

    https://github.com/pytorch/pytorch/issues/181645
    """
    return (lse / np.log(2)).astype(lse.dtype)


@fault("finish")
def lse_without_the_maximum(call: Call, state: State, seen: Array) -> tuple[Array, Array]:
    """The lse is the logarithm of the sum after the maximum was subtracted.

    https://github.com/Dao-AILab/flash-attention/issues/404
    """
    output, lse = kernel.finish(call, state, seen)
    return output, np.where(seen, np.log(state.z), lse)


@fault("rounded_lse")
def lse_transposed(call: Call, lse: Array) -> Array:
    """Heads and rows of the lse are in the wrong order.

    https://github.com/feifeibear/long-context-attention/pull/128
    """
    return lse.swapaxes(-1, -2).reshape(lse.shape)


@fault("rounded_lse")
def lse_rounded_to_a_finite_number(call: Call, lse: Array) -> Array:
    """The lse of an empty row is a very negative number instead of -inf.

    https://github.com/flashinfer-ai/flashinfer/pull/4401
    """
    return np.maximum(lse, np.finfo(call.acc).min * call.acc.type(0.7))


@fault("merge")
def two_empties_merge_to_nan(a: Pair, b: Pair) -> Pair:
    """Two states without keys subtract -inf from -inf.

    https://github.com/flashinfer-ai/flashinfer/issues/4051
    """
    m = np.maximum(a[1], b[1])
    shares = np.exp(a[1] - m), np.exp(b[1] - m)
    z = shares[0] + shares[1]
    output = sum(share[..., None] * x.astype(m.dtype) for share, (x, _) in zip(shares, (a, b), strict=True))
    return (output / z[..., None]).astype(a[0].dtype), m + np.log(z)


@fault("merge")
def merge_overflows(a: Pair, b: Pair) -> Pair:
    """States are weighed by exp(lse), without the larger of the two.

    https://github.com/SHI-Labs/NATTEN/pull/202
    """
    shares = np.exp(a[1]), np.exp(b[1])
    z = shares[0] + shares[1]
    output = sum(share[..., None] * x.astype(z.dtype) for share, (x, _) in zip(shares, (a, b), strict=True))
    return (output / np.where(z == 0, 1, z)[..., None]).astype(a[0].dtype), np.log(z)


@fault("merge")
def merge_adds_the_lse(a: Pair, b: Pair) -> Pair:
    """The lse of the whole is the sum of the two.

    https://github.com/zhuzilin/ring-flash-attention/issues/20
    """
    return kernel.merge(a, b)[0], a[1] + b[1]


@fault("merge")
def merge_in_base_two(a: Pair, b: Pair) -> Pair:
    """States with a natural lse are merged as if it were one to the base 2.

    https://github.com/meta-pytorch/attention-gym/pull/205
    """
    output, lse = kernel.merge((a[0], a[1] * np.log(2).astype(a[1].dtype)), (b[0], b[1] * np.log(2).astype(b[1].dtype)))
    return output, (lse / np.log(2)).astype(lse.dtype)


@fault("merge")
def merge_overwrites_the_lse(a: Pair, b: Pair) -> Pair:
    """The merged lse is stored over that of the first state before its share is computed.

    https://github.com/local-inference-lab/vllm/pull/468
    """
    lse = kernel.merge(a, b)[1]
    return kernel.merge((a[0], lse), b)[0], lse


@fault("merge")
def merge_in_sixteen_bits(a: Pair, b: Pair) -> Pair:
    """The shares of two states are rounded to 16 bits before they are applied.

    https://github.com/vllm-project/tpu-inference/pull/3212
    """
    output, lse = kernel.merge(a, b)
    seen = lse > -np.inf
    shares = [
        np.where(seen, np.exp(x[1] - np.where(seen, lse, 0)), 0).astype(np.float16).astype(lse.dtype) for x in (a, b)
    ]
    total = sum(share[..., None] * x[0].astype(lse.dtype) for share, x in zip(shares, (a, b), strict=True))
    return np.asarray(total, output.dtype), lse
