"""What is to be recorded: asked for when the page says so, and never else."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertd_client import Client, client
from expertd_client.testing import FakeDaemon, tiny_source
from expertd_protocol import codec
from expertd_protocol.layout import Header
from expertd_protocol.messages import Record, Records, RecordsRequest

RECORD = Record(session=b"s", path="/traces/a", tokens=5, until_ns=6)


class Recording(FakeDaemon):
    """Has one record for whoever asks, unless it is silent."""

    asked = 0
    silent = False

    def _request(self, session_id: bytes, data: bytes) -> None:
        if codec.is_miss(data) or not isinstance(codec.decode(data), RecordsRequest):
            return super()._request(session_id, data)
        self.asked += 1
        if not self.silent:
            reply = codec.encode(Records(wanted=(RECORD,)))
            self._router.send_multipart([session_id, reply])
        return None

    def want(self) -> None:
        page = self.worker.page
        assert page is not None
        page.header[Header.RECORDS] += 1


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[Recording]:
    with Recording(run_dir) as daemon:
        yield daemon


@pytest.fixture
def worker(daemon: Recording, run_dir: Path) -> Iterator[Client]:
    with Client.connect(run_dir, name="test") as worker:
        worker.attach(tiny_source(), quota_min=2, quota_wanted=8)
        yield worker


def test_nothing_is_asked_unless_the_page_says_so_and_then_once(
    daemon: Recording, worker: Client
) -> None:
    assert [worker.records() for _ in range(100)] == [()] * 100
    assert daemon.asked == 0

    daemon.want()
    daemon.want()

    assert worker.records() == (RECORD,)
    assert worker.records() == ()
    assert daemon.asked == 1


def test_a_silent_daemon_costs_one_deadline_and_fails_no_pass(
    daemon: Recording,
    worker: Client,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(client, "RECORDS_SECONDS", 0.05)
    daemon.silent = True
    daemon.want()
    caplog.set_level(logging.WARNING)

    assert worker.records() == ()
    assert worker.records() == ()
    assert daemon.asked == 1
    assert "no recording" in caplog.text

    daemon.silent = False
    daemon.want()
    assert worker.records() == (RECORD,)


def test_the_next_daemon_counts_anew(daemon: Recording, worker: Client, run_dir: Path) -> None:
    daemon.want()
    assert worker.records() == (RECORD,)
    daemon.stop()
    assert worker.records() == ()
    with Recording(run_dir) as successor:
        worker.begin_pass()
        assert worker.records() == ()
        assert successor.asked == 0
        successor.want()

        assert worker.records() == (RECORD,)
