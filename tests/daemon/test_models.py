"""A daemon with models inside the test's own loop: real folders, real memory, reads that obey the test."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop

from expertd import models as models_module
from expertd.attach import AttachServer
from expertd.cache.budget import minimum_budget
from expertd.cache.ledger import Ledger
from expertd.cache.table import SlotState
from expertd.handlers import Handlers
from expertd.models import Model, ModelOptions, Models
from expertd.server import Router
from expertd.snapshot import Daemon
from expertd.sockets import bind_listener, prepare_run_dir
from expertd.store.index import ExpertIndex, build_index
from expertd.store.reader import Reader
from expertd_client import Admin
from expertd_protocol import codec
from expertd_protocol.endpoints import Endpoints
from expertd_protocol.errors import BudgetExhausted, ErrorCode, ModelChanged, ReadFailed
from expertd_protocol.layout import Phase
from expertd_protocol.messages import (
    Attach,
    Attached,
    Failure,
    Hello,
    Miss,
    MissError,
    MissReply,
    Ping,
    Pong,
    Welcome,
)
from tests.daemon.conftest import Run
from tests.daemon.test_attach import Client as RawClient
from tests.daemon.test_server import dealer
from tests.daemon.tiny_worker import EXPERTS, LAYERS, attached, pin, source, write

ROOT = Path(__file__).parents[2]
PING = codec.encode(Ping())


class Disk:
    """Reads as the test wants them: at once, not before `open` is set, or with an error."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()
        self.open.set()
        self.error: int | None = None

    def __call__(self, fd: int, views: Sequence[Any], offset: int) -> int:
        self.entered.release()
        assert self.open.wait(20)
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return os.preadv(fd, views, offset)


class Small:
    """The parts of `app`, but with a disk, and without a process of their own."""

    def __init__(self, run_dir: Path, budget: int, *, poison: bool, warm: bool) -> None:
        loop = asyncio.get_running_loop()
        self.run_dir = run_dir
        self.disk = Disk()
        self.ledger = Ledger(budget)
        endpoints = prepare_run_dir(run_dir)
        options = ModelOptions("buffered", 2, 0.001, 4, poison_free_slots=poison)
        self.models = Models(
            self.ledger,
            options,
            loop,
            lambda model, ended: self.handlers.on_reads_ended(model, ended),
        )
        daemon = Daemon(os.getpid(), 1, endpoints, time.monotonic())
        self.handlers = Handlers(
            loop, daemon, self.ledger, self.models, max_sessions=8, max_in_flight=4, warm=warm
        )
        self.router = self.handlers.router = Router(loop, endpoints, self.handlers.on_message)
        self.attach = AttachServer(loop, bind_listener(endpoints.attach), self.handlers.serve, 64)

    @property
    def model(self) -> Model:
        (model,) = self.models.by_path.values()
        return model

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.001)


@pytest.fixture
def run() -> Run:
    """The daemon's own loop alone: these tests start processes, and the parts know both loops."""
    return uvloop.run


Start = Callable[..., contextlib.AbstractAsyncContextManager[Small]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, short_dir: Path) -> Start:
    @contextlib.asynccontextmanager
    async def start(
        budget: int = 4 << 20, *, poison: bool = False, warm: bool = False
    ) -> AsyncIterator[Small]:
        failures: list[object] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: failures.append(context)
        )
        small = Small(short_dir / "run", budget, poison=poison, warm=warm)
        monkeypatch.setattr(
            models_module, "Reader", lambda **kwargs: Reader(**kwargs, preadv=small.disk)
        )
        try:
            yield small
        finally:
            small.disk.open.set()
            await small.attach.close()
            await asyncio.to_thread(small.models.close, 5.0)
            await asyncio.sleep(0)  # ends of reads that came last
            small.router.close()
        for session in list(small.handlers.sessions.values()):
            small.handlers._session_over(session, "end of test")
        for model in list(small.models.by_path.values()):
            assert await small.models._close(model)
        assert failures == []

    return start


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def least_budget(folder: Path, quota: int) -> int:
    index = ExpertIndex(build_index(folder), source(folder).layers, EXPERTS)
    return minimum_budget([index.parts(n) for n in range(LAYERS)], EXPERTS, quota)


