"""Shared-memory objects: created once, never resized, without a name, handed out by descriptor.

Nothing survives a crash: Linux memfds have no name, macOS names are unlinked before they are used.
Workers get a descriptor that the kernel refuses to map writable, so only the daemon can change bytes.
`multiprocessing.shared_memory` is not used: its resource tracker unlinks segments it does not own (D15).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import sys
import time
from collections.abc import Callable

from expertd.cache.headroom import headroom
from expertd_protocol.errors import OutOfMemory

#: PSHMNAMLEN of XNU is 31 with the slash (D17).
SHM_NAME_MAX_BYTES = 30
#: So little is taken without asking what is left, which takes a millisecond.
_UNASKED_BYTES = 1 << 20
_UNMAP_SECONDS = 0.5
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h, since 5.1; not in Python's fcntl


class SharedMemory:
    """One object: a writable mapping here, and a descriptor for others."""

    def __init__(self, fd: int, nbytes: int, share_fd: int) -> None:
        self.nbytes = nbytes
        self.share_fd = share_fd
        self._fd = fd
        try:
            self.buffer = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError:
            if share_fd != fd:  # `fd` is still the caller's, this one nobody else knows
                os.close(share_fd)
            raise

    def close(self) -> None:
        """Unmap and close. The arrays over `buffer` must be gone (D16)."""
        self._unmap()
        os.close(self._fd)
        if self.share_fd != self._fd:
            os.close(self.share_fd)

    def _unmap(self) -> None:
        end = time.monotonic() + _UNMAP_SECONDS
        while True:
            try:
                return self.buffer.close()
            except BufferError:
                # a reader thread may refer to its last destination for some microseconds more
                if time.monotonic() > end:
                    raise
                time.sleep(0.0005)


def create(nbytes: int, *, workers_write: bool = False) -> SharedMemory:
    """Make a zeroed object of `nbytes` (a whole number of pages), really allocated.

    Args:
        workers_write: hand out a writable descriptor (a worker's own page).

    Raises:
        OutOfMemory: the system does not have the memory now; nothing is left behind.
    """
    if nbytes <= 0 or nbytes % mmap.PAGESIZE:
        raise ValueError(f"{nbytes} bytes are not a whole number of pages")
    if sys.platform == "darwin":
        return _create_darwin(nbytes, workers_write)  # not run on macOS yet
    return _create_linux(nbytes, workers_write)


def _no_memory(nbytes: int, why: str) -> OutOfMemory:
    return OutOfMemory(
        f"the system has no {nbytes:,} bytes of shared memory left ({why}); "
        "give a smaller budget, or in a container raise its memory limit"
    )


def _create_linux(nbytes: int, workers_write: bool) -> SharedMemory:
    if sys.platform == "darwin":
        raise AssertionError("the other one is for macOS")
    if (
        nbytes > _UNASKED_BYTES and nbytes > headroom()
    ):  # the kernel would not refuse, it would kill
        raise _no_memory(nbytes, "not available now")
    try:
        fd = os.memfd_create("expertd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as exc:
        raise OutOfMemory(f"cannot make shared memory: {exc.strerror}") from exc
    try:
        # ftruncate alone would succeed and a later touch would be SIGBUS (C07)
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        if workers_write:
            os.fchmod(fd, 0o600)  # a memfd is 0777 at first
            return SharedMemory(fd, nbytes, fd)
        os.fchmod(fd, 0o400)  # no second way in by opening /proc/<pid>/fd again
        share_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        memory = SharedMemory(fd, nbytes, share_fd)
    except OSError as exc:
        os.close(fd)
        if exc.errno in (errno.ENOSPC, errno.ENOMEM):
            raise _no_memory(nbytes, str(exc.strerror)) from exc
        raise
    with contextlib.suppress(OSError):  # older kernels: the read-only descriptor alone protects
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    return memory


def _create_darwin(
    nbytes: int,
    workers_write: bool,
    shm_open: Callable[[str, int, int], int] | None = None,
    shm_unlink: Callable[[str], None] | None = None,
) -> SharedMemory:
    """POSIX shared memory: sized once (a second ftruncate is EINVAL there, D18), unlinked at once."""
    if shm_open is None or shm_unlink is None:
        import _posixshmem  # CPython's own thin wrapper of shm_open(2)

        shm_open = _posixshmem.shm_open
        shm_unlink = _posixshmem.shm_unlink
    name = f"/expertd-{secrets.token_hex(8)}"
    assert len(name.encode()) <= SHM_NAME_MAX_BYTES
    try:
        fd = shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as exc:
        raise OutOfMemory(f"cannot make shared memory: {exc.strerror}") from exc
    try:
        try:
            os.ftruncate(fd, nbytes)
            share_fd = fd if workers_write else shm_open(name, os.O_RDONLY, 0o600)
        finally:
            shm_unlink(name)
        return SharedMemory(fd, nbytes, share_fd)
    except OSError as exc:
        os.close(fd)
        raise OutOfMemory(
            f"the system refused {nbytes:,} bytes of shared memory: {exc.strerror}"
        ) from exc
