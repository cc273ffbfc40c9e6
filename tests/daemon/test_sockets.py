"""The run directory is ours alone, there is one daemon, and nothing that is not ours is touched."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from expertd.sockets import RunLock, bind_listener, clear_stale_socket, prepare_run_dir
from expertd_protocol.errors import AlreadyRunning, ExitCode, PathTooLong, UnsafePath

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def _leave_stale_socket(path: Path) -> None:
    """What a daemon leaves behind that was killed."""
    with closing(socket.socket(socket.AF_UNIX)) as sock:
        sock.bind(os.fspath(path))


# --- run directory -----------------------------------------------------------------------------------
@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_the_run_directory_is_for_its_owner_alone_whatever_the_umask_D05(
    mask: int, short_dir: Path
) -> None:
    with umask(mask):
        endpoints = prepare_run_dir(short_dir / "a" / "run")

    assert endpoints.run_dir == short_dir / "a" / "run"
    assert _mode(endpoints.run_dir) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o777, 0o710])
def test_a_run_directory_that_is_too_open_is_tightened_D05(mode: int, short_dir: Path) -> None:
    run_dir = short_dir / "run"
    run_dir.mkdir()
    run_dir.chmod(mode)

    prepare_run_dir(run_dir)

    assert _mode(run_dir) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o1777])
def test_a_directory_with_other_things_in_it_is_refused_and_left_as_it_is_D05(
    mode: int, short_dir: Path
) -> None:
    run_dir = short_dir / "run"
    run_dir.mkdir()
    if mode == 0o755:
        (run_dir / "notes.txt").write_text("mine")
    run_dir.chmod(mode)

    with pytest.raises(UnsafePath, match="used for other things too"):
        prepare_run_dir(run_dir)

    assert _mode(run_dir) == mode


def test_a_run_directory_can_be_used_again(short_dir: Path) -> None:
    assert prepare_run_dir(short_dir / "run") == prepare_run_dir(short_dir / "run")


def test_a_link_is_refused_even_to_a_directory_of_ours_D05(short_dir: Path) -> None:
    (short_dir / "real").mkdir(mode=0o755)
    (short_dir / "run").symlink_to(short_dir / "real")

    with pytest.raises(UnsafePath, match="is not a directory"):
        prepare_run_dir(short_dir / "run")

    assert _mode(short_dir / "real") == 0o755


def test_a_regular_file_is_refused_D05(short_dir: Path) -> None:
    (short_dir / "run").write_text("a model")

    with pytest.raises(UnsafePath, match="is not a directory"):
        prepare_run_dir(short_dir / "run")

    assert (short_dir / "run").read_text() == "a model"


@as_root
def test_a_directory_of_someone_else_is_refused_D05(short_dir: Path) -> None:
    (short_dir / "run").mkdir(mode=0o777)
    os.chown(short_dir / "run", 12345, 12345)

    with pytest.raises(UnsafePath, match="belongs to user 12345"):
        prepare_run_dir(short_dir / "run")


def test_a_directory_that_cannot_be_made_is_named(short_dir: Path) -> None:
    (short_dir / "file").write_text("")

    with pytest.raises(UnsafePath, match=r"file/run cannot be used"):
        prepare_run_dir(short_dir / "file" / "run")


def test_a_path_that_is_too_long_is_refused_before_anything_is_made(short_dir: Path) -> None:
    with pytest.raises(PathTooLong):
        prepare_run_dir(short_dir / ("d" * 100))

    assert os.listdir(short_dir) == []


# --- lock --------------------------------------------------------------------------------------------
def test_a_second_daemon_is_refused_and_told_the_pid_of_the_first_D01(short_dir: Path) -> None:
    with closing(RunLock(short_dir / "lock")):
        with pytest.raises(AlreadyRunning, match=rf"pid {os.getpid()}\b") as caught:
            RunLock(short_dir / "lock")
        assert str(short_dir) in caught.value.message
        assert caught.value.exit_code == ExitCode.ALREADY_RUNNING

    RunLock(short_dir / "lock").close()


def test_the_lock_of_a_killed_daemon_is_free_D03(short_dir: Path) -> None:
    code = (
        "import sys, pathlib\n"
        "from expertd.sockets import RunLock\n"
        "lock = RunLock(pathlib.Path(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(short_dir / "lock")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(AlreadyRunning, match=rf"pid {holder.pid}\b"):
            RunLock(short_dir / "lock")
        holder.kill()
        holder.wait(5)

    with closing(RunLock(short_dir / "lock")):
        assert (short_dir / "lock").read_text() == f"{os.getpid()}\n"


def test_the_lock_is_private_and_not_inherited(short_dir: Path) -> None:
    with umask(0), closing(RunLock(short_dir / "lock")) as lock:
        assert _mode(short_dir / "lock") == 0o600
        assert not os.get_inheritable(lock._fd)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF])
def test_a_file_system_without_locks_is_named_and_nothing_stays_open_E18(
    number: int, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    before = os.dup(0)
    os.close(before)

    with pytest.raises(UnsafePath, match=r"lock cannot be locked .* must be on a local disk"):
        RunLock(short_dir / "lock")

    after = os.dup(0)
    os.close(after)
    assert before == after


@pytest.mark.parametrize("what", ["link", "directory"])
def test_something_else_in_the_place_of_the_lock_is_refused(what: str, short_dir: Path) -> None:
    if what == "link":
        (short_dir / "victim").write_text("keep")
        (short_dir / "lock").symlink_to(short_dir / "victim")
    else:
        (short_dir / "lock").mkdir()

    with pytest.raises(UnsafePath, match="cannot be opened as the lock"):
        RunLock(short_dir / "lock")

    assert what == "directory" or (short_dir / "victim").read_text() == "keep"


def test_a_lock_whose_file_was_removed_or_replaced_is_not_in_place(short_dir: Path) -> None:
    with closing(RunLock(short_dir / "lock")) as lock:
        assert lock.is_in_place()
        (short_dir / "lock").unlink()
        assert not lock.is_in_place()
        with closing(RunLock(short_dir / "lock")) as another:
            assert not lock.is_in_place()
            assert another.is_in_place()


def test_a_pipe_in_the_place_of_the_lock_is_refused(short_dir: Path) -> None:
    os.mkfifo(short_dir / "lock")

    with pytest.raises(UnsafePath, match="cannot be the lock"):
        RunLock(short_dir / "lock")


# --- sockets -----------------------------------------------------------------------------------------
def test_a_stale_socket_is_replaced_D03(short_dir: Path) -> None:
    path = short_dir / "attach.sock"
    _leave_stale_socket(path)

    with closing(bind_listener(path)), closing(socket.socket(socket.AF_UNIX)) as client:
        client.connect(os.fspath(path))


def test_the_socket_of_a_daemon_that_lives_is_not_taken_although_its_lock_was_removed_D01(
    short_dir: Path,
) -> None:
    path = short_dir / "attach.sock"
    with closing(bind_listener(path)) as listener:
        with pytest.raises(AlreadyRunning, match=r"attach\.sock"):
            bind_listener(path)
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(os.fspath(path))
            listener.accept()[0].close()
    bind_listener(path).close()


def test_a_regular_file_at_a_sockets_place_is_refused_and_not_touched_D02(short_dir: Path) -> None:
    path = short_dir / "attach.sock"
    path.write_bytes(b"a model of 20 GB")

    with pytest.raises(UnsafePath, match="is not a socket of ours"):
        bind_listener(path)

    assert path.read_bytes() == b"a model of 20 GB"


def test_a_link_at_a_sockets_place_is_refused_and_not_followed_D02(short_dir: Path) -> None:
    _leave_stale_socket(short_dir / "real.sock")
    (short_dir / "attach.sock").symlink_to(short_dir / "real.sock")

    with pytest.raises(UnsafePath):
        clear_stale_socket(short_dir / "attach.sock")

    assert (short_dir / "real.sock").is_socket()


@as_root
def test_a_socket_of_someone_else_is_refused_and_not_touched_D02(short_dir: Path) -> None:
    path = short_dir / "attach.sock"
    _leave_stale_socket(path)
    os.chown(path, 12345, 12345)

    with pytest.raises(UnsafePath):
        clear_stale_socket(path)

    assert path.is_socket()


def test_an_empty_place_needs_no_clearing(short_dir: Path) -> None:
    clear_stale_socket(short_dir / "attach.sock")

    assert os.listdir(short_dir) == []


@pytest.mark.parametrize("mask", [0, 0o022])
def test_only_the_owner_may_connect_whatever_the_umask_D05(mask: int, short_dir: Path) -> None:
    path = short_dir / "attach.sock"
    with umask(mask), closing(bind_listener(path)) as listener:
        assert _mode(path) == 0o600
        assert os.umask(mask) == mask  # and the umask is as it was
        assert not listener.getblocking()


@pytest.mark.parametrize("failing", ["bind", "listen"])
def test_a_socket_that_the_disk_refuses_is_one_sentence(
    failing: str, short_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(socket.socket):
        def bind(self, address: Any) -> None:
            self.fail("bind")

        def listen(self, backlog: int = 0, /) -> None:
            self.fail("listen")

        def fail(self, call: str) -> None:
            if call == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("expertd.sockets.socket.socket", Refusing)
    before = os.umask(0o022)
    os.umask(before)

    with pytest.raises(
        UnsafePath, match=r"attach\.sock cannot be bound .*No space left.*--run-dir"
    ):
        bind_listener(short_dir / "attach.sock")

    assert os.umask(before) == before  # put back


def test_a_directory_that_is_gone_is_one_sentence(short_dir: Path) -> None:
    with pytest.raises(UnsafePath, match="No such file or directory"):
        bind_listener(short_dir / "gone" / "attach.sock")
