"""Reader threads: right bytes in every mode, one answer per fill, errors that stay local."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertd.store.header import Identity, read_header
from expertd.store.plan import Fill, Piece, Priority
from expertd.store.platform import READ_MAX_BYTES, Preadv, ReadMode, Source, open_source
from expertd.store.reader import Reader
from expertd_protocol.errors import (
    Draining,
    ExpertdError,
    ModelChanged,
    ReadFailed,
    TruncatedFile,
)
from expertd_protocol.ids import ExpertKey
from tests.safetensors_files import Raw, pattern, write_file

WAIT_SECONDS = 20
Answer = tuple[Fill, ExpertdError | None]


class Answers:
    """Collects what `on_done` is told, with the thread that told it."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Fill, ExpertdError | None, str]] = queue.SimpleQueue()
        self.threads: set[str] = set()

    def __call__(self, fill: Fill, error: ExpertdError | None) -> None:
        self._queue.put((fill, error, threading.current_thread().name))

    def take(self, count: int) -> list[Answer]:
        answers = []
        for _ in range(count):
            fill, error, thread = self._queue.get(timeout=WAIT_SECONDS)
            self.threads.add(thread)
            answers.append((fill, error))
        return answers

    def error_of(self, fill: Fill) -> ExpertdError | None:
        ((answered, error),) = self.take(1)
        assert answered is fill
        return error

    @property
    def empty(self) -> bool:
        return self._queue.empty()


def strict(fd: int, views: Sequence[Any], offset: int) -> int:
    """Read as a direct device does that checks everything."""
    for view in views:
        address = np.frombuffer(view, np.uint8).ctypes.data
        if address % 4096 or len(view) % 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
    if offset % 4096:
        raise OSError(errno.EINVAL, "Invalid argument")
    return os.preadv(fd, views, offset)


@pytest.fixture
def answers() -> Answers:
    return Answers()


@pytest.fixture
def reader(answers: Answers) -> Iterator[Callable[..., Reader]]:
    """Make readers that are closed at the end of the test."""
    made: list[Reader] = []

    def make(
        preadv: Preadv = os.preadv,
        *,
        threads: int = 2,
        buffer_bytes: int = 64 * 1024,
        name: str = "disk",
    ) -> Reader:
        one = Reader(
            threads=threads, buffer_bytes=buffer_bytes, on_done=answers, name=name, preadv=preadv
        )
        made.append(one)
        return one

    yield make
    for one in made:
        one.close(5)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "model.safetensors"
    file.write_bytes(pattern(300_001))
    return file


def plain_source(path: Path, mode: ReadMode = ReadMode.BUFFERED) -> Source:
    """A source of a chosen mode whose descriptor is a plain one: the injected call plays the disk."""
    return Source(os.open(path, os.O_RDONLY | os.O_CLOEXEC), path, Identity.of(path), mode)


def fill_of(
    source: Source,
    *ranges: tuple[int, int],
    key: int = 0,
    priority: Priority = Priority.DEMAND,
    session: bytes = b"s",
) -> Fill:
    pieces = tuple(Piece(source, at, memoryview(bytearray(n))) for at, n in ranges)
    return Fill(ExpertKey(0, key), (0, key), pieces, priority, session)


def bytes_of(fill: Fill) -> list[bytes]:
    return [bytes(piece.dest) for piece in fill.pieces]


def expected(path: Path, fill: Fill) -> list[bytes]:
    content = path.read_bytes()
    return [content[p.offset : p.offset + len(p.dest)] for p in fill.pieces]


