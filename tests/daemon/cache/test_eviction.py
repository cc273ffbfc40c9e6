"""Who leaves first: what is needed last, whatever a page says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.cache.duel import LEAD_MOST, TRUSTED_FROM
from expertd.cache.eviction import IDLE_HALF_SECONDS, NextUse
from expertd_protocol.ids import SessionId
from expertd_protocol.layout import U32

LAYERS, EXPERTS = 4, 8
A, B = SessionId(b"a" * 16), SessionId(b"b" * 16)


class Worker:
    """One worker's page, shown to the policy after every layer."""

    def __init__(self, policy: NextUse, session: SessionId, experts: int = EXPERTS) -> None:
        self.policy, self.session = policy, session
        self.uses: U32 = np.zeros((LAYERS, experts), np.uint32)
        self.show(0.0)

    def show(self, now: float) -> None:
        self.policy.observe(self.session, self.uses.copy(), now)

    def use(self, layer: int, *experts: int, now: float = 0.0) -> None:
        self.uses[layer, list(experts)] += np.uint32(1)
        self.show(now)

    def passes(self, *sets: tuple[int, ...], times: int = 1) -> None:
        for _ in range(times):
            for used in sets:
                for layer in range(LAYERS):
                    self.use(layer, *used)


def _order(policy: NextUse, keys: list[tuple[int, int]], now: float = 0.0) -> list[tuple[int, int]]:
    layers, experts = np.array(keys, np.intp).T
    return [keys[i] for i in policy.victims(layers, experts, len(keys), now)]


@pytest.fixture
def policy() -> NextUse:
    return _trusted(NextUse(LAYERS, EXPERTS))


def _trusted(policy: NextUse) -> NextUse:
    policy.duel.lead = LEAD_MOST
    return policy


def test_of_experts_used_alike_the_layer_that_comes_round_last_leaves_first(
    policy: NextUse,
) -> None:
    worker = Worker(policy, A)
    worker.passes((1, 2), times=20)
    worker.use(0, 1, 2)
    worker.use(1, 1, 2)

    assert _order(policy, [(layer, 1) for layer in range(LAYERS)]) == [
        (1, 1),
        (0, 1),
        (3, 1),
        (2, 1),
    ]


def test_what_is_never_used_leaves_before_what_is_used_now_and_then(policy: NextUse) -> None:
    worker = Worker(policy, A)
    worker.passes((1, 2), (1, 3), (1, 2), (1, 2), times=10)

    assert _order(policy, [(2, 1), (2, 3), (2, 7)]) == [(2, 7), (2, 3), (2, 1)]


def test_what_followed_a_pass_like_this_one_stays(policy: NextUse) -> None:
    """(1, 2) is always followed by (3, 4), and (5, 6) by (0, 7); averages cannot tell them apart."""
    worker = Worker(policy, A)
    worker.passes((1, 2), (3, 4), (5, 6), (0, 7), times=12)
    worker.passes((1, 2))

    assert _order(policy, [(1, 3), (1, 0)]) == [(1, 0), (1, 3)]

    worker.passes((3, 4), (5, 6))

    assert _order(policy, [(1, 3), (1, 0)]) == [(1, 3), (1, 0)]


def test_a_session_learns_from_the_passes_of_another(policy: NextUse) -> None:
    Worker(policy, A).passes((1, 2), (3, 4), (5, 6), (0, 7), times=12)
    policy.forget(A)
    other = Worker(policy, B)
    other.passes((5, 6))

    assert _order(policy, [(1, 3), (1, 0)]) == [(1, 3), (1, 0)]


def test_what_either_of_two_sessions_needs_outlasts_what_neither_does(policy: NextUse) -> None:
    one, other = Worker(policy, A), Worker(policy, B)
    for _ in range(10):
        one.passes((1, 2))
        other.passes((3, 4))

    assert set(_order(policy, [(0, 1), (0, 3), (0, 5), (0, 6)])[:2]) == {(0, 5), (0, 6)}


def test_a_prefill_that_sweeps_its_layers_changes_nothing_of_what_is_wanted(
    policy: NextUse,
) -> None:
    worker = Worker(policy, A)
    worker.passes((1, 2), (1, 3), times=10)
    before = policy.habits[A].average.copy()
    shared = policy.shared.copy()

    worker.passes(tuple(range(EXPERTS)))

    assert (policy.habits[A].average == before).all()
    assert (policy.shared == shared).all()
    assert _order(policy, [(2, 1), (2, 7)]) == [(2, 7), (2, 1)]


