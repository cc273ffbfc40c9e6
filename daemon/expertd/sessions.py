"""Attached processes: identity, quota, page, and what is left of them when they end.

A session ends in one of three ways. `Detach`: it holds nothing, everything is given back at once.
EOF: it is served no more, but its page and so its pins stay, because the process may live on.
Death of the process, proven by the kernel: its pins end with it.
"""

from __future__ import annotations

import secrets
import socket
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from expertd.cache.hazards import count_held
from expertd.cache.requests import Holder
from expertd.cache.shm import SharedMemory
from expertd.latency import LatencyHistogram
from expertd.peer import DeathWatch, Peer
from expertd_protocol.fence import fence
from expertd_protocol.ids import SessionId
from expertd_protocol.layout import U64, Counter, Header, PageLayout, Phase
from expertd_protocol.messages import Record
from expertd_protocol.stats import Counters, SessionStats

if TYPE_CHECKING:
    from expertd.models import Model

#: A page's counters are read again while its version is odd or changes; then the last good ones serve.
_COUNTER_TRIES = 8
#: Recordings that wait for one idle worker; the oldest are given up first.
_RECORDS_MAX = 8
#: No honest counter gets here; larger is a broken or hostile page and would break the wire's integers.
_COUNTER_MAX = np.uint64(1 << 62)


def new_session_id() -> SessionId:
    """16 random bytes; the first is not 0, which ZeroMQ keeps for its own routing ids."""
    return SessionId(bytes([1 + secrets.randbelow(255)]) + secrets.token_bytes(15))


class WorkerPage:
    """The daemon's view of one worker's page; nothing in it is trusted."""

    def __init__(self, layout: PageLayout, memory: SharedMemory) -> None:
        self.layout = layout
        self.memory = memory
        self.header: U64 = layout.header(memory.buffer)
        self.hazards: U64 = layout.hazards(memory.buffer)
        self.counters: U64 = layout.counters(memory.buffer)
        self._last_good = np.zeros_like(self.counters)

    def holder(self) -> Holder:
        return Holder(
            quota=self.layout.quota,
            header=self.header,
            hazards=self.hazards,
            uses=self.layout.uses(self.memory.buffer),
        )

    def read_counters(self) -> tuple[Counters, Counters]:
        """Return (prefill, decode) as of one moment between two updates."""
        for _ in range(_COUNTER_TRIES):
            before = int(self.header[Header.COUNTER_VERSION])
            fence()  # arm64 may read the counters before, or after, the version otherwise
            values = np.minimum(self.counters.copy(), _COUNTER_MAX)
            fence()
            if before % 2 == 0 and int(self.header[Header.COUNTER_VERSION]) == before:
                self._last_good = values
                break
        return _counters(self._last_good[Phase.PREFILL]), _counters(self._last_good[Phase.DECODE])

    def word(self, which: Header) -> int:
        return int(min(self.header[which], _COUNTER_MAX))

    def close(self) -> None:
        """Drop the views, then the mapping (D16)."""
        del self.header, self.hazards, self.counters
        self.memory.close()


def _counters(row: U64) -> Counters:
    return Counters(**{c.name.lower(): int(row[c]) for c in Counter})


@dataclass
class Session:
    """One connection on the attach socket, and what it got."""

    id: SessionId
    role: str
    name: str
    peer: Peer
    connection: socket.socket
    attached_at: float
    model: Model | None = None
    page: WorkerPage | None = None
    serving: bool = True
    #: Its connection was ended from here.
    cut: bool = False
    death: DeathWatch | None = None
    latency: LatencyHistogram = field(default_factory=LatencyHistogram)
    #: Wanted of this worker; it fetches them at its next forward pass.
    records: deque[Record] = field(default_factory=lambda: deque(maxlen=_RECORDS_MAX))
    records_asked: int = 0
    #: Wishes taken; its page says one more, or 0 where none are wanted.
    wishes: int = 0

    def take_wishes(self, more: int) -> None:
        """Say in the page that wishes are taken, and that `more` were."""
        assert self.page is not None
        self.wishes += more
        self.page.header[Header.WISHES] = 1 + self.wishes

    def note(self, record: Record) -> None:
        """Keep what is wanted of this worker, and say so in its page."""
        assert self.page is not None
        self.records.append(record)
        self.records_asked += 1
        self.page.header[Header.RECORDS] = self.records_asked

    def take_records(self) -> tuple[Record, ...]:
        records = tuple(self.records)
        self.records.clear()
        return records

    def snapshot(self, now: float) -> SessionStats:
        assert self.model is not None
        assert self.page is not None
        prefill, decode = self.page.read_counters()
        holder = self.model.cache.holders.get(self.id)
        return SessionStats(
            session=self.id.hex(),
            name=self.name,
            pid=self.peer.pid,
            model=str(self.model.path),
            state="serving" if self.serving else "detached",
            quota=self.page.layout.quota,
            pinned=min(count_held(self.page.hazards), self.page.layout.quota),
            in_flight=len(holder.waiting) if holder else 0,
            attached_seconds=now - self.attached_at,
            reattaches=self.page.word(Header.REATTACHES),
            mismatches=self.page.word(Header.MISMATCHES),
            resident_weight_bytes=self.page.word(Header.RESIDENT_BYTES),
            prefill=prefill,
            decode=decode,
            miss_latency=self.latency.snapshot(),
        )
