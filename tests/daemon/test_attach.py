"""The attach socket: whatever a client does, it loses its own connection at most."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from expertd import attach
from expertd.attach import AttachServer, Connection, unlink_quietly
from expertd.sockets import bind_listener
from expertd_protocol import codec
from expertd_protocol.errors import ErrorCode
from expertd_protocol.messages import (
    AnyMessage,
    Failure,
    Inspected,
    Message,
    Ping,
    Pong,
)
from tests.daemon.conftest import Run

Serve = Callable[[Connection], Awaitable[None]]


async def echo(connection: Connection) -> None:
    """Answer every message with a Pong."""
    while await connection.read(patient=True) is not None:
        await connection.write(Pong(epoch=7))


async def impatient_echo(connection: Connection) -> None:
    while await connection.read(patient=False) is not None:
        await connection.write(Pong(epoch=7))


class Client:
    """A client that may do anything; every wait of it ends."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.setblocking(False)
        self._path = path
        self._loop = asyncio.get_running_loop()

    async def __aenter__(self) -> Client:
        await self._loop.sock_connect(self.sock, os.fspath(self._path))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.sock.close()

    async def send(self, data: bytes) -> None:
        await asyncio.wait_for(self._loop.sock_sendall(self.sock, data), 5)

    async def ask(self, message: Message) -> AnyMessage | None:
        await self.send(framed(codec.encode(message)))
        return await self.answer()

    async def answer(self) -> AnyMessage | None:
        """Return the next message, None at EOF."""
        head = await self._exactly(4)
        return codec.decode(await self._exactly(struct.unpack("!I", head)[0])) if head else None

    async def failure(self) -> Failure:
        """Return the refusal; after it the connection must be closed."""
        message = await self.answer()
        assert isinstance(message, Failure), message
        assert await self.ended()
        return message

    async def ended(self) -> bool:
        try:
            return await self.answer() is None
        except ConnectionResetError:  # closed with bytes of ours unread
            return True

    async def _exactly(self, n: int) -> bytes:
        data = b""
        while len(data) < n:
            some = await asyncio.wait_for(self._loop.sock_recv(self.sock, n - len(data)), 5)
            if not some:
                assert not data, "the connection ended inside a message"
                return b""
            data += some
        return data


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


@contextlib.asynccontextmanager
async def serving(
    directory: Path, serve: Serve = echo, limit: int = 8
) -> AsyncIterator[Callable[[], Client]]:
    path = directory / "attach.sock"
    server = AttachServer(asyncio.get_running_loop(), bind_listener(path), serve, limit)
    try:
        yield lambda: Client(path)
    finally:
        await asyncio.wait_for(server.close(), 5)
        unlink_quietly(path)


