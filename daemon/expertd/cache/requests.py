"""What the cache is asked for and what it leaves to do: plain records, no behaviour."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from expertd_protocol.ids import ExpertKey, SessionId
from expertd_protocol.layout import U32, U64, Phase
from expertd_protocol.messages import Miss, MissError, MissReply


@dataclass(frozen=True)
class FillOrder:
    """Read this expert into this slot; answer with `filled` or `failed`.

    `phase` is that of the pass that waits for it; None when nobody does (`warm`).
    """

    key: ExpertKey
    slab: int
    slot: int
    phase: Phase | None
    session: SessionId


@dataclass(frozen=True)
class Answer:
    """Send this to a session. `seconds` is how long the request waited in the daemon."""

    session: SessionId
    message: MissReply | MissError
    seconds: float


@dataclass
class Waiting:
    """One miss request that is not answered yet."""

    session: SessionId
    request: Miss
    asked_at: float
    missing: set[int]
    joined: int = 0
    missed: int = 0
    granted: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Holder:
    """A session as the cache sees it: its quota and its (hostile) page."""

    quota: int
    header: U64
    hazards: U64
    uses: U32
    waiting: dict[int, Waiting] = field(default_factory=dict)
    #: Number and layer of its latest request.
    seq: int = 0
    layer: int = -1
    #: Answered, but the worker has not yet said that it holds the slots itself.
    grants: deque[tuple[int, list[tuple[int, int]]]] = field(default_factory=deque)


@dataclass
class Tally:
    """Counters of one model; they only grow."""

    saved_reads: npt.NDArray[np.int64]  # by layer
    evictions: int = 0
    deferred_reuses: int = 0
