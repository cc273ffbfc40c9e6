"""Route: the faster way wins, the copy must be worth it, and neither is forgotten."""

from __future__ import annotations

import pytest

from expertd.store.route import FIRST_READS, LARGE_BYTES, TRY_EVERY, Route

BIG = 4 * LARGE_BYTES


def run(route: Route, reads: int, straight_seconds: float, buffer_seconds: float) -> list[bool]:
    """Do reads that take so long on each way; return which were straight."""
    ways = []
    for _ in range(reads):
        straight = route.goes_straight(BIG)
        route.took(straight, straight_seconds if straight else buffer_seconds, BIG)
        ways.append(straight)
    return ways


@pytest.mark.parametrize(
    ("straight_seconds", "buffer_seconds", "straight"),
    [(1.0, 1.0, True), (1.1, 1.0, True), (1.2, 1.0, False), (1.0, 2.0, True), (3.0, 1.0, False)],
)
def test_the_copy_must_be_worth_it(
    straight_seconds: float, buffer_seconds: float, straight: bool
) -> None:
    route = Route()
    first = run(route, FIRST_READS, straight_seconds, buffer_seconds)
    later = run(route, 10 * TRY_EVERY, straight_seconds, buffer_seconds)

    assert first.count(True) == first.count(False)
    assert route.prefers_straight == straight
    assert later.count(not straight) == 10  # tried again, and no more often


def test_it_follows_a_device_that_changes() -> None:
    route = Route()
    run(route, FIRST_READS, 3.0, 1.0)
    assert not route.prefers_straight

    run(route, 60 * TRY_EVERY, 1.0, 3.0)

    assert route.prefers_straight


def test_one_read_that_hung_does_not_decide() -> None:
    route = Route()
    run(route, FIRST_READS, 1.0, 1.0)
    route.took(True, 3600.0, BIG)
    assert route.prefers_straight
    run(route, 2 * TRY_EVERY, 1.0, 1.0)
    assert route.prefers_straight


def test_small_reads_go_straight_and_teach_nothing() -> None:
    route = Route()
    assert all(route.goes_straight(LARGE_BYTES - 1) for _ in range(100))
    route.took(True, 9.0, LARGE_BYTES - 1)
    assert repr(route) == "<Route straight [0.0, 0.0]>"
