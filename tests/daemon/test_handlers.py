"""What each message means, over both sockets, without a model: refusals, pings, stats, the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from expertd.attach import AttachServer
from expertd.cache.ledger import Ledger
from expertd.handlers import Handlers
from expertd.models import ModelOptions, Models
from expertd.server import Router
from expertd.snapshot import Daemon
from expertd.sockets import bind_listener, prepare_run_dir
from expertd_protocol import codec
from expertd_protocol.errors import ErrorCode
from expertd_protocol.messages import (
    PROTOCOL_VERSION,
    AnyMessage,
    Attach,
    Detach,
    Detached,
    Failure,
    Hello,
    Inspect,
    LayerSource,
    Message,
    Miss,
    MissError,
    PartSource,
    Ping,
    Pong,
    Record,
    Records,
    RecordsRequest,
    StatsReply,
    StatsRequest,
    Welcome,
)
from tests.daemon.conftest import Run
from tests.daemon.test_attach import Client, framed

BUDGET = 1 << 20
EPOCH = 1234


class Small:
    """A daemon inside the test's own loop."""

    def __init__(self, run_dir: Path, max_sessions: int) -> None:
        loop = asyncio.get_running_loop()
        self.endpoints = prepare_run_dir(run_dir)
        options = ModelOptions("auto", 1, 0.005, 4, poison_free_slots=False)
        ledger = Ledger(BUDGET)
        models = Models(ledger, options, loop, lambda *done: None)
        daemon = Daemon(os.getpid(), EPOCH, self.endpoints, time.monotonic())
        self.handlers = Handlers(
            loop, daemon, ledger, models, max_sessions=max_sessions, max_in_flight=4
        )
        self.router = self.handlers.router = Router(loop, self.endpoints, self.handlers.on_message)
        self.attach = AttachServer(
            loop, bind_listener(self.endpoints.attach), self.handlers.serve, limit=16
        )

    def client(self) -> Client:
        return Client(self.endpoints.attach)

    async def hello(self, client: Client, role: str = "admin") -> Welcome:
        welcome = await client.ask(Hello(role=role, pid=os.getpid()))  # type: ignore[arg-type]
        assert isinstance(welcome, Welcome), welcome
        return welcome

    async def over_router(self, session: bytes, *payloads: bytes) -> list[bytes]:
        """Send each payload, with its answer before the next."""

        def talk() -> list[bytes]:
            context = zmq.Context()
            sock = context.socket(zmq.DEALER)
            sock.setsockopt(zmq.ROUTING_ID, session)
            sock.linger, sock.rcvtimeo = 0, 5_000
            sock.connect(self.endpoints.router_url)
            answers = []
            try:
                for payload in payloads:
                    sock.send(payload)
                    answers.append(sock.recv())
            finally:
                sock.close(0)
                context.term()
            return answers

        return await asyncio.to_thread(talk)


@contextlib.asynccontextmanager
async def small_daemon(run_dir: Path, max_sessions: int = 2) -> AsyncIterator[Small]:
    small = Small(run_dir, max_sessions)
    try:
        yield small
    finally:
        await small.attach.close()
        small.router.close()


def _attach_request(path: str) -> Attach:
    part = PartSource(name="w", tensor="t", dtype="F32", shape=(4,))
    layer = LayerSource(path="model.layers.0.mlp", parts=(part,))
    return Attach(path=path, experts=4, layers=(layer,), quota_min=1, quota_wanted=4)


