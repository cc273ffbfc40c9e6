"""Rule 21: what is read before anybody asks costs nobody anything, and every such expert is accounted for."""

import numpy as np
import pytest

from expertd.cache.eviction import EvictionPolicy, NextUse
from expertd.cache.experts import AHEAD_BATCH
from expertd.cache.prefetch import PATIENCE_SECONDS, Early, Prefetch
from expertd.cache.table import SlotState
from expertd_protocol.errors import ProtocolError
from expertd_protocol.ids import ExpertKey
from expertd_protocol.layout import Ints, Phase
from expertd_protocol.messages import Wish
from tests.fakes import GRACE, FakeArena, FakeWorker


def crowded(
    slots: int = 24, experts: int = 16, quota: int = 2, policy: EvictionPolicy | None = None
) -> tuple[FakeArena, FakeWorker]:
    """Return two layers in one full slab, 8 slots of it rested, and a worker at layer 0.

    A quarter of the experts of layer 0 were never read.
    """
    arena = FakeArena(layers=2, experts=experts, slots=slots, policy=policy)
    worker = arena.worker(quota)
    for layer, most in ((1, experts), (0, 3 * experts // 4)):
        for first in range(0, most, quota):
            worker.pin(layer, tuple(range(first, first + quota)))
            arena.settle()
            worker.unpin()
            arena.advance(GRACE)
    arena.advance(GRACE)
    arena.advance(GRACE)
    worker.pin(0, (0,))
    arena.settle()
    worker.unpin()
    arena.advance(GRACE)
    assert not arena.reading
    return arena, worker


def absent(arena: FakeArena, layer: int, n: int) -> tuple[int, ...]:
    """Return experts that are in no slot."""
    in_slots = set(zip(arena.tables[0].layer, arena.tables[0].expert, strict=True))
    found = [e for e in range(arena.experts) if (layer, e) not in in_slots][:n]
    assert len(found) == n
    return tuple(found)


def fates(arena: FakeArena) -> tuple[int, int, int, int, int]:
    p = arena.cache.prefetch
    return int(p.ordered.sum()), p.useful, p.late, p.wasted, len(p.early)


def test_a_wish_is_read_while_nobody_waits_and_the_worker_finds_it() -> None:
    arena, worker = crowded()
    (expert,) = absent(arena, 1, 1)

    worker.wish(1, (expert,))
    assert [(o.key, o.phase) for o in arena.reading] == [((1, expert), None)]
    arena.finish_read()
    seq = worker.seq
    worker.pin(1, (expert,))

    assert worker.complete
    assert worker.seq == seq  # a hit: no message
    worker.use()
    worker.unpin()
    assert fates(arena) == (1, 0, 0, 0, 1)  # nobody has told us yet
    worker.pin(0, absent(arena, 0, 1))
    assert fates(arena) == (1, 1, 0, 0, 0)


def test_who_asks_while_it_is_read_makes_it_urgent_and_it_was_late() -> None:
    arena, worker = crowded()
    (expert,) = absent(arena, 1, 1)
    worker.wish(1, (expert,))

    worker.pin(1, (expert,))

    assert arena.cache.hurried == [((1, expert), Phase.DECODE)]
    assert len(arena.reading) == 1
    arena.finish_read()
    worker.use()
    assert fates(arena) == (1, 0, 1, 0, 0)
    assert arena.cache.tally.saved_reads.sum() == 0  # it was read for nobody else


def test_what_was_not_used_goes_back_to_rest_at_once_and_nothing_else_had_to_leave() -> None:
    arena, worker = crowded()
    wished = absent(arena, 1, 3)
    evictions = arena.cache.tally.evictions
    resident = np.argwhere(arena.directory)
    worker.wish(1, wished)
    while arena.reading:
        arena.finish_read()
    assert arena.directory[1, list(wished)].all()

    worker.wish(0, absent(arena, 0, 1))  # its layer has passed

    ordered, useful, late, wasted, early = fates(arena)
    assert (ordered, useful, late, wasted, early) == (4, 0, 0, 3, 1)
    assert np.argwhere(arena.directory).tolist() == resident.tolist()
    assert arena.cache.tally.evictions == evictions
    other = arena.worker(quota=2)
    other.pin(1, wished[:1])  # and comes back without a read
    assert other.complete
    other.use()


def test_what_is_still_being_read_when_its_layer_has_passed_is_wasted_when_it_comes() -> None:
    arena, worker = crowded()
    (expert,) = absent(arena, 1, 1)
    worker.wish(1, (expert,))

    arena.kill(worker)
    assert fates(arena) == (1, 0, 0, 0, 1)
    arena.finish_read()

    assert fates(arena) == (1, 0, 0, 1, 0)
    assert arena.directory[1, expert] == 0


def test_a_read_that_fails_is_wasted_and_frees_its_slot() -> None:
    arena, worker = crowded()
    worker.wish(1, absent(arena, 1, 1))

    arena.fail_read()

    assert fates(arena) == (1, 0, 0, 1, 0)
    assert worker.error is None
    arena.cache.check()


def test_nothing_is_ordered_while_anybody_waits_for_anything() -> None:
    arena, worker = crowded()
    other = arena.worker(quota=2)
    other.pin(0, absent(arena, 0, 1))

    worker.wish(1, absent(arena, 1, 2))
    assert len(arena.reading) == 1

    arena.finish_read()  # the other one is served: now
    assert [order.phase for order in arena.reading] == [None, None]


def test_a_new_wish_replaces_the_last_one_and_a_request_ends_it() -> None:
    arena, worker = crowded()
    arena.spare = 0  # the device is busy with something
    old, new = absent(arena, 1, 2)
    worker.wish(1, (old,))
    worker.wish(1, (new,))
    arena.spare = 4
    arena.pump()
    assert [order.key for order in arena.reading] == [(1, new)]
    arena.finish_read()

    arena.spare = 0
    worker.wish(1, (old,))
    seq = worker.seq
    worker.pin(1, (int(np.flatnonzero(arena.directory[1])[0]),))
    worker.unpin()
    assert worker.seq == seq  # a hit: no message, but the page says that the layer has come
    arena.spare = 4
    arena.pump()
    assert not arena.reading

    arena.spare = 0
    worker.wish(1, (old,))
    arena.spare = 4
    worker.pin(0, absent(arena, 0, 1))
    arena.finish_read()
    assert not arena.reading
    assert fates(arena)[0] == 1


def test_sessions_take_turns() -> None:
    arena, worker = crowded()
    other = arena.worker(quota=2)
    arena.spare = 0
    first, second, third, fourth = absent(arena, 1, 4)
    worker.wish(1, (first, second))
    other.wish(1, (third, fourth))
    arena.spare = 3

    arena.pump()

    assert [order.key.expert for order in arena.reading] == [first, third, second]


def test_demand_keeps_its_share_of_the_slots_that_are_ready_for_reuse() -> None:
    arena, worker = crowded(slots=40, experts=32)
    table, ahead = arena.tables[0], arena.cache._ahead[0]
    arena.spare = 100
    before = len(table.free) + len(table.resting)

    worker.wish(1, absent(arena, 1, 12))

    lent = len(arena.reading)
    assert 0 < lent <= ahead // AHEAD_BATCH
    assert before - lent >= ahead - ahead // AHEAD_BATCH
    while arena.reading:
        arena.finish_read()
    assert (table.state == SlotState.READY).sum() <= len(table) - ahead + ahead // AHEAD_BATCH


def test_nothing_is_lent_when_demand_has_used_up_its_half() -> None:
    arena, worker = crowded(quota=4)
    table, ahead = arena.tables[0], arena.cache._ahead[0]
    assert len(table.free) + len(table.resting) == ahead - ahead // AHEAD_BATCH

    worker.wish(1, absent(arena, 1, 1))

    assert not arena.reading


class Against(NextUse):
    """Would rather be rid of some experts than of any other."""

    unloved: tuple[int, ...] = ()

    def victims(self, layers: Ints, experts: Ints, need: int, now: float) -> Ints:
        order = super().victims(layers, experts, len(layers), now)
        loved = ~((layers[order] == 1) & np.isin(experts[order], self.unloved))
        return order[np.argsort(loved, kind="stable")][:need]


def test_an_early_expert_is_no_victim_before_its_layer_has_come() -> None:
    policy = Against(2, 16)
    arena, worker = crowded(policy=policy)
    policy.unloved = wished = absent(arena, 1, 2)
    worker.wish(1, wished)
    assert len(arena.reading) == 2
    while arena.reading:
        arena.finish_read()
    other = arena.worker(quota=4)

    evictions = arena.cache.tally.evictions
    for first in (12, 0, 4, 8):
        other.pin(0, tuple(range(first, first + 4)))
        arena.settle()
        other.unpin()

    assert arena.cache.tally.evictions > evictions
    seq = worker.seq
    worker.pin(1, wished)
    assert worker.complete
    assert worker.seq == seq  # a hit
    worker.use()


def test_nothing_is_read_ahead_where_quotas_leave_no_slots() -> None:
    arena = FakeArena(layers=2, experts=8, slots=5)
    worker = arena.worker(quota=4)

    worker.wish(1, (0, 1, 2))

    assert not arena.reading


def test_demand_gets_its_slots_while_early_experts_hold_theirs() -> None:
    """The disk does not deliver those, and others need every slot that they were promised."""
    arena, worker = crowded(slots=24, quota=2)
    arena.spare = 100
    worker.wish(1, (0, 1, 2, 3))
    assert len(arena.reading) == 4
    arena.spare = 0
    others = [arena.worker(quota=5) for _ in range(4)]  # 22 of 24 slots are promised
    for n, other in enumerate(others):
        other.pin(n % 2, tuple(range(4 + 5 * (n // 2), 9 + 5 * (n // 2))))

    for _ in range(20):
        while arena.reading and any(o.phase is not None for o in arena.reading):
            which = next(i for i, o in enumerate(arena.reading) if o.phase is not None)
            arena.finish_read(which)
        arena.advance(GRACE)

    assert all(other.complete for other in others)
    for other in others:
        other.use()


def test_who_is_not_heard_of_for_long_has_used_or_wasted_what_was_read_for_it() -> None:
    arena, worker = crowded()
    used, unused = absent(arena, 1, 2)
    worker.wish(1, (used, unused))
    while arena.reading:
        arena.finish_read()
    worker.pin(1, (used,))

    arena.advance(PATIENCE_SECONDS)

    assert fates(arena) == (2, 1, 0, 1, 0)
    worker.use()


def test_an_unused_expert_that_somebody_else_holds_stays() -> None:
    arena, worker = crowded()
    (expert,) = absent(arena, 1, 1)
    worker.wish(1, (expert,))
    arena.finish_read()
    other = arena.worker(quota=2)
    other.pin(1, (expert,))

    worker.wish(0, absent(arena, 0, 1))

    assert arena.directory[1, expert]
    other.use()


def test_what_is_there_or_asked_for_already_is_not_ordered() -> None:
    arena, worker = crowded()
    resident = int(np.flatnonzero(arena.directory[1])[0])
    (expert,) = absent(arena, 1, 1)
    worker.wish(1, (expert,))

    arena.worker(quota=2).wish(1, (resident, expert))

    assert len(arena.reading) == 1


@pytest.mark.parametrize(
    "wish", [Wish(-1, (0,)), Wish(2, (0,)), Wish(0, (-1,)), Wish(0, (16,)), Wish(10**12, (0,))]
)
def test_a_wish_for_what_does_not_exist_is_refused_and_changes_nothing_D34(wish: Wish) -> None:
    arena, worker = crowded()
    worker.wish(1, absent(arena, 1, 1))
    before = fates(arena)

    with pytest.raises(ProtocolError):
        arena.cache.wish(worker.id, wish, arena.now)

    assert fates(arena) == before


def test_a_flood_of_wishes_orders_no_more_than_one_session_may_F8() -> None:
    arena, worker = crowded(slots=40, experts=32)
    most = arena.cache._ahead[0] // AHEAD_BATCH
    rng = np.random.default_rng(3)

    for step in range(300):
        layer = int(rng.integers(2))
        experts = tuple(int(e) for e in rng.integers(32, size=8))
        worker.wish(layer, experts + experts)  # twice each, too
        worker.page[:] = rng.bytes(len(worker.page)) if step % 3 == 0 else worker.page
        assert len(arena.cache.prefetch.early) <= most
        if arena.reading and step % 2:
            arena.finish_read()
        arena.cache.check()
    worker.page[:] = bytes(len(worker.page))

    other = arena.worker(quota=4)
    other.pin(0, absent(arena, 0, 4))
    arena.settle()
    other.use()


def test_a_slab_that_holds_everything_is_not_read_ahead() -> None:
    arena = FakeArena(layers=2, experts=4, slots=8)
    worker = arena.worker(quota=2)

    worker.wish(1, (0, 1))

    assert not arena.reading
    assert not arena.cache.takes_wishes


def test_the_counts_say_what_became_of_everything() -> None:
    prefetch = Prefetch(2, {})
    for expert in range(4):
        early = Early(ExpertKey(1, expert), 0, expert, None, 0, 1.0)  # type: ignore[arg-type]
        prefetch.order(early)
    prefetch.asked(ExpertKey(1, 0))
    prefetch.filled(ExpertKey(1, 1))
    prefetch.asked(ExpertKey(1, 1))
    prefetch.lost(ExpertKey(1, 2))

    assert prefetch.in_slab(0) == [3]
    assert repr(prefetch) == "<Prefetch ordered=4 useful=1 late=1 wasted=1 early=1 wishes=0>"
    assert prefetch.ordered.tolist() == [0, 4]
