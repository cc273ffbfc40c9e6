"""Who leaves first: the least used, then the least lately used, whatever a page says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.cache.eviction import AGE_AFTER, MAX_DELTA, AgedUse
from expertd_protocol.layout import U32
from tests.fakes import GRACE, FakeArena

EXPERTS = 6


class Page:
    """One worker's page: uses and last use of one layer."""

    def __init__(self) -> None:
        self.uses = np.zeros((1, EXPERTS), np.uint32)
        self.last_use = np.zeros((1, EXPERTS), np.uint32)
        self.seen = self.uses.copy()

    def use(self, *experts: int, at_ms: int) -> None:
        for expert in experts:
            self.uses[:, expert] += np.uint32(1)  # on a slice, where counts wrap silently
            self.last_use[0, expert] = at_ms & 0xFFFF_FFFF

    def show(self, policy: AgedUse, now_ms: int) -> None:
        policy.observe(self.uses, self.seen, self.last_use, now_ms)
        self.seen = self.uses.copy()


def _order(policy: AgedUse, experts: list[int], need: int | None = None) -> list[int]:
    layers = np.zeros(len(experts), np.intp)
    chosen = policy.victims(layers, np.array(experts, np.intp), need or len(experts))
    return [experts[i] for i in chosen]


@pytest.fixture
def policy() -> AgedUse:
    return AgedUse(1, EXPERTS, slots=1000)


def test_the_least_used_leave_first(policy: AgedUse) -> None:
    page = Page()
    for expert, times in enumerate((3, 1, 2)):
        page.use(*[expert] * times, at_ms=100)
    page.show(policy, 100)

    assert _order(policy, [0, 1, 2]) == [1, 2, 0]
    assert _order(policy, [0, 1, 2], need=1) == [1]


def test_among_equals_the_least_recent_leaves_first(policy: AgedUse) -> None:
    page = Page()
    for expert, when in ((0, 300), (1, 100), (2, 200)):
        page.use(expert, at_ms=when)
    page.show(policy, 400)

    assert _order(policy, [0, 1, 2]) == [1, 2, 0]


def test_an_expert_that_was_just_filled_is_not_the_next_victim(policy: AgedUse) -> None:
    policy.filled(0, 4, now_ms=500)

    assert _order(policy, [4, 1]) == [1, 4]


def test_a_look_counts_only_what_is_new(policy: AgedUse) -> None:
    page = Page()
    page.use(0, at_ms=1)
    page.show(policy, 1)
    page.show(policy, 2)

    assert policy.heat[0, 0] == 1


def test_counts_that_wrap_around_go_on(policy: AgedUse) -> None:
    page = Page()
    page.uses[0, 0] = page.seen[0, 0] = 0xFFFF_FFFF
    page.use(0, at_ms=1)
    page.show(policy, 1)

    assert policy.heat[0, 0] == 1


def test_clocks_that_wrap_around_go_on(policy: AgedUse) -> None:
    wrap = 1 << 32
    page = Page()
    page.use(0, at_ms=wrap - 5)
    page.use(1, at_ms=wrap + 5)
    page.show(policy, wrap + 10)

    assert policy.last_ms[0, :2].tolist() == [wrap - 5, wrap + 5]


def test_old_use_is_forgotten_by_halves() -> None:
    policy = AgedUse(1, EXPERTS, slots=2)
    page = Page()
    page.use(*[0] * 8, at_ms=1)
    page.show(policy, 1)
    assert policy.heat[0, 0] == 8

    page.use(*[1] * (2 * AGE_AFTER - 8), at_ms=2)
    page.show(policy, 2)

    assert policy.heat[0, 0] == 4


def test_a_tick_from_the_future_is_now_F8(policy: AgedUse) -> None:
    page = Page()
    page.use(0, at_ms=5_000)
    page.show(policy, 1_000)

    assert policy.last_ms[0, 0] == 1_000


u32s = st.lists(st.integers(0, (1 << 32) - 1), min_size=EXPERTS, max_size=EXPERTS)


def _table(values: list[int]) -> U32:
    return np.array([values], np.uint32)


@given(st.lists(st.tuples(u32s, u32s, u32s, st.integers(0, 1 << 40)), min_size=1, max_size=10))
def test_no_page_breaks_the_policy_F8(looks: list[tuple[list[int], ...]]) -> None:
    policy = AgedUse(1, EXPERTS, slots=4)
    latest = 0
    for uses, seen, last_use, now in looks:
        latest = max(latest, now)
        policy.observe(_table(uses), _table(seen), _table(last_use), now)

        assert np.isfinite(policy.heat).all()
        assert (policy.heat >= 0).all()
        assert (policy.heat <= MAX_DELTA * len(looks)).all()
        assert (policy.last_ms <= latest).all()
    assert sorted(_order(policy, [3, 1, 5])) == [1, 3, 5]


@pytest.mark.parametrize("which", [-1, 1])
def test_victims_do_not_depend_on_the_order_in_which_reads_end_E21(which: int) -> None:
    def residents(which: int) -> list[list[int]]:
        arena = FakeArena(experts=12, slots=7)
        worker = arena.worker(quota=3)
        history = []
        for n in range(12):
            worker.pin(n % 2, tuple((5 * n + i) % 12 for i in range(3)))
            while worker.asked:
                while arena.reading:
                    arena.finish_read(min(which, len(arena.reading) - 1))
                arena.advance(GRACE)
            worker.unpin()
            history.append(np.flatnonzero(arena.directory).tolist())
        return history

    assert residents(which) == residents(0)
    assert len({tuple(one) for one in residents(0)}) > 6
