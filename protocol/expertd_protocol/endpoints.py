"""Where the daemon is found: one run directory with fixed, short names.

No model name ever appears in a path. A Unix socket path is at most 103 bytes on macOS
(`sun_path` is 104 with its NUL; Linux allows 107), so the same limit holds everywhere.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from expertd_protocol.errors import PathTooLong

SOCKET_PATH_MAX_BYTES = 103

RUN_DIR_ENV = "EXPERTD_RUN_DIR"


@dataclass(frozen=True)
class Endpoints:
    """The files of one daemon. All of them live in `run_dir` (mode 0700)."""

    run_dir: Path

    def __post_init__(self) -> None:
        for path in (self.attach, self.router):
            n = len(os.fsencode(path))
            if n > SOCKET_PATH_MAX_BYTES:
                raise PathTooLong(
                    f"socket path {path} is {n} bytes, the system allows {SOCKET_PATH_MAX_BYTES}; "
                    f"choose a shorter directory with --run-dir or {RUN_DIR_ENV}"
                )

    @property
    def attach(self) -> Path:
        """Unix stream socket: handshake, file descriptors, life."""
        return self.run_dir / "attach.sock"

    @property
    def router(self) -> Path:
        """ZeroMQ ROUTER over ipc: misses and admin requests."""
        return self.run_dir / "router.sock"

    @property
    def lock(self) -> Path:
        """flock held by the one daemon of this directory for its whole life."""
        return self.run_dir / "lock"

    @property
    def names(self) -> frozenset[str]:
        """All file names that a daemon makes in its run directory."""
        return frozenset(path.name for path in (self.attach, self.router, self.lock))

    @property
    def router_url(self) -> str:
        return f"ipc://{self.router}"


def default_run_dir() -> Path:
    """Return the per-user run directory: `EXPERTD_RUN_DIR`, else the platform's usual place."""
    if chosen := os.environ.get(RUN_DIR_ENV):
        return Path(chosen).expanduser().absolute()
    if sys.platform != "darwin" and (runtime := os.environ.get("XDG_RUNTIME_DIR")):
        return Path(runtime) / "expertd"
    return Path.home() / ".expertd" / "run"