@contextlib.asynccontextmanager
async def worker(small: Small, folder: Path, *how: str) -> AsyncIterator[Any]:
    """A worker process; yields it when it has attached."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.daemon.tiny_worker", str(small.run_dir), str(folder), *how],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            child = int(await asyncio.to_thread(process.stdout.readline))
            process.grandchild = child  # type: ignore[attr-defined]
            yield process
        finally:
            process.kill()
            if child > 0:
                os.kill(child, signal.SIGKILL)


def nothing_is_left(small: Small) -> None:
    """No session, no pin, no page: as if nobody had ever been there."""
    assert small.handlers.sessions == {}
    assert small.model.sessions == []
    assert small.model.cache.holders == {}
    assert small.model.cache.held(0) == 0
    assert not small.model.arena.slabs[0].table.grants.any()
    assert small.ledger.held("page") == 0


@pytest.mark.parametrize("order", ["both at once", "EOF first", "death first"])
def test_a_dead_workers_pins_end_once_whichever_end_is_noticed_first_C05(
    order: str, start: Start, folder: Path, run: Run
) -> None:
    """Each end has its own way to notice it; neither may rely on the other, nor do its work again."""

    async def main() -> None:
        async with start() as small:
            how = ("hold", "fork") if order == "death first" else ("hold",)
            async with worker(small, folder, *how) as process:
                (session,) = small.handlers.sessions.values()
                if order == "EOF first":
                    process.stdin.write("hang up\n")
                    process.stdin.flush()
                    await small.until(lambda: not session.serving)
                    assert small.model.cache.held(0) == 2  # the process is alive, and may read
                process.kill()
                await small.until(lambda: not small.handlers.sessions)
                nothing_is_left(small)
            async with asyncio.timeout(10):  # the last holder of the socket is gone, too
                while small.attach._tasks:
                    await asyncio.sleep(0.001)
            nothing_is_left(small)

    run(main())


def test_a_stopped_worker_wakes_up_to_the_bytes_it_pinned_C05(
    start: Start, folder: Path, run: Run
) -> None:
    def press(run_dir: Path) -> None:
        with attached(run_dir, folder) as other:
            for expert in (*range(EXPERTS), *range(EXPERTS)):
                pin(other, 1, expert)
                other.unpin()

    async def main() -> None:
        async with (
            start(2 * least_budget(folder, 2)) as small,
            worker(small, folder, "hold") as process,
        ):
            process.send_signal(signal.SIGSTOP)
            before = small.model.arena.directory[0, 1:3].tolist()
            await asyncio.to_thread(press, small.run_dir)
            assert small.model.arena.directory[0, 1:3].tolist() == before
            process.send_signal(signal.SIGCONT)
            process.stdin.write("pin again\n")
            process.stdin.close()
            assert await asyncio.to_thread(process.wait, 10) == 0

    run(main())


def test_a_read_whose_worker_was_killed_ends_in_the_cache_and_answers_nobody_C24(
    start: Start, folder: Path, run: Run
) -> None:
    def hit(run_dir: Path) -> None:
        with attached(run_dir, folder) as heir:
            pin(heir, 0, 1, 2)

    async def main() -> None:
        async with start() as small:
            async with worker(small, folder) as process:
                small.disk.open.clear()
                process.stdin.write("pin\n")
                process.stdin.flush()
                assert await asyncio.to_thread(small.disk.entered.acquire, timeout=10)
                process.kill()
                await small.until(lambda: not small.handlers.sessions)
            assert not small.model.arena.directory.any()
            sent: list[bytes] = []
            small.handlers._send = lambda peer, payload: sent.append(peer)  # type: ignore
            small.disk.open.set()
            await small.until(lambda: small.models.in_flight == 0)
            assert small.model.arena.directory[0].astype(bool).tolist() == [
                expert in (1, 2) for expert in range(EXPERTS)
            ]
            assert sent == []
            del small.handlers._send
            reads = small.model.sources[0].reads
            await asyncio.to_thread(hit, small.run_dir)
            assert small.model.sources[0].reads == reads

    run(main())


def test_a_slot_is_poisoned_before_it_is_filled_again_B02(
    start: Start, folder: Path, run: Run
) -> None:
    def work(small: Small, done: threading.Event) -> None:
        with attached(small.run_dir, folder) as client:
            for expert in range(6):  # more than there are slots
                pin(client, 0, expert)
                client.unpin()
            small.disk.open.clear()
            done.set()
            pin(client, 0, 6, 7)

    async def main() -> None:
        async with start(least_budget(folder, 2), poison=True) as small:
            done = threading.Event()
            working = asyncio.create_task(asyncio.to_thread(work, small, done))
            await asyncio.to_thread(done.wait, 10)
            slab = small.model.arena.slabs[0]
            filling: list[int] = []
            await small.until(
                lambda: (
                    filling.extend(np.flatnonzero(slab.table.state == SlotState.FILLING)) or filling
                )
            )
            for row in slab.destinations(filling[0]):
                assert bytes(row) == b"\xff" * len(row)
                row.release()
            assert slab.table.generations[filling[0]] > 1
            small.disk.open.set()
            await working

    run(main())


def test_a_second_model_takes_the_place_of_an_idle_one_and_never_of_one_in_use_C17(
    start: Start, folder: Path, tmp_path: Path, run: Run
) -> None:
    other = write(tmp_path / "other")

    def work(run_dir: Path) -> None:
        with attached(run_dir, folder) as first:
            pin(first, 0, 1, 2)
            with (
                pytest.raises(BudgetExhausted, match=rf"held by {folder} .*1 sessions"),
                attached(run_dir, other),
            ):
                pass
            first.unpin()
            pin(first, 1, 3)
        with attached(run_dir, other) as second:
            pin(second, 0, 1, 2)

    async def main() -> None:
        budget = least_budget(folder, EXPERTS) * 2 - 1
        async with start(budget, warm=True) as small:
            await asyncio.to_thread(work, small.run_dir)
            assert list(small.models.by_path) == [other]
            assert small.ledger.peak_bytes <= budget

    run(main())


def test_a_file_that_changes_while_it_serves_stops_new_reads_and_nothing_else_E09(
    start: Start, folder: Path, run: Run
) -> None:
    shard = folder / "model-00001-of-00002.safetensors"

    def work(small: Small) -> None:
        with attached(small.run_dir, folder) as client:
            pin(client, 0, 1)
            client.unpin()
            data = bytearray(shard.read_bytes())
            data[-64:] = bytes(64)
            shard.write_bytes(data)
            os.utime(shard, ns=(0, 1))  # clocks may be coarse
            for _ in range(2):
                with pytest.raises(ModelChanged, match="rewritten in place"):
                    client.pin(0, np.array([2], np.intp), Phase.DECODE)
            pin(client, 0, 1)  # what is resident was read from the old file, and stays whole
            assert client.stats().models[0].state == "stale"
            with pytest.raises(ModelChanged, match=str(folder)), attached(small.run_dir, folder):
                pass

    async def main() -> None:
        async with start() as small:
            await asyncio.to_thread(work, small)
            assert small.model.arena.directory[0].astype(bool).sum() == 1

    run(main())


def test_a_device_error_is_an_answer_and_the_next_read_works_E08(
    start: Start, folder: Path, run: Run
) -> None:
    def work(small: Small) -> None:
        with attached(small.run_dir, folder) as client:
            small.disk.error = errno.EIO
            with pytest.raises(ReadFailed, match="Input/output error"):
                pin(client, 0, 1)
            small.disk.error = None
            pin(client, 0, 1)

    async def main() -> None:
        async with start() as small:
            await asyncio.to_thread(work, small)
            assert small.handlers.stats().read_errors == 1

    run(main())


def test_stats_are_answered_while_every_reader_thread_hangs_D35(
    start: Start, folder: Path, run: Run
) -> None:
    def work(small: Small) -> None:
        with attached(small.run_dir, folder) as client:
            pin(client, 0, 0)
            client.unpin()
            small.disk.open.clear()
            pin(client, 0, 1, 2)

    async def main() -> None:
        async with start() as small:
            working = asyncio.create_task(asyncio.to_thread(work, small))
            await small.until(lambda: not small.disk.open.is_set() and small.models.in_flight)

            def ask() -> float:
                with Admin.connect(small.run_dir) as admin:
                    began = time.monotonic()
                    assert admin.stats().slots.filling > 0
                    return time.monotonic() - began

            assert min([await asyncio.to_thread(ask) for _ in range(5)]) < 0.1
            small.disk.open.set()
            await working

    run(main())


def test_a_peer_that_never_reads_is_cut_off_and_never_left_waiting_D06(
    start: Start, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers that do not fit any more cannot be sent; so its connection ends, and it knows."""

    def flood(url: Endpoints, session: bytes) -> None:
        with dealer(url, session, RCVHWM=1) as sock:
            for _ in range(20_000):
                sock.send(PING)

    def talk(url: Endpoints, session: bytes) -> None:
        with dealer(url, session) as sock:
            for _ in range(200):
                sock.send(PING)
                assert codec.decode(sock.recv()) == Pong(epoch=1)

    async def main() -> None:
        async with start() as small:
            endpoints = Endpoints(small.run_dir)
            async with RawClient(endpoints.attach) as deaf, RawClient(endpoints.attach) as other:
                sessions = []
                for client in (deaf, other):
                    welcome = await client.ask(Hello(role="worker", pid=os.getpid()))
                    assert isinstance(welcome, Welcome)
                    sessions.append(welcome.session)
                await asyncio.gather(
                    asyncio.to_thread(flood, endpoints, sessions[0]),
                    asyncio.to_thread(talk, endpoints, sessions[1]),
                )
                assert await deaf.ended()
                assert list(small.handlers.sessions) == [sessions[1]]

    run(main())
    assert sum("unread" in record.getMessage() for record in caplog.records) == 1


