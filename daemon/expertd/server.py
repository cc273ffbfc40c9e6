"""The ROUTER: frames in, frames out. Knows ZeroMQ and the event loop, nothing of experts.

zmq.FD is edge-triggered (pyzmq#1021): after any receive or send EVENTS is read again and the socket
drained. Sends never block: ROUTER_MANDATORY makes a vanished or stuck peer an error instead of a silent
loss (D06), and the caller decides what that means for the session.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Callable

import zmq

from expertd.sockets import bind_listener
from expertd_protocol.codec import ROUTER_MAX_BYTES
from expertd_protocol.endpoints import Endpoints

log = logging.getLogger(__name__)

#: Unanswered messages to one peer; a worker has at most `max_in_flight` requests, so more is stuck.
SEND_HIGH_WATER = 64
#: Messages of one peer that wait to be taken. Each may have a MiB, and none of it is in the budget.
RECEIVE_HIGH_WATER = 16
HANDSHAKE_MS = 2000
#: Messages taken per wake-up, so that timers and the attach socket get their turn in a flood.
BATCH = 256


def refuse_other_users(router: zmq.SyncSocket) -> None:
    """Let libzmq drop connections of other users, where it can.

    Not every build for macOS can. The directory (0700) and the socket (0600) keep others out anyway.
    """
    try:
        router.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
    except zmq.ZMQError as exc:
        if exc.errno != errno.EINVAL:
            raise
        log.warning("peer_uid_unchecked reason=libzmq_without_IPC_FILTER_UID guard=file_modes")


class Router:
    """One bound ROUTER socket inside a running loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        endpoints: Endpoints,
        on_message: Callable[[bytes, bytes], None],
    ) -> None:
        self._loop = loop
        self._on_message = on_message
        listener = bind_listener(endpoints.router)
        self._context = zmq.Context(io_threads=1)
        self._socket: zmq.SyncSocket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, ROUTER_MAX_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER)
        # a connection that does not speak ZMTP gives its descriptor back soon (the default is 30 s)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        refuse_other_users(self._socket)
        # libzmq's own bind unlinks whatever is at the path (D02), and its close what is there by then
        self._socket.setsockopt(zmq.USE_FD, listener.detach())
        self._socket.bind(endpoints.router_url)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(self._fd, self._drain)
        self._scheduled = False
        self._schedule()

    def send(self, peer: bytes, payload: bytes) -> bool:
        """Send one message; False when the peer is gone or does not read."""
        try:
            self._socket.send_multipart((peer, payload), zmq.DONTWAIT)
        except zmq.Again:
            log.debug("peer_stuck session=%s unread=%d", peer.hex(), SEND_HIGH_WATER)
            return False
        except zmq.ZMQError as exc:
            log.info("peer_unreachable session=%s reason=%s", peer.hex(), exc)
            return False
        finally:
            self._schedule()  # a send may have swallowed the edge of the next receive
        return True

    def _schedule(self) -> None:
        if not self._scheduled and not self._socket.closed:
            self._scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if self._socket.closed:
            return
        more = True
        try:
            for _ in range(BATCH):
                # asking first: Again, as an exception, costs as much as a message
                if not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    more = False
                    return
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
                # other than two frames: a REQ socket or garbage; answered, so that its sender does
                # not wait for ever
                self._on_message(frames[0], frames[1] if len(frames) == 2 else b"")
        finally:
            if more:  # after an exception too: no new edge would come for what is queued already
                self._schedule()

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.close(linger=0)
        self._context.term()
