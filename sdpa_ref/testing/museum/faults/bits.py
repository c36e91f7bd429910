"""Results that are right, and not the same: they depend on the batch, on other heads, or on the run."""

from collections.abc import Iterator

import numpy as np

from sdpa_ref.arrays import Array
from sdpa_ref.testing.museum import kernel
from sdpa_ref.testing.museum.arguments import Call
from sdpa_ref.testing.museum.exhibit import fault


@fault("tiles")
def splits_chosen_by_the_batch(call: Call) -> Iterator[slice]:
    """Where the batch leaves processors idle, the keys are split in more pieces.

    https://github.com/Dao-AILab/flash-attention/issues/1897
    """
    S, size = call.shape[3], 8 if call.shape[0] < 4 else kernel.TILE
    return (slice(j, min(j + size, S)) for j in range(0, S, size))


@fault("tiles")
def splits_chosen_by_the_heads(call: Call) -> Iterator[slice]:
    """The size of a tile depends on how many heads there are.

    https://github.com/Dao-AILab/flash-attention/pull/2901
    """
    S, size = call.shape[3], 8 if call.shape[1] > 4 else kernel.TILE
    return (slice(j, min(j + size, S)) for j in range(0, S, size))


@fault("tiles")
def sums_in_any_order(call: Call) -> Iterator[slice]:
    """Tiles are added as they arrive, in another order each time.

    https://github.com/Dao-AILab/flash-attention/issues/414
    """
    found = [slice(j, min(j + 4, call.shape[3])) for j in range(0, call.shape[3], 4)]
    return iter([found[n] for n in np.random.default_rng().permutation(len(found))])


@fault("kept")
def noise_of_another_call(call: Call) -> Array:
    """Dropout draws from a generator that all calls share, and every call drops other pairs.

    https://github.com/xlite-dev/ffpa-attn/pull/166
    """
    if call.dropout is None:
        return kernel.kept(call)
    bits = np.random.default_rng().random(call.shape) >= call.dropout.p
    return bits * call.acc.type(call.dropout.factor)
