"""Who connected, and when that process is really dead."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from expertd.peer import DeathWatch, Peer, peer_of
from expertd_protocol.errors import NotAuthorized
from tests.daemon.conftest import Run

#: Connects, forks when asked to, says who it is, and lives until its stdin ends.
_CHILD = """
import os, socket, sys
sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
grandchild = os.fork() if sys.argv[2] == "fork" else -1
if grandchild:
    print(grandchild, flush=True)
sys.stdin.read()
"""


class Child:
    """A process that has connected."""

    def __init__(self, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
        assert process.stdout is not None
        self.process = process
        self.pid = process.pid
        self.connection = connection
        self.grandchild = int(process.stdout.readline())


@contextmanager
def child(directory: Path, *, forks: bool = False) -> Iterator[Child]:
    path = str(directory / "s")
    with closing(socket.socket(socket.AF_UNIX)) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(20)
        with subprocess.Popen(
            [sys.executable, "-c", _CHILD, path, "fork" if forks else "alone"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as process:  # fmt: skip
            connection, _ = listener.accept()
            with closing(connection):
                made = Child(process, connection)
                try:
                    yield made
                finally:
                    process.kill()
                    if made.grandchild > 0:
                        os.kill(made.grandchild, signal.SIGKILL)


def test_the_kernel_says_who_connected(short_dir: Path) -> None:
    with child(short_dir) as worker:
        assert peer_of(worker.connection) == Peer(worker.pid, os.geteuid())


def test_a_socket_pair_is_our_own_process() -> None:
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        assert peer_of(ours) == Peer(os.getpid(), os.geteuid())


def test_another_user_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    uid = os.geteuid()
    with closing(ours), closing(theirs):
        monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
        with pytest.raises(
            NotAuthorized, match=rf"belongs to user {uid}, this daemon to {uid + 1}"
        ):
            peer_of(ours)


def test_a_killed_process_is_noticed_at_once(short_dir: Path, run: Run) -> None:
    async def main(worker: Child) -> None:
        dead = asyncio.Event()
        watch = DeathWatch(asyncio.get_running_loop(), worker.connection, worker.pid, dead.set)
        began = time.monotonic()
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.wait_for(dead.wait(), 5)
        assert time.monotonic() - began < 1  # 0.5-2 ms were measured on an idle machine
        watch.close()

    with child(short_dir) as worker:
        run(main(worker))


def test_a_killed_process_is_noticed_although_its_child_holds_the_socket_F9(
    short_dir: Path, run: Run
) -> None:
    async def main(worker: Child) -> None:
        dead = asyncio.Event()
        DeathWatch(asyncio.get_running_loop(), worker.connection, worker.pid, dead.set)
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.wait_for(dead.wait(), 5)
        worker.connection.setblocking(False)
        with pytest.raises(BlockingIOError):  # no EOF: the grandchild lives
            worker.connection.recv(1)

    with child(short_dir, forks=True) as worker:
        run(main(worker))


def test_a_stopped_process_is_alive_C05(short_dir: Path, run: Run) -> None:
    async def main(worker: Child) -> None:
        dead = asyncio.Event()
        DeathWatch(asyncio.get_running_loop(), worker.connection, worker.pid, dead.set)
        os.kill(worker.pid, signal.SIGSTOP)
        process = psutil.Process(worker.pid)
        while process.status() != psutil.STATUS_STOPPED:
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(dead.wait(), 0.2)
        os.kill(worker.pid, signal.SIGKILL)
        await asyncio.wait_for(dead.wait(), 5)

    with child(short_dir) as worker:
        run(main(worker))


class NoPidfd:
    """A connection of a kernel without SO_PEERPIDFD."""

    def getsockopt(self, *args: object) -> bytes:
        raise OSError(92, "Protocol not available")


@pytest.mark.parametrize("old_kernel", [False, True])
def test_a_process_that_is_gone_already_is_reported(
    old_kernel: bool, short_dir: Path, run: Run
) -> None:
    async def main(worker: Child) -> None:
        dead = asyncio.Event()
        connection = NoPidfd() if old_kernel else worker.connection
        DeathWatch(asyncio.get_running_loop(), connection, worker.pid, dead.set)  # type: ignore[arg-type]
        await asyncio.wait_for(dead.wait(), 5)

    with child(short_dir) as worker:
        worker.process.kill()
        worker.process.wait(5)
        run(main(worker))


@pytest.mark.parametrize("dead_before", [False, True])
def test_a_watch_that_was_closed_says_nothing(dead_before: bool, short_dir: Path, run: Run) -> None:
    calls: list[str] = []

    async def main(worker: Child) -> None:
        loop = asyncio.get_running_loop()
        open_before = psutil.Process().num_fds()
        if dead_before:
            worker.process.kill()
            worker.process.wait(5)
        watch = DeathWatch(
            loop,
            NoPidfd(),  # type: ignore[arg-type]
            worker.pid,
            lambda: calls.append("dead"),
        )
        watch.close()
        watch.close()
        worker.process.kill()
        worker.process.wait(5)
        await asyncio.sleep(0.05)
        assert psutil.Process().num_fds() == open_before

    with child(short_dir) as worker:
        run(main(worker))
    assert calls == []
