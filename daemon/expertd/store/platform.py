"""One open file of a model, and how it is really read: past the page cache wherever possible.

`open_source` hides O_DIRECT (Linux), F_NOCACHE (macOS) and fadvise. Bypassing the page cache is what
keeps expert bytes counted once. Where a file system cannot do it, that file alone falls back to
buffered reads, says so once in the log, and reports it as its `mode`.

Files are opened read-only, never mapped and never written. A file that was replaced, rewritten,
truncated or deleted is never read on: its old and new bytes would be mixed.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

from expertd.store.header import Identity, open_file
from expertd_protocol.errors import ModelChanged, ReadFailed, UnreadableFile
from expertd_protocol.layout import round_up

log = logging.getLogger(__name__)

#: Most bytes of one read call: macOS fails above INT_MAX, Linux returns short reads above 2 GiB.
READ_MAX_BYTES = 64 << 20
#: Offset, length and address of a direct read are multiples of this: the largest block of any disk.
DIRECT_ALIGN_BYTES = 4096
#: What the kernel answers when this file cannot be read directly; some answer it only to a read.
NOT_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP})

HUGE_PAGE_BYTES = 2 << 20

_F_RDAHEAD, _F_NOCACHE = 45, 48  # <sys/fcntl.h> of macOS; Python's fcntl has them only there
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})

Preadv = Callable[[int, Sequence[Any], int], int]
ReadWish = Literal["auto", "direct", "buffered"]


class ReadMode(StrEnum):
    """How a file is really read, as stats show it."""

    DIRECT = "direct"
    NOCACHE = "nocache"
    BUFFERED = "buffered"


class Source:
    """One open shard. Safe to use from several reader threads; made by `open_source`.

    `fd` keeps its number for life, also over `reopen`. Counters only grow.
    """

    def __init__(self, fd: int, path: Path, identity: Identity, mode: ReadMode) -> None:
        self.fd = fd
        self.path = path
        self.identity = identity
        self.mode = mode
        #: How often the file was opened; `reopen` needs to know what its caller saw.
        self.opened = 1
        self.reads = 0
        self.read_bytes = 0
        self.errors = 0
        self._path = os.fspath(path)
        self._users = 0
        self._closed = False
        self._lock = threading.Lock()
        self._reopening = threading.Lock()  # guards mode, too; opening may hang, counting may not

    def __repr__(self) -> str:
        return f"<Source {self.path} {self.mode} reads={self.reads} errors={self.errors}>"

    @property
    def align(self) -> int:
        """Offsets, lengths and addresses must be multiples of this; 1 when anything goes."""
        return 1 if self.mode is ReadMode.BUFFERED else DIRECT_ALIGN_BYTES

    @property
    def device(self) -> int:
        """The device (st_dev): each has its own reader threads."""
        return self.identity.dev

    def in_use(self) -> Source:
        """Use as `with source.in_use():` to keep the descriptor open meanwhile.

        A number that is closed too early could be another file.
        """
        return self

    def __enter__(self) -> Source:
        with self._lock:
            if self._closed:
                raise ReadFailed(f"{self.path} was closed before it was read; attach again")
            self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and not self._users
        if last:
            os.close(self.fd)

    def close(self) -> None:
        """Close the file, at the latest when the last read of it has ended."""
        with self._lock:
            now = not self._closed and not self._users
            self._closed = True
        if now:
            os.close(self.fd)

    def preadv(self, views: Sequence[Any], offset: int, call: Preadv = os.preadv) -> int:
        """Read once into `views`, count it, and return the bytes read; 0 at the end of the file."""
        wanted = sum(len(view) for view in views)
        if wanted > READ_MAX_BYTES:
            raise ValueError(f"one read of {wanted} bytes, at most {READ_MAX_BYTES} are allowed")
        got = call(self.fd, views, offset)
        with self._lock:
            self.reads += 1
            self.read_bytes += got
        return got

    def failed(self) -> None:
        """Count an error."""
        with self._lock:
            self.errors += 1

    def check_identity(self) -> None:
        """Raise `ModelChanged` when the open file or the one at its path is not the indexed one."""
        try:
            self.verify()
        except OSError as exc:
            raise ReadFailed(f"{self.path} cannot be checked: {exc.strerror}") from exc

    def verify(self) -> None:
        """Do what `check_identity` does, but let an OSError of the device through."""
        there: os.stat_result | None
        try:
            there = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            there = None
        if there is not None and self.identity.matches(there):
            return  # that says the same of the open file: it is the same inode
        now = os.fstat(self.fd)
        if not self.identity.matches(now):
            raise ModelChanged(
                f"{self.path} was rewritten in place (it had {self.identity.size} bytes, now "
                f"{now.st_size}, or has another time); end its sessions and attach again"
            )
        if there is None:
            raise ModelChanged(
                f"{self.path} was deleted or moved away; put it back or attach to another model"
            )
        raise ModelChanged(
            f"{self.path} was replaced by another file; end its sessions and attach again"
        )

    def fall_back(self, reason: str) -> None:
        """Read through the page cache from now on; logs it the first time."""
        with self._reopening:
            if self.mode is ReadMode.BUFFERED:
                return
            _bypass_cache(self.fd, False)
            _expect_random_reads(self.fd)
            self.mode = ReadMode.BUFFERED
        log.warning("read_mode_fallback path=%s mode=buffered reason=%s", self.path, reason)

    def reopen(self, seen: int) -> None:
        """Open the path again under the same descriptor number, after an outage of its device.

        Args:
            seen: `opened` as it was before the read that failed. When another thread has
                opened the file since, nothing is done.

        Raises:
            ModelError: the file cannot be opened or is another one.
        """
        with self._reopening:
            if self.opened != seen:
                return
            fd = open_file(self.path)
            try:
                if Identity.of(fd) != self.identity:
                    raise ModelChanged(
                        f"{self.path} is another file after its device came back; attach again"
                    )
                if self.mode is ReadMode.BUFFERED:
                    _expect_random_reads(fd)
                else:
                    _bypass_cache(fd, True)
                os.dup2(fd, self.fd, inheritable=False)
            finally:
                os.close(fd)
            self.opened += 1
        log.warning("file_reopened path=%s", self.path)

    def drop_cache(self, offset: int, nbytes: int) -> None:
        """Let the page cache forget what a buffered read left there: the arena has it now."""
        if sys.platform != "darwin":
            start = offset - offset % mmap.PAGESIZE  # only whole pages are dropped
            end = round_up(offset + nbytes, mmap.PAGESIZE)
            os.posix_fadvise(self.fd, start, end - start, os.POSIX_FADV_DONTNEED)


def open_source(
    path: Path, identity: Identity, wanted: ReadWish = "auto", *, preadv: Preadv = os.preadv
) -> Source:
    """Open a shard for reading.

    Args:
        path: The file, links followed.
        identity: What its header was read from.
        wanted: "auto" reads directly where that works; "direct" refuses where it does not.
        preadv: Makes the probing read; tests inject failures here.

    Raises:
        ModelChanged: the file is not the one that was indexed.
        UnreadableFile: it cannot be opened, or "direct" is wanted and impossible.
        ModelNotFound, NotAModel: it is gone, or not a file.
    """
    fd = open_file(path)
    try:
        if Identity.of(fd) != identity:
            raise ModelChanged(f"{path} changed after its header was read; attach again")
        if wanted == "buffered":
            reason = "wanted"
        else:
            reason = _try_direct(fd, identity, preadv)
            if reason and wanted == "direct":
                raise UnreadableFile(
                    f"{path} cannot be read past the page cache ({reason}); "
                    "use read mode auto or buffered"
                )
    except BaseException:
        os.close(fd)
        raise
    if not reason:
        mode = ReadMode.NOCACHE if sys.platform == "darwin" else ReadMode.DIRECT
        return Source(fd, path, identity, mode)
    if wanted != "buffered":
        log.warning("read_mode_fallback path=%s mode=buffered reason=%s", path, reason)
    _expect_random_reads(fd)
    return Source(fd, path, identity, ReadMode.BUFFERED)


def _try_direct(fd: int, identity: Identity, preadv: Preadv) -> str:
    """Switch the page cache off and prove it by one real read; return why not, or nothing."""
    file_system = file_system_name(identity.dev)
    if file_system in _MEMORY_FILE_SYSTEMS:
        return f"{file_system} lives in memory"
    try:
        _bypass_cache(fd, True)
        with mmap.mmap(-1, DIRECT_ALIGN_BYTES) as page, memoryview(page) as view:
            preadv(fd, [view], 0)
    except OSError as exc:
        _bypass_cache(fd, False)
        if exc.errno in NOT_DIRECT:
            return (
                f"the {file_system or 'unknown'} file system answers {errno.errorcode[exc.errno]}"
            )
        # Any other error is the device's: the reads that follow will meet and report it.
        return exc.strerror or str(exc)
    return ""


def _bypass_cache(fd: int, bypass: bool) -> None:
    if sys.platform == "darwin":
        macos_bypass_cache(fd, bypass)
    else:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        wanted = flags | os.O_DIRECT if bypass else flags & ~os.O_DIRECT
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)


def macos_bypass_cache(
    fd: int, bypass: bool, call: Callable[[int, int, int], Any] = fcntl.fcntl
) -> None:
    """Switch caching and read-ahead of a file off or on. Not run on macOS yet."""
    call(fd, _F_NOCACHE, int(bypass))
    call(fd, _F_RDAHEAD, int(not bypass))


def _expect_random_reads(fd: int) -> None:
    """No read-ahead: the next expert is somewhere else."""
    if sys.platform == "darwin":
        fcntl.fcntl(fd, _F_RDAHEAD, 0)
    else:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def read_buffer(nbytes: int) -> mmap.mmap:
    """Return private memory for direct reads, of huge pages where its size allows it."""
    buffer = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux" and nbytes % HUGE_PAGE_BYTES == 0:
        # Pinning 4 KiB pages is half of what a direct read costs the CPU: measured on 790 KB reads,
        # 0.068 s per GB with huge pages, 0.131 without.
        with suppress(OSError):  # a kernel without them
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return buffer


def file_system_name(device: int, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """Return the type of the file system with that st_dev, or nothing where it is not known."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text(errors="replace").splitlines()
    except OSError:  # no /proc: macOS
        return ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split(" ")[2:3] == [wanted]:
            return rest.split(" ")[0]
    return ""
