"""The daemon goes, a daemon comes: a pin waits and never raises because of it, up to its deadlines."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from expertd_client import Client
from expertd_client import client as client_module
from expertd_client.testing import FakeDaemon, FakeSession, holds, tiny_source
from expertd_protocol import codec
from expertd_protocol.errors import (
    BadConfig,
    BudgetExhausted,
    DaemonUnavailable,
    DeadlineExceeded,
    ErrorCode,
    ModelChanged,
    ReadFailed,
)
from expertd_protocol.layout import Counter, Header, Ints, Phase
from expertd_protocol.messages import Attach, Message, Miss, MissError

DECODE = Phase.DECODE


def ids(*experts: int) -> Ints:
    return np.array(experts, np.intp)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def worker(run_dir: Path, stack: ExitStack, **seconds: float) -> Client:
    client = stack.enter_context(Client.connect(run_dir, **seconds))  # type: ignore[arg-type]
    client.attach(tiny_source(), quota_min=2, quota_wanted=8)
    return client


class Refusing(FakeDaemon):
    """Answers miss requests with an error."""

    code = ErrorCode.READ_FAILED

    def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
        return [codec.encode_reply(MissError(miss.seq, self.code, "no"))]


class Silent(FakeDaemon):
    def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
        return []


def test_a_daemon_killed_while_a_pin_waits_is_replaced_by_the_next(
    run_dir: Path, stack: ExitStack
) -> None:
    command = [sys.executable, "-m", "expertd_client.testing", str(run_dir), "silent"]
    old = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    stack.callback(old.wait)
    stack.callback(old.kill)
    assert old.stdout is not None
    assert old.stdin is not None
    stack.enter_context(old.stdout)
    stack.enter_context(old.stdin)
    assert old.stdout.readline() == b"ready\n"
    client = worker(run_dir, stack)
    first = client.arena
    next_daemon: list[FakeDaemon] = []

    def replace() -> None:
        assert old.stdout is not None
        assert old.stdout.readline() == b"miss 1\n"
        old.kill()
        old.wait()
        next_daemon.append(stack.enter_context(FakeDaemon(run_dir)))

    thread = threading.Thread(target=replace)
    thread.start()
    experts = ids(1, 2, 3)
    words = client.pin(1, experts, DECODE)
    thread.join()

    assert client.arena is not first
    assert (first.serial, client.arena.serial) == (1, 2)
    assert client.arena.epoch == next_daemon[0].epoch != first.epoch
    assert all(holds(client.arena, 1, e, w) for e, w in zip(experts, words, strict=True))
    assert client.verify()
    header, row = client.arena.page.header, client.arena.page.counters[DECODE]
    assert header[Header.REATTACHES] == 1
    assert row[[Counter.LOOKUPS, Counter.MISSES, Counter.REQUESTS]].tolist() == [3, 3, 1]
    client.unpin()
    assert not first.directory.any()  # still mapped
    client.drop_old_arenas()
    assert first.slabs == ()


def test_the_old_arena_stays_readable_until_it_is_dropped(run_dir: Path, stack: ExitStack) -> None:
    old = stack.enter_context(FakeDaemon(run_dir))
    client = worker(run_dir, stack)
    first = client.arena
    kept = client.pin(0, ids(1, 2), DECODE)
    client.pin(0, ids(1, 2), DECODE)
    old.stop()
    stack.enter_context(FakeDaemon(run_dir))
    words = client.pin(1, ids(3), DECODE)

    assert client.arena.serial == 2
    assert first.page.counters[DECODE, Counter.HITS] == 2  # to the last one
    assert holds(client.arena, 1, 3, words[0])
    assert [holds(first, 0, e, w) for e, w in zip((1, 2), kept, strict=True)] == [True, True]
    assert client.verify()
    assert first.page.hazards.any()
    client.unpin()
    assert not first.page.hazards.any()
    client.drop_old_arenas()
    assert first.slabs == ()


def test_a_worker_survives_twenty_restarts_D08(run_dir: Path, stack: ExitStack) -> None:
    daemon = stack.enter_context(FakeDaemon(run_dir))
    client = worker(run_dir, stack)
    for i in range(20):
        daemon.stop()
        daemon = stack.enter_context(FakeDaemon(run_dir))
        expert = i % 16
        words = client.pin(i % 3, ids(expert), DECODE)
        assert holds(client.arena, i % 3, expert, words[0])
        client.unpin()
        client.drop_old_arenas()

    assert client.arena.serial == 21
    assert client.arena.page.header[Header.REATTACHES] == 20


def test_hits_go_on_without_a_daemon_and_a_pass_finds_the_next_one(
    run_dir: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PASS_PAUSE_SECONDS", 0.0)
    daemon = stack.enter_context(FakeDaemon(run_dir))
    client = worker(run_dir, stack, daemon_deadline_seconds=0.05)
    client.report_resident_bytes(12345)
    words = client.pin(0, ids(1, 2), DECODE)
    client.unpin()
    daemon.stop()
    client.begin_pass()

    assert client.pin(0, ids(1, 2), DECODE).tolist() == words.tolist()
    assert client.verify()
    client.unpin()
    client.end_pass(1, DECODE)
    assert client.arena.serial == 1
    with pytest.raises(DaemonUnavailable, match="went away and none came back in time"):
        client.pin(0, ids(3), DECODE)
    stack.enter_context(FakeDaemon(run_dir))
    client.begin_pass()
    assert client.arena.serial == 2
    assert client.arena.page.header[Header.RESIDENT_BYTES] == 12345
    assert holds(client.arena, 0, 3, client.pin(0, ids(3), DECODE)[0])


def test_a_pass_looks_for_a_new_daemon_only_now_and_then(run_dir: Path, stack: ExitStack) -> None:
    daemon = stack.enter_context(FakeDaemon(run_dir))
    client = worker(run_dir, stack)
    daemon.stop()
    client.begin_pass()
    stack.enter_context(FakeDaemon(run_dir))
    client.begin_pass()

    assert client.arena.serial == 1


def test_no_daemon_in_time_is_an_error_that_says_what_to_do(
    run_dir: Path, stack: ExitStack
) -> None:
    daemon = stack.enter_context(FakeDaemon(run_dir))
    client = worker(run_dir, stack, daemon_deadline_seconds=0.1)
    daemon.stop()
    start = time.monotonic()
    with pytest.raises(DaemonUnavailable, match="start one with 'expertd'"):
        client.pin(0, ids(1), DECODE)

    assert 0.1 <= time.monotonic() - start < 5
    assert not client.arena.page.hazards.any()


def test_a_silent_daemon_is_a_deadline_that_names_pid_seconds_and_layer(
    run_dir: Path, stack: ExitStack
) -> None:
    """B19: no wait for the daemon is without an end."""
    stack.enter_context(Silent(run_dir))
    client = worker(run_dir, stack, miss_deadline_seconds=0.1)
    pid = client.welcome.daemon_pid
    with pytest.raises(
        DeadlineExceeded, match=rf"daemon {pid} lives .* 1 experts of layer 2 within 0\.1 s"
    ):
        client.pin(2, ids(1), DECODE)

    page = client.arena.page
    assert not page.hazards.any()
    assert page.header[Header.ACK] == 1  # given up: the daemon may take a late grant back


def test_a_late_reply_to_a_request_given_up_is_ignored(run_dir: Path, stack: ExitStack) -> None:
    late: list[bytes] = []

    class Late(FakeDaemon):
        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            late.append(self.grant(session, miss))
            return list(late) if miss.seq > 1 else []

    stack.enter_context(Late(run_dir))
    client = worker(run_dir, stack, miss_deadline_seconds=0.1)
    with pytest.raises(DeadlineExceeded):
        client.pin(0, ids(1), DECODE)
    words = client.pin(0, ids(2), DECODE)

    assert len(late) == 2
    assert holds(client.arena, 0, 2, words[0])
    assert client.stats().version == "0-fake"  # nothing stale is taken for its answer either


def test_a_read_error_is_raised_and_the_next_pin_works(run_dir: Path, stack: ExitStack) -> None:
    class Once(Refusing):
        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            return super().answer(session, miss) if miss.seq == 1 else [self.grant(session, miss)]

    stack.enter_context(Once(run_dir))
    client = worker(run_dir, stack)
    with pytest.raises(ReadFailed, match="no"):
        client.pin(0, ids(1), DECODE)

    assert not client.arena.page.hazards.any()
    assert holds(client.arena, 0, 1, client.pin(0, ids(1), DECODE)[0])
    assert client.arena.serial == 1


def test_a_request_that_could_not_be_parsed_is_an_error_too(
    run_dir: Path, stack: ExitStack
) -> None:
    class Deaf(FakeDaemon):
        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            return [codec.encode_reply(MissError(0, "read_failed", "what?"))]

    stack.enter_context(Deaf(run_dir))
    with pytest.raises(ReadFailed, match=r"what\?"):
        worker(run_dir, stack).pin(0, ids(1), DECODE)


def test_an_unknown_session_attaches_again(run_dir: Path, stack: ExitStack) -> None:
    class Forgetful(Refusing):
        code = ErrorCode.UNKNOWN_SESSION

        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            if len(self.requests) == 1:
                return super().answer(session, miss)
            return [self.grant(session, miss)]

    stack.enter_context(Forgetful(run_dir))
    client = worker(run_dir, stack)

    assert holds(client.arena, 0, 1, client.pin(0, ids(1), DECODE)[0])
    assert client.arena.serial == 2


def test_a_daemon_that_forgets_every_session_is_an_error_in_the_end(
    run_dir: Path, stack: ExitStack
) -> None:
    class Forgetful(Refusing):
        code = ErrorCode.UNKNOWN_SESSION

    stack.enter_context(Forgetful(run_dir))
    client = worker(run_dir, stack, miss_deadline_seconds=0.1, daemon_deadline_seconds=0.1)
    with pytest.raises(DaemonUnavailable, match="went away"):
        client.pin(0, ids(1), DECODE)


def test_a_draining_daemon_is_waited_for_to_go(run_dir: Path, stack: ExitStack) -> None:
    refused = threading.Event()

    class Stopping(Refusing):
        code = ErrorCode.DRAINING

        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            refused.set()
            return super().answer(session, miss)

    old = stack.enter_context(Stopping(run_dir))
    client = worker(run_dir, stack)

    def replace() -> None:
        refused.wait(10)
        old.stop()
        stack.enter_context(FakeDaemon(run_dir))

    thread = threading.Thread(target=replace)
    thread.start()
    words = client.pin(0, ids(1), DECODE)
    thread.join()

    assert client.arena.serial == 2
    assert holds(client.arena, 0, 1, words[0])


def test_a_daemon_that_drains_for_ever_is_an_error(run_dir: Path, stack: ExitStack) -> None:
    class Stopping(Refusing):
        code = ErrorCode.DRAINING

    stack.enter_context(Stopping(run_dir))
    client = worker(run_dir, stack, daemon_deadline_seconds=0.1)
    with pytest.raises(DaemonUnavailable, match=r"is stopping and still there after 0\.1 s"):
        client.pin(0, ids(1), DECODE)


def test_a_smaller_quota_after_a_restart_pins_a_prefix(run_dir: Path, stack: ExitStack) -> None:
    old = stack.enter_context(FakeDaemon(run_dir))
    client = worker(run_dir, stack)
    assert client.quota == 8
    old.stop()
    stack.enter_context(FakeDaemon(run_dir, quota=3))
    experts = ids(9, 8, 7, 6, 5)
    words = client.pin(0, experts, DECODE)

    assert client.quota == 3
    assert [holds(client.arena, 0, e, w) for e, w in zip((9, 8, 7), words, strict=True)] == [
        True
    ] * 3
    client.unpin()
    assert client.pin(0, experts[3:], DECODE).shape == (2,)
    client.unpin()
    assert client.pin(0, experts, DECODE).shape == (3,)  # now without any message


def test_memory_that_is_not_free_yet_is_waited_for(run_dir: Path, stack: ExitStack) -> None:
    tries: list[int] = []

    class Full(FakeDaemon):
        def attached(self, session: FakeSession, attach: Attach) -> tuple[Message, list[int]]:
            tries.append(1)
            if len(tries) < 3:
                raise BudgetExhausted("others hold the budget")
            return super().attached(session, attach)

    old = stack.enter_context(FakeDaemon(run_dir))
    client = worker(run_dir, stack)
    old.stop()
    stack.enter_context(Full(run_dir))

    assert client.pin(0, ids(1), DECODE).shape == (1,)
    assert len(tries) == 3


def test_memory_that_never_becomes_free_is_the_error(run_dir: Path, stack: ExitStack) -> None:
    old = stack.enter_context(FakeDaemon(run_dir))
    client = worker(run_dir, stack, daemon_deadline_seconds=0.5)
    old.stop()
    new = stack.enter_context(FakeDaemon(run_dir))
    new.refuse = BudgetExhausted("others hold the budget")
    with pytest.raises(BudgetExhausted, match="others hold the budget"):
        client.pin(0, ids(1), DECODE)


def test_a_changed_model_after_a_restart_is_raised_at_once(run_dir: Path, stack: ExitStack) -> None:
    old = stack.enter_context(FakeDaemon(run_dir))
    client = worker(run_dir, stack)
    old.stop()
    new = stack.enter_context(FakeDaemon(run_dir))
    new.refuse = ModelChanged("model.safetensors is another file now")
    with pytest.raises(ModelChanged, match="another file"):
        client.pin(0, ids(1), DECODE)


def test_deadlines_come_from_the_environment(
    daemon: FakeDaemon, run_dir: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(client_module.DAEMON_DEADLINE_ENV, "0.05")
    client = worker(run_dir, stack)
    daemon.stop()
    with pytest.raises(DaemonUnavailable):
        client.pin(0, ids(1), DECODE)
    monkeypatch.setenv(client_module.MISS_DEADLINE_ENV, "soon")
    with pytest.raises(BadConfig, match="'soon'"):
        Client.connect(run_dir)
