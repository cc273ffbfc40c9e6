"""Names for numbers: which expert, whose session."""

from typing import NamedTuple, NewType

SessionId = NewType("SessionId", bytes)
"""16 random bytes, told only to the process that attached; also its ZeroMQ routing id."""


class ExpertKey(NamedTuple):
    """One expert of one model. `layer` counts MoE layers from 0, not decoder layers."""

    layer: int
    expert: int
