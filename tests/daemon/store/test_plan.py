"""Planning reads: every byte once, in file order, and fair turns between sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.store.header import Identity
from expertd.store.plan import (
    MAX_SEGMENTS,
    PASSED_OVER_MOST,
    Fill,
    Piece,
    Priority,
    ReadQueue,
    coalesce,
)
from expertd.store.platform import ReadMode, Source
from expertd_protocol.ids import ExpertKey


def a_source(mode: ReadMode = ReadMode.BUFFERED) -> Source:
    return Source(-1, Path("shard"), Identity(0, 0, 1 << 40, 0), mode)


def a_fill(
    pieces: Sequence[tuple[Source, int, int]],
    priority: Priority = Priority.DEMAND,
    session: bytes = b"s",
) -> Fill:
    return Fill(
        ExpertKey(0, 0),
        (0, 0),
        tuple(Piece(source, at, memoryview(bytearray(size))) for source, at, size in pieces),
        priority,
        session,
    )


def plan(
    fills: Sequence[Fill], max_bytes: int = 1 << 20, max_gap: int = 0
) -> list[tuple[int, int, int]]:
    """Return (offset, bytes, segments) of each read."""
    reads = coalesce(fills, max_bytes=max_bytes, max_gap=max_gap)
    return [(r.offset, r.nbytes, len(r.segments)) for r in reads]


def test_neighbours_become_one_read_also_across_fills() -> None:
    s = a_source()
    fills = [a_fill([(s, 300, 100), (s, 1000, 10)]), a_fill([(s, 200, 100)]), a_fill([(s, 400, 5)])]

    (first, second) = coalesce(fills, max_bytes=1 << 20, max_gap=0)

    assert (first.offset, first.nbytes, first.end) == (200, 205, 405)
    assert [(seg.fill, seg.at, len(seg.dest)) for seg in first.segments] == [
        (1, 0, 100),
        (0, 100, 100),
        (2, 200, 5),
    ]
    assert (second.offset, second.nbytes) == (1000, 10)


def test_gaps_up_to_the_limit_are_read_along() -> None:
    s = a_source()
    fill = a_fill([(s, 0, 10), (s, 15, 10), (s, 31, 10)])

    assert plan([fill], max_gap=5) == [(0, 25, 2), (31, 10, 1)]
    assert plan([fill], max_gap=6) == [(0, 41, 3)]


def test_files_priorities_and_sessions_do_not_share_reads() -> None:
    s, other = a_source(), a_source()
    fills = [
        a_fill([(s, 0, 10), (other, 10, 10)]),
        a_fill([(s, 10, 10)], Priority.PREFILL),
        a_fill([(s, 10, 10)], session=b"t"),
    ]

    reads = coalesce(fills, max_bytes=1 << 20, max_gap=100)

    assert len(reads) == 4
    assert {(r.priority, r.session) for r in reads} == {
        (Priority.DEMAND, b"s"),
        (Priority.PREFILL, b"s"),
        (Priority.DEMAND, b"t"),
    }


def test_a_piece_is_split_only_when_it_is_too_long_itself() -> None:
    s = a_source()

    assert plan([a_fill([(s, 0, 60), (s, 60, 60)])], max_bytes=100) == [(0, 60, 1), (60, 60, 1)]
    assert plan([a_fill([(s, 0, 250)])], max_bytes=100) == [
        (0, 100, 1),
        (100, 100, 1),
        (200, 50, 1),
    ]


def test_the_aligned_superset_of_a_direct_read_fits_the_limit() -> None:
    s = a_source(ReadMode.DIRECT)

    assert plan([a_fill([(s, 4000, 20_000)])], max_bytes=8192) == [
        (4000, 4192, 1),
        (8192, 8192, 1),
        (16384, 7616, 1),
    ]
    with pytest.raises(ValueError, match="cannot be aligned"):
        plan([a_fill([(s, 0, 10)])], max_bytes=4095)


def test_the_same_bytes_for_two_slots_are_read_twice() -> None:
    s = a_source()

    assert plan([a_fill([(s, 0, 10)]), a_fill([(s, 0, 10)])], max_gap=100) == [(0, 10, 1)] * 2


def test_one_read_has_no_more_buffers_than_a_call_takes() -> None:
    s = a_source()
    reads = coalesce([a_fill([(s, 2 * n, 1) for n in range(3000)])], max_bytes=1 << 20, max_gap=1)
    assert sum(len(r.segments) for r in reads) == 3000
    assert all(2 * len(r.segments) <= MAX_SEGMENTS for r in reads)


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 60_000), st.integers(0, 30_000)), max_size=4
        ),
        max_size=5,
    ),
    st.integers(2, 8).map(lambda n: n * 4096 + 5),
    st.integers(0, 20_000),
)
def test_every_byte_is_covered_once_and_no_read_is_too_long(
    layout: list[list[tuple[int, int, int]]], max_bytes: int, max_gap: int
) -> None:
    sources = [a_source(), a_source(ReadMode.DIRECT), a_source(ReadMode.NOCACHE)]
    fills = [a_fill([(sources[n], at, size) for n, at, size in pieces]) for pieces in layout]

    reads = coalesce(fills, max_bytes=max_bytes, max_gap=max_gap)

    for read in reads:
        align = read.source.align
        start = read.offset - read.offset % align
        assert -(-read.end // align) * align - start <= max_bytes
        at = 0
        for segment in read.segments:
            assert 0 <= segment.at - at <= max_gap
            at = segment.at + len(segment.dest)
            # Write where in the file these bytes come from.
            for i in range(0, len(segment.dest), 997):
                segment.dest[i] += (read.offset + segment.at + i) % 251 + 1
    total = sum(len(s.dest) for read in reads for s in read.segments)
    assert total == sum(len(p.dest) for fill in fills for p in fill.pieces)
    for number, fill in enumerate(fills):
        for piece in fill.pieces:
            written = {i: b for i, b in enumerate(piece.dest) if b}
            assert all(b == (piece.offset + i) % 251 + 1 for i, b in written.items())
        mine = sum(len(s.dest) for read in reads for s in read.segments if s.fill == number)
        assert mine == sum(len(piece.dest) for piece in fill.pieces)


# --- queue ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Item:
    session: bytes
    nbytes: int
    priority: Priority = Priority.DEMAND
    number: int = 0


def drain(queue: ReadQueue[Item]) -> list[Item]:
    items = []
    while (item := queue.pop()) is not None:
        items.append(item)
    return items


def test_demand_goes_before_prefill_before_prefetch() -> None:
    queue: ReadQueue[Item] = ReadQueue()
    for priority in (Priority.PREFETCH, Priority.PREFILL, Priority.DEMAND, Priority.PREFILL):
        queue.push(Item(b"s", 10, priority))

    assert len(queue) == 4
    assert [item.priority for item in drain(queue)] == [0, 1, 1, 2]
    assert len(queue) == 0
    assert queue.pop() is None


def test_no_read_waits_for_ever_behind_those_of_more_priority() -> None:
    queue: ReadQueue[Item] = ReadQueue()
    for priority in Priority:
        for _ in range(100):
            queue.push(Item(b"%d" % priority, 10, priority))
    order = [item.priority for item in drain(queue)]

    while_all_wait = order[:90]
    assert order[:PASSED_OVER_MOST] == [Priority.DEMAND] * PASSED_OVER_MOST
    assert while_all_wait.count(Priority.DEMAND) >= 70
    assert while_all_wait.count(Priority.PREFILL) >= 8
    assert while_all_wait.count(Priority.PREFETCH) >= 8


def test_one_session_keeps_its_order() -> None:
    queue: ReadQueue[Item] = ReadQueue(100)
    items = [Item(b"s", 1 + 50 * (n % 7), number=n) for n in range(50)]
    for item in items:
        queue.push(item)

    assert drain(queue) == items


def test_a_session_with_much_to_read_does_not_delay_another_by_more_than_a_turn() -> None:
    queue: ReadQueue[Item] = ReadQueue(1000)
    for n in range(500):
        queue.push(Item(b"greedy", 100, number=n))
    queue.pop()
    queue.push(Item(b"modest", 100))

    before = [item.session for item in drain(queue)].index(b"modest")

    assert before * 100 <= 2 * 1000


@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    st.integers(1, 2000),
)
def test_sessions_share_by_bytes_while_both_wait(
    first: list[int], second: list[int], quantum: int
) -> None:
    queue: ReadQueue[Item] = ReadQueue(quantum)
    for name, sizes in ((b"a", first), (b"b", second)):
        for size in sizes:
            queue.push(Item(name, size))
    left = {b"a": len(first), b"b": len(second)}
    served = {b"a": 0, b"b": 0}

    while left[b"a"] and left[b"b"]:
        item = queue.pop()
        assert item is not None
        left[item.session] -= 1
        served[item.session] += item.nbytes
        assert abs(served[b"a"] - served[b"b"]) <= 2 * quantum + 3000
    assert len(drain(queue)) == left[b"a"] + left[b"b"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(Priority), st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 5000)
        )
    ),
    st.integers(2, 5),
)
def test_cancel_takes_exactly_what_it_is_asked_for(
    pushes: list[tuple[Priority, bytes, int]], nth: int
) -> None:
    queue: ReadQueue[Item] = ReadQueue(1000)
    items = [Item(session, n, priority, i) for i, (priority, session, n) in enumerate(pushes)]
    for item in items:
        queue.push(item)

    cancelled = queue.cancel(lambda item: item.number % nth == 0)

    assert sorted(item.number for item in cancelled) == list(range(0, len(items), nth))
    assert len(queue) == len(items) - len(cancelled)
    assert sorted(i.number for i in drain(queue)) == [i.number for i in items if i.number % nth]


def test_the_queue_says_what_waits() -> None:
    queue: ReadQueue[Item] = ReadQueue()
    queue.push(Item(b"s", 1, Priority.PREFILL))

    assert repr(queue) == "<ReadQueue {'DEMAND': 0, 'PREFILL': 1, 'PREFETCH': 0}>"
