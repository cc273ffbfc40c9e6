"""How much shared memory a process really has: the independent look at the budget.

The daemon counts what it allocates; this asks the kernel instead. Linux only: /proc has shared
memory apart from other memory, macOS has no such number for another process.
"""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType

#: Kernel figures in /proc/PID/status are in units of 1024 bytes.
_KIB = 1024
PERIOD_SECONDS = 0.015


def shared_bytes(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Return the resident shared memory of a process, None where the system does not say."""
    try:
        status = (proc / str(pid) / "status").read_text("ascii", "replace")
    except OSError:
        return None
    for line in status.splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * _KIB
    return None


class SharedMemoryPeak:
    """Samples a process in a thread of its own until the `with` block ends."""

    def __init__(self, pid: int, period_seconds: float = PERIOD_SECONDS) -> None:
        self.peak_bytes: int | None = None
        self.samples = 0
        self._pid = pid
        self._period = period_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shared-memory-peak", daemon=True)

    def _run(self) -> None:
        while (now := shared_bytes(self._pid)) is not None:
            self.peak_bytes = max(self.peak_bytes or 0, now)
            self.samples += 1
            if self._over.wait(self._period):
                return

    def __enter__(self) -> SharedMemoryPeak:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        self._thread.join(5.0)
