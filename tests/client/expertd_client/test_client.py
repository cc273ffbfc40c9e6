"""The client's life: bad replies, close, fork, threads, and what an import does."""

from __future__ import annotations

import select
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgpack
import numpy as np
import pytest

from expertd_client import Client
from expertd_client.session import Session
from expertd_client.testing import FakeDaemon, FakeSession, holds, tiny_source
from expertd_protocol import codec
from expertd_protocol.errors import ModelNotFound, ProtocolError
from expertd_protocol.layout import Header, Ints, Phase, pack_word, word_slabs
from expertd_protocol.messages import AnyMessage, Inspect, Message, Miss, MissReply

DECODE = Phase.DECODE


def ids(*experts: int) -> Ints:
    return np.array(experts, np.intp)


def run(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-X", "dev", "-c", script, *map(str, args)],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def packed(*values: object) -> bytes:
    data: bytes = msgpack.packb(values)
    return data


def words(*words: int, joined: int = 0, missed: int | None = None) -> Callable[[Miss], bytes]:
    count = len(words) if missed is None else missed
    return lambda miss: codec.encode_reply(MissReply(miss.seq, words, joined, count))


class Moving(FakeDaemon):
    """Layer 0 moves to slab 1 after a worker's second look, before its request is answered."""

    def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
        model = session.model
        assert model is not None
        if model.slab_of_layer[0] == 0 and miss.seq == 2:
            model.words = {key: word for key, word in model.words.items() if key[0] != 0}
            model.directory[0] = 0
            model.slab_of_layer = (1, *model.slab_of_layer[1:])
        return [self.grant(session, miss)]


def test_a_layer_that_moves_in_the_middle_of_a_pin_is_pinned_in_its_new_slab(run_dir: Path) -> None:
    with Moving(run_dir, layers_per_slab=1) as daemon, Client.connect(run_dir) as client:
        arena = client.attach(tiny_source(), quota_min=2, quota_wanted=8)
        client.pin(0, ids(5), DECODE)
        client.unpin()

        got = client.pin(0, ids(4, 5, 6), DECODE)  # 5 was found in slab 0

        assert word_slabs(got).tolist() == [1, 1, 1]
        assert all(holds(arena, 0, e, w) for e, w in zip((4, 5, 6), got.tolist(), strict=True))
        assert client.verify()
        hazards = arena.page.hazards
        assert sorted(hazards[hazards != 0].tolist()) == sorted(got.tolist())
        assert [len(miss.experts) for miss in daemon.requests] == [1, 2, 1]


def test_a_reply_that_names_two_slabs_is_a_protocol_error(run_dir: Path) -> None:
    class Torn(FakeDaemon):
        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            torn = (pack_word(1, 0, 0), pack_word(1, 1, 0))
            return [codec.encode_reply(MissReply(miss.seq, torn, 0, 2))]

    with Torn(run_dir, layers_per_slab=1), Client.connect(run_dir) as client:
        client.attach(tiny_source(), quota_min=2, quota_wanted=8)
        with pytest.raises(ProtocolError, match=r"layer 0 from slabs \[0, 1\] at once"):
            client.pin(0, ids(1, 2), DECODE)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (lambda miss: b"\xc1", "not one msgpack value"),
        (lambda miss: b"", "not one msgpack value"),
        (lambda miss: packed(9, miss.seq), "neither a reply nor an error"),
        (words(pack_word(0, 0, 32)), "granted slot 32 of slab 0 for layer 0"),
        (words(pack_word(0, 1, 32)), "granted slot 32 of slab 1 for layer 0"),
        (words(pack_word(0, 7, 0)), "slab 7"),
        (words(0), "granted 0, which is no directory word"),
        (words(-1), "granted -1, which is no directory word"),
        (words(1 << 20), "granted slot -1"),
        (lambda miss: packed(2, miss.seq, ["x"], 0, 1), "neither a reply nor an error"),
        (lambda miss: packed(2, miss.seq, [True], 0, 1), "neither a reply nor an error"),
        (words(missed=1), "granted 0 experts, 1 were asked for"),
        (words(1, 2, missed=1), "granted 2 experts, 1 were asked for"),
        (words(1, joined=1), "counted 1 joins and 1 misses for 1 experts"),
        (words(1, joined=-1, missed=2), "counted -1 joins"),
    ],
)
def test_a_garbled_reply_is_a_protocol_error_and_the_next_pin_works(
    run_dir: Path, reply: Callable[[Miss], bytes], says: str
) -> None:
    class Garbling(FakeDaemon):
        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            return [reply(miss)] if miss.seq == 1 else [self.grant(session, miss)]

    with Garbling(run_dir) as daemon, Client.connect(run_dir) as client:
        client.attach(tiny_source(), quota_min=2, quota_wanted=8)
        daemon.fill(0, 5)
        with pytest.raises(ProtocolError, match=says):
            client.pin(0, ids(5, 1), DECODE)

        assert not client.arena.page.hazards.any()
        assert not client.arena.page.counters.any()
        assert client.arena.page.header[Header.ACK] == 1
        assert holds(client.arena, 0, 1, client.pin(0, ids(5, 1), DECODE)[1])