def test_a_session_that_stands_still_gives_way_to_one_that_moves(policy: NextUse) -> None:
    idle, busy = Worker(policy, A), Worker(policy, B)
    idle.passes((1, 2), times=10)
    later = 10 * IDLE_HALF_SECONDS
    for _ in range(10):
        for layer in range(LAYERS):
            busy.use(layer, *((3, 4) if layer % 2 else (3, 5)), now=later)

    assert _order(policy, [(0, 1), (0, 5)], now=later) == [(0, 1), (0, 5)]


def test_counts_that_wrap_around_go_on(policy: NextUse) -> None:
    worker = Worker(policy, A)
    worker.uses[:] = 0xFFFF_FFFF
    worker.show(0.0)
    worker.uses[1, 3] = 0
    worker.show(0.0)

    assert policy.habits[A].average[1].argmax() == 3


def test_a_look_counts_only_what_is_new(policy: NextUse) -> None:
    worker = Worker(policy, A)
    worker.use(0, 1)
    before = policy.habits[A].average.copy()
    worker.show(1.0)

    assert (policy.habits[A].average == before).all()


def test_until_it_has_proved_itself_the_least_recent_leave_first() -> None:
    policy = NextUse(LAYERS, EXPERTS)
    worker = Worker(policy, A)
    worker.passes((1, 2), times=9)
    worker.use(0, 3)
    worker.use(1, 1)

    # of these, (2, 1) is needed next and (0, 3) hardly ever
    assert _order(policy, [(0, 3), (1, 1), (2, 1)]) == [(2, 1), (0, 3), (1, 1)]


def test_it_proves_itself_by_naming_what_is_needed_later() -> None:
    policy = NextUse(LAYERS, EXPERTS)
    worker = Worker(policy, A)
    keys = [(layer, expert) for layer in range(LAYERS) for expert in (1, 2)]
    for _ in range(40):
        for layer in range(LAYERS):
            policy.victims(*np.array(keys, np.intp).T, 2, 0.0)
            worker.use(layer, 1, 2)

    assert policy.duel.lead >= TRUSTED_FROM
    worker.use(0, 1, 2)
    assert _order(policy, keys)[0][0] == 0  # a whole pass away, and the most recent of all


def test_at_most_as_many_leave_as_are_needed_and_each_once(policy: NextUse) -> None:
    layers, experts = np.divmod(np.arange(LAYERS * EXPERTS), EXPERTS)

    for need in (0, 1, 5, LAYERS * EXPERTS, 99):
        chosen = policy.victims(layers, experts, need, 0.0)
        assert len(set(chosen.tolist())) == len(chosen) == min(need, LAYERS * EXPERTS)


def test_sessions_that_come_and_go_leave_nothing_behind(policy: NextUse) -> None:
    for n in range(50):
        session = SessionId(n.to_bytes(16, "big"))
        Worker(policy, session).passes((1, 2))
        policy.forget(session)

    assert not policy.habits
    assert not policy.recall.places


def test_more_passes_than_are_remembered_and_a_session_that_sleeps_through_them() -> None:
    policy = _trusted(NextUse(LAYERS, EXPERTS, passes=16))
    sleeper, busy = Worker(policy, A), Worker(policy, B)
    sleeper.passes((6, 7))
    busy.passes((1, 2), (3, 4), times=30)
    sleeper.passes((6, 7), times=2)

    assert _order(policy, [(1, 7), (1, 0)]) == [(1, 0), (1, 7)]
    assert (policy.recall.following < 16).all()


def test_a_batch_uses_more_experts_of_a_layer_than_one_token() -> None:
    policy = _trusted(NextUse(LAYERS, 64))
    worker = Worker(policy, A, experts=64)
    worker.passes(tuple(range(4)), tuple(range(10, 32)), times=10)

    assert _order(policy, [(1, 12), (1, 40)]) == [(1, 40), (1, 12)]


pages = st.lists(
    st.integers(0, (1 << 32) - 1), min_size=LAYERS * EXPERTS, max_size=LAYERS * EXPERTS
)


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), pages, st.floats(0, 1e9)), min_size=1, max_size=12)
)
def test_no_page_breaks_the_policy_F8(looks: list[tuple[SessionId, list[int], float]]) -> None:
    policy = NextUse(LAYERS, EXPERTS, passes=16)
    for session, values, now in looks:
        uses = np.array(values, np.uint32).reshape(LAYERS, EXPERTS)
        policy.observe(session, uses, now)

        assert sorted(_order(policy, [(0, 3), (1, 1), (3, 5)], now)) == [(0, 3), (1, 1), (3, 5)]
        average = policy.habits[session].average
        assert ((average >= 0) & (average <= 1)).all()
        assert np.isfinite(policy.habits[session].worth).all()
