"""The admin's client: asks, and maps nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from expertd_client import Admin
from expertd_client.testing import FakeDaemon
from expertd_protocol import codec
from expertd_protocol.errors import DaemonUnavailable, DeadlineExceeded, NotAuthorized
from expertd_protocol.messages import Failure


def test_stats_and_ping_are_answered(daemon: FakeDaemon, run_dir: Path) -> None:
    with Admin.connect(run_dir) as admin:
        stats = admin.stats()

        assert (stats.epoch, stats.run_dir) == (daemon.epoch, str(run_dir))
        assert 0 < admin.ping() < 10
        assert admin.welcome.daemon_pid == stats.pid
        hello = next(iter(daemon.sessions.values())).hello
        assert hello is not None
        assert hello.role == "admin"


def test_close_may_be_called_again(daemon: FakeDaemon, run_dir: Path) -> None:
    admin = Admin.connect(run_dir)
    admin.close()
    admin.close()


class Odd(FakeDaemon):
    frames: tuple[bytes, ...] = ()

    def _request(self, session_id: bytes, data: bytes) -> None:
        for frame in self.frames:
            self._router.send_multipart([session_id, frame])


def test_a_refusal_is_raised(run_dir: Path) -> None:
    with Odd(run_dir) as daemon, Admin.connect(run_dir) as admin:
        daemon.frames = (codec.encode(Failure(code="not_authorized", message="not you")),)
        with pytest.raises(NotAuthorized, match="not you"):
            admin.stats()


def test_no_answer_is_a_deadline_and_no_daemon_is_no_daemon(run_dir: Path) -> None:
    with Odd(run_dir) as daemon, Admin.connect(run_dir, deadline_seconds=0.1) as admin:
        with pytest.raises(DeadlineExceeded, match=r"a Ping within 0\.1 s"):
            admin.ping()
        daemon.stop()
        with pytest.raises(DaemonUnavailable, match="is gone"):
            admin.ping()


def test_an_admin_loads_no_numpy_and_so_starts_fast() -> None:
    code = "import sys; from expertd_client import Admin; sys.exit('numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False
    )
    assert done.returncode == 0
