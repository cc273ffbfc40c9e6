"""Threads per device: noise decides nothing, a device that fails or hangs is not measured."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expertd.store import tuning
from expertd.store.header import Identity
from expertd.store.platform import ReadMode, Source, open_source
from expertd.store.tuning import choose, measure, threads_for


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * (1 << 20))
    source = open_source(path, Identity.of(path), "buffered")
    source.mode = ReadMode.DIRECT  # what a real disk would say
    yield source
    source.close()


@pytest.mark.parametrize(
    ("rates", "most", "threads"),
    [
        ({2: 1.0, 4: 1.1, 8: 1.0}, 8, 8),
        ({2: 1.0, 4: 1.2, 8: 1.0}, 8, 4),
        ({2: 9.0, 4: 5.0, 8: 1.0}, 8, 2),
        ({2: 9.0, 4: 1.0}, 4, 2),
        ({2: 9.0, 4: 1.0, 8: 1.0}, 1, 1),
        ({}, 8, 8),
        ({}, 3, 3),
    ],
)
def test_another_number_must_be_clearly_better(
    rates: dict[int, float], most: int, threads: int
) -> None:
    assert choose(rates, most) == threads


def test_each_number_of_threads_really_reads_at_once(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads of n threads meet at a barrier of n: with fewer at once none would return."""
    monkeypatch.setattr(tuning, "SECONDS_EACH", 1e-9)
    now = iter([0.0, 0.0, 0.0, 1.0, *[1.0] * 50])
    barrier = threading.Barrier(2, timeout=10)

    def preadv(fd: int, views: Any, offset: int) -> int:
        barrier.wait()
        assert offset % 4096 == 0
        return len(views[0])

    rates = measure(source, 8192, [2], preadv=preadv, clock=lambda: next(now))

    assert list(rates) == [2]
    assert rates[2] > 0


def test_a_device_that_fails_is_not_measured(source: Source) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    assert measure(source, 8192, preadv=fails) == {}


def test_a_device_that_hangs_is_not_measured(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "HANGS_SECONDS", 0.01)
    release = threading.Event()

    def hangs(*_: object) -> int:
        release.wait(20)
        raise OSError(errno.EIO, "gone")

    assert measure(source, 8192, [2], preadv=hangs) == {}
    release.set()


def test_what_was_measured_is_remembered_and_bounded(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fake(source: Source, read_bytes: int, candidates: Any) -> dict[int, float]:
        calls.append(read_bytes)
        return {2: 5.0, 4: 1.0, 8: 1.0}

    monkeypatch.setattr(tuning, "measure", fake)
    monkeypatch.setattr(tuning, "MEASURED_FROM_BYTES", 1)
    state = tmp_path / "state" / "readers.json"

    assert threads_for(source, 700_000, 8, state) == 2
    assert threads_for(source, 600_000, 8, state) == 2  # the same size class
    assert threads_for(source, 600_000, 1, state) == 1
    assert calls == [1 << 19]
    assert list(json.loads(state.read_text()).values()) == [2]
    state.write_text("[damaged")
    assert threads_for(source, 600_000, 8, state) == 2
    assert len(calls) == 2


def test_small_and_buffered_files_are_not_measured(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "measure", None)  # calling it would fail
    assert threads_for(source, 8192, 16, tmp_path / "none") == 8
    monkeypatch.setattr(tuning, "MEASURED_FROM_BYTES", 1)
    source.mode = ReadMode.BUFFERED
    assert threads_for(source, 8192, 3, tmp_path / "none") == 3
    assert not (tmp_path / "none").exists()
