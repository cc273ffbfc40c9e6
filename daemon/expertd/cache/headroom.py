"""How much memory the system still has for us: asked before an allocation that it could not survive.

Linux promises memory that it does not have. Where a machine or a container runs out, the kernel kills a
process instead of refusing: with the arena as the cause, most likely the daemon.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _Names:
    """Files of one version of control groups; page cache counts as used there, but can be dropped."""

    limit: str
    usage: str
    droppable: tuple[str, ...]


_V1 = _Names(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Names("memory.max", "memory.current", ("active_file", "inactive_file"))


def headroom(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Return bytes: what is available in the machine, or in the tightest control group around us."""
    available = int(psutil.virtual_memory().available)
    return min(available, *_left_in_groups(proc, cgroups), 1 << 62)


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for line in proc.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                root, names = cgroups / "memory", _V1
            elif not controllers:
                root, names = cgroups, _V2
            else:
                continue
            group = root / path.lstrip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(root):
                    with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                        yield _left(folder, names)


def _left(group: Path, names: _Names) -> int:
    limit = int((group / names.limit).read_text())
    usage = int((group / names.usage).read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return max(limit - usage + sum(int(stat.get(name, 0)) for name in names.droppable), 0)