# --- right bytes ---------------------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_experts_at_any_address_are_read_back_byte_for_byte_in_every_mode_A14_A15(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Odd header lengths, odd tensors in front, slots at odd addresses, buffers of any size."""
    draw = data.draw
    experts = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(1, 30_000) | st.just(8192), min_size=1, max_size=4))
    tensors = {"odd": Raw("U8", (n := draw(st.integers(0, 9)),), bytes(n))}
    for number, size in enumerate(sizes):
        dtype = draw(st.sampled_from(["F8_E4M3", "F8_E8M0", "U8"]))
        tensors[f"t{number}"] = Raw(dtype, (experts, size), pattern(experts * size, seed=number))
    path = tmp_path_factory.getbasetemp() / "model.safetensors"
    write_file(path, tensors, pad_header=draw(st.integers(0, 5000)))
    header = read_header(path)

    mode = draw(st.sampled_from(["auto", "buffered", "direct", "nocache"]))
    if mode in ("direct", "nocache"):
        source, call = plain_source(path, ReadMode(mode)), strict
    else:
        source, call = open_source(path, header.identity, mode), os.preadv
    answers = Answers()
    reader = Reader(
        threads=2,
        buffer_bytes=4096 * draw(st.integers(2, 12)),
        on_done=answers,
        preadv=call,
    )
    shift = draw(st.integers(0, 4097))
    slots = mmap.mmap(-1, 4096 * 64 + 4098 + experts * sum(sizes))
    at, fills = shift, []
    for expert in draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=6, unique=True)):
        pieces = []
        for number, size in enumerate(sizes):
            where = header.tensors[f"t{number}"].offset + expert * size
            pieces.append(Piece(source, where, memoryview(slots)[at : at + size]))
            at += size
        priority = draw(st.sampled_from(Priority))
        fills.append(Fill(ExpertKey(0, expert), (0, 0), tuple(pieces), priority, b"s"))

    reader.submit(fills)
    got = answers.take(len(fills))

    assert reader.close(5)
    assert answers.empty
    assert {id(fill) for fill, _ in got} == {id(fill) for fill in fills}
    assert [error for _, error in got] == [None] * len(fills)
    for fill in fills:
        for number, size in enumerate(sizes):
            whole = tensors[f"t{number}"].data
            start = fill.key.expert * size
            assert bytes_of(fill)[number] == whole[start : start + size]
    assert source.errors == 0
    assert source.mode == (mode if mode != "auto" else source.mode)  # no fallback was needed
    source.close()


