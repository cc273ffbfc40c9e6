"""The run directory, its lock and its socket files: who may be here, and never two daemons.

libzmq unlinks whatever is at an ipc path before it binds, and a second bind silently steals the
endpoint (D01, D02). So: a lock first, an lstat before each bind, and a directory that is ours alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from expertd_protocol.endpoints import Endpoints
from expertd_protocol.errors import AlreadyRunning, UnsafePath


def prepare_run_dir(run_dir: Path) -> Endpoints:
    """Make the run directory (0700) or check that it is a directory of ours alone (D05).

    Raises:
        UnsafePath: it is a link, belongs to someone else, or cannot be made.
        PathTooLong: a socket in it would not fit the kernel's limit.
    """
    endpoints = Endpoints(run_dir)
    try:
        run_dir.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            run_dir.mkdir(mode=0o700)
        info = run_dir.lstat()
        if not stat.S_ISDIR(info.st_mode):
            raise UnsafePath(f"run directory {run_dir} is not a directory (a link is refused too)")
        if info.st_uid != os.geteuid():
            raise UnsafePath(
                f"run directory {run_dir} belongs to user {info.st_uid}, not to {os.geteuid()}; "
                "choose another with --run-dir"
            )
        if info.st_mode & 0o077:
            foreign = {entry.name for entry in run_dir.iterdir()} - endpoints.names
            if foreign or info.st_mode & stat.S_ISVTX:
                raise UnsafePath(
                    f"run directory {run_dir} (mode {stat.S_IMODE(info.st_mode):o}) is used for other "
                    f"things too{f', {min(foreign)} for one' if foreign else ''}; choose one for "
                    "expertd alone with --run-dir, it is made when it does not exist"
                )
            run_dir.chmod(0o700)
    except OSError as exc:
        raise UnsafePath(f"run directory {run_dir} cannot be used: {exc.strerror}") from exc
    return endpoints


class RunLock:
    """Held for the daemon's whole life; the kernel lets go when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            AlreadyRunning: another process holds it.
            UnsafePath: something else is in its place, or the file system has no locks.
        """
        try:
            self._path = path
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise UnsafePath(
                f"{path} cannot be opened as the lock ({exc.strerror}); "
                "move it away or choose another --run-dir"
            ) from exc
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.close(self._fd)
            raise UnsafePath(
                f"{path} is not a file and cannot be the lock; "
                "move it away or choose another --run-dir"
            )
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            holder = os.read(self._fd, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            if exc.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise AlreadyRunning(
                    f"another expertd (pid {holder}) already serves {path.parent}; "
                    "use it, stop it, or choose another --run-dir"
                ) from exc
            raise UnsafePath(
                f"{path} cannot be locked ({exc.strerror}); the run directory must be on a local disk"
            ) from exc
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def is_in_place(self) -> bool:
        """Tell whether the file at the path is still the locked one; if not, the sockets are another's."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except OSError:
            return False

    def close(self) -> None:
        os.close(self._fd)


def clear_stale_socket(path: Path) -> None:
    """Remove a socket file that a killed daemon of ours left behind; the lock must be held.

    Raises:
        UnsafePath: there is something else than our own socket; it is not touched.
        AlreadyRunning: somebody listens there: a daemon whose lock file was removed.
    """
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(info.st_mode) or info.st_uid != os.geteuid():
        raise UnsafePath(
            f"{path} exists and is not a socket of ours; move it away or choose another --run-dir"
        )
    if _somebody_listens(path):
        raise AlreadyRunning(
            f"another process serves {path}, although it does not hold the lock of its directory; "
            "stop it, or choose another --run-dir"
        )
    path.unlink()


def _somebody_listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except BlockingIOError:  # its backlog is full
            return True
        except OSError:
            return False
    return True


def bind_listener(path: Path) -> socket.socket:
    """Return a listening socket (mode 0600), non-blocking.

    Raises:
        UnsafePath: something else is at `path`, or the file system has no sockets.
        AlreadyRunning: somebody listens there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        clear_stale_socket(path)
        listener.bind(os.fspath(path))
        listener.listen(64)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        raise UnsafePath(
            f"{path} cannot be bound as a socket ({exc.strerror or exc}); choose another --run-dir, "
            "on a local disk with room"
        ) from exc
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    return listener
