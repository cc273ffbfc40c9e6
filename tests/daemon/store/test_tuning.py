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
from expertd.store.tuning import Tuning, choose, measure, tuned


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Source]:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"x" * (1 << 20))
    source = open_source(path, Identity.of(path), "buffered")
    source.mode = ReadMode.DIRECT  # what a real disk would say
    yield source
    source.close()


@pytest.mark.parametrize(
    ("buffered", "straight", "most", "wanted"),
    [
        ({2: 1.0, 4: 1.1, 8: 1.0}, 1.0, 8, Tuning(8, True)),
        ({2: 1.0, 4: 1.2, 8: 1.0}, 0.9, 8, Tuning(4, True)),
        ({2: 9.0, 4: 5.0, 8: 1.0}, 0.8, 8, Tuning(2, False)),
        ({2: 1.0, 4: 1.0, 8: 1.0}, 9.0, 16, Tuning(8, True)),
        ({2: 1.0, 4: 1.0, 8: 1.0}, 0.0, 8, Tuning(8, True)),
        ({}, 1.0, 3, Tuning(3, True)),
    ],
)
def test_another_way_must_be_clearly_better(
    buffered: dict[int, float], straight: float, most: int, wanted: Tuning
) -> None:
    assert choose(buffered, straight, most) == wanted


@pytest.mark.parametrize("straight", [True, False])
def test_so_many_threads_really_read_at_once(
    source: Source, monkeypatch: pytest.MonkeyPatch, straight: bool
) -> None:
    """Reads of two threads meet at a barrier of two: one alone would never return."""
    monkeypatch.setattr(tuning, "SECONDS_EACH", 1e-9)
    now = iter([0.0, 0.0, 0.0, *[1.0] * 50])
    barrier = threading.Barrier(2, timeout=10)

    def preadv(fd: int, views: Any, offset: int) -> int:
        barrier.wait()
        assert offset % 4096 == 0
        return len(views[0])

    rate = measure(source, 8192, 2, straight=straight, preadv=preadv, clock=lambda: next(now))

    assert rate == 2 * 8192 / 1.0


def test_a_device_that_fails_is_not_measured(source: Source) -> None:
    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    assert measure(source, 8192, 2, preadv=fails) == 0


def test_a_device_that_hangs_is_not_measured(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "HANGS_SECONDS", 0.01)
    release = threading.Event()

    def hangs(*_: object) -> int:
        release.wait(20)
        raise OSError(errno.EIO, "gone")

    assert measure(source, 8192, 2, preadv=hangs) == 0
    release.set()


def test_what_was_measured_is_remembered(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def fake(source: Source, read_bytes: int, threads: int, *, straight: bool = False) -> float:
        calls.append(read_bytes)
        return 1.0 if straight or threads > 2 else 5.0

    monkeypatch.setattr(tuning, "measure", fake)
    monkeypatch.setattr(tuning, "MEASURED_FROM_BYTES", 1)
    state = tmp_path / "state" / "readers.json"

    assert tuned(source, 700_000, 4 << 20, 8, state) == Tuning(2, True)
    assert tuned(source, 600_000, 4 << 20, 8, state) == Tuning(2, True)  # the same size class
    assert calls == [1 << 19] * 4
    assert list(json.loads(state.read_text()).values()) == [{"threads": 2, "straight": True}]
    for damaged in ("[damaged", "[]", '{"a": 1}', '{"a": {"threads": "x"}}', '{"a": {"b": 1}}'):
        state.write_text(damaged)
        assert tuned(source, 600_000, 4 << 20, 8, state) == Tuning(2, True)
    assert len(calls) == 24


def test_measuring_takes_no_more_than_the_buffers_there_is_room_for(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def fake(source: Source, read_bytes: int, threads: int, *, straight: bool = False) -> float:
        taken.append((threads + 1) * read_bytes)
        return 1.0

    monkeypatch.setattr(tuning, "measure", fake)
    monkeypatch.setattr(tuning, "MEASURED_FROM_BYTES", 1)

    tuned(source, 30 << 20, 64 << 10, 8, tmp_path / "readers.json")

    assert max(taken) <= 8 * (64 << 10)


def test_small_and_buffered_files_and_few_buffers_are_not_measured(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "measure", None)  # calling it would fail
    none = tmp_path / "none"
    assert tuned(source, 8192, 65536, 16, none) == Tuning(8)
    monkeypatch.setattr(tuning, "MEASURED_FROM_BYTES", 1)
    assert tuned(source, 8192, 65536, 3, none) == Tuning(3)
    source.mode = ReadMode.BUFFERED
    assert tuned(source, 8192, 65536, 8, none) == Tuning(8)
    assert not none.exists()