def test_impossible_layers_experts_and_paths_are_answered_and_the_session_stays_usable_D34(
    start: Start, folder: Path, run: Run
) -> None:
    async def main() -> None:
        async with start() as small, RawClient(Endpoints(small.run_dir).attach) as client:
            welcome = await client.ask(Hello(role="worker", pid=os.getpid()))
            assert isinstance(welcome, Welcome)
            right = Attach(
                path=str(folder), experts=EXPERTS, layers=source(folder).layers,
                quota_min=2, quota_wanted=2,
            )  # fmt: skip
            for path in ("x" * 1000, "/" + "x/" * 1000, "a\0b"):
                refusal = await client.ask(right.model_copy(update={"path": path}))
                assert isinstance(refusal, Failure), path
            assert isinstance(await client.ask(right), Attached)  # the descriptors are dropped

            def ask() -> list[str]:
                codes = []
                with dealer(Endpoints(small.run_dir), welcome.session) as sock:
                    for seq, (layer, expert) in enumerate(
                        [(-1, 0), (LAYERS, 0), (10**9, 0), (0, -1), (0, EXPERTS), (0, 2**62)], 1
                    ):
                        sock.send(codec.encode_miss(Miss(seq, layer, Phase.DECODE, (expert,))))
                        error = codec.decode_reply(sock.recv())
                        assert isinstance(error, MissError)
                        codes.append(error.code)
                    sock.send(codec.encode_miss(Miss(99, 0, Phase.DECODE, (3,))))
                    assert isinstance(codec.decode_reply(sock.recv()), MissReply)
                return codes

            assert await asyncio.to_thread(ask) == [ErrorCode.BAD_REQUEST] * 6

    run(main())
