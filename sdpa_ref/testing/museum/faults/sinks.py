"""The sink: one more logit in the denominator, counted too often, too seldom, or at the wrong scale."""

from dataclasses import replace

import numpy as np

from sdpa_ref.testing.museum import kernel
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import fault
from sdpa_ref.testing.museum.kernel import TILE, State


@fault("with_sink")
def sink_in_every_split(call: Call, state: State) -> State:
    """The sink is counted once for each split of the keys, here for each tile.

    https://github.com/ROCm/rocm-libraries/issues/12227
    """
    for _ in range(0, call.shape[3], TILE):
        state = kernel.with_sink(call, state)
    return state


@fault("with_sink")
def sink_scaled(call: Call, state: State) -> State:
    """The sink is multiplied by the scale of the scores.

    https://github.com/ROCm/rocm-libraries/pull/12229
    """
    if call.sink is None:
        return state
    return kernel.with_sink(replace(call, sink=np.asarray(call.sink) * kernel.scale(call)), state)


@fault("with_sink")
def sink_beyond_the_maximum(call: Call, state: State) -> State:
    """The sink does not take part in the maximum: a large one overflows, and an empty row with a sink has no lse.

    https://github.com/Dao-AILab/flash-attention/pull/2752
    """
    if call.sink is None:
        return state
    sink = np.broadcast_to(np.asarray(call.sink, call.acc), call.shape[1:2])[:, None]
    return state._replace(z=state.z + np.exp(sink - state.m))


@fault("with_sink")
def sink_dropped_for_short_rows(call: Call, state: State) -> State:
    """The path without split keys forgets the sink.

    https://github.com/kekzl/imp/issues/1303
    """
    return kernel.with_sink(call, state) if call.shape[3] > TILE else state


@fault("with_sink")
def sink_of_the_key_head(call: Call, state: State) -> State:
    """Query heads of a group share the sink of the first.

    https://github.com/Dao-AILab/flash-attention/issues/1797
    """
    if call.sink is None or np.ndim(call.sink) == 0:
        return kernel.with_sink(call, state)
    group = call.shape[1] // max(1, call.key.shape[1])
    return kernel.with_sink(replace(call, sink=np.repeat(np.asarray(call.sink)[::group], group)), state)
