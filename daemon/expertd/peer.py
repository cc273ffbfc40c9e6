"""Who is at the other end of a Unix socket, and when that process is really dead.

A worker is dead only when its process is. EOF is not proof (a forked child may hold the descriptors,
measured: 3 s late), heartbeats are not (a stopped process is alive). pidfd and kqueue are: 0.5-2 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from expertd_protocol.errors import NotAuthorized

_SO_PEERPIDFD = 77  # linux/socket.h, since 6.5; not in Python's socket
_SOL_LOCAL, _LOCAL_PEERPID = 0, 0x002  # sys/un.h of macOS


@dataclass(frozen=True)
class Peer:
    """Credentials that the kernel vouches for."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return the process that connected.

    Raises:
        NotAuthorized: it belongs to another user.
    """
    if sys.platform == "darwin":  # not run on macOS yet
        pid = struct.unpack("i", connection.getsockopt(_SOL_LOCAL, _LOCAL_PEERPID, 4))[0]
        peer = Peer(pid, _darwin_uid(connection))
    else:
        pid, uid, _gid = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        peer = Peer(pid, uid)
    if peer.uid != os.geteuid():
        raise NotAuthorized(
            f"process {peer.pid} belongs to user {peer.uid}, this daemon to {os.geteuid()}; "
            "every user runs a daemon of their own"
        )
    return peer


def _darwin_uid(connection: socket.socket) -> int:
    import ctypes

    uid, gid = ctypes.c_uint32(), ctypes.c_uint32()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getpeereid(connection.fileno(), ctypes.byref(uid), ctypes.byref(gid)) != 0:
        raise OSError(ctypes.get_errno(), "getpeereid failed")
    return uid.value


class DeathWatch:
    """Calls back once, in the loop, when one process has ended. `close` forgets it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        pid: int,
        on_death: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._on_death = on_death
        self._soon: asyncio.Handle | None = None
        self._fd = _exit_fd(connection, pid)
        if self._fd is None:  # gone before we could look
            self._soon = loop.call_soon(on_death)
        else:
            loop.add_reader(self._fd.fileno(), self._fired)

    def _fired(self) -> None:
        self.close()
        self._on_death()

    def close(self) -> None:
        if self._soon is not None:
            self._soon.cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd.fileno())
            self._fd.close()
            self._fd = None


class _Watched(Protocol):
    """A pidfd or a kqueue."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


class _Fd:
    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        os.close(self._fd)


def _exit_fd(connection: socket.socket, pid: int) -> _Watched | None:
    """Return something that becomes readable when `pid` exits, or None when it already has."""
    if sys.platform == "darwin":  # not run on macOS yet
        queue = select.kqueue()
        event = select.kevent(
            pid, select.KQ_FILTER_PROC, select.KQ_EV_ADD | select.KQ_EV_ONESHOT, select.KQ_NOTE_EXIT
        )
        try:
            queue.control([event], 0, 0)
        except ProcessLookupError:
            queue.close()
            return None
        return queue
    with contextlib.suppress(OSError):
        # the kernel's own handle on the peer: no race with a reused pid
        raw = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4)
        return _Fd(struct.unpack("i", raw)[0])
    try:
        return _Fd(os.pidfd_open(pid))
    except ProcessLookupError:
        return None