def test_a_message_of_two_frames_is_a_protocol_error(run_dir: Path) -> None:
    class Chatty(FakeDaemon):
        def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
            self._router.send_multipart([session.id, b"a", b"b"])
            return []

    with Chatty(run_dir), Client.connect(run_dir) as client:
        client.attach(tiny_source(), quota_min=2, quota_wanted=8)
        with pytest.raises(ProtocolError, match="2 frames"):
            client.pin(0, ids(1), DECODE)


def test_bytes_that_nobody_asked_for_are_a_protocol_error(
    client: Client, daemon: FakeDaemon
) -> None:
    with daemon.lock:
        daemon.worker.conn.sendall(b"psst")
    assert select.select([client._session.attach], [], [], 10)[0]
    with pytest.raises(ProtocolError, match="nobody asked for"):
        client.begin_pass()


def test_inspect_is_answered_or_refused_by_the_daemon(run_dir: Path) -> None:
    class Reading(FakeDaemon):
        def _control(self, session: FakeSession, message: AnyMessage) -> tuple[Message, list[int]]:
            if isinstance(message, Inspect) and message.path == "/nothing":
                raise ModelNotFound("there is nothing at /nothing")
            return super()._control(session, message)

    with Reading(run_dir), Client.connect(run_dir) as client:
        assert client.inspect(Path("/models/tiny")).path == "/models/tiny"
        with pytest.raises(ModelNotFound, match="nothing at /nothing"):
            client.inspect(Path("/nothing"))


def test_a_client_attaches_once_and_pins_only_after_that(daemon: FakeDaemon, run_dir: Path) -> None:
    with Client.connect(run_dir) as client:
        for use in (lambda: client.pin(0, ids(1), DECODE), client.unpin, client.begin_pass):
            with pytest.raises(ProtocolError, match="call attach first"):
                use()
        client.attach(tiny_source(), quota_min=2, quota_wanted=8)
        with pytest.raises(ProtocolError, match="use one per model"):
            client.attach(tiny_source(), quota_min=2, quota_wanted=8)


def test_close_gives_the_session_back_and_may_be_called_again(
    daemon: FakeDaemon, run_dir: Path
) -> None:
    client = Client.connect(run_dir)
    client.attach(tiny_source(), quota_min=2, quota_wanted=8)
    page = client.arena.page
    client.pin(0, ids(1, 2), DECODE)
    session = daemon.worker
    client.close()
    client.close()

    assert session.attach is None  # the daemon saw the Detach
    assert not page.hazards.any()
    with pytest.raises(ProtocolError, match="closed"):
        client.pin(0, ids(1), DECODE)


