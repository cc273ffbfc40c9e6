"""The ROUTER: nothing is lost, nobody is starved, and nobody can stop it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import select
import socket
import stat
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import zmq

from expertd.server import SEND_HIGH_WATER, Router, refuse_other_users
from expertd.sockets import prepare_run_dir
from expertd_protocol.codec import ROUTER_MAX_BYTES
from expertd_protocol.endpoints import Endpoints
from expertd_protocol.errors import UnsafePath
from tests.daemon.conftest import Run


@contextlib.contextmanager
def dealer(endpoints: Endpoints, name: bytes, **options: int) -> Iterator[zmq.SyncSocket]:
    """A client for use in another thread; every wait of it ends."""
    context = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.ROUTING_ID, name)
    sock.linger = 0
    sock.rcvtimeo = sock.sndtimeo = 10_000
    for option, value in options.items():
        sock.setsockopt(getattr(zmq, option), value)
    sock.connect(endpoints.router_url)
    try:
        yield sock
    finally:
        sock.close(0)
        context.term()


class Server:
    """A ROUTER that notes what it gets, and echoes unless told otherwise."""

    def __init__(self, run_dir: Path) -> None:
        self.endpoints = prepare_run_dir(run_dir)
        self.got: list[tuple[bytes, bytes]] = []
        self.on_message: Callable[[bytes, bytes], object] = self.echo
        self.router = Router(asyncio.get_running_loop(), self.endpoints, self._note)

    def _note(self, peer: bytes, payload: bytes) -> None:
        self.got.append((peer, payload))
        self.on_message(peer, payload)

    def echo(self, peer: bytes, payload: bytes) -> None:
        assert self.router.send(peer, payload)

    async def until(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.got) < count:
                await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def serving(run_dir: Path) -> AsyncIterator[Server]:
    server = Server(run_dir)
    try:
        yield server
    finally:
        server.router.close()


def _ping(endpoints: Endpoints, name: bytes, times: int = 1) -> None:
    with dealer(endpoints, name) as sock:
        for n in range(times):
            sock.send(b"%d" % n)
            assert sock.recv() == b"%d" % n


def test_a_burst_of_one_is_answered_every_time_D09(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with serving(short_dir) as server:
            await asyncio.to_thread(_ping, server.endpoints, b"a", 300)

    run(main())


def test_a_burst_of_1000_is_received_whole_and_in_order_D09(short_dir: Path, run: Run) -> None:
    def burst(endpoints: Endpoints) -> None:
        with dealer(endpoints, b"a", SNDHWM=0, RCVHWM=0) as sock:
            for n in range(1000):
                sock.send(b"%d" % n)
            assert sock.recv() == b"all"

    async def main() -> None:
        async with serving(short_dir) as server:

            def answer_the_last(peer: bytes, payload: bytes) -> None:
                if payload == b"999":
                    assert server.router.send(peer, b"all")

            server.on_message = answer_the_last
            await asyncio.to_thread(burst, server.endpoints)
            assert server.got == [(b"a", b"%d" % n) for n in range(1000)]

    run(main())


def test_several_clients_in_bursts_lose_nothing_D09(short_dir: Path, run: Run) -> None:
    def bursts(endpoints: Endpoints, name: bytes) -> None:
        with dealer(endpoints, name) as sock:
            for size in (1, 30, 1, 2, 30, 7):
                for n in range(size):
                    sock.send(b"%d" % n)
                assert [sock.recv() for _ in range(size)] == [b"%d" % n for n in range(size)]

    async def main() -> None:
        async with serving(short_dir) as server, asyncio.TaskGroup() as group:
            for name in (b"a", b"b", b"c", b"d"):
                group.create_task(asyncio.to_thread(bursts, server.endpoints, name))

    run(main())


def test_a_send_that_takes_the_edge_of_a_message_does_not_lose_it_D09(
    short_dir: Path, run: Run
) -> None:
    """Sending consumes what made zmq.FD readable; a message that came meanwhile must still be seen."""

    def talk(endpoints: Endpoints, go: threading.Event) -> None:
        with dealer(endpoints, b"a") as sock:
            sock.send(b"hello")
            go.wait(10)
            sock.send(b"second")
            while sock.recv() != b"done":
                pass

    async def main() -> None:
        async with serving(short_dir) as server:
            server.on_message = lambda peer, payload: None
            go = threading.Event()
            talking = asyncio.create_task(asyncio.to_thread(talk, server.endpoints, go))
            await server.until(1)
            # the loop stands still from here, so only these sends look at the socket
            go.set()
            assert select.select([server.router._fd], [], [], 5)[0]
            for _ in range(5):
                time.sleep(0.005)  # libzmq looks for commands once a millisecond at most
                assert server.router.send(b"a", b"unasked")
            assert not select.select([server.router._fd], [], [], 0)[0]
            await server.until(2)
            assert server.router.send(b"a", b"done")
            await talking

    run(main())


def test_an_exception_while_serving_one_message_stops_no_other(short_dir: Path, run: Run) -> None:
    def talk(endpoints: Endpoints) -> None:
        with dealer(endpoints, b"a") as sock:
            for word in (b"bad", b"1", b"2"):
                sock.send(word)
            assert [sock.recv(), sock.recv()] == [b"1", b"2"]

    async def main() -> None:
        async with serving(short_dir) as server:
            failures: list[object] = []
            asyncio.get_running_loop().set_exception_handler(
                lambda loop, context: failures.append(context.get("exception"))
            )

            def serve(peer: bytes, payload: bytes) -> None:
                if payload == b"bad":
                    raise RuntimeError("a bug")
                server.echo(peer, payload)

            server.on_message = serve
            await asyncio.to_thread(talk, server.endpoints)
            assert [repr(f) for f in failures] == ["RuntimeError('a bug')"]

    run(main())


def test_a_message_that_is_too_large_ends_that_connection_only(short_dir: Path, run: Run) -> None:
    def send_too_much(endpoints: Endpoints) -> None:
        with dealer(endpoints, b"bad", RCVTIMEO=300) as sock:
            monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            monitor.rcvtimeo = 5_000
            sock.send(b"x" * (ROUTER_MAX_BYTES + 1))
            monitor.recv_multipart()
            sock.disable_monitor()
            monitor.close(0)

    def send_just_enough(endpoints: Endpoints) -> None:
        with dealer(endpoints, b"good") as sock:
            sock.send(b"x" * ROUTER_MAX_BYTES)
            assert len(sock.recv()) == ROUTER_MAX_BYTES

    async def main() -> None:
        async with serving(short_dir) as server:
            await asyncio.to_thread(send_too_much, server.endpoints)
            assert server.got == []
            await asyncio.to_thread(send_just_enough, server.endpoints)
            await asyncio.to_thread(_ping, server.endpoints, b"other")

    run(main())


def test_a_wrong_number_of_frames_is_passed_on_as_garbage_D34(short_dir: Path, run: Run) -> None:
    def talk(endpoints: Endpoints) -> None:
        with dealer(endpoints, b"a") as sock:
            for frames in ([b"", b"a request of a REQ socket"], [b"1", b"2", b"3"], [b""]):
                sock.send_multipart(frames)
                assert sock.recv() == b"refused"

    async def main() -> None:
        async with serving(short_dir) as server:
            server.on_message = lambda peer, payload: server.router.send(peer, b"refused")
            await asyncio.to_thread(talk, server.endpoints)
            assert server.got == [(b"a", b"")] * 3

    run(main())


def test_sending_to_nobody_is_false_and_not_silent_D06(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with serving(short_dir) as server:
            assert not server.router.send(b"nobody", b"x")
            await asyncio.to_thread(_ping, server.endpoints, b"a")

    run(main())


def test_a_peer_that_never_reads_is_noticed_while_others_are_served_D06_D07(
    short_dir: Path, run: Run
) -> None:
    async def main() -> None:
        release = threading.Event()

        def hello_and_no_more(endpoints: Endpoints) -> None:
            with dealer(endpoints, b"stuck", RCVHWM=1, RCVBUF=4096) as sock:
                sock.send(b"hello")
                release.wait(10)

        async with serving(short_dir) as server:
            server.on_message = lambda peer, payload: None
            stuck = asyncio.create_task(asyncio.to_thread(hello_and_no_more, server.endpoints))
            await server.until(1)
            sent = 0
            while server.router.send(b"stuck", b"x" * 65_536):
                sent += 1
                assert sent < 10_000
                await asyncio.sleep(0)
            assert sent >= SEND_HIGH_WATER // 2

            server.on_message = server.echo
            await asyncio.to_thread(_ping, server.endpoints, b"other", 50)
            release.set()
            await stuck

    run(main())


def test_a_flood_starves_neither_timers_nor_other_readers(short_dir: Path, run: Run) -> None:
    def flood(endpoints: Endpoints, sent: threading.Event) -> None:
        with dealer(endpoints, b"a", SNDHWM=0) as sock:
            for _ in range(5000):
                sock.send(b"x")
            sent.set()
            assert sock.recv() == b"all"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        served_before_turn: list[int] = []
        async with serving(short_dir) as server:

            def serve(peer: bytes, payload: bytes) -> None:
                if len(server.got) == 1:
                    # queued behind this wake-up: how much is served before its turn comes?
                    loop.call_soon(lambda: served_before_turn.append(len(server.got)))
                if len(server.got) == 5000:
                    server.router.send(peer, b"all")

            server.on_message = serve
            sent = threading.Event()
            flooding = asyncio.create_task(asyncio.to_thread(flood, server.endpoints, sent))
            await asyncio.sleep(0)
            sent.wait(10)  # on purpose in the loop's thread: it wakes up to a full queue
            await flooding
            assert len(server.got) == 5000
            (served,) = served_before_turn
            assert served <= 1000

    run(main())


@pytest.mark.parametrize("mask", [0, 0o022])
def test_only_the_owner_may_connect_whatever_the_umask_D05(
    mask: int, short_dir: Path, run: Run
) -> None:
    async def main() -> None:
        before = os.umask(mask)
        try:
            async with serving(short_dir) as server:
                mode = server.endpoints.router.lstat().st_mode
                assert stat.S_ISSOCK(mode)
                assert stat.S_IMODE(mode) & 0o077 == 0
                assert os.umask(mask) == mask
        finally:
            os.umask(before)

    run(main())


def test_a_regular_file_at_the_routers_place_is_refused_and_not_touched_D02(
    short_dir: Path, run: Run
) -> None:
    async def main() -> None:
        (short_dir / "router.sock").write_bytes(b"a model of 20 GB")
        with pytest.raises(UnsafePath, match="is not a socket of ours"):
            Server(short_dir)
        assert (short_dir / "router.sock").read_bytes() == b"a model of 20 GB"

    run(main())


def test_a_stale_socket_is_replaced_D03(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as stale:
            stale.bind(os.fspath(short_dir / "router.sock"))
        async with serving(short_dir) as server:
            await asyncio.to_thread(_ping, server.endpoints, b"a")

    run(main())


def test_a_closed_router_ignores_what_the_loop_still_does(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with serving(short_dir) as server:
            await asyncio.to_thread(_ping, server.endpoints, b"a")
            server.router.send(b"a", b"x")  # leaves a call to drain behind
        await asyncio.sleep(0)

    run(main())


def test_every_socket_is_a_router_or_a_dealer_D11() -> None:
    """The thread-safe kinds (CLIENT, SERVER, RADIO, ...) have no FD that a loop could watch."""
    root = Path(__file__).parents[2]
    sources = [p for top in ("daemon", "client") for p in (root / top).rglob("*.py")]
    kinds = {k for p in sources for k in re.findall(r"\.socket\(\s*(zmq\.\w+)", p.read_text())}

    assert kinds == {"zmq.ROUTER", "zmq.DEALER"}


class FakeSocket:
    """Takes options, or refuses each with one error number."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses = refuses
        self.options: dict[int, int] = {}

    def setsockopt(self, option: int, value: int) -> None:
        if self.refuses:
            raise zmq.ZMQError(self.refuses)
        self.options[option] = value


def test_only_our_own_user_may_connect() -> None:
    router = FakeSocket()
    refuse_other_users(cast(zmq.SyncSocket, router))

    assert router.options == {zmq.IPC_FILTER_UID: os.geteuid()}


def test_a_libzmq_that_cannot_check_users_is_said_once_and_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse_other_users(cast(zmq.SyncSocket, FakeSocket(errno.EINVAL)))

    assert [(r.levelname, r.getMessage().split()[0]) for r in caplog.records] == [
        ("WARNING", "peer_uid_unchecked")
    ]


def test_any_other_refusal_is_an_error() -> None:
    with pytest.raises(zmq.ZMQError):
        refuse_other_users(cast(zmq.SyncSocket, FakeSocket(errno.ENOTSOCK)))
