"""All exhibits, by name."""

from collections.abc import Mapping

from sdpa_ref.testing.museum.exhibit import Fault
from sdpa_ref.testing.museum.faults import (
    bits,
    calls,
    dropout,
    gradients,
    heads,
    keys,
    masks,
    memory,
    positions,
    precision,
    scores,
    sinks,
    sizes,
    softmax,
    states,
    storage,
)

ROOMS = {
    room.__name__.rpartition(".")[2]: tuple(found for found in vars(room).values() if isinstance(found, Fault))
    + getattr(room, "FAULTS", ())
    for room in (
        masks, positions, scores, softmax, sinks, keys, heads, storage, memory, precision, states, dropout, gradients,
        bits, sizes, calls,
    )
}  # fmt: skip
"""The exhibits by what they are about."""

FAULTS: Mapping[str, Fault] = {fault.name: fault for room in ROOMS.values() for fault in room}
"""The exhibits by name."""
