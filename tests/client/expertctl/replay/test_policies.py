"""The textbook policies do what their papers say, on sequences that were worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.replay.policies import (
    Arc,
    Belady,
    Keys,
    LeastFrequent,
    LeastRecent,
    Policy,
    S3Fifo,
    Sieve,
)

TEXTBOOK = [LeastRecent, LeastFrequent, S3Fifo, Sieve, Arc]


def _hits(policy: Policy, keys: str) -> str:
    """Play one letter a step; return `+` for each hit and `.` for each miss."""
    return "".join("+" if policy.step([ord(key)]) else "." for key in keys)


def _held(policy: Policy) -> str:
    return "".join(sorted(map(chr, policy.resident())))


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = LeastRecent(3)

    assert _hits(policy, "abcadab") == "...+.+."
    assert _held(policy) == "abd"


def test_lru_hits_nothing_in_a_loop_one_larger_than_itself() -> None:
    assert "+" not in _hits(LeastRecent(3), "abcd" * 5)


def test_lfu_evicts_the_least_used_and_among_equals_the_least_recent() -> None:
    policy = LeastFrequent(3)

    assert _hits(policy, "aabbcdabc") == ".+.+..++."  # c left for d, d for c
    assert _held(policy) == "abc"


def test_sieve_keeps_what_was_visited_and_its_hand_moves_on() -> None:
    policy = Sieve(3)

    # the hand clears a's bit, evicts b, and stays at c, which goes next
    assert _hits(policy, "abcadae") == "...+.+."
    assert _held(policy) == "ade"


def test_s3fifo_sends_used_newcomers_to_main_and_brings_ghosts_back_into_it() -> None:
    policy = S3Fifo(3)

    assert _hits(policy, "aaabcd") == ".++..."  # a goes to main, b to the ghosts
    assert _held(policy) == "acd"
    assert _hits(policy, "bef") == "..."  # b is in main now, c, d and e pass through
    assert _held(policy) == "abf"


def test_arc_keeps_what_was_used_twice_from_a_scan() -> None:
    policy = Arc(4)
    _hits(policy, "abab")

    assert _hits(policy, "cdefghij") == "........"
    assert _hits(policy, "ab") == "++"


def test_arc_gives_recency_more_room_after_a_ghost_hit() -> None:
    policy = Arc(2)
    _hits(policy, "aabc")  # a in t2, b a ghost of t1
    assert _held(policy) == "ac"

    _hits(policy, "b")  # t1 may now hold one: a goes, and not c

    assert _held(policy) == "bc"


def test_belady_evicts_what_is_used_again_last() -> None:
    keys = "abcdabeabcd"
    policy = Belady(3, [[ord(key)] for key in keys])

    assert _hits(policy, keys) == "....++.++.."  # c, then d left


steps = st.lists(
    st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), min_size=1, max_size=60
)


@pytest.mark.parametrize("kind", TEXTBOOK)
@given(steps=steps, capacity=st.integers(3, 8))
def test_no_policy_holds_too_much_or_evicts_what_a_step_uses(
    kind: type[Policy], steps: list[Keys], capacity: int
) -> None:
    policy = kind(capacity)
    for keys in steps:
        before = policy.resident()
        assert policy.step(keys) == len(before & set(keys))
        assert set(keys) <= policy.resident()
        assert len(policy.resident()) == min(len(before | set(keys)), capacity)


@given(steps=steps, capacity=st.integers(3, 8))
def test_belady_is_never_beaten(steps: list[Keys], capacity: int) -> None:
    belady = Belady(capacity, steps)
    best = sum(belady.step(keys) for keys in steps)

    for kind in TEXTBOOK:
        policy = kind(capacity)
        assert sum(policy.step(keys) for keys in steps) <= best


@given(steps=steps, capacity=st.integers(3, 8))
def test_belady_holds_its_capacity_too(steps: list[Keys], capacity: int) -> None:
    policy = Belady(capacity, steps)
    for keys in steps:
        before = policy.resident()
        assert policy.step(keys) == len(before & set(keys))
        assert set(keys) <= policy.resident()
        assert len(policy.resident()) <= capacity
