"""Names for numbers: which expert, which slot, whose session."""

from typing import NamedTuple, NewType

SlotId = NewType("SlotId", int)
"""Index of a slot inside its slab, from 0."""

SlabId = NewType("SlabId", int)
"""Index of a slab inside its model, from 0."""

SessionId = NewType("SessionId", bytes)
"""16 random bytes, told only to the process that attached; also its ZeroMQ routing id."""


class ExpertKey(NamedTuple):
    """One expert of one model. `layer` counts MoE layers from 0, not decoder layers."""

    layer: int
    expert: int
