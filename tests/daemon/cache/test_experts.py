"""The cache of one model: requests, joins, eviction, reuse, failure, death."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expertd.cache.eviction import NextUse
from expertd.cache.table import SlotState
from expertd_protocol.errors import ProtocolError, QuotaExceeded, TooManyInFlight
from expertd_protocol.layout import Header, Ints, Phase, pack_word, unpack_word
from expertd_protocol.messages import Miss
from tests.fakes import GRACE, FakeArena


def test_a_miss_is_read_once_and_answered_when_it_is_complete() -> None:
    arena = FakeArena()
    worker = arena.worker(quota=3)

    worker.pin(0, (1, 2))

    assert [order.key for order in arena.reading] == [(0, 1), (0, 2)]
    arena.finish_read()
    assert worker.asked
    arena.finish_read()
    assert worker.complete
    worker.use()


def test_a_hit_needs_no_message() -> None:
    arena = FakeArena()
    worker = arena.worker(quota=3)
    worker.pin(0, (1, 2))
    arena.settle()
    worker.unpin()

    worker.pin(0, (2, 1))

    assert worker.complete
    assert worker.seq == 1


def test_two_workers_that_miss_the_same_expert_cause_one_read() -> None:
    arena = FakeArena()
    first, second = arena.worker(quota=1), arena.worker(quota=1)

    first.pin(0, (5,))
    second.pin(0, (5,))

    assert len(arena.reading) == 1
    arena.finish_read()
    assert first.complete
    assert second.complete
    assert second.last_reply is not None
    assert (second.last_reply.joined, second.last_reply.missed) == (1, 0)
    assert arena.cache.tally.saved_reads.tolist() == [1, 0]


def test_what_one_request_waits_for_is_not_evicted_for_its_own_other_members_B01() -> None:
    arena = FakeArena(experts=8, slots=5)
    worker = arena.worker(quota=4)
    worker.pin(0, (4, 5, 6, 7))
    arena.settle()
    worker.unpin()

    worker.pin(0, (0, 1, 2, 3))
    arena.settle()

    assert worker.complete
    worker.use()


class MostWantedFirst(NextUse):
    """The worst of policies: what is needed soonest leaves first."""

    def victims(self, layers: Ints, experts: Ints, need: int, now: float) -> Ints:
        return super().victims(layers, experts, len(layers), now)[::-1][:need]


@pytest.mark.parametrize("quota", [2, 3, 4])
def test_what_a_request_has_got_already_stays_until_it_has_all_B01(quota: int) -> None:
    """Another session wants slots all the while."""
    arena = FakeArena(experts=8, slots=quota + 2, policy=MostWantedFirst(2, 8))
    worker, other = arena.worker(quota=quota), arena.worker(quota=1)
    wanted = 0
    for first in (0, 4, 0, 4):
        worker.pin(0, tuple(range(first, first + quota)))
        while worker.asked:
            if not other.asked:
                other.use()
                other.unpin()
                other.pin(1, (wanted % 8,))
                wanted += 1
            arena.advance(GRACE)
            for which in (-1, 0):  # one of its own, one of the worker's
                if arena.reading:
                    arena.finish_read(which)
            assert wanted < 100
        assert worker.complete
        worker.use()
        worker.unpin()


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


def test_a_slot_that_a_worker_holds_is_never_reused() -> None:
    arena = FakeArena(slots=4)
    holder, other = arena.worker(quota=1), arena.worker(quota=2)
    holder.pin(0, (0,))
    arena.settle()

    for round_ in range(20):
        other.pin(1, (2 * round_ % 8, (2 * round_ + 1) % 8))
        arena.settle()
        other.use()
        holder.use()
        other.unpin()


def test_a_hazard_published_after_the_victim_was_chosen_defers_its_reuse() -> None:
    arena = FakeArena(slots=2)
    reader, other = arena.worker(quota=1), arena.worker(quota=1)
    reader.pin(0, (0,))
    arena.settle()
    reader.unpin()
    words = {0: int(arena.directory[0, 0])}
    reader.layer, reader.wanted = 0, (0,)
    reader.hazards[0] = words[0]  # published from a word read before the eviction ...

    other.pin(0, (1,))  # ... and both slots are wanted
    arena.settle()
    other.unpin()
    other.pin(0, (2,))
    for _ in range(5):
        arena.advance(GRACE)

    slot = int(np.flatnonzero(arena.tables[0].layer == 0)[0])
    assert arena.bytes[0][slot] is not None
    reader._hold(0, words[0])
    reader.use()


def test_a_word_read_before_an_eviction_is_seen_as_a_miss_by_the_second_look() -> None:
    arena = FakeArena(slots=3)
    slow, other = arena.worker(quota=1), arena.worker(quota=1)
    slow.pin(0, (0,))
    arena.settle()
    slow.unpin()
    arena.advance(GRACE)

    stale = {0: int(arena.directory[0, 0])}
    for expert in range(1, 8):
        other.pin(0, (expert,))
        arena.settle()
        other.unpin()
    assert arena.directory[0, 0] != stale[0]
    slow.hazards[0] = stale[0]
    slow.layer, slow.wanted, slow.pinned = 0, (0,), {}

    assert slow.recheck(stale) == (0,)


def test_a_retired_expert_that_is_wanted_again_needs_no_read() -> None:
    arena = FakeArena(slots=4)
    worker = arena.worker(quota=3)
    worker.pin(0, (0, 1, 2))
    arena.settle()
    worker.pin(1, (0, 1, 2))  # needs slots: some of layer 0 are retired and rest
    retired = np.flatnonzero(arena.tables[0].state == SlotState.RETIRED)
    assert len(retired)
    worker.unpin()
    expert = int(arena.tables[0].expert[retired[0]])
    other = arena.worker(quota=1)
    reads = len(arena.reading)

    other.pin(0, (expert,))

    assert other.complete
    other.use()
    assert len(arena.reading) == reads


def test_a_request_that_was_given_up_no_longer_counts_against_the_quota() -> None:
    arena = FakeArena(slots=4)
    worker = arena.worker(quota=2)
    worker.pin(0, (1, 2))  # the disk takes too long ...
    worker.unpin()
    worker.header[Header.ACK] = worker.seq  # ... and the worker says that it waits no more

    worker.pin(0, (2, 3))

    assert [order.key for order in arena.reading] == [(0, 1), (0, 2), (0, 3)]
    arena.settle()
    assert worker.complete
    worker.use()
    arena.cache.check()


def test_a_failed_read_publishes_nothing_and_frees_its_slot() -> None:
    arena = FakeArena()
    first, second = arena.worker(quota=1), arena.worker(quota=1)
    first.pin(0, (3,))
    second.pin(0, (3,))

    arena.fail_read()

    assert first.error is not None
    assert second.error is not None
    assert first.error.code == "read_failed"
    assert arena.directory[0, 3] == 0
    arena.cache.check()
    first.pin(0, (3,))
    arena.settle()
    first.use()


def test_a_read_asked_for_by_a_dead_worker_completes_into_the_cache_C24() -> None:
    arena = FakeArena()
    dead, heir = arena.worker(quota=1), arena.worker(quota=1)
    dead.pin(0, (3,))

    arena.kill(dead)
    arena.finish_read()

    assert arena.directory[0, 3] != 0
    heir.pin(0, (3,))
    assert heir.complete
    heir.use()


def test_the_pins_of_a_dead_worker_end_and_those_of_a_silent_one_stay_C05() -> None:
    arena = FakeArena(slots=3)
    stopped, other = arena.worker(quota=1), arena.worker(quota=1)
    stopped.pin(0, (0,))
    arena.settle()
    arena.cache.stop_serving(stopped.id, arena.now)

    for expert in range(1, 8):
        other.pin(0, (expert,))
        arena.settle()
        other.unpin()
        stopped.use()

    assert arena.cache.held(0) == 1
    arena.kill(stopped)
    assert arena.cache.held(0) == 0


def test_a_dead_workers_unanswered_want_is_not_read() -> None:
    arena = FakeArena(slots=2)
    holder, dead = arena.worker(quota=1), arena.worker(quota=1)
    holder.pin(0, (0,))
    arena.settle()
    dead.pin(1, (1,))
    arena.settle()
    dead.unpin()
    dead.pin(1, (2,))  # waits for a slot to come free
    assert not arena.reading

    arena.kill(dead)
    arena.advance(GRACE)

    assert not arena.reading
    assert not arena.cache.busy


def test_an_unacknowledged_reply_keeps_its_slots() -> None:
    arena = FakeArena(slots=3)
    slow, other = arena.worker(quota=1), arena.worker(quota=1)
    slow.receive = lambda message: None  # type: ignore[method-assign, assignment]
    slow.pin(0, (0,))
    arena.finish_read()
    word = int(arena.directory[0, 0])

    for expert in range(1, 8):
        other.pin(0, (expert,))
        while other.asked:
            while arena.reading:
                arena.finish_read()
            arena.advance(GRACE)
        other.unpin()

    assert int(arena.directory[0, 0]) == word


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (Miss(1, -1, 1, (0,)), ProtocolError),
        (Miss(1, 10**9, 1, (0,)), ProtocolError),
        (Miss(1, 0, 1, (-1,)), ProtocolError),
        (Miss(1, 0, 1, (8,)), ProtocolError),
        (Miss(1, 0, 1, (1, 1)), ProtocolError),
        (Miss(1, 0, 1, (0, 1, 2, 3)), QuotaExceeded),
    ],
)
def test_a_bad_request_is_refused_and_changes_nothing_D34(
    request_: Miss, error: type[Exception]
) -> None:
    arena = FakeArena()
    worker = arena.worker(quota=3)

    with pytest.raises(error):
        arena.cache.request(worker.id, request_, arena.now)

    assert not arena.cache.fills
    assert not arena.cache.busy
    worker.pin(0, (1,))
    arena.settle()
    worker.use()


def test_a_session_has_a_credit_of_requests() -> None:
    arena = FakeArena(slots=8)
    worker = arena.worker(quota=8)
    for seq in range(1, 5):
        arena.cache.request(worker.id, Miss(seq, 0, 1, (seq,)), arena.now)

    with pytest.raises(TooManyInFlight):
        arena.cache.request(worker.id, Miss(5, 0, 1, (5,)), arena.now)


def test_request_numbers_only_grow_so_that_unacknowledged_grants_cannot_pile_up() -> None:
    arena = FakeArena(slots=9)
    mad, other = arena.worker(quota=4), arena.worker(quota=4)
    mad.receive = lambda message: None  # type: ignore[method-assign, assignment]
    arena.cache.request(mad.id, Miss(1000, 0, 1, (0, 1, 2, 3)), arena.now)
    arena.pump()
    while arena.reading:
        arena.finish_read()

    for seq in (999, 1000):
        with pytest.raises(ProtocolError, match="numbers only grow"):
            arena.cache.request(mad.id, Miss(seq, 0, 1, (4, 5, 6, 7)), arena.now)

    other.pin(1, (0, 1, 2, 3))
    arena.settle()
    other.use()


@pytest.mark.parametrize("answered", [True, False])
def test_a_worker_that_pins_its_quota_beside_what_it_is_granted_stops_nobody(
    answered: bool,
) -> None:
    arena = FakeArena(slots=9)
    mad, other = arena.worker(quota=4), arena.worker(quota=4)
    mad.receive = lambda message: None  # type: ignore[method-assign, assignment]
    for seq, experts in ((1, (0, 1, 2, 3)), (2, (4, 5, 6, 7))):
        arena.cache.request(mad.id, Miss(seq, 0, 1, experts), arena.now)
        arena.pump()
        while arena.reading and (answered or seq == 1):
            arena.finish_read()
    mad.hazards[:4] = arena.directory[0, :4]

    other.pin(1, (0, 1, 2, 3))
    arena.settle()

    assert other.complete
    other.use()
    assert arena.cache.held(0) <= 8


def test_decode_is_given_slots_before_prefill() -> None:
    arena = FakeArena(slots=3)
    long, short = arena.worker(quota=1), arena.worker(quota=1)
    for expert in (0, 1):
        long.pin(0, (expert,))
        arena.settle()
        long.unpin()
    while arena.tables[0].free:
        long.pin(0, (len(arena.reading) + 2,))
        arena.settle()
        long.unpin()
    long.pin(1, (6,), Phase.PREFILL)
    short.pin(1, (7,), Phase.DECODE)
    assert not arena.reading

    arena.advance(GRACE)

    assert arena.reading[0].key == (1, 7)


def test_random_bytes_in_a_workers_page_harm_nobody_F8() -> None:
    arena = FakeArena(slots=4)
    mad, other = arena.worker(quota=2), arena.worker(quota=2)
    rng = np.random.default_rng(7)

    for step in range(200):
        mad.page[:] = rng.bytes(len(mad.page))
        other.pin(step % 2, (step % 8, (step + 1) % 8))
        arena.settle()
        other.use()
        other.unpin()
        arena.cache.check()


def test_a_slab_with_room_for_all_gives_every_expert_its_own_slot_in_order() -> None:
    arena = FakeArena(layers=3, experts=4, slots=8, slab_of_layer=(0, 1, 0))
    worker = arena.worker(quota=4)

    for layer, slab, slots in ((2, 0, [4, 5, 6, 7]), (0, 0, [0, 1, 2, 3]), (1, 1, [0, 1, 2, 3])):
        worker.pin(layer, (3, 0, 2, 1))
        arena.settle()
        words = [unpack_word(int(w)) for w in arena.directory[layer]]
        assert [(s, n) for _, s, n in words] == [(slab, n) for n in slots]
        worker.unpin()

    arena.advance(1.0)
    assert arena.directory.all()
    assert arena.cache.tally.evictions == 0


def test_what_fits_is_read_in_the_background_once_and_only_with_a_session() -> None:
    arena = FakeArena(layers=2, experts=4, slots=8)
    arena.cache.warm(8)
    assert not arena.cache.fills
    worker = arena.worker(quota=4)
    worker.pin(0, (2,))

    arena.cache.warm(3)
    arena.pump()
    assert [order.key for order in arena.reading] == [(0, 2), (0, 0), (0, 1), (0, 3)]
    assert [order.phase for order in arena.reading[1:]] == [None] * 3
    arena.finish_read()
    arena.fail_read()  # nobody waits for it, and it is not tried for ever
    arena.cache.warm(100)
    arena.pump()
    while arena.reading:
        arena.finish_read()
    arena.cache.warm(100)

    assert not arena.cache.fills
    assert np.argwhere(arena.directory == 0).tolist() == [[0, 0]]
    worker.unpin()
    worker.pin(0, (0,))
    arena.settle()
    worker.use()
    assert arena.directory.all()


def test_who_joins_a_read_that_nobody_waited_for_makes_it_urgent() -> None:
    arena = FakeArena(layers=1, experts=4, slots=5)
    worker = arena.worker(quota=4)
    arena.cache.warm(4)
    arena.pump()

    worker.pin(0, (1, 2), Phase.PREFILL)
    assert arena.cache.hurried == [((0, 1), Phase.PREFILL), ((0, 2), Phase.PREFILL)]
    arena.cache.hurried.clear()
    other = arena.worker(quota=1)
    other.pin(0, (2,), Phase.DECODE)
    third = arena.worker(quota=1)
    third.pin(0, (2,), Phase.PREFILL)  # in less of a hurry: nothing to do

    assert arena.cache.hurried == [((0, 2), Phase.DECODE)]
    arena.settle()
    for one in (worker, other, third):
        one.use()


def test_a_slab_that_must_evict_is_not_read_in_the_background() -> None:
    arena = FakeArena(layers=2, experts=4, slots=7)
    arena.worker(quota=2)

    arena.cache.warm(100)

    assert not arena.cache.fills


def test_a_layer_that_moves_starts_without_experts_and_leaves_what_is_pinned() -> None:
    arena = FakeArena(layers=2, experts=8, slots=4, slab_of_layer=(0, 1))
    holder, other = arena.worker(quota=2), arena.worker(quota=1)
    holder.pin(0, (1, 2))
    arena.settle()

    assert arena.cache.move(0, 1, arena.now)

    assert not arena.directory[0].any()
    holder.use()
    arena.advance(GRACE)
    other.pin(0, (1,))
    arena.settle()
    assert [unpack_word(word)[1] for word in other.pinned.values()] == [1]
    other.use()
    holder.use()  # by its hazard, for as long as it wants
    holder.unpin()
    arena.advance(GRACE)
    arena.cache.check()


def test_a_layer_does_not_move_while_a_reply_may_name_its_slots() -> None:
    arena = FakeArena(layers=2, experts=8, slots=4, slab_of_layer=(0, 1))
    worker = arena.worker(quota=2)
    worker.pin(0, (1, 2))
    assert not arena.cache.move(0, 1, arena.now)  # both are being read
    arena.finish_read()
    assert not arena.cache.move(0, 1, arena.now)  # one is granted, one is being read

    arena.finish_read()
    worker.use()

    assert arena.cache.move(0, 1, arena.now)
    with pytest.raises(ValueError, match="room for all"):
        FakeArena(layers=2, experts=4, slots=4, slab_of_layer=(0, 1)).cache.move(0, 1, 0.0)


def test_a_layer_that_comes_back_finds_what_was_read_there_since() -> None:
    arena = FakeArena(layers=2, experts=8, slots=7, slab_of_layer=(0, 1))
    holder, second, third = (arena.worker(quota=1) for _ in range(3))
    holder.pin(0, (0,))
    arena.settle()
    assert arena.cache.move(0, 1, arena.now)
    assert arena.cache.move(0, 0, arena.now)
    second.pin(0, (0,))  # into another slot: the first one is held
    arena.settle()
    holder.unpin()

    for expert in range(1, 7):  # the old slot is reused at last
        third.pin(0, (expert,))
        arena.settle()
        third.use()
        third.unpin()
        arena.advance(GRACE)
        arena.cache.check()

    second.use()


def test_what_waits_for_a_slot_moves_with_its_layer() -> None:
    arena = FakeArena(layers=2, experts=8, slots=2, slab_of_layer=(0, 1))
    holder, other = arena.worker(quota=2), arena.worker(quota=1)
    holder.pin(0, (1, 2))
    arena.settle()
    other.pin(0, (3,))  # no slot is free
    assert not arena.reading
    holder.header[Header.ACK] = holder.seq
    arena.cache.tick(arena.now)

    assert arena.cache.move(0, 1, arena.now)
    arena.settle()

    assert other.complete
    other.use()
    holder.use()


def test_who_finds_half_of_a_layer_before_it_moves_asks_for_all_of_it() -> None:
    arena = FakeArena(layers=2, experts=8, slots=5, slab_of_layer=(0, 1))
    worker, other = arena.worker(quota=2), arena.worker(quota=1)
    other.pin(0, (1,))
    arena.settle()
    other.unpin()
    missing = worker.recheck(worker.publish(0, (1, 2)))
    assert missing == (2,)

    assert arena.cache.move(0, 1, arena.now)
    worker.ask(missing)
    arena.settle()

    assert {unpack_word(word)[1] for word in worker.pinned.values()} == {1}
    worker.use()


class Workers(RuleBasedStateMachine):
    """Workers, reads, failures, deaths and time in any order: no wrong bytes, nothing lost, no deadlock."""

    SLOTS, QUOTA, EXPERTS = 9, 2, 12
    ROOM = False

    def __init__(self) -> None:
        super().__init__()
        self.arena = FakeArena(
            layers=3, experts=self.EXPERTS, slots=self.SLOTS, slab_of_layer=(0, 0, 1)
        )
        for _ in range(4):
            self.arena.worker(quota=self.QUOTA)

    def idle(self) -> list[int]:
        return [
            i for i, w in enumerate(self.arena.workers.values()) if not w.asked and not w.wanted
        ]

    @rule(
        who=st.integers(0, 3),
        layer=st.integers(0, 2),
        experts=st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=QUOTA),
        phase=st.sampled_from(Phase),
    )
    def pin(self, who: int, layer: int, experts: set[int], phase: Phase) -> None:
        workers = list(self.arena.workers.values())
        worker = workers[who % len(workers)]
        if not worker.asked and not worker.wanted:
            worker.pin(layer, tuple(experts), phase)

    @rule(
        who=st.integers(0, 3),
        layer=st.integers(0, 2),
        experts=st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=4),
    )
    def wish(self, who: int, layer: int, experts: set[int]) -> None:
        workers = list(self.arena.workers.values())
        workers[who % len(workers)].wish(layer, tuple(experts))

    @rule(who=st.integers(0, 3), layer=st.integers(0, 2), expert=st.integers(0, EXPERTS - 1))
    def publish_late(self, who: int, layer: int, expert: int) -> None:
        """The pause between the two looks of rule 1, with an eviction and time in between."""
        workers = list(self.arena.workers.values())
        worker = workers[who % len(workers)]
        if worker.asked or worker.wanted:
            return
        stale = {expert: int(self.arena.directory[layer, expert])}
        self.arena.advance(GRACE)
        worker.layer, worker.wanted, worker.pinned = layer, (expert,), {}
        worker.hazards[:] = 0
        worker.hazards[0] = stale[expert]
        missing = worker.recheck(stale)
        if missing:
            worker.ask(missing)

    @precondition(lambda self: self.arena.reading)
    @rule(which=st.integers(0, 100), ok=st.integers(0, 9))
    def end_read(self, which: int, ok: int) -> None:
        which %= len(self.arena.reading)
        if ok:
            self.arena.finish_read(which)
        else:
            self.arena.fail_read(which)

    @rule(who=st.integers(0, 3))
    def evaluate(self, who: int) -> None:
        workers = list(self.arena.workers.values())
        worker = workers[who % len(workers)]
        if worker.complete:
            worker.use()
            worker.unpin()

    @rule(seconds=st.sampled_from([0.001, GRACE, 0.2]))
    def wait(self, seconds: float) -> None:
        self.arena.advance(seconds)

    @precondition(lambda self: not self.ROOM)
    @rule(layer=st.integers(0, 2), slab=st.integers(0, 1))
    def move(self, layer: int, slab: int) -> None:
        self.arena.cache.move(layer, slab, self.arena.now)
        self.arena.pump()

    @precondition(lambda self: len(self.arena.workers) > 1)
    @rule(who=st.integers(0, 3))
    def kill(self, who: int) -> None:
        workers = list(self.arena.workers.values())
        self.arena.kill(workers[who % len(workers)])

    @invariant()
    def tables_and_directory_agree(self) -> None:
        self.arena.cache.check()
        for worker in self.arena.workers.values():
            worker.use()
        prefetch = self.arena.cache.prefetch
        settled = prefetch.useful + prefetch.late + prefetch.wasted
        assert settled + len(prefetch.early) == prefetch.ordered.sum()

    def teardown(self) -> None:
        """Whatever happened, everybody who still waits is served."""
        for worker in self.arena.workers.values():
            if worker.complete:
                worker.unpin()
        self.arena.settle()
        for worker in self.arena.workers.values():
            worker.use()
            worker.unpin()
        self.arena.advance(1.0)
        self.arena.advance(1.0)
        while self.arena.reading:
            self.arena.finish_read()
        for worker in list(self.arena.workers.values()):
            self.arena.kill(worker)
        assert not self.arena.cache.prefetch.early
        assert not self.arena.cache.busy
        for table in self.arena.tables:
            assert (table.grants == 0).all() or self.arena.workers


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


class WorkersWithRoom(Workers):
    """Slots are left for early experts in one slab, and the other has room for all."""

    SLOTS = 16
    ROOM = True


TestWorkersWithRoom = WorkersWithRoom.TestCase
TestWorkersWithRoom.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_the_machine_above_finds_a_missing_second_look() -> None:
    """A control: a worker that trusts its first look reads another expert's bytes."""
    arena = FakeArena(slots=2)
    careless, other = arena.worker(quota=1), arena.worker(quota=1)
    careless.pin(0, (0,))
    arena.settle()
    careless.unpin()
    stale = int(arena.directory[0, 0])
    for expert in (1, 2):
        other.pin(0, (expert,))
        arena.settle()
        other.unpin()

    careless.layer = 0
    careless.pinned = {0: stale}

    with pytest.raises(AssertionError):
        careless.use()


def test_a_word_names_its_generation() -> None:
    arena = FakeArena(slots=2)
    worker = arena.worker(quota=1)
    seen = set()
    for expert in (0, 1, 2, 3, 0, 1):
        worker.pin(0, (expert,))
        arena.settle()
        seen.add(int(arena.directory[0, expert]))
        worker.unpin()

    assert len(seen) == 6
    assert pack_word(1, 0, 0) in seen
