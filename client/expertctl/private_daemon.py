"""A private daemon: one that lives as long as the command that started it.

Owns a run directory of its own (0700, a short path: a socket path has 103 bytes) and the process.
It ends with SIGTERM, then SIGKILL; should this process be killed first, the daemon sees the end of
its lifeline pipe and ends by itself. Never touches a daemon that was running before.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from expertd_protocol.endpoints import SOCKET_PATH_MAX_BYTES, Endpoints
from expertd_protocol.errors import (
    AlreadyRunning,
    BadBudget,
    BadConfig,
    DaemonUnavailable,
    ExitCode,
    ExpertdError,
)

#: Python, pyzmq and the slabs of a small budget take under a second; a loaded machine more.
READY_SECONDS = 30.0
STOP_SECONDS = 10.0
_POLL_SECONDS = 0.01
_PREFIX = "expertd-"
_ERROR = re.compile(r"(?:expertd: )?error: (.+)")

_BY_EXIT_CODE: dict[int, type[ExpertdError]] = {
    ExitCode.ALREADY_RUNNING: AlreadyRunning,
    ExitCode.BUDGET: BadBudget,
    ExitCode.CONFIG: BadConfig,
}


@dataclass(frozen=True)
class PrivateDaemon:
    """A daemon that accepts connections."""

    run_dir: Path
    pid: int

    @property
    def socket(self) -> Path:
        return Endpoints(self.run_dir).attach


def daemon_command(run_dir: Path, budget: str, lifeline: int) -> list[str]:
    """Return the command line; `-P` keeps modules of the current directory out of it."""
    return [
        sys.executable, "-P", "-m", "expertd", "--run-dir", str(run_dir),
        "--budget", budget, "--lifeline-fd", str(lifeline),
    ]  # fmt: skip


@contextmanager
def private_daemon(
    budget: str, *, ready_seconds: float = READY_SECONDS, stop_seconds: float = STOP_SECONDS
) -> Iterator[PrivateDaemon]:
    """Start a daemon, wait until it accepts, and end it on the way out.

    Raises:
        ExpertdError: it ended before it was ready; the sentence is the daemon's own.
    """
    run_dir = _run_dir()
    try:
        read_end, write_end = os.pipe()
        try:
            with tempfile.TemporaryFile() as log:
                command = daemon_command(run_dir, budget, read_end)
                process = _spawn(command, read_end, log)
                try:
                    _wait_ready(process, Endpoints(run_dir).attach, log, ready_seconds)
                    yield PrivateDaemon(run_dir, process.pid)
                finally:
                    stop(process, stop_seconds)
        finally:
            os.close(read_end)
            os.close(write_end)
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)


def _run_dir() -> Path:
    """Make the run directory where temporary files go, or in /tmp when that path is too long."""
    longest = len(os.fsencode(tempfile.gettempdir())) + len(f"/{_PREFIX}12345678/attach.sock")
    place = "/tmp" if longest > SOCKET_PATH_MAX_BYTES else None
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place)).resolve()


def _spawn(command: Sequence[str], lifeline: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    # its own session: Ctrl-C reaches only the command, which then ends the daemon in order
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(lifeline,),
        start_new_session=True,
    )


def _wait_ready(
    process: subprocess.Popen[bytes], path: Path, log: IO[bytes], ready_seconds: float
) -> None:
    deadline = time.monotonic() + ready_seconds
    while time.monotonic() < deadline:
        if (code := process.poll()) is not None:
            cls = _BY_EXIT_CODE.get(code, DaemonUnavailable)
            raise cls(last_sentence(log) or f"the daemon ended with exit code {code} at its start")
        if _accepts(path):
            return
        time.sleep(_POLL_SECONDS)
    said = last_sentence(log)
    raise DaemonUnavailable(
        f"the private daemon (pid {process.pid}) was not ready within {ready_seconds:g} s"
        + (f"; it last said: {said}" if said else "")
    )


def _accepts(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def last_sentence(log: IO[bytes]) -> str:
    """Return the last `error: ...` line of a process, else its last line, else nothing."""
    log.seek(0, os.SEEK_END)
    log.seek(max(log.tell() - (64 << 10), 0))
    lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines()]
    lines = [line for line in lines if line]
    errors = [found[1] for line in lines if (found := _ERROR.match(line))]
    return (errors or lines or [""])[-1]


def stop(process: subprocess.Popen[bytes], stop_seconds: float) -> None:
    """End a child: SIGTERM, and SIGKILL when it does not go."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(stop_seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:  # a second Ctrl-C is no reason to leave it behind
        if process.poll() is None:
            process.kill()
            process.wait(stop_seconds)
