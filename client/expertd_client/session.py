"""One session: the attach socket, the DEALER, the arena and the pins, from hello to the end.

A session never outlives its daemon and is never repaired: when the daemon goes, every request raises
`SessionLost`, and the client opens the next session. At most one miss request is in flight.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path

import zmq

from expertd_client.arena import Arena
from expertd_client.attach import AttachSocket
from expertd_client.dealer import Dealer
from expertd_client.pins import Pins
from expertd_client.source import ModelSource
from expertd_protocol import codec, errors
from expertd_protocol.layout import U64, Header, Ints
from expertd_protocol.messages import (
    Attach,
    Attached,
    Detach,
    Detached,
    Miss,
    MissError,
    MissReply,
    Wish,
)

#: Grants that do not match the directory, in one pin, before the daemon is called broken.
MAX_RETRIES = 64
#: A clean end is worth this long, and no longer.
DETACH_SECONDS = 1.0
#: Wishes that the daemon may be behind with: more would only fill the queue that misses need.
WISHES_MOST = 8


class SessionLost(Exception):
    """The session is over: its daemon is gone, or does not know it any more."""


@dataclass(frozen=True)
class Wanted:
    """What the worker attaches to, the first time and after every restart of the daemon."""

    source: ModelSource
    quota_min: int
    quota_wanted: int


@dataclass(frozen=True)
class Patience:
    """Seconds that one pin waits: for a living daemon, and for a daemon to come back."""

    miss_seconds: float
    daemon_seconds: float


class Session:
    """Open until `end` or `detach`; `pins` are there once it is attached to a model."""

    def __init__(self, attach: AttachSocket, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.attach = attach
        self.lost = False
        self.seq = 0
        self.wishes = 0
        self.pins: Pins | None = None
        self._context = context
        self._dealer: Dealer | None = None

    @classmethod
    def open(
        cls,
        path: Path,
        name: str,
        context: zmq.Context[zmq.Socket[bytes]],
        wanted: Wanted,
        serial: int,
        deadline: float,
        replaces: bytes,
    ) -> Session:
        """Connect and attach in one go; `deadline` is a `time.monotonic` value.

        Args:
            replaces: id of this worker's lost session when it holds nothing there, else empty.
        """
        session = cls(AttachSocket.connect(path, "worker", name, deadline), context)
        try:
            session.map(wanted, serial, deadline, replaces)
        except BaseException:
            session.end()
            raise
        return session

    @property
    def daemon_pid(self) -> int:
        return self.attach.welcome.daemon_pid

    @property
    def dealer(self) -> Dealer:
        if self._dealer is None:
            self._dealer = Dealer(self._context, self.attach)
        return self._dealer

    def map(self, wanted: Wanted, serial: int, deadline: float, replaces: bytes = b"") -> Pins:
        """Attach to a model and map what the daemon sends."""
        source = wanted.source
        request = Attach(
            path=os.fspath(source.path),
            experts=source.experts,
            layers=source.layers,
            quota_min=wanted.quota_min,
            quota_wanted=wanted.quota_wanted,
            replaces=replaces,
        )
        attached, fds = self.attach.request_fds(request, Attached, deadline)
        arena = Arena(source, attached, fds, serial=serial, epoch=self.attach.welcome.epoch)
        try:
            if arena.quota < wanted.quota_min:
                raise errors.ProtocolError(
                    f"the daemon granted a quota of {arena.quota}, "
                    f"at least {wanted.quota_min} was asked for"
                )
            self._dealer = self.dealer  # connecting takes longer than a first miss should
            self.pins = Pins(arena)
        except BaseException:
            arena.close()
            raise
        return self.pins

    def fetch(
        self, layer: int, experts: Ints, phase: int, patience: Patience, waited_from: int
    ) -> U64:
        """Ask the daemon for what `Pins.hold` did not find (rule 2), until all of it is pinned.

        Args:
            waited_from: `time.monotonic_ns` when the pin began; waiting counts from there.
        """
        pins = self.pins
        assert pins is not None
        deadline = time.monotonic() + patience.miss_seconds
        missing = pins.missing(len(experts))
        joins = misses = requests = 0
        while len(missing):
            if requests > MAX_RETRIES:
                raise errors.ProtocolError(
                    f"daemon {self.daemon_pid} granted experts of layer {layer} that its "
                    f"directory does not have, {requests} times"
                )
            wanted = tuple(experts[missing].tolist())
            reply = self._ask(layer, wanted, phase, patience, deadline)
            if min(reply.joined, reply.missed) < 0 or reply.joined + reply.missed != len(wanted):
                raise errors.ProtocolError(
                    f"the daemon counted {reply.joined} joins and {reply.missed} misses "
                    f"for {len(wanted)} experts"
                )
            if not requests:  # an expert that has to be asked for again is still one lookup
                joins, misses = reply.joined, reply.missed
            requests += 1
            missing = pins.grant(reply.seq, layer, experts, missing, reply.words)
        waited_ns = time.monotonic_ns() - waited_from
        return pins.complete(layer, experts, phase, joins, misses, waited_ns, requests)

    def takes_wishes(self) -> bool:
        """Tell whether the daemon reads ahead (rule 21), and keeps up with what was wished for."""
        taken = self.pins.get_header(Header.WISHES) - 1 if self.pins is not None else -1
        return not self.lost and taken >= 0 and self.wishes - taken < WISHES_MOST

    def wish(self, layer: int, experts: tuple[int, ...]) -> None:
        """Say what this worker will probably ask for next; nobody waits for it, and it may get lost."""
        if self.takes_wishes():
            with contextlib.suppress(errors.DeadlineExceeded):  # the queue is full
                self.dealer.send(codec.encode_wish(Wish(layer, experts)))
                self.wishes += 1

    def give_up(self) -> None:
        """Drop a pin that did not complete, and whatever its request may still be granted."""
        if self.pins is not None:
            self.pins.abandon()
            self.pins.acknowledge(self.seq)

    def end(self) -> None:
        """Close the connection; what is mapped stays readable."""
        self.lost = True
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None
        self.attach.close()

    def detach(self) -> None:
        """Give the session back, then `end`. Nothing may be pinned any more."""
        if not self.lost:
            with contextlib.suppress(errors.ExpertdError):
                self.attach.request(Detach(), Detached, time.monotonic() + DETACH_SECONDS)
        self.end()

    def _ask(
        self, layer: int, experts: tuple[int, ...], phase: int, patience: Patience, deadline: float
    ) -> MissReply:
        """Send one request and return its reply; replies to requests given up are skipped."""
        if self.lost:
            raise SessionLost
        self.seq += 1
        self.dealer.send(codec.encode_miss(Miss(self.seq, layer, int(phase), experts)))
        while True:
            data = self._receive(deadline)
            if data is None:
                raise errors.DeadlineExceeded(
                    f"daemon {self.daemon_pid} lives but did not deliver {len(experts)} experts "
                    f"of layer {layer} within {patience.miss_seconds:g} s; "
                    "look at its log and at the disk"
                )
            if not codec.is_miss(data):
                codec.decode(data)  # a late answer to `stats`, or garbage
                continue
            reply = codec.decode_reply(data)
            if isinstance(reply, MissError) and reply.seq in (0, self.seq):
                raise self._refusal(reply, patience)
            if isinstance(reply, MissReply) and reply.seq == self.seq:
                return reply

    def _refusal(self, refusal: MissError, patience: Patience) -> Exception:
        """Return what a refused request ends with; a draining daemon is waited for to go first."""
        error = errors.from_wire(refusal.code, refusal.message)
        if isinstance(error, errors.UnknownSession):
            return SessionLost(refusal.message)
        if not isinstance(error, errors.Draining):
            return error
        deadline = time.monotonic() + patience.daemon_seconds
        while self._receive(deadline) is not None:
            continue
        return errors.DaemonUnavailable(
            f"daemon {self.daemon_pid} is stopping and still there after "
            f"{patience.daemon_seconds:g} s; look at its log"
        )

    def _receive(self, deadline: float) -> bytes | None:
        try:
            return self.dealer.receive(deadline)
        except errors.DaemonUnavailable as exc:
            raise SessionLost(exc.message) from exc
