"""Dropout: bits that depend on the wrong thing, and weights that are not scaled."""

from dataclasses import replace

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import backward, kernel
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.backward import Pieces
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.kernel import State


@fault("kept")
def dropout_scaled_by_p(call: Call) -> Array:
    """Kept weights are multiplied by 1 / p.

    https://github.com/NVIDIA/apex/pull/816
    """
    return kernel.kept(call) if call.dropout is None else np.sign(kernel.kept(call)) * call.acc.type(1 / call.dropout.p)


@fault("kept")
def dropout_alike_in_all_rows(call: Call) -> Array:
    """All queries drop the same keys.

    https://github.com/NVIDIA/TransformerEngine/pull/227
    """
    kept = kernel.kept(call)
    return np.broadcast_to(kept[:, :, :1], kept.shape) if kept.size else kept


@fault("kept")
def dropout_ignores_the_seed(call: Call) -> Array:
    """The seed is a constant.

    https://github.com/Dao-AILab/flash-attention/issues/2088
    """
    return kernel.kept(call if call.dropout is None else replace(call, dropout=replace(call.dropout, seed=0x1BF58)))


@fault("kept")
def dropout_begins_anew_in_each_tile(call: Call) -> Array:
    """The bits are addressed by the place in the tile, so that they depend on the tile's size.

    https://github.com/Dao-AILab/flash-attention/pull/2439
    """
    kept = kernel.kept(call)
    return kept[..., np.arange(call.shape[3]) % kernel.TILE] if call.dropout else kept


@fault("fold")
def dropout_before_the_sum(call: Call, state: State, s: Array, keep: Array, values: Array, kept: Array) -> State:
    """Dropped weights are missing from the denominator.

    https://github.com/aws-neuron/nki-samples/pull/80
    """
    return kernel.fold(call, state, s, keep & (kept > 0), values, kept)


@fault("d_scores")
def dropout_forgotten_in_the_gradient(call: Call, p: Pieces) -> Array:
    """The gradient of the weights is not dropped like the weights.

    https://github.com/aws-neuron/nki-samples/pull/81
    """
    return backward.d_scores(call, p._replace(kept=np.ones_like(p.kept)))


@fault("d_inputs")
def dropout_drawn_again_in_the_gradient(call: Call, p: Pieces, d: Array) -> tuple[Array, Array, Array]:
    """The backward pass draws other bits than the forward pass.

    https://github.com/Dao-AILab/flash-attention/issues/612
    """
    if call.dropout is None:
        return backward.d_inputs(call, p, d)
    other = replace(call, dropout=replace(call.dropout, seed=(call.dropout.seed + 1) % 2**64))
    return backward.d_inputs(call, p._replace(kept=kernel.kept(other)), d)
