"""Private daemons: started, waited for, ended, whatever happens. The daemon here is a small script."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from expertctl import private_daemon as module
from expertctl.private_daemon import PrivateDaemon, daemon_command, last_sentence, private_daemon
from expertd_protocol.errors import (
    AlreadyRunning,
    BadBudget,
    BadConfig,
    DaemonUnavailable,
    ExpertdError,
)

#: Binds the attach socket as the real one does, then waits for the end of the lifeline.
LISTEN = """
import os, signal, socket, sys
run_dir, lifeline = sys.argv[1], int(sys.argv[2])
server = socket.socket(socket.AF_UNIX)
server.bind(run_dir + "/attach.sock")
server.listen(8)
"""
OBEDIENT = LISTEN + "signal.signal(signal.SIGTERM, lambda *_: os._exit(0)); os.read(lifeline, 1)"
STUBBORN = LISTEN + "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"
#: Ends when its lifeline does, and says so in a file named by the environment.
LIFELINE = LISTEN + "os.read(lifeline, 1); open(os.environ['SAID'], 'w').write('lifeline ended')"

Scripted = Callable[[str], None]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    def use(script: str) -> None:
        def command(run_dir: Path, budget: str, lifeline: int) -> list[str]:
            return [sys.executable, "-c", script, str(run_dir), str(lifeline), budget]

        monkeypatch.setattr(module, "daemon_command", command)

    return use


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_it_lives_as_long_as_the_block_and_leaves_nothing(scripted: Scripted) -> None:
    scripted(OBEDIENT)
    with private_daemon("1MiB") as daemon:
        assert alive(daemon.pid)
        assert daemon.socket.is_socket()
        assert stat.S_IMODE(daemon.run_dir.stat().st_mode) == 0o700
    assert not alive(daemon.pid)
    assert not daemon.run_dir.exists()


def test_it_ends_with_the_block_when_that_fails(scripted: Scripted) -> None:
    scripted(OBEDIENT)
    seen: list[PrivateDaemon] = []

    def interrupted() -> None:
        with private_daemon("1MiB") as daemon:
            seen.append(daemon)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not alive(seen[0].pid)
    assert not seen[0].run_dir.exists()


def test_one_that_ignores_sigterm_is_killed(scripted: Scripted) -> None:
    scripted(STUBBORN)
    with private_daemon("1MiB", stop_seconds=0.2) as daemon:
        pass
    assert not alive(daemon.pid)


@pytest.mark.parametrize(
    ("code", "cls"),
    [(6, AlreadyRunning), (4, BadBudget), (78, BadConfig), (1, DaemonUnavailable)],
)
def test_its_own_error_sentence_is_passed_on(
    scripted: Scripted, code: int, cls: type[ExpertdError]
) -> None:
    scripted(
        "import sys; print('INFO up', file=sys.stderr);"
        "print('expertd: error: budget is 3 bytes', file=sys.stderr);"
        f"print('bye', file=sys.stderr); sys.exit({code})"
    )
    with pytest.raises(cls, match=r"^budget is 3 bytes$"), private_daemon("1MiB"):
        pass


def test_one_that_dies_silently_is_named_by_its_exit_code(scripted: Scripted) -> None:
    scripted("raise SystemExit(9)")
    with pytest.raises(DaemonUnavailable, match="exit code 9"), private_daemon("1MiB"):
        pass


def test_one_that_never_gets_ready_is_given_up_and_ended(scripted: Scripted) -> None:
    scripted("import sys, signal; print('stuck', file=sys.stderr, flush=True); signal.pause()")
    with (
        pytest.raises(DaemonUnavailable, match=r"not ready within 1 s; it last said: stuck"),
        private_daemon("1MiB", ready_seconds=1),
    ):
        pass


def test_a_long_temporary_directory_is_not_used_for_the_socket(
    scripted: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    scripted(OBEDIENT)
    with private_daemon("1MiB") as daemon:
        assert daemon.run_dir.parent == Path("/tmp").resolve()


def test_it_ends_when_the_command_is_killed(tmp_path: Path) -> None:
    """Nobody can clean up after SIGKILL: the daemon sees the end of its lifeline."""
    said = tmp_path / "said"
    os.mkfifo(said)
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import os, signal, sys\n"
        "from expertctl import private_daemon as m\n"
        f"script = {LIFELINE!r}\n"
        "m.daemon_command = lambda d, b, fd: [sys.executable, '-c', script, str(d), str(fd)]\n"
        "with m.private_daemon('1MiB') as d:\n"
        "    print(d.run_dir, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "SAID": str(said), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, starter], env=env, stdout=subprocess.PIPE, text=True, timeout=60
    )
    shutil.rmtree(done.stdout.strip())

    assert done.returncode == -9
    assert said.read_text() == "lifeline ended"


def test_the_command_line_is_the_daemon_s(tmp_path: Path) -> None:
    assert daemon_command(tmp_path, "24GiB", 7)[1:] == [
        "-P", "-m", "expertd", "--run-dir", str(tmp_path), "--budget", "24GiB", "--lifeline-fd", "7",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (b"", ""),
        (b"one\n\ntwo\n\n", "two"),
        (b"error: first\nerror: second\nlast\n", "second"),
        (b"\xff\xfe bad bytes\n", "\ufffd\ufffd bad bytes"),
        (b"x" * 100_000 + b"\nerror: late\n", "late"),
    ],
)
def test_the_last_sentence_of_a_log(log: bytes, sentence: str) -> None:
    with tempfile.TemporaryFile() as file:
        file.write(log)
        assert last_sentence(file) == sentence