def test_messages_are_answered_one_after_the_other(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with serving(short_dir) as new_client, new_client() as client:
            for _ in range(3):
                assert await client.ask(Ping()) == Pong(epoch=7)

    run(main())


def test_a_message_may_come_in_pieces(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with serving(short_dir) as new_client, new_client() as client:
            for byte in framed(codec.encode(Ping())):
                await client.send(bytes([byte]))
                await asyncio.sleep(0)
            assert await client.answer() == Pong(epoch=7)

    run(main())


@pytest.mark.parametrize(
    "data",
    [
        framed(b"\xff" * 30),
        framed(b""),
        framed(b"\x80"),
        framed(codec.encode(Ping())[:-1]),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["garbage", "empty", "no kind", "cut", "http"],
)
def test_garbage_is_refused_with_a_code_and_the_others_are_served_D34(
    data: bytes, short_dir: Path, run: Run
) -> None:
    async def main() -> None:
        async with (
            serving(short_dir) as new_client,
            new_client() as bad,
            new_client() as good,
        ):
            await bad.send(data)
            failure = await bad.failure()
            assert failure.code == ErrorCode.BAD_REQUEST
            assert failure.message
            assert await good.ask(Ping()) == Pong(epoch=7)

    run(main())


def test_a_length_that_is_too_large_is_refused_before_a_byte_of_it_is_read(
    short_dir: Path, run: Run
) -> None:
    async def main() -> None:
        async with serving(short_dir) as new_client:
            for size in (codec.ATTACH_MAX_BYTES + 1, (1 << 32) - 1):
                async with new_client() as client:
                    await client.send(struct.pack("!I", size))
                    failure = await client.failure()
                    assert f"{size:,} bytes is announced, 16,777,216 are allowed" in failure.message

    run(main())


def test_eof_inside_a_message_is_an_error_and_between_two_is_the_end(
    short_dir: Path, run: Run
) -> None:
    async def main() -> None:
        async with serving(short_dir) as new_client:
            for part in (b"\0\0", framed(codec.encode(Ping()))[:-3]):
                async with new_client() as client:
                    await client.send(part)
                    client.sock.shutdown(socket.SHUT_WR)
                    assert "the connection ended after" in (await client.failure()).message
            async with new_client() as client:
                client.sock.shutdown(socket.SHUT_WR)
                assert await client.ended()

    run(main())


@pytest.mark.parametrize("begun", [b"\0", b"\0\0\0", framed(codec.encode(Ping()))[:-1]])
@pytest.mark.parametrize("serve", [echo, impatient_echo])
def test_a_message_that_is_begun_must_be_finished_in_time(
    begun: bytes, serve: Serve, short_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "MESSAGE_SECONDS", 0.1)

    async def main() -> None:
        async with serving(short_dir, serve) as new_client, new_client() as client:
            await client.send(begun)
            assert await client.ended()

    run(main())


def test_who_says_nothing_is_closed_unless_it_may_be_silent(
    short_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "MESSAGE_SECONDS", 0.1)

    async def patient_after_the_first(connection: Connection) -> None:
        await connection.read(patient=False)
        await connection.write(Pong(epoch=1))
        await echo(connection)

    async def main() -> None:
        async with (
            serving(short_dir, patient_after_the_first) as new_client,
            new_client() as attached,
            new_client() as silent,
        ):
            assert await attached.ask(Ping()) == Pong(epoch=1)
            assert await silent.ended()
            await asyncio.sleep(0.1)
            assert await attached.ask(Ping()) == Pong(epoch=7)

    run(main())


def test_who_does_not_read_its_answer_is_closed_and_stops_nobody(
    short_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "MESSAGE_SECONDS", 0.2)
    ended = asyncio.Event()

    async def big_answer(connection: Connection) -> None:
        try:
            message = await connection.read(patient=True)
            if isinstance(message, Pong):
                await connection.write(_large())
            await echo(connection)
        finally:
            ended.set()

    async def main() -> None:
        async with (
            serving(short_dir, big_answer) as new_client,
            new_client() as stuck,
            new_client() as good,
        ):
            await stuck.send(framed(codec.encode(Pong(epoch=0))))
            await good.send(framed(codec.encode(Ping())))
            assert await good.ask(Ping()) == Pong(epoch=7)
            await asyncio.wait_for(ended.wait(), 5)

    run(main())


def _large() -> Inspected:
    """About 3 MB: more than a socket takes at once."""
    return Inspected(path="/", shards=1, tensors=1, nbytes=1, warnings=("w" * 60_000,) * 50)


@pytest.mark.parametrize("message", [Pong(epoch=3), _large()], ids=["small", "large"])
def test_descriptors_come_with_the_first_bytes_of_their_message(
    message: Message, short_dir: Path, run: Run
) -> None:
    async def with_fds(connection: Connection) -> None:
        ends = os.pipe()
        await connection.read(patient=True)
        await connection.write(message, ends)
        for fd in ends:
            os.close(fd)

    def receive(sock: socket.socket) -> tuple[AnyMessage, list[int]]:
        sock.setblocking(True)
        sock.settimeout(5)
        head, fds, _, _ = socket.recv_fds(sock, 4, 8)
        left = struct.unpack("!I", head)[0]
        body = b""
        while left > len(body):
            body += sock.recv(left - len(body))
        return codec.decode(body), fds

    async def main() -> None:
        async with serving(short_dir, with_fds) as new_client, new_client() as client:
            await client.send(framed(codec.encode(Ping())))
            answer, fds = await asyncio.to_thread(receive, client.sock)
            assert answer == message
            read_end, write_end = fds
            os.write(write_end, b"through")
            assert os.read(read_end, 10) == b"through"
            for fd in fds:
                os.close(fd)

    run(main())


def test_too_many_connections_are_refused_until_one_ends(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with serving(short_dir, limit=2) as new_client, new_client() as first:
            async with new_client() as second:
                for client in (first, second):
                    assert await client.ask(Ping()) == Pong(epoch=7)
                async with new_client() as third:
                    failure = await third.failure()
                    assert failure.code == ErrorCode.TOO_MANY_SESSIONS
                    assert "2 connections are open, 2 are allowed" in failure.message
                second.sock.shutdown(socket.SHUT_WR)
                assert await second.ended()
            async with new_client() as fourth:
                assert await fourth.ask(Ping()) == Pong(epoch=7)
            assert await first.ask(Ping()) == Pong(epoch=7)

    run(main())


def test_an_exception_while_serving_ends_one_connection_and_is_logged(
    short_dir: Path, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def buggy(connection: Connection) -> None:
        if isinstance(await connection.read(patient=True), Pong):
            raise RuntimeError("a bug")
        await connection.write(Pong(epoch=7))

    async def main() -> None:
        async with serving(short_dir, buggy) as new_client, new_client() as good:
            async with new_client() as bad:
                await bad.send(framed(codec.encode(Pong(epoch=0))))
                assert await bad.ended()
            assert await good.ask(Ping()) == Pong(epoch=7)

    run(main())
    assert "RuntimeError: a bug" in caplog.text


def test_another_user_is_refused(
    short_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(short_dir) as new_client:
            uid = os.geteuid()
            monkeypatch.setattr("expertd.peer.os.geteuid", lambda: uid + 1)
            async with new_client() as client:
                assert (await client.failure()).code == ErrorCode.NOT_AUTHORIZED

    run(main())


def test_closing_ends_every_connection_and_leaves_no_descriptor(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        before = len(os.listdir("/dev/fd"))
        async with contextlib.AsyncExitStack() as clients:
            async with serving(short_dir) as new_client:
                for _ in range(5):
                    client = await clients.enter_async_context(new_client())
                    assert await client.ask(Ping()) == Pong(epoch=7)
            assert await client.ended()
        assert len(os.listdir("/dev/fd")) == before

    run(main())


def test_unlinking_a_file_that_is_gone_is_no_error(short_dir: Path) -> None:
    unlink_quietly(short_dir / "gone")
    (short_dir / "directory").mkdir()
    unlink_quietly(short_dir / "directory")

    assert os.listdir(short_dir) == ["directory"]
