"""The ZeroMQ side of a session: one DEALER socket, one payload frame per message.

A wait ends with a frame, at its deadline, or when the attach socket says that the daemon is gone.
A new session gets a new socket: an old one would reconnect to the next daemon under a name that it
does not know. The context is made with the first socket, never at import (D10).
"""

from __future__ import annotations

import contextlib
import time

import zmq

from expertd_client.attach import AttachSocket
from expertd_protocol import codec, errors

#: Messages queued in each direction before the daemon is called stuck; one is the usual number.
HIGH_WATER_MARK = 64


class Dealer:
    """Connected to the ROUTER that `attach.welcome` names, under the session's id."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], attach: AttachSocket) -> None:
        self._attach = attach
        self._pid = attach.welcome.daemon_pid
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.ROUTING_ID, attach.welcome.session)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
            socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
            socket.setsockopt(zmq.MAXMSGSIZE, codec.ROUTER_MAX_BYTES)
            socket.connect(attach.welcome.endpoint)
        except zmq.ZMQError as exc:
            socket.close(0)
            raise errors.ProtocolError(
                f"cannot connect to {attach.welcome.endpoint!r}, "
                f"where daemon {self._pid} says it listens: {exc}"
            ) from exc
        self._socket = socket
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(attach.fileno(), zmq.POLLIN)

    def send(self, data: bytes) -> None:
        """Queue one message; never blocks.

        Raises:
            DeadlineExceeded: the queue is full, so the daemon has not read for a long time.
        """
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again as exc:
            raise errors.DeadlineExceeded(
                f"daemon {self._pid} has left {HIGH_WATER_MARK} requests unread; restart it"
            ) from exc

    def receive(self, deadline: float) -> bytes | None:
        """Return the next message, or None at `deadline` (a `time.monotonic` value).

        Raises:
            DaemonUnavailable: the daemon closed the attach socket and no message is left.
        """
        while True:
            left = deadline - time.monotonic()
            ready = dict(self._poller.poll(max(0, int(left * 1000) + 1) if left > 0 else 0))
            if self._socket in ready:
                with contextlib.suppress(zmq.Again):
                    frames = self._socket.recv_multipart(zmq.NOBLOCK)
                    if len(frames) != 1:
                        raise errors.ProtocolError(
                            f"daemon {self._pid} sent a message of {len(frames)} frames, one is due"
                        )
                    return frames[0]
            elif ready and self._attach.gone():
                raise errors.DaemonUnavailable(f"daemon {self._pid} is gone")
            elif left <= 0:
                return None

    def close(self) -> None:
        self._socket.close(0)
