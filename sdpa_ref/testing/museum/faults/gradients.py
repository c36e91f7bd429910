"""The backward pass."""

from dataclasses import replace
from typing import Any

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import backward
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.backward import Inner, Pieces
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.sums import mixed


@fault("of_group")
def groups_not_summed(call: Call, gradient: Array) -> Array:
    """The gradient of a key head is that of the last query head of its group.

    https://github.com/marin-community/levanter/pull/449
    """
    group = gradient.shape[1] // max(1, call.key.shape[1])
    return gradient[:, group - 1 :: group] if group else backward.of_group(call, gradient)


@fault("d_inputs")
def query_gradient_not_scaled(call: Call, p: Pieces, d: Array) -> tuple[Array, Array, Array]:
    """The gradient of the query lacks the scale.

    https://github.com/Dao-AILab/flash-attention/issues/2651
    """
    _, d_key, d_value = backward.d_inputs(call, p, d)
    return mixed(d, p.seen, p.key), d_key, d_value


@fault("d_inputs")
def empty_rows_have_nan_gradients(call: Call, p: Pieces, d: Array) -> tuple[Array, Array, Array]:
    """The weights of a row without keys are computed again as exp(-inf + inf).

    https://github.com/pytorch/pytorch/issues/41508
    """
    empty = ~p.seen.any(-1, keepdims=True)
    d, w = (np.where(empty, np.nan, x).astype(call.acc) for x in (d, p.w))
    return backward.d_inputs(call, p._replace(w=w, seen=p.seen | empty), d)


@fault("d_inputs")
def gradients_of_empty_rows_leak(call: Call, p: Pieces, d: Array) -> tuple[Array, Array, Array]:
    """A row without keys has weights of 0, and 0 times NaN of its incoming gradient is NaN.

    https://github.com/Dao-AILab/flash-attention/issues/1228
    """
    return backward.d_inputs(call, p._replace(seen=p.seen | ~p.seen.any(-1, keepdims=True)), d)


@fault("d_scores")
def row_sum_forgotten(call: Call, p: Pieces) -> Array:
    """The derivative of the softmax is taken to be its diagonal.

    https://github.com/wkcn/mobula/issues/3
    """
    return backward.d_scores(call, p) + np.where(p.seen, p.w * backward.row_sum(p), 0)


@fault("through_cap")
def softcap_without_derivative(call: Call, d: Array, capped: Array) -> Array:
    """The gradient passes the soft cap unchanged.

    https://github.com/openxla/tokamax/pull/1121
    """
    return d


@fault("through_cap")
def softcap_derivative_not_divided(call: Call, d: Array, capped: Array) -> Array:
    """The derivative is taken at the capped score instead of at its ratio to the cap.

    https://github.com/Dao-AILab/flash-attention/pull/1033
    """
    return d * (1 - capped**2)


@fault("as_given")
def bias_gradient_of_the_first_entry(call: Call, inner: Inner, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradient of a bias that all entries share is that of the first.

    https://github.com/HKUSTDial/flash-sparse-attention/pull/193
    """
    first = np.zeros_like(inner.biased)
    first[:1] = inner.biased[:1]
    return backward.as_given(call, inner._replace(biased=first), given)


@fault("as_given")
def key_and_value_exchanged(call: Call, inner: Inner, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The gradients of key and value are returned in the wrong order where their shapes agree.

    https://github.com/huggingface/diffusers/issues/14338
    """
    d_query, d_key, d_value, *others = backward.as_given(call, inner, given)
    return d_query, d_value, d_key, *others


@fault("weights_again")
def weights_of_low_rows_overflow(call: Call, s: Array, m: Array, z: Array, seen: Array) -> Array:
    """The weights are exp(score) / exp(lse), which is 0 / 0 where the lse is below -88.

    https://github.com/pytorch/pytorch/issues/196678
    """
    return np.where(seen, np.exp(s) / np.exp(m + np.log(z)), 0).astype(s.dtype)


@fault("weights_again")
def weights_from_a_rounded_lse(call: Call, s: Array, m: Array, z: Array, seen: Array) -> Array:
    """The weights are exp(score - lse), and beside a large score the logarithm of the sum is lost in the lse.

    So does the kernel that is named below; https://github.com/Dao-AILab/flash-attention/issues/1012 tells why.

    https://github.com/pytorch/pytorch/pull/103826
    """
    return np.where(seen, np.exp(s - np.where(seen, m + np.log(z), 0)), 0).astype(s.dtype)


@fault("d_sink")
def sink_share_from_a_rounded_lse(call: Call, p: Pieces) -> Array:
    """The share of a large sink is exp(sink - lse), where the keys beside it are lost.

    https://github.com/Dao-AILab/flash-attention/issues/1012
    """
    return backward.d_sink(call, p._replace(m=p.m + np.log(p.z), z=np.where(p.z == 0, p.z, 1).astype(p.z.dtype)))


@fault("d_sink")
def sink_has_no_gradient(call: Call, p: Pieces) -> Array:
    """The gradient of the sink is dropped on the way.

    https://github.com/ISEEKYAN/Megatron-LM/pull/205
    """
    return 0 * backward.d_sink(call, p)


@fault("d_sink")
def sink_gradient_without_lse(call: Call, p: Pieces) -> Array:
    """What flows in through the lse does not reach the sink.

    https://github.com/Dao-AILab/flash-attention/pull/2706
    """
    return backward.d_sink(call, p._replace(d_lse=np.zeros_like(p.d_lse)))


@fault("d_scores")
def lse_gradient_ignored(call: Call, p: Pieces) -> Array:
    """What flows in through the lse is dropped in silence.

    https://github.com/Dao-AILab/flash-attention/issues/1817
    """
    return backward.d_scores(call, p._replace(d_lse=np.zeros_like(p.d_lse)))


@fault("d_inputs")
def masked_keys_leak_into_gradients(call: Call, p: Pieces, d: Array) -> tuple[Array, Array, Array]:
    """A masked key is multiplied by a gradient of 0, and NaN times 0 is NaN.

    https://github.com/jax-ml/jax/issues/17070
    """
    return backward.d_inputs(call, p._replace(seen=np.ones_like(p.seen)), d)


@fault("seen_again")
def causal_alignment_of_the_forward_pass_alone(call: Call) -> Array:
    """The backward pass aligns a causal mask to the first key, where the forward pass aligned it to the last.

    https://github.com/xlite-dev/ffpa-attn/pull/300
    """
    return call.kernel.visible(replace(call, query_offset="start") if call.query_offset == "end" else call)