def test_a_hello_is_answered_with_who_serves_and_where(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with small_daemon(short_dir) as daemon, daemon.client() as client:
            welcome = await daemon.hello(client)
            assert (welcome.daemon_pid, welcome.epoch) == (os.getpid(), EPOCH)
            assert welcome.endpoint == daemon.endpoints.router_url
            assert welcome.max_in_flight == 4
            assert len(welcome.session) == 16

    run(main())


@pytest.mark.parametrize("first", [Ping(), Detach(), Inspect(path="/"), _attach_request("/")])
def test_the_first_message_must_be_hello(first: Message, short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with small_daemon(short_dir) as daemon, daemon.client() as client:
            await client.send(framed(codec.encode(first)))
            failure = await client.failure()
            assert failure.code == ErrorCode.BAD_REQUEST
            assert "the first message must be hello, got" in failure.message

    run(main())


def test_another_protocol_version_is_told_both_versions_D34(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with small_daemon(short_dir) as daemon, daemon.client() as client:
            future = Hello(role="admin", pid=1, version=PROTOCOL_VERSION + 1)
            await client.send(framed(codec.encode(future)))
            failure = await client.failure()
            assert failure.code == ErrorCode.VERSION_MISMATCH
            assert f"version {PROTOCOL_VERSION + 1}, this one {PROTOCOL_VERSION}" in failure.message

    run(main())


def test_a_refused_request_leaves_the_connection_usable_D34(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with small_daemon(short_dir) as daemon, daemon.client() as client:
            await daemon.hello(client, "worker")
            missing = str(short_dir / "no-model")
            for request, code in [
                (Ping(), ErrorCode.BAD_REQUEST),
                (Hello(role="worker", pid=1), ErrorCode.BAD_REQUEST),
                (Inspect(path=missing), ErrorCode.MODEL_NOT_FOUND),
                (_attach_request(missing), ErrorCode.MODEL_NOT_FOUND),
            ]:
                refusal = await client.ask(request)
                assert isinstance(refusal, Failure)
                assert (refusal.code, bool(refusal.message)) == (code, True)
            assert await client.ask(Detach()) == Detached()
            assert await client.ended()
            assert daemon.handlers.sessions == {}

    run(main())


def test_an_admin_cannot_attach(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with small_daemon(short_dir) as daemon, daemon.client() as client:
            await daemon.hello(client, "admin")
            refusal = await client.ask(_attach_request(str(short_dir)))
            assert isinstance(refusal, Failure)
            assert "attach is for a worker" in refusal.message

    run(main())


def test_more_workers_than_allowed_are_refused_and_admins_are_not(
    short_dir: Path, run: Run
) -> None:
    async def main() -> None:
        async with (
            small_daemon(short_dir, max_sessions=1) as daemon,
            daemon.client() as first,
            daemon.client() as second,
            daemon.client() as admin,
        ):
            await daemon.hello(first, "worker")
            await second.send(framed(codec.encode(Hello(role="worker", pid=1))))
            failure = await second.failure()
            assert failure.code == ErrorCode.TOO_MANY_SESSIONS
            assert "1 workers are attached, 1 are allowed" in failure.message
            await daemon.hello(admin)

    run(main())


def test_pings_and_stats_are_answered_over_the_router(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with small_daemon(short_dir) as daemon, daemon.client() as client:
            session = (await daemon.hello(client)).session
            ping, stats = await daemon.over_router(
                session, codec.encode(Ping()), codec.encode(StatsRequest())
            )
            assert codec.decode(ping) == Pong(epoch=EPOCH)
            reply: AnyMessage = codec.decode(stats)
            assert isinstance(reply, StatsReply)
            assert (reply.stats.budget_bytes, reply.stats.committed_bytes) == (BUDGET, 0)
            assert (reply.stats.models, reply.stats.sessions) == ((), ())

    run(main())


def test_only_an_attached_worker_can_be_recorded(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with small_daemon(short_dir) as daemon, daemon.client() as client:
            session = (await daemon.hello(client, "worker")).session
            for wanted in (session, b"", b"nobody"):
                record = Record(session=wanted, path="/x", tokens=1, until_ns=1)
                (answer,) = await daemon.over_router(session, codec.encode(record))
                refusal = codec.decode(answer)
                assert isinstance(refusal, Failure)
                assert refusal.code == ErrorCode.UNKNOWN_SESSION
                assert wanted.hex() in refusal.message
            (answer,) = await daemon.over_router(session, codec.encode(RecordsRequest()))
            assert codec.decode(answer) == Records(wanted=())

    run(main())


def test_whatever_comes_over_the_router_gets_an_answer_D34(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with small_daemon(short_dir) as daemon, daemon.client() as client:
            session = (await daemon.hello(client, "worker")).session
            sound_miss = codec.encode_miss(Miss(7, 0, 1, (3,)))
            garbage = (b"", b"\xff", b"\x80", codec.encode(Detach()), codec.encode(Pong(epoch=1)))
            bad_misses = (sound_miss[:-1], b"\x90", b"\xdc\xff\xff")
            *answers, unattached, ping = await daemon.over_router(
                session, *garbage, *bad_misses, sound_miss, codec.encode(Ping())
            )
            for answer in answers[: len(garbage)]:
                refusal = codec.decode(answer)
                assert isinstance(refusal, Failure)
                assert refusal.code == ErrorCode.BAD_REQUEST
            for answer in answers[len(garbage) :]:
                error = codec.decode_reply(answer)
                assert isinstance(error, MissError)
                assert (error.seq, error.code) == (0, ErrorCode.BAD_REQUEST)
            error = codec.decode_reply(unattached)
            assert isinstance(error, MissError)
            assert (error.seq, error.code) == (7, ErrorCode.BAD_REQUEST)
            assert codec.decode(ping) == Pong(epoch=EPOCH)

    run(main())


def test_a_bug_is_an_answer_and_stands_in_the_log(
    short_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stats() -> None:
        raise RuntimeError("a bug")

    async def main() -> None:
        async with small_daemon(short_dir) as daemon, daemon.client() as client:
            monkeypatch.setattr(daemon.handlers, "stats", stats)
            session = (await daemon.hello(client)).session
            answer, ping = await daemon.over_router(
                session, codec.encode(StatsRequest()), codec.encode(Ping())
            )
            failure = codec.decode(answer)
            assert isinstance(failure, Failure)
            assert failure.code == ErrorCode.INTERNAL
            assert "a bug" in failure.message
            assert codec.decode(ping) == Pong(epoch=EPOCH)

    run(main())
    assert "message_failed" in caplog.text


def test_a_peer_that_is_no_session_is_told_to_attach(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with small_daemon(short_dir) as daemon:
            ping, miss = await daemon.over_router(
                b"\x01" * 16, codec.encode(Ping()), codec.encode_miss(Miss(7, 0, 1, (3,)))
            )
            refusal, error = codec.decode(ping), codec.decode_reply(miss)
            assert isinstance(refusal, Failure)
            assert isinstance(error, MissError)
            assert refusal.code == error.code == ErrorCode.UNKNOWN_SESSION

    run(main())


def test_a_session_ends_with_its_connection(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with small_daemon(short_dir) as daemon:
            async with daemon.client() as client:
                session = (await daemon.hello(client, "worker")).session
                assert list(daemon.handlers.sessions) == [session]
            async with asyncio.timeout(5):
                while daemon.handlers.sessions:
                    await asyncio.sleep(0.001)
            (answer,) = await daemon.over_router(session, codec.encode(Ping()))
            refusal = codec.decode(answer)
            assert isinstance(refusal, Failure)
            assert refusal.code == ErrorCode.UNKNOWN_SESSION

    run(main())


def test_a_draining_daemon_refuses_whom_it_greets_and_what_it_is_asked(
    short_dir: Path, run: Run
) -> None:
    async def main() -> None:
        async with (
            small_daemon(short_dir) as daemon,
            daemon.client() as old,
            daemon.client() as new,
        ):
            await daemon.hello(old, "worker")
            await daemon.handlers.drain(deadline_seconds=0.0)
            await new.send(framed(codec.encode(Hello(role="worker", pid=1))))
            failure = await new.failure()
            assert failure.code == ErrorCode.DRAINING
            assert f"pid {os.getpid()}" in failure.message

    run(main())


def test_a_length_of_0_is_no_hello(short_dir: Path, run: Run) -> None:
    async def main() -> None:
        async with small_daemon(short_dir) as daemon, daemon.client() as client:
            await client.send(struct.pack("!I", 0))
            assert (await client.failure()).code == ErrorCode.BAD_REQUEST
            assert daemon.handlers.sessions == {}

    run(main())


def test_who_gave_up_before_its_model_was_open_gets_no_session(
    short_dir: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process lives, so the session would keep its quota for as long: a few, and nobody fits."""

    async def main() -> None:
        async with small_daemon(short_dir) as daemon:
            opening, opened = asyncio.Event(), asyncio.Event()

            async def open_slowly(request: Attach) -> None:
                opening.set()
                await opened.wait()

            attached: list[object] = []
            monkeypatch.setattr(daemon.handlers._models, "open", open_slowly)
            monkeypatch.setattr(daemon.handlers, "_attach", lambda *given: attached.append(given))
            async with daemon.client() as client:
                await daemon.hello(client, "worker")
                await client.send(framed(codec.encode(_attach_request("/"))))
                await opening.wait()
            opened.set()
            async with asyncio.timeout(5):
                while daemon.handlers.sessions:
                    await asyncio.sleep(0.001)
            assert attached == []

    run(main())
