"""Replay: sessions take turns, steps are whole, and the daemon's policy never does worse than LRU."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.replay.simulator import NAMES, Workload, hit_rate, interleave
from expertctl.traces import NOT_ROUTED, U16, read_trace
from expertd_protocol.errors import BadTrace

SHIPPED = Path(__file__).parents[4] / "bench" / "traces" / "tiny_moe_generate.npz"


def _random(seed: int, tokens: int = 12, layers: int = 3, experts: int = 8, k: int = 2) -> U16:
    rng = np.random.default_rng(seed)
    rows = [rng.permutation(experts)[:k] for _ in range(tokens * layers)]
    return np.array(rows, np.uint16).reshape(tokens, layers, k)


def test_sessions_take_turns_token_by_token_until_each_ends() -> None:
    work = interleave([_random(1, tokens=2, layers=2), _random(2, tokens=1, layers=2)], 8)

    assert [(step.session, step.layer) for step in work.steps] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 0), (0, 1),
    ]  # fmt: skip


def test_a_limit_is_per_session() -> None:
    assert len(interleave([_random(1), _random(2)], 8, limit=4).steps) == 2 * 4 * 3


def test_what_is_not_routed_is_not_looked_up() -> None:
    ids = _random(1, tokens=1, layers=2)
    ids[0, 0, 1] = NOT_ROUTED
    ids[0, 1] = NOT_ROUTED
    work = interleave([ids], 8)

    assert work.lookups == 1
    assert len(work.steps) == 1


def test_sessions_of_different_models_do_not_fit_together() -> None:
    with pytest.raises(BadTrace, match=r"\[2, 3\]"):
        interleave([_random(1, layers=3), _random(1, layers=2)], 8)


def test_a_capacity_is_never_less_than_one_step() -> None:
    assert interleave([_random(1)], 8).slots(0.001) == 2


@pytest.mark.parametrize("name", NAMES)
def test_with_room_for_all_only_first_uses_miss(name: str) -> None:
    work = interleave([_random(1), _random(2)], 8)
    different = len(set().union(*work.keys()))

    assert hit_rate(name, work, work.total) == pytest.approx(1 - different / work.lookups)


@given(st.integers(0, 1000), st.integers(1, 3), st.integers(2, 20))
def test_no_policy_beats_belady(seed: int, sessions: int, slots: int) -> None:
    work = interleave([_random(seed + n) for n in range(sessions)], 8)
    best = hit_rate("belady", work, slots)

    assert all(hit_rate(name, work, slots) <= best for name in NAMES)


@pytest.fixture(scope="module", params=[1, 4])
def shipped(request: pytest.FixtureRequest) -> Workload:
    trace = read_trace(SHIPPED)
    return interleave(trace.parts(request.param), trace.num_experts, 240 // request.param)


@pytest.mark.parametrize("capacity", [0.1, 0.25, 0.5])
def test_the_daemons_policy_is_a_fifth_of_the_way_from_lru_to_belady_on_the_shipped_trace(
    shipped: Workload, capacity: float
) -> None:
    """A short piece of it, from a cold start; docs/replacement.md has the whole."""
    slots = shipped.slots(capacity)
    lru, default, belady = (hit_rate(n, shipped, slots) for n in ("lru", "default", "belady"))

    assert default >= lru + (belady - lru) / 5