def test_aligned_experts_go_straight_into_the_slot_in_one_read(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    source = plain_source(path, ReadMode.DIRECT)
    seen: list[list[int]] = []

    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        seen.append([np.frombuffer(v, np.uint8).ctypes.data for v in views])
        return strict(fd, views, offset)

    slots = memoryview(mmap.mmap(-1, 3 * 16384))
    parts = [slots[:8192], slots[16384 : 16384 + 4096], slots[32768 : 32768 + 4096]]
    pieces = tuple(
        Piece(source, at, dest) for at, dest in zip((4096, 12288, 16384), parts, strict=True)
    )
    fill = Fill(ExpertKey(0, 0), (0, 0), pieces, Priority.DEMAND, b"s")

    reader(preadv).submit([fill])

    assert answers.error_of(fill) is None
    assert seen == [[np.frombuffer(part, np.uint8).ctypes.data for part in parts]]
    assert bytes_of(fill) == expected(path, fill)
    assert (source.reads, source.read_bytes) == (1, 16384)


def test_aligned_experts_with_room_between_their_parts_go_straight_too(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    """A packed record whose part ends on a block, but not where the next one begins."""
    source = plain_source(path, ReadMode.DIRECT)
    slots = memoryview(mmap.mmap(-1, 3 * 4096))
    pieces = (Piece(source, 4096, slots[:4096]), Piece(source, 16384, slots[4096:]))
    fill = Fill(ExpertKey(0, 0), (0, 0), pieces, Priority.DEMAND, b"s")
    seen: list[list[int]] = []

    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        seen.append([len(v) for v in views])
        return strict(fd, views, offset)

    reader(preadv).submit([fill])

    assert answers.error_of(fill) is None
    assert seen == [[4096, 8192, 8192]]
    assert bytes_of(fill) == expected(path, fill)


@pytest.mark.parametrize("straight", [True, False])
def test_large_aligned_reads_go_the_way_that_was_measured_and_bring_the_same_bytes(
    tmp_path: Path, answers: Answers, straight: bool
) -> None:
    path = tmp_path / "large.safetensors"
    path.write_bytes(pattern(1 << 20))
    source = plain_source(path, ReadMode.DIRECT)
    slot = memoryview(mmap.mmap(-1, 512 << 10))
    ours = np.frombuffer(slot, np.uint8).ctypes.data
    ways: list[bool] = []

    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        ways.append(np.frombuffer(views[0], np.uint8).ctypes.data == ours)
        return strict(fd, views, offset)

    one = Reader(threads=1, buffer_bytes=2 << 20, on_done=answers, straight=straight, preadv=preadv)
    try:
        for at, size in ((4096, len(slot)), (8192, 4096)):
            fill = Fill(
                ExpertKey(0, 0), (0, 0), (Piece(source, at, slot[:size]),), Priority.DEMAND, b"s"
            )
            one.submit([fill])
            assert answers.error_of(fill) is None
            assert bytes_of(fill) == expected(path, fill)
    finally:
        one.close(5)

    assert ways == [straight, True]  # small ones always go straight


def test_neighbours_of_one_call_share_a_read_and_gaps_are_dropped(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    """E06: one read, not one for each small part."""
    for mode in (ReadMode.BUFFERED, ReadMode.DIRECT):
        source = plain_source(path, mode)
        fills = [fill_of(source, (n * 1000 + 7, 900), key=n) for n in range(10)]

        reader(os.preadv if mode is ReadMode.BUFFERED else strict).submit(fills)

        assert {error for _, error in answers.take(10)} == {None}
        assert source.reads == 1
        assert all(bytes_of(fill) == expected(path, fill) for fill in fills)


def test_a_buffer_smaller_than_the_gap_limit_still_reads_the_right_bytes(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    source = plain_source(path)
    fill = fill_of(source, (0, 10), (9000, 10), (20_000, 30_000))

    reader(buffer_bytes=8192).submit([fill])

    assert answers.error_of(fill) is None
    assert bytes_of(fill) == expected(path, fill)


def test_no_call_ever_asks_for_more_than_the_buffer_E01(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    asked: list[int] = []

    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        asked.append(sum(len(v) for v in views))
        return os.preadv(fd, views, offset)

    for mode in (ReadMode.BUFFERED, ReadMode.DIRECT):
        fill = fill_of(plain_source(path, mode), (5, 299_990))
        reader(preadv, buffer_bytes=16384).submit([fill])
        assert answers.error_of(fill) is None
        assert bytes_of(fill) == expected(path, fill)
    assert max(asked) <= 16384
    with pytest.raises(ValueError, match="from 8192 to 67108864"):
        reader(buffer_bytes=READ_MAX_BYTES + 4096)


def test_the_last_bytes_of_a_file_that_ends_inside_a_block_are_read(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    fill = fill_of(plain_source(path, ReadMode.DIRECT), (299_000, 1001))

    reader(strict).submit([fill])

    assert answers.error_of(fill) is None
    assert bytes_of(fill) == expected(path, fill)


@pytest.mark.parametrize("mode", [ReadMode.BUFFERED, ReadMode.DIRECT])
def test_short_and_interrupted_reads_are_continued(
    path: Path, mode: ReadMode, reader: Callable[..., Reader], answers: Answers
) -> None:
    calls = iter(range(10_000))
    step = 4096 if mode is ReadMode.DIRECT else 777

    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        if next(calls) % 3 == 0:
            raise InterruptedError(errno.EINTR, "Interrupted system call")
        if mode is ReadMode.DIRECT:
            assert offset % 4096 == 0
        return os.preadv(fd, [views[0][:step]], offset)

    fill = fill_of(plain_source(path, mode), (4099, 20_000), (24_200, 5000))
    reader(preadv).submit([fill])

    assert answers.error_of(fill) is None
    assert bytes_of(fill) == expected(path, fill)


def test_reading_leaves_the_file_as_it_was_A32(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    path.chmod(0o444)
    before = hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns
    source = open_source(path, Identity.of(path))
    fill = fill_of(source, (1, 200_000))

    reader().submit([fill])

    assert answers.error_of(fill) is None
    assert (hashlib.sha256(path.read_bytes()).digest(), path.stat().st_mtime_ns) == before
    source.close()


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc")
def test_no_model_file_is_ever_mapped_E08(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    """C14 too: demand paging of a model larger than memory starves the system."""
    maps: list[str] = []

    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        maps.append(Path("/proc/self/maps").read_text())
        return os.preadv(fd, views, offset)

    fill = fill_of(plain_source(path), (0, 1000))
    reader(preadv).submit([fill])

    assert answers.error_of(fill) is None
    assert maps
    assert str(path) not in "".join(maps)


# --- errors --------------------------------------------------------------------------------------
def failing(number: int, where: range) -> Preadv:
    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        size = sum(len(v) for v in views)
        if where.start < offset + size and offset < where.stop:
            raise OSError(number, os.strerror(number))
        return os.preadv(fd, views, offset)

    return preadv


def test_a_device_error_fails_only_the_fills_that_touch_it_E08(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    source = plain_source(path)
    good = fill_of(source, (0, 100), (200_000, 50), key=1)
    bad = fill_of(source, (50_000, 100), (100_000, 100), key=2)

    one = reader(failing(errno.EIO, range(100_000, 100_001)))
    one.submit([good, bad])
    results = {fill.key.expert: error for fill, error in answers.take(2)}

    assert results[1] is None
    assert bytes_of(good) == expected(path, good)
    error = results[2]
    assert type(error) is ReadFailed
    for word in (str(path), "100 bytes", "offset 100000", "Input/output error"):
        assert word in error.message
    assert source.errors == 1
    again = fill_of(source, (0, 100))
    one.submit([again])  # the thread lives
    assert answers.error_of(again) is None


def test_a_file_that_ends_early_is_truncated(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    for mode, call in ((ReadMode.BUFFERED, os.preadv), (ReadMode.DIRECT, strict)):
        fill = fill_of(plain_source(path, mode), (299_900, 200))
        reader(call).submit([fill])
        error = answers.error_of(fill)
        assert type(error) is TruncatedFile
        assert f"{path} ended at byte 300001, 99 bytes before" in error.message


def test_a_read_that_answers_einval_falls_back_once_and_succeeds_E03(
    path: Path,
    reader: Callable[..., Reader],
    answers: Answers,
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = plain_source(path, ReadMode.DIRECT)

    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        if source.mode is ReadMode.DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return os.preadv(fd, views, offset)

    fills = [fill_of(source, (n * 70_000, 60_000), key=n) for n in range(4)]
    reader(preadv, threads=4).submit(fills)

    assert [error for _, error in answers.take(4)] == [None] * 4
    assert all(bytes_of(fill) == expected(path, fill) for fill in fills)
    assert source.mode is ReadMode.BUFFERED
    assert source.errors == 0
    assert [r.getMessage().split()[0] for r in caplog.records] == ["read_mode_fallback"]


def test_einval_of_a_buffered_read_is_an_error_not_a_loop(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    fill = fill_of(plain_source(path), (0, 10))
    reader(failing(errno.EINVAL, range(0, 10))).submit([fill])

    assert type(answers.error_of(fill)) is ReadFailed


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENXIO, errno.ENODEV])
def test_a_dead_descriptor_is_opened_again_once_E15(
    path: Path, number: int, reader: Callable[..., Reader], answers: Answers
) -> None:
    source = plain_source(path)
    dead = [True]

    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        if dead:
            dead.pop()
            raise OSError(number, os.strerror(number))
        return os.preadv(fd, views, offset)

    fill = fill_of(source, (5, 1000))
    reader(preadv).submit([fill])

    assert answers.error_of(fill) is None
    assert bytes_of(fill) == expected(path, fill)
    assert (source.opened, source.errors) == (2, 0)


def test_a_device_that_stays_away_is_an_error_after_one_try_E15(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    """E16 too: a volume that was unplugged."""
    source = plain_source(path)
    fill = fill_of(source, (0, 10))

    reader(failing(errno.ESTALE, range(0, 10))).submit([fill])

    error = answers.error_of(fill)
    assert type(error) is ReadFailed
    assert os.strerror(errno.ESTALE) in error.message
    assert source.opened == 2


def test_another_file_at_the_path_after_an_outage_is_not_read_E15(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        path.unlink()
        path.write_bytes(pattern(300_001, seed=9))
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    fill = fill_of(plain_source(path), (0, 10))
    reader(preadv).submit([fill])

    assert type(answers.error_of(fill)) is ModelChanged


@pytest.mark.parametrize("change", ["rewrite", "replace", "truncate", "delete"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_old_and_new_bytes_are_never_mixed_E09(
    path: Path, change: str, when: str, reader: Callable[..., Reader], answers: Answers
) -> None:
    source = plain_source(path)

    def change_file() -> None:
        if change == "rewrite":
            mtime = path.stat().st_mtime_ns
            with path.open("r+b") as file:
                file.write(b"new")
            os.utime(path, ns=(0, mtime + 1_000_000))
        elif change == "replace":
            path.with_suffix(".new").write_bytes(pattern(300_001, seed=3))
            path.with_suffix(".new").rename(path)
        elif change == "truncate":
            os.truncate(path, 100)
        else:
            path.unlink()

    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        if when == "during":
            change_file()
        return os.preadv(fd, views, offset)

    if when == "before":
        change_file()
    fill = fill_of(source, (50, 1000))
    reader(preadv).submit([fill])

    error = answers.error_of(fill)
    assert type(error) is ModelChanged
    assert str(path) in error.message


def test_a_closed_source_is_an_error(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    source = plain_source(path)
    source.close()
    fill = fill_of(source, (0, 10))

    reader().submit([fill])

    assert type(answers.error_of(fill)) is ReadFailed


def test_a_mistake_in_a_thread_is_an_answer_and_the_thread_lives(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    mistakes = [True]

    def preadv(fd: int, views: Sequence[Any], offset: int) -> int:
        if mistakes:
            mistakes.pop()
            raise ZeroDivisionError("planted")
        return os.preadv(fd, views, offset)

    source = plain_source(path)
    one = reader(preadv, threads=1)
    first, second = fill_of(source, (0, 10)), fill_of(source, (0, 10))
    one.submit([first])
    one.submit([second])

    error = answers.error_of(first)
    assert isinstance(error, ReadFailed)
    assert "planted" in error.message
    assert answers.error_of(second) is None


def test_an_on_done_that_raises_does_not_stop_the_others(path: Path) -> None:
    answers, told = Answers(), []

    def on_done(fill: Fill, error: ExpertdError | None) -> None:
        told.append(fill)
        answers(fill, error)
        if len(told) == 1:
            raise RuntimeError("planted")

    reader = Reader(threads=1, buffer_bytes=8192, on_done=on_done)
    source = plain_source(path)
    reader.submit([fill_of(source, (0, 10)), fill_of(source, (50_000, 10))])

    answers.take(2)
    assert reader.close(5)
    assert len(told) == 2


# --- order, threads, closing ---------------------------------------------------------------------
class Gate:
    """A disk that reads only when it is told to."""

    def __init__(self) -> None:
        self.entered: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.opened = threading.Event()

    def __call__(self, fd: int, views: Sequence[Any], offset: int) -> int:
        self.entered.put(offset)
        assert self.opened.wait(WAIT_SECONDS)
        return os.preadv(fd, views, offset)


def test_demand_overtakes_what_waits(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    gate = Gate()
    source = plain_source(path)
    one = reader(gate, threads=1)
    one.submit([fill_of(source, (0, 10))])
    gate.entered.get(timeout=WAIT_SECONDS)  # the thread is busy; the rest waits
    for key, priority in enumerate((Priority.PREFETCH, Priority.PREFILL, Priority.DEMAND)):
        one.submit([fill_of(source, ((key + 1) * 50_000, 10), key=key, priority=priority)])
    assert one.queue_depth == 3
    assert "queue_depth=3" in repr(one)

    gate.opened.set()

    order = [fill.priority for fill, _ in answers.take(4)][1:]
    assert order == [Priority.DEMAND, Priority.PREFILL, Priority.PREFETCH]
    assert one.queue_depth == 0


def test_what_somebody_waits_for_by_now_overtakes_what_waits(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    gate = Gate()
    source = plain_source(path)
    one = reader(gate, threads=1)
    fills = [fill_of(source, (n * 50_000, 10), key=n, priority=Priority.PREFETCH) for n in range(4)]
    one.submit(fills[:1])
    gate.entered.get(timeout=WAIT_SECONDS)
    for fill in fills[1:]:
        one.submit([fill])

    one.hurry(fills[3], Priority.DEMAND)
    one.hurry(fills[3], Priority.PREFILL)  # no step back
    one.hurry(fills[0], Priority.DEMAND)  # is being read already
    assert one.queue_depth == 3
    gate.opened.set()

    order = [fill.key.expert for fill, error in answers.take(4) if error is None]
    assert order == [0, 3, 1, 2]


def test_the_parts_of_one_expert_are_read_at_the_same_time(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    """E21: reads one after the other are bound by latency."""
    gate = Gate()
    fill = fill_of(plain_source(path), (0, 10), (100_000, 10), (200_000, 10))

    reader(gate, threads=3).submit([fill])
    entered = {gate.entered.get(timeout=WAIT_SECONDS) for _ in range(3)}
    assert answers.empty  # a fill is done when all of it is
    gate.opened.set()

    assert entered == {0, 100_000, 200_000}
    assert answers.error_of(fill) is None
    assert all(name.startswith("disk-") for name in answers.threads)


def test_a_hung_disk_stops_only_its_own_reader_and_is_abandoned_at_the_deadline_E08(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    gate = Gate()
    source = plain_source(path)
    hung = reader(gate, threads=1, name="hung")
    stuck, waiting = fill_of(source, (0, 10), key=1), fill_of(source, (50_000, 10), key=2)
    hung.submit([stuck])
    gate.entered.get(timeout=WAIT_SECONDS)
    hung.submit([waiting])

    other = fill_of(source, (0, 10), key=3)
    reader().submit([other])
    assert answers.error_of(other) is None
    start = time.monotonic()
    assert hung.close(0.05) is False
    assert time.monotonic() - start < 5

    results = answers.take(2)
    assert {fill.key.expert for fill, _ in results} == {1, 2}
    assert all(type(error) is Draining for _, error in results)
    gate.opened.set()  # the disk comes back too late
    for thread in threading.enumerate():
        if thread.name == "hung-0":
            thread.join(WAIT_SECONDS)
    assert answers.empty  # nobody is told twice


def test_close_finishes_what_was_taken_and_takes_nothing_more(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    source = plain_source(path)
    one = reader()
    fills = [fill_of(source, (n * 10_000, 9000), key=n) for n in range(20)]
    one.submit(fills)

    assert one.close(WAIT_SECONDS) is True

    assert {error for _, error in answers.take(20)} == {None}
    assert all(bytes_of(fill) == expected(path, fill) for fill in fills)
    with pytest.raises(Draining, match="disk is closing"):
        one.submit(fills)
    assert answers.empty
    assert one.close(0) is True


def test_an_error_that_is_kept_does_not_keep_the_memory_of_slots_mapped(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    for mode, call in ((ReadMode.BUFFERED, os.preadv), (ReadMode.DIRECT, strict)):
        slab = mmap.mmap(-1, 4096)
        piece = Piece(plain_source(path, mode), 299_990, memoryview(slab)[:100])
        one = reader(call, threads=1)
        one.submit([Fill(ExpertKey(0, 0), (0, 0), (piece,), Priority.DEMAND, b"s")])
        ((_, error),) = answers.take(1)
        assert one.close(5)
        del piece, _

        slab.close()  # BufferError when anything still points there

        assert isinstance(error, TruncatedFile)


def test_an_idle_thread_does_not_keep_the_memory_of_slots_mapped(
    path: Path, reader: Callable[..., Reader], answers: Answers
) -> None:
    slab = mmap.mmap(-1, 4096)
    source = plain_source(path)
    view = memoryview(slab)[:100]
    reader(threads=1).submit(
        [Fill(ExpertKey(0, 0), (0, 0), (Piece(source, 0, view),), Priority.DEMAND, b"s")]
    )
    answers.take(1)
    del view

    end = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            slab.close()
            break
        except BufferError:  # the thread is just about to let go
            assert time.monotonic() < end, "the thread still holds the slot"
            os.sched_yield()


def test_bad_arguments_are_refused_before_anything_is_queued(
    path: Path, reader: Callable[..., Reader]
) -> None:
    source = plain_source(path)
    one = reader()
    for dest, words in (
        (memoryview(bytearray(0)), "has no bytes"),
        (memoryview(b"read-only"), "not plain bytes"),
        (memoryview(bytearray(8))[::2], "not plain bytes"),
        (memoryview(bytearray(8)).cast("I"), "not plain bytes"),
    ):
        fill = Fill(ExpertKey(0, 0), (0, 0), (Piece(source, 0, dest),), Priority.DEMAND, b"s")
        with pytest.raises(ValueError, match=words):
            one.submit([fill])
    assert one.queue_depth == 0
    for threads, buffer_bytes in ((0, 8192), (1, 4096), (1, 8193), (1, 0)):
        with pytest.raises(ValueError, match=r"reader threads|read buffer"):
            reader(threads=threads, buffer_bytes=buffer_bytes)
    assert reader(threads=3, buffer_bytes=8192).nbytes == 3 * 8192
