"""The attach socket and what is mapped: odd daemons, descriptors, read-only memory."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from expertd_client import Admin, Client
from expertd_client.attach import attach_path
from expertd_client.testing import FakeDaemon, FakeSession, Shared, tiny_source
from expertd_protocol import codec
from expertd_protocol.endpoints import RUN_DIR_ENV
from expertd_protocol.errors import (
    BudgetTooSmall,
    DaemonUnavailable,
    DeadlineExceeded,
    ExpertdError,
    PathTooLong,
    ProtocolError,
    VersionMismatch,
)
from expertd_protocol.layout import Phase
from expertd_protocol.messages import Attach, Attached, Detached, Message, Pong, SlabInfo


def open_fds() -> int:
    return len(os.listdir("/dev/fd"))


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


@pytest.mark.parametrize("make", [Client.connect, Admin.connect])
def test_no_daemon_is_said_at_once_with_the_command_to_start_one(
    run_dir: Path, make: Callable[[Path], object]
) -> None:
    start = time.monotonic()
    with pytest.raises(DaemonUnavailable, match=r"attach\.sock .* start one with 'expertd'"):
        make(run_dir)
    assert time.monotonic() - start < 5


def test_a_socket_file_without_a_daemon_is_no_daemon(run_dir: Path) -> None:
    FakeDaemon(run_dir).stop()
    with pytest.raises(DaemonUnavailable, match="Connection refused"):
        Client.connect(run_dir)


def test_the_socket_may_be_named_in_three_ways(
    daemon: FakeDaemon, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR_ENV, str(run_dir))
    for where in (None, run_dir, run_dir / "attach.sock"):
        assert attach_path(where) == run_dir / "attach.sock"
    (run_dir / "other").symlink_to(run_dir / "attach.sock")
    with Client.connect(run_dir / "other") as client:
        assert client.welcome.epoch == daemon.epoch


def test_a_path_longer_than_a_socket_address_is_refused() -> None:
    with pytest.raises(PathTooLong, match="103"):
        attach_path(Path("/tmp") / ("x" * 100))


@pytest.mark.parametrize(
    ("reply", "error", "says"),
    [
        (frame(b"\xc1garbage"), ProtocolError, "not one msgpack value"),
        (frame(b""), ProtocolError, "not one msgpack value"),
        (frame(codec.encode(Pong(epoch=1))), ProtocolError, "'pong' where Welcome was due"),
        ((1 << 31).to_bytes(4, "big"), ProtocolError, "2147483648 bytes"),
        (b"\0\0\1\0half", DaemonUnavailable, "closed the connection"),
        (b"", DaemonUnavailable, "closed the connection"),
        (frame(b"\x82\xa4kind\xa7welcome\xa7version\x63"), VersionMismatch, "version 99"),
        (
            frame(b"\x83\xa4kind\xa7failure\xa4code\xb0budget_too_small\xa7message\xa4tiny"),
            BudgetTooSmall,
            "tiny",
        ),
    ],
)
def test_an_odd_answer_to_hello_is_a_clear_error_and_leaks_nothing(
    run_dir: Path, reply: bytes, error: type[ExpertdError], says: str
) -> None:
    run_dir.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(run_dir / "attach.sock"))
        listener.listen()

        def serve() -> None:
            conn, _ = listener.accept()
            with conn:
                size = int.from_bytes(conn.recv(4, socket.MSG_WAITALL), "big")
                conn.recv(size, socket.MSG_WAITALL)
                conn.sendall(reply)

        thread = threading.Thread(target=serve)
        before = open_fds()
        thread.start()
        with pytest.raises(error, match=says):
            Client.connect(run_dir)
        thread.join()
        assert open_fds() == before


def test_a_daemon_that_does_not_answer_hello_is_a_deadline(run_dir: Path) -> None:
    run_dir.mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(run_dir / "attach.sock"))
        listener.listen()
        with pytest.raises(DeadlineExceeded, match="did not answer a Hello in time"):
            Client.connect(run_dir, deadline_seconds=0.05)


Reply = tuple[Attached, list[int]]


def less(reply: Attached, fds: list[int]) -> Reply:
    return reply, fds[:-1]


def more(reply: Attached, fds: list[int]) -> Reply:
    return reply, [*fds, fds[0]]


def none(reply: Attached, fds: list[int]) -> Reply:
    return reply, []


def page_for_slab(reply: Attached, fds: list[int]) -> Reply:
    return reply, [*fds[:2], fds[1], *fds[3:]]


def wrong_nbytes(reply: Attached, fds: list[int]) -> Reply:
    first = SlabInfo(slots=reply.slabs[0].slots, nbytes=reply.slabs[0].nbytes + 1)
    return reply.model_copy(update={"slabs": (first, *reply.slabs[1:])}), fds


def far_slab(reply: Attached, fds: list[int]) -> Reply:
    return reply.model_copy(update={"slab_of_layer": (0, 0, 7)}), fds


def empty_slab(reply: Attached, fds: list[int]) -> Reply:
    return reply.model_copy(update={"slab_of_layer": (0, 0, 0)}), fds


def few_layers(reply: Attached, fds: list[int]) -> Reply:
    return reply.model_copy(update={"slab_of_layer": (0, 1)}), fds


def small_quota(reply: Attached, fds: list[int]) -> Reply:
    return reply.model_copy(update={"quota": 1}), fds


def a_pipe(reply: Attached, fds: list[int]) -> Reply:
    reader, writer = os.pipe()
    os.close(writer)
    pipes.append(reader)
    return reply, [reader, *fds[1:]]


pipes: list[int] = []


@pytest.mark.parametrize(
    ("twist", "says"),
    [
        (less, "3 descriptors for a directory, a page and 2 slabs"),
        (more, "5 descriptors"),
        (none, "0 descriptors"),
        (page_for_slab, "the slab 0 is .* bytes, its layout needs"),
        (wrong_nbytes, "by its layers, the daemon says"),
        (far_slab, "the slab of layer 2 is 7"),
        (empty_slab, "slab 1 holds no layer"),
        (few_layers, "placed 2 layers, the model has 3"),
        (small_quota, "granted a quota of 1, at least 2"),
        (a_pipe, "the directory is 0 bytes"),
    ],
)
def test_an_attach_that_does_not_fit_is_refused_and_leaks_nothing(
    run_dir: Path, twist: Callable[[Attached, list[int]], Reply], says: str
) -> None:
    class Twisted(FakeDaemon):
        def attached(self, session: FakeSession, attach: Attach) -> tuple[Message, list[int]]:
            reply, fds = super().attached(session, attach)
            assert isinstance(reply, Attached)
            return twist(reply, fds)

    before = open_fds()
    with Twisted(run_dir), Client.connect(run_dir) as client:
        with pytest.raises(ProtocolError, match=says):
            client.attach(tiny_source(), quota_min=2, quota_wanted=8)
        while pipes:
            os.close(pipes.pop())
    assert open_fds() == before


def test_descriptors_that_nobody_asked_for_are_closed(run_dir: Path) -> None:
    before = open_fds()

    class Generous(FakeDaemon):
        def attached(self, session: FakeSession, attach: Attach) -> tuple[Message, list[int]]:
            _, fds = super().attached(session, attach)
            return Detached(), fds

    with (
        Generous(run_dir),
        Client.connect(run_dir) as client,
        pytest.raises(ProtocolError, match="'detached' where Attached was due"),
    ):
        client.attach(tiny_source(), quota_min=2, quota_wanted=8)
    assert open_fds() == before


def test_a_refused_attach_raises_what_the_daemon_said(daemon: FakeDaemon, run_dir: Path) -> None:
    daemon.refuse = BudgetTooSmall("the model needs at least 1048576 bytes")
    with Client.connect(run_dir) as client, pytest.raises(BudgetTooSmall, match="1048576"):
        client.attach(tiny_source(), quota_min=2, quota_wanted=8)


def test_fifty_sessions_leak_no_descriptor(run_dir: Path) -> None:
    before = open_fds()
    with FakeDaemon(run_dir):
        for _ in range(50):
            with Client.connect(run_dir) as client:
                client.attach(tiny_source(), quota_min=2, quota_wanted=8)
                client.pin(0, np.array([1, 2]), Phase.DECODE)
    assert open_fds() == before


def test_the_kernel_refuses_a_writable_map_of_directory_and_slabs(client: Client) -> None:
    arena = client.arena
    for fd, nbytes in [
        (arena.directory_fd, 4096),
        *((slab.fd, slab.layout.nbytes) for slab in arena.slabs),
    ]:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
    for view in (arena.directory, arena.slabs[0].plane(0), arena.slabs[0].generations):
        assert not view.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_a_writable_descriptor_would_have_been_mapped_writable() -> None:
    """The control of the test above: it is the descriptor that makes the kernel refuse."""
    shared = Shared(4096)
    mmap.mmap(shared.fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE).close()
    shared.map.close()
    shared.close()


def test_descriptors_do_not_pass_to_child_programs(client: Client) -> None:
    assert not any(os.get_inheritable(slab.fd) for slab in client.arena.slabs)


def test_a_plane_is_a_view_of_the_slab(client: Client, daemon: FakeDaemon) -> None:
    plane = client.arena.slabs[0].plane(1)
    part = client.arena.slabs[0].layout.parts[1]
    before = plane.tobytes()
    daemon.fill(0, 1)

    assert plane.shape == (client.arena.slabs[0].layout.slots, part.nbytes)
    assert plane.tobytes() != before
