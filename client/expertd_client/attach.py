"""The attach socket: handshake, file descriptors, life.

One blocking Unix stream connection, open as long as its owner serves. Every request has a deadline,
and end of file means that the daemon is gone. File descriptors that come along belong to the caller;
those that come unasked are closed. It never sends anything but one request at a time.
"""

from __future__ import annotations

import array
import os
import select
import socket
import stat
import time
from pathlib import Path
from typing import Literal, TypeVar

from expertd_protocol import codec, errors
from expertd_protocol.endpoints import SOCKET_PATH_MAX_BYTES, Endpoints, default_run_dir
from expertd_protocol.messages import Failure, Hello, Message, Welcome

#: The kernel passes at most this many descriptors in one message (SCM_MAX_FD of Linux).
MAX_FDS = 253
_LENGTH_BYTES = 4
#: Close-on-exec from the start where the kernel can do it; elsewhere it is set right after.
_RECV_FLAGS = getattr(socket, "MSG_CMSG_CLOEXEC", 0)

Reply = TypeVar("Reply", bound=Message)


def attach_path(where: Path | None) -> Path:
    """Return the attach socket of `where`: a socket, a run directory, or None for the usual one."""
    if where is None:
        return Endpoints(default_run_dir()).attach
    where = where.expanduser().absolute()
    if where.name == "attach.sock":
        return Endpoints(where.parent).attach
    try:
        if not stat.S_ISSOCK(where.stat().st_mode):
            return Endpoints(where).attach
    except OSError:  # not there yet: the connect says so, with the path it needs
        return Endpoints(where).attach
    if (n := len(os.fsencode(where))) > SOCKET_PATH_MAX_BYTES:
        raise errors.PathTooLong(
            f"socket path {where} is {n} bytes, the system allows {SOCKET_PATH_MAX_BYTES}; "
            "choose a shorter directory"
        )
    return where


class AttachSocket:
    """One connection to the daemon. `welcome` says who it is."""

    def __init__(self, path: Path, sock: socket.socket) -> None:
        self.path = path
        self.welcome: Welcome
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    @classmethod
    def connect(
        cls, path: Path, role: Literal["worker", "admin"], name: str, deadline: float
    ) -> AttachSocket:
        """Connect and say hello. `deadline` is a `time.monotonic` value.

        Raises:
            DaemonUnavailable: nobody listens at `path`; the message says how to start a daemon.
            DeadlineExceeded: somebody listens but does not answer.
        """
        attach = cls(path, _connected(path, deadline))
        try:
            hello = Hello(role=role, pid=os.getpid(), name=name)
            attach.welcome = attach.request(hello, Welcome, deadline)
            if not 0 < len(attach.welcome.session) <= 255:
                raise errors.ProtocolError(
                    f"the daemon at {path} gave a session id of {len(attach.welcome.session)} bytes"
                )
        except BaseException:
            attach.close()
            raise
        return attach

    def fileno(self) -> int:
        return self._sock.fileno()

    def gone(self) -> bool:
        """Tell, without waiting, whether the daemon closed the connection.

        Raises:
            ProtocolError: bytes that nobody asked for.
        """
        if self._sock.fileno() < 0:
            return True
        if not self._poll.poll(0):
            return False
        try:
            unasked = self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True
        if unasked:
            raise errors.ProtocolError(
                f"the daemon at {self.path} sent bytes on the attach socket that nobody asked for"
            )
        return True

    def request(self, message: Message, expect: type[Reply], deadline: float) -> Reply:
        """Send `message` and return the reply, which must be an `expect`."""
        reply, fds = self.request_fds(message, expect, deadline)
        if fds:
            close_fds(fds)
            raise errors.ProtocolError(
                f"the daemon at {self.path} sent {len(fds)} descriptors along with {reply.kind!r}"  # type: ignore[attr-defined]
            )
        return reply

    def request_fds(
        self, message: Message, expect: type[Reply], deadline: float
    ) -> tuple[Reply, list[int]]:
        """As `request`, and return the file descriptors that came along; the caller closes them."""
        data = codec.encode(message)
        fds: list[int] = []
        try:
            self._within(deadline)
            self._sock.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
            size = int.from_bytes(self._receive(_LENGTH_BYTES, fds, deadline), "big")
            if size > codec.ATTACH_MAX_BYTES:
                raise errors.ProtocolError(
                    f"the daemon at {self.path} announced a message of {size} bytes, "
                    f"allowed are {codec.ATTACH_MAX_BYTES}"
                )
            reply = codec.decode(self._receive(size, fds, deadline))
            if isinstance(reply, Failure):
                raise errors.from_wire(reply.code, reply.message)
            if not isinstance(reply, expect):
                raise errors.ProtocolError(
                    f"the daemon at {self.path} answered with {reply.kind!r} "
                    f"where {expect.__name__} was due"
                )
            return reply, fds
        except TimeoutError as exc:
            close_fds(fds)
            raise errors.DeadlineExceeded(
                f"the daemon at {self.path} did not answer a {type(message).__name__} in time; "
                "look at its log, or restart it"
            ) from exc
        except OSError as exc:
            close_fds(fds)
            raise errors.DaemonUnavailable(
                f"the daemon at {self.path} closed the connection: {exc.strerror or exc}"
            ) from exc
        except BaseException:
            close_fds(fds)
            raise

    def close(self) -> None:
        self._sock.close()

    def _receive(self, size: int, fds: list[int], deadline: float) -> bytes:
        """Read exactly `size` bytes; descriptors ride on the first bytes of a reply."""
        data = bytearray()
        while len(data) < size:
            self._within(deadline)
            piece, ancillary, flags, _ = self._sock.recvmsg(
                min(size - len(data), 1 << 20),
                socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize),
                _RECV_FLAGS,
            )
            for level, kind, payload in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    got = array.array("i")
                    got.frombytes(payload[: len(payload) - len(payload) % got.itemsize])
                    fds.extend(got)
            if not _RECV_FLAGS:
                for fd in fds:
                    os.set_inheritable(fd, False)
            if flags & socket.MSG_CTRUNC:
                raise errors.ProtocolError(
                    f"descriptors from the daemon at {self.path} were cut off; "
                    "raise the limit of open files (ulimit -n)"
                )
            if not piece:
                raise errors.DaemonUnavailable(
                    f"the daemon at {self.path} closed the connection; it may be restarting"
                )
            data += piece
        return bytes(data)

    def _within(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._sock.settimeout(left)


def close_fds(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _connected(path: Path, deadline: float) -> socket.socket:
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock.connect(os.fspath(path))
            return sock
        except BlockingIOError:  # its backlog is full: it lives, but is busy
            sock.close()
            if time.monotonic() >= deadline:
                raise errors.DeadlineExceeded(
                    f"the daemon at {path} accepts no connection; look at its log, or restart it"
                ) from None
            time.sleep(0.005)
        except OSError as exc:
            sock.close()
            raise errors.DaemonUnavailable(
                f"no daemon answers at {path} ({exc.strerror or exc}); start one with 'expertd', "
                "or name the run directory of a running one"
            ) from exc
        except BaseException:
            sock.close()
            raise
