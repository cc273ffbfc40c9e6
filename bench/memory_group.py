"""A memory limit for a few processes: a control group of its own, made and removed here.

Used for what goes through the page cache: pages that a member reads first are charged to the group, and
the kernel makes room within it. Memory that a member had before it came in stays charged where it was.
Version 1 and version 2 of the memory controller; only version 1 was run so far.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
#: Processes that were killed leave their group a moment later.
REMOVE_SECONDS = 10.0


class Unavailable(Exception):
    """Why there can be no such group here, in one sentence."""


class MemoryGroup:
    """One group; `folder` is where the kernel shows it."""

    def __init__(self, folder: Path, limit_file: str, limit_bytes: int) -> None:
        self.folder = folder
        self._limit_file = limit_file
        self.set_limit(limit_bytes)

    def set_limit(self, nbytes: int) -> None:
        (self.folder / self._limit_file).write_text(str(nbytes))

    def add(self, pid: int) -> None:
        """Move a process in, with all its threads."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def peak_bytes(self) -> int | None:
        """Return the most that was charged at once, where the kernel says so."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (path := self.folder / name).exists():
                return int(path.read_text())
        return None


def _root() -> tuple[Path, str]:
    """Return where groups are made, and the name of the file that limits one."""
    if (MOUNT / "memory" / "memory.limit_in_bytes").exists():
        return MOUNT / "memory", "memory.limit_in_bytes"
    controllers = MOUNT / "cgroup.controllers"
    if controllers.exists() and "memory" in controllers.read_text().split():
        if "memory" not in (MOUNT / "cgroup.subtree_control").read_text().split():
            raise Unavailable("the memory controller is not passed on to groups below the root")
        return MOUNT, "memory.max"
    raise Unavailable("this system has no memory control groups")


@contextmanager
def memory_group(name: str, limit_bytes: int) -> Iterator[MemoryGroup]:
    """Make a group, and remove it on the way out; its members must have ended by then.

    Raises:
        Unavailable: this system has none, or we may not make one.
    """
    root, limit_file = _root()
    folder = root / f"expertd-bench-{os.getpid()}-{name}"
    try:
        folder.mkdir()
    except OSError as exc:
        raise Unavailable(
            f"no control group can be made under {root}: {exc.strerror} (root is needed)"
        ) from exc
    try:
        try:
            group = MemoryGroup(folder, limit_file, limit_bytes)
        except OSError as exc:
            raise Unavailable(f"{folder / limit_file} cannot be set: {exc.strerror}") from exc
        yield group
    finally:
        _remove(folder)


def why_not() -> str | None:
    """Return why groups cannot be made here, or None when they can."""
    try:
        with memory_group("probe", 64 << 20):
            return None
    except Unavailable as exc:
        return str(exc)


def _remove(folder: Path) -> None:
    end = time.monotonic() + REMOVE_SECONDS
    while True:
        try:
            folder.rmdir()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