def test_close_unmaps_the_arena_before_its_memory_may_be_given_to_another_model(
    daemon: FakeDaemon, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client.connect(run_dir)
    arena = client.attach(tiny_source(), quota_min=2, quota_wanted=8)
    detach, left = Session.detach, []

    def look(session: Session) -> None:
        left.append((arena.slabs, arena._fds, arena._maps))
        detach(session)

    monkeypatch.setattr(Session, "detach", look)
    client.close()

    assert left == [((), [], [])]


def test_close_is_silent_when_the_daemon_is_gone(client: Client, daemon: FakeDaemon) -> None:
    daemon.stop()
    client.close()


def test_close_is_silent_while_views_exist_and_they_stay_readable_D16(
    daemon: FakeDaemon, run_dir: Path
) -> None:
    client = Client.connect(run_dir)
    arena = client.attach(tiny_source(), quota_min=2, quota_wanted=8)
    word = client.pin(0, ids(3), DECODE)[0]
    slot, plane = int(word & np.uint64(0xFFFFF)) - 1, arena.slabs[0].plane(0)
    before = plane[slot].tobytes()
    client.close()
    arena.close()

    assert plane[slot].tobytes() == before


EXIT_WITH_VIEWS = """
import sys
from pathlib import Path
import numpy as np
from expertd_client import Client
from expertd_client.testing import tiny_source
client = Client.connect(Path(sys.argv[1]))
arena = client.attach(tiny_source(), quota_min=2, quota_wanted=8)
kept = [arena.slabs[0].plane(0), memoryview(arena.slabs[0].buffer), arena.directory, arena.page]
client.pin(0, np.array([1, 2]), 1)
if sys.argv[2] == "close":
    client.close()
"""


@pytest.mark.parametrize("how", ["close", "just exit"])
def test_a_process_that_exits_with_views_says_nothing_D16(
    daemon: FakeDaemon, run_dir: Path, how: str
) -> None:
    done = run(EXIT_WITH_VIEWS, run_dir, how)

    noise = [line for line in done.stderr.splitlines() if "ResourceWarning" not in line]
    assert (done.returncode, done.stdout) == (0, "")
    if how == "close":
        assert done.stderr == ""
    assert not any("Error" in line for line in noise)


FORK = """
import os, sys
from pathlib import Path
import numpy as np
from expertd_client import Client
from expertd_client.testing import tiny_source
from expertd_protocol.errors import Forked
client = Client.connect(Path(sys.argv[1]))
client.attach(tiny_source(), quota_min=2, quota_wanted=8)
client.pin(0, np.array([1, 2]), 1)
if os.fork() == 0:
    uses = [
        lambda: client.pin(0, np.array([1]), 1), client.unpin, client.verify, client.begin_pass,
        lambda: client.end_pass(1, 1), client.stats, lambda: client.arena, lambda: client.quota,
        lambda: client.resident(0), client.drop_old_arenas, lambda: client.inspect(Path("/x")),
        lambda: client.report_resident_bytes(1),
        lambda: client.attach(tiny_source(), quota_min=2, quota_wanted=8),
    ]
    for use in uses:
        try:
            use()
        except Forked as error:
            assert f"process {os.getppid()}" in str(error)
        else:
            sys.exit("not refused")
    client.close()
    print(len(uses), "refused", flush=True)
    sys.exit(0)
_, status = os.wait()
assert status == 0, status
assert client.arena.page.hazards.sum() and client.verify()
client.unpin()
assert len(client.pin(1, np.array([5, 6]), 1)) == 2
client.close()
print("parent works")
"""


def test_a_forked_child_is_refused_and_harms_nobody_D12(daemon: FakeDaemon, run_dir: Path) -> None:
    done = run(FORK, run_dir)

    assert done.stdout.splitlines() == ["13 refused", "parent works"]
    assert done.returncode == 0
    harmless = ("ResourceWarning", "fork()")  # the child closes nothing of its parent's
    assert [x for x in done.stderr.splitlines() if not any(h in x for h in harmless)] == []


def test_a_second_thread_is_refused_where_it_would_wait(client: Client) -> None:
    client.pin(0, ids(1), DECODE)
    caught: list[BaseException] = []

    def other() -> None:
        try:
            client.pin(0, ids(2), DECODE)
        except ProtocolError as exc:
            caught.append(exc)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()

    (error,) = caught
    assert "make one client per thread" in str(error)


def test_a_client_may_be_attached_in_one_thread_and_used_in_another(client: Client) -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(client.pin(0, ids(1), DECODE).tolist()))
    thread.start()
    thread.join()

    assert len(found) == 1


IMPORT = """
import os, sys, threading
before = len(os.listdir("/dev/fd"))
import expertd_client.client
import zmq
assert zmq.Context._instance is None
assert threading.active_count() == 1
assert len(os.listdir("/dev/fd")) == before
assert not {"asyncio", "mlx", "mlx_lm", "expertd"} & sys.modules.keys() - set(sys.argv[1:])
"""


def test_an_import_opens_and_starts_nothing_D10() -> None:
    done = run(IMPORT, *(["asyncio"] if _zmq_imports_asyncio() else []))
    assert (done.returncode, done.stderr) == (0, "")


def _zmq_imports_asyncio() -> bool:
    return run("import sys, zmq, pydantic; sys.exit('asyncio' in sys.modules)").returncode != 0
