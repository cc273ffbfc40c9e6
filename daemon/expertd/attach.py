"""The attach socket: handshake, file descriptors and the life of a connection.

One coroutine per connection. It owns no policy: `handlers` decides, this sends. A connection that says
nothing in time, or too much, is closed; a connection that ends is reported, and that is all EOF means.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Sequence

from expertd.peer import Peer, peer_of
from expertd.thread import in_thread
from expertd_protocol import codec
from expertd_protocol.errors import ExpertdError, ProtocolError, TooManySessions
from expertd_protocol.messages import AnyMessage, Failure, Message

log = logging.getLogger(__name__)

#: Larger messages are decoded in a thread: 4 MB took 0.9 s, in which nobody else is served.
LARGE_BYTES = 1 << 16
#: A message, once begun, must be complete in this time; the first one counts from accept.
MESSAGE_SECONDS = 10.0


class Connection:
    """One accepted socket: reads and writes length-prefixed messages."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, peer: Peer) -> None:
        self.sock = sock
        self.peer = peer
        self._loop = loop

    async def read(self, *, patient: bool) -> AnyMessage | None:
        """Return the next message, None at EOF.

        Args:
            patient: wait for its first byte without limit (an attached worker may stay silent).
        """
        begun = b""
        if patient and not (begun := await self._loop.sock_recv(self.sock, 1)):
            return None
        return await asyncio.wait_for(self._message(begun), MESSAGE_SECONDS)

    async def _message(self, begun: bytes) -> AnyMessage | None:
        head = begun + await self._read_exactly(4 - len(begun), eof_ok=not begun)
        if not head:
            return None
        (size,) = struct.unpack("!I", head)
        if size > codec.ATTACH_MAX_BYTES:
            raise ProtocolError(
                f"a message of {size:,} bytes is announced, {codec.ATTACH_MAX_BYTES:,} are allowed"
            )
        body = await self._read_exactly(size)
        if size < LARGE_BYTES:
            return codec.decode(body)
        return await in_thread(lambda: codec.decode(body))

    async def _read_exactly(self, size: int, *, eof_ok: bool = False) -> bytes:
        data = bytearray()
        while len(data) < size:
            some = await self._loop.sock_recv(self.sock, min(size - len(data), 1 << 16))
            if not some:
                if eof_ok and not data:
                    return b""
                raise ProtocolError(f"the connection ended after {len(data)} of {size} bytes")
            data += some
        return bytes(data)

    def ended(self) -> bool:
        """Tell, without waiting, whether the peer has closed the connection and left nothing to read."""
        try:
            return not self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    async def write(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Send one message; the descriptors go with its first bytes."""
        await asyncio.wait_for(self._write(message, fds), MESSAGE_SECONDS)

    async def _write(self, message: Message, fds: Sequence[int]) -> None:
        body = codec.encode(message)
        data = struct.pack("!I", len(body)) + body
        sent = 0
        if fds:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
            # the peer waits for this reply, so its buffer is empty: this never blocks in practice,
            # and a peer that has filled it gets BlockingIOError and is closed
            sent = self.sock.sendmsg([data], ancillary, socket.MSG_DONTWAIT)
        await self._loop.sock_sendall(self.sock, data[sent:])


Serve = Callable[[Connection], Awaitable[None]]


class AttachServer:
    """Accepts, checks who it is, and hands the connection to `serve`."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, listener: socket.socket, serve: Serve, limit: int
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._serve = serve
        self._limit = limit
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting = loop.create_task(self._accept())

    async def _accept(self) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(self._listener)
            except OSError as exc:  # EMFILE and friends: let others finish, then go on
                log.error("accept_failed reason=%s", exc)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            task = self._loop.create_task(self._run(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, sock: socket.socket) -> None:
        try:
            connection = Connection(self._loop, sock, peer_of(sock))
            if len(self._tasks) > self._limit:
                raise TooManySessions(
                    f"{len(self._tasks) - 1} connections are open, {self._limit} are allowed; "
                    "end a worker, or raise max_sessions"
                )
            await self._serve(connection)
        except ExpertdError as exc:
            await self._refuse(sock, exc)
        except (TimeoutError, OSError) as exc:
            log.info("connection_lost reason=%r", exc)
        except Exception:  # a bug costs one connection, and is not kept quiet
            log.exception("connection_failed")
        finally:
            sock.close()

    async def _refuse(self, sock: socket.socket, error: ExpertdError) -> None:
        log.info("connection_refused code=%s reason=%s", error.code, error)
        body = codec.encode(Failure(code=error.code, message=error.message))
        try:
            await asyncio.wait_for(
                self._loop.sock_sendall(sock, struct.pack("!I", len(body)) + body), 1.0
            )
        except (TimeoutError, OSError):
            return

    async def close(self) -> None:
        """Stop accepting and end every connection."""
        tasks = [self._accepting, *self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()


def unlink_quietly(path: os.PathLike[str]) -> None:
    """Remove a socket file at shutdown; it may be gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as exc:
        log.warning("unlink_failed path=%s reason=%s", path, exc)
