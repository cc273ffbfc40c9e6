"""What a worker's page says: read as of one moment, capped, and never trusted."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import numpy as np
import pytest

from expertd.cache.shm import create
from expertd.peer import Peer
from expertd.sessions import Session, WorkerPage, new_session_id
from expertd_protocol import codec
from expertd_protocol.layout import Counter, Header, PageLayout, Phase
from expertd_protocol.messages import Record, StatsReply
from expertd_protocol.stats import Counters, Latency, SlotCounts, Stats

LAYOUT = PageLayout(quota=4, layers=2, experts=8)


@pytest.fixture
def page() -> Iterator[WorkerPage]:
    page = WorkerPage(LAYOUT, create(LAYOUT.nbytes, workers_write=True))
    yield page
    page.close()


def _write(page: WorkerPage, version: int, hits: int) -> None:
    page.header[Header.COUNTER_VERSION] = version
    page.counters[Phase.DECODE, Counter.HITS] = hits


def _decode_hits(page: WorkerPage) -> int:
    return page.read_counters()[Phase.DECODE].hits


def test_counters_are_kept_apart_by_phase_and_named(page: WorkerPage) -> None:
    for phase in Phase:
        for counter in Counter:
            page.counters[phase, counter] = 100 * phase + counter

    prefill, decode = page.read_counters()

    for counter in Counter:
        assert getattr(prefill, counter.name.lower()) == counter
        assert getattr(decode, counter.name.lower()) == 100 + counter


def test_every_counter_of_the_page_is_one_of_the_stats() -> None:
    assert {c.name.lower() for c in Counter} == set(Counters.model_fields)


def test_while_a_worker_writes_its_counters_the_last_good_ones_serve(page: WorkerPage) -> None:
    _write(page, version=2, hits=10)
    assert _decode_hits(page) == 10

    _write(page, version=3, hits=11)  # odd: in the middle of an update, for ever if it is stopped
    assert _decode_hits(page) == 10

    _write(page, version=4, hits=12)
    assert _decode_hits(page) == 12


class Moving:
    """A header whose version is even and different at each look."""

    def __init__(self) -> None:
        self.looks = 0

    def __getitem__(self, word: Header) -> np.uint64:
        self.looks += 1
        return np.uint64(2 * self.looks)


def test_counters_that_change_under_the_reader_are_not_used(page: WorkerPage) -> None:
    _write(page, version=2, hits=10)
    assert _decode_hits(page) == 10

    page.header = moving = Moving()  # type: ignore[assignment]
    page.counters[Phase.DECODE, Counter.HITS] = 99

    assert _decode_hits(page) == 10
    assert 2 < moving.looks < 100  # tried again, but not for ever


def test_a_page_before_its_first_update_reads_0(page: WorkerPage) -> None:
    _write(page, version=1, hits=5)

    assert page.read_counters() == (Counters(), Counters())


def test_hostile_numbers_are_capped_and_can_be_summed_and_sent_F8(page: WorkerPage) -> None:
    page.memory.buffer[:] = b"\xff" * LAYOUT.nbytes
    page.header[Header.COUNTER_VERSION] = 2
    prefill, decode = page.read_counters()
    total = Counters()
    for _ in range(64):  # as many sessions, all hostile
        total = total + prefill + decode

    for header in Header:
        assert 0 <= page.word(header) < 1 << 63
    assert decode.hits == 1 << 62
    reply = StatsReply(stats=_stats(prefill, decode, total))
    assert codec.decode(codec.encode(reply)) == reply


def _stats(prefill: Counters, decode: Counters, total: Counters) -> Stats:
    zeros = dict.fromkeys(
        (n for n, f in Stats.model_fields.items() if f.annotation in (int, float)), 0
    )
    return Stats.model_validate(
        zeros
        | {
            "version": "1", "run_dir": "/run/x", "slots": SlotCounts(), "prefill": prefill,
            "decode": decode, "total": total, "miss_latency": Latency(), "models": (),
            "sessions": (),
        }
    )  # fmt: skip


def test_a_holder_sees_what_the_worker_writes(page: WorkerPage) -> None:
    uses = LAYOUT.uses(page.memory.buffer)

    holder = page.holder()
    uses[1, 3] = 9

    assert holder.quota == 4
    assert holder.uses[1, 3] == 9
    holder.hazards[0] = 5
    assert page.hazards[0] == 5
    del holder, uses


def test_what_is_to_be_recorded_waits_for_the_worker_and_its_page_says_so(
    page: WorkerPage,
) -> None:
    id = new_session_id()
    with socket.socket() as connection:
        session = Session(id, "worker", "agent", Peer(1, 2), connection, 0.0, page=page)
        records = [Record(session=id, path=f"/{n}", tokens=5, until_ns=6) for n in range(10)]
        assert session.take_records() == ()

        session.note(records[0])
        page.header[Header.RECORDS] = np.uint64((1 << 64) - 1)  # a hostile page
        session.note(records[1])

        assert page.header[Header.RECORDS] == 2
        assert session.take_records() == tuple(records[:2])
        assert session.take_records() == ()
        for record in records:  # an idle worker: the oldest are given up
            session.note(record)
        assert session.take_records() == tuple(records[2:])
        assert page.header[Header.RECORDS] == 12


def test_a_session_id_is_16_bytes_that_zeromq_leaves_to_us() -> None:
    ids = {new_session_id() for _ in range(5000)}

    assert len(ids) == 5000
    assert {len(i) for i in ids} == {16}
    assert all(i[0] != 0 for i in ids)
    assert len({i[0] for i in ids}) > 200
