"""The admin's client: stats, ping and what a worker is to record; nothing mapped, nothing pinned.

Made for commands that live for a moment: it imports no numpy, and opens two sockets.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import zmq

from expertd_client.attach import AttachSocket, attach_path
from expertd_client.dealer import Dealer
from expertd_protocol import codec, errors
from expertd_protocol.messages import (
    Failure,
    Message,
    Noted,
    Ping,
    Pong,
    Record,
    StatsReply,
    StatsRequest,
    Welcome,
)
from expertd_protocol.stats import Stats

Reply = TypeVar("Reply", bound=Message)


class Admin:
    """One admin session. Use it as a context manager, or `close` it."""

    def __init__(self, attach: AttachSocket, deadline_seconds: float) -> None:
        self._attach = attach
        self._deadline_seconds = deadline_seconds
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._dealer = Dealer(self._context, attach)
        except BaseException:
            self._context.term()
            raise

    @classmethod
    def connect(cls, socket: Path | None = None, *, deadline_seconds: float = 10) -> Admin:
        """Connect to the daemon at `socket`: a run directory, its attach.sock, or None = the usual.

        Args:
            deadline_seconds: how long this and every later request may take.

        Raises:
            DaemonUnavailable: nobody listens there; the message says how to start a daemon.
        """
        deadline = time.monotonic() + deadline_seconds
        attach = AttachSocket.connect(attach_path(socket), "admin", "", deadline)
        try:
            return cls(attach, deadline_seconds)
        except BaseException:
            attach.close()
            raise

    @property
    def welcome(self) -> Welcome:
        """Who the daemon is: version, pid, epoch."""
        return self._attach.welcome

    def stats(self) -> Stats:
        return ask(self._dealer, StatsRequest(), StatsReply, self._deadline_seconds).stats

    def ping(self) -> float:
        """Return the seconds of one round trip."""
        start = time.monotonic()
        ask(self._dealer, Ping(), Pong, self._deadline_seconds)
        return time.monotonic() - start

    def record(self, record: Record) -> None:
        """Have a worker record what it routes, from its next forward pass on.

        Raises:
            UnknownSession: no such worker is attached.
        """
        ask(self._dealer, record, Noted, self._deadline_seconds)

    def close(self) -> None:
        """End the session; idempotent."""
        self._dealer.close()
        self._context.term()
        self._attach.close()

    def __enter__(self) -> Admin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def ask(dealer: Dealer, message: Message, expect: type[Reply], seconds: float) -> Reply:
    """Send one control message over ZeroMQ and return its reply.

    Late replies to miss requests that were given up may still be queued; they are skipped.
    """
    deadline = time.monotonic() + seconds
    dealer.send(codec.encode(message))
    while (data := dealer.receive(deadline)) is not None:
        if codec.is_miss(data):  # every message of the miss path is a msgpack array
            continue
        reply = codec.decode(data)
        if isinstance(reply, Failure):
            raise errors.from_wire(reply.code, reply.message)
        if isinstance(reply, expect):
            return reply
    raise errors.DeadlineExceeded(
        f"the daemon did not answer a {type(message).__name__} within {seconds:g} s; "
        "look at its log"
    )
