"""What to read, in which pieces and in which order. Pure: no clock, no file, no thread.

`coalesce` turns the experts that are wanted into reads in file order: neighbours become one read, big
pieces several. `ReadQueue` orders them: demand before prefill before prefetch, but none waits for ever,
and within each of these fair between sessions by bytes, so that one session's prefill cannot starve
another's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, NamedTuple, Protocol, TypeVar

from expertd.store.platform import Source
from expertd_protocol.ids import ExpertKey

#: Buffers of one preadv call (IOV_MAX of Linux and macOS).
MAX_SEGMENTS = 1024
#: Bytes a session may read before the next one has its turn.
QUANTUM_BYTES = 1 << 20
#: Reads in a row that may go before one of less priority. Without a limit, workers that decode from a
#: busy disk would hold up another's prefill until its deadline.
PASSED_OVER_MOST = 8


class Priority(IntEnum):
    """Lower goes first: a worker waits for demand now, for prefill in bulk, for prefetch not at all."""

    DEMAND = 0
    PREFILL = 1
    PREFETCH = 2


class Piece(NamedTuple):
    """Bytes of one file and where they go. `dest` is writable and contiguous; its length counts."""

    source: Source
    offset: int
    dest: memoryview


@dataclass(frozen=True, eq=False)
class Fill:
    """One expert to read into one slot, `(slab, slot)`."""

    key: ExpertKey
    slot: tuple[int, int]
    pieces: tuple[Piece, ...]
    priority: Priority
    session: bytes


class Segment(NamedTuple):
    """The bytes of a read that go to one place; `at` counts from the start of the read."""

    fill: int
    at: int
    dest: memoryview


@dataclass(eq=False)
class Read:
    """One read of one file for one or more fills; bytes between segments are read and dropped."""

    source: Source
    offset: int
    segments: list[Segment]
    priority: Priority
    session: bytes

    @property
    def nbytes(self) -> int:
        """Bytes from the first to the last wanted one."""
        last = self.segments[-1]
        return last.at + len(last.dest)

    @property
    def end(self) -> int:
        """Offset in the file behind the last wanted byte."""
        return self.offset + self.nbytes


def coalesce(fills: Sequence[Fill], *, max_bytes: int, max_gap: int) -> list[Read]:
    """Return the reads that cover every byte of every piece exactly once.

    Pieces of the same file, priority and session that are at most `max_gap` bytes apart share a
    read. A read, widened to the alignment of its source, is at most `max_bytes` long; only
    pieces longer than that are split.
    """
    groups: dict[tuple[Priority, bytes, int], list[tuple[int, Piece]]] = {}
    for number, fill in enumerate(fills):
        for piece in fill.pieces:
            if len(piece.dest):
                key = (fill.priority, fill.session, id(piece.source))
                groups.setdefault(key, []).append((number, piece))
    reads: list[Read] = []
    for (priority, session, _), pieces in groups.items():
        pieces.sort(key=lambda item: item[1].offset)
        read: Read | None = None
        end = limit = 0  # of `read`; asking it for every piece takes half of all time here
        for number, piece in pieces:
            source, start, size = piece.source, piece.offset, len(piece.dest)
            if (
                read is not None
                and 0 <= start - end <= max_gap
                and start + size <= limit
                and len(read.segments) < MAX_SEGMENTS // 2  # gaps take a buffer each, too
            ):
                read.segments.append(Segment(number, start - read.offset, piece.dest))
                end = start + size
                continue
            done = 0
            while done < size:
                read = Read(source, start + done, [], priority, session)
                limit = _limit(read, max_bytes)
                take = min(size - done, limit - start - done)
                read.segments.append(Segment(number, 0, piece.dest[done : done + take]))
                reads.append(read)
                done += take
            end = start + size
    return reads


def _limit(read: Read, max_bytes: int) -> int:
    """Return the offset that the read, widened to its source's alignment, may reach."""
    align = read.source.align
    if max_bytes < align:
        raise ValueError(f"reads of {max_bytes} bytes cannot be aligned to {align}")
    return read.offset - read.offset % align + max_bytes - max_bytes % align


class Queued(Protocol):
    """What `ReadQueue` needs to know of its items."""

    @property
    def priority(self) -> Priority: ...
    @property
    def session(self) -> bytes: ...
    @property
    def nbytes(self) -> int: ...


T = TypeVar("T", bound=Queued)


class ReadQueue(Generic[T]):
    """Reads that wait for a thread. Plain state: the owner locks it.

    Deficit round robin: a session's turn gives it `QUANTUM_BYTES` more to spend, and its first read
    goes when it can pay for it. So long as two sessions both wait, what they were served differs
    by no more than a turn and one read. Within a session, reads keep the order of `push`.
    """

    def __init__(self, quantum_bytes: int = QUANTUM_BYTES) -> None:
        self._quantum = quantum_bytes
        self._waiting: dict[Priority, dict[bytes, deque[T]]] = {p: {} for p in Priority}
        self._turns: dict[Priority, deque[bytes]] = {p: deque() for p in Priority}
        self._deficits: dict[Priority, dict[bytes, int]] = {p: {} for p in Priority}
        self._passed_over = dict.fromkeys(Priority, 0)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __repr__(self) -> str:
        waiting = {
            p.name: sum(len(q) for q in sessions.values()) for p, sessions in self._waiting.items()
        }
        return f"<ReadQueue {waiting}>"

    def push(self, item: T) -> None:
        """Add one read behind the others of its session."""
        sessions = self._waiting[item.priority]
        if item.session not in sessions:
            sessions[item.session] = deque()
            self._turns[item.priority].append(item.session)
            self._deficits[item.priority][item.session] = 0
        sessions[item.session].append(item)
        self._length += 1

    def pop(self) -> T | None:
        """Take the read that goes next, or None when nothing waits."""
        waiting = [priority for priority in Priority if self._turns[priority]]
        if not waiting:
            return None
        late = [p for p in waiting if self._passed_over[p] >= PASSED_OVER_MOST]
        chosen = late[0] if late else waiting[0]
        for priority in waiting:
            self._passed_over[priority] += priority > chosen
        self._passed_over[chosen] = 0
        return self._next(chosen)

    def _next(self, priority: Priority) -> T:
        turns, deficits = self._turns[priority], self._deficits[priority]
        while True:
            session = turns[0]
            waiting = self._waiting[priority][session]
            if deficits[session] >= waiting[0].nbytes:
                break
            deficits[session] += self._quantum
            turns.rotate(-1)
        item = waiting.popleft()
        deficits[session] -= item.nbytes
        if not waiting:  # an idle session saves nothing up
            self._forget(priority, session)
        self._length -= 1
        return item

    def cancel(self, predicate: Callable[[T], bool]) -> list[T]:
        """Take out and return every waiting read for which `predicate` holds."""
        cancelled: list[T] = []
        for priority, sessions in self._waiting.items():
            for session, waiting in list(sessions.items()):
                kept: deque[T] = deque()
                for item in waiting:
                    (cancelled if predicate(item) else kept).append(item)
                sessions[session] = kept
                if not kept:
                    self._forget(priority, session)
        self._length -= len(cancelled)
        return cancelled

    def _forget(self, priority: Priority, session: bytes) -> None:
        del self._waiting[priority][session]
        del self._deficits[priority][session]
        self._turns[priority].remove(session)
