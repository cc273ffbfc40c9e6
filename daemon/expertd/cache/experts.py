"""One model's experts in the arena: who is resident, who waits, who leaves.

Synchronous and pure: every call takes `now` and only changes plain state (some of the arrays are
shared memory). What must be done outside is left in two outboxes, `fills` (experts to read) and
`answers` (replies to send); the caller takes them after each call. The rules are those of
daemon/README.md; the ones cited here decide whether a worker can ever see wrong bytes.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from expertd.cache.eviction import EvictionPolicy
from expertd.cache.hazards import count_held, held_slots
from expertd.cache.requests import Answer, FillOrder, Holder, Tally, Waiting
from expertd.cache.table import SlotState, SlotTable
from expertd_protocol.errors import ExpertdError, ProtocolError, QuotaExceeded, TooManyInFlight
from expertd_protocol.ids import ExpertKey, SessionId
from expertd_protocol.layout import (
    U64,
    Header,
    Phase,
    check_range,
    pack_word,
    word_slabs,
    word_slots,
)
from expertd_protocol.messages import Miss, MissError, MissReply

#: Slots are kept ready for reuse ahead of demand: one in `AHEAD_SHARE`, within these limits. They are
#: retired, not emptied: until they are taken, their experts come back without a read when asked for.
#: One in 8 cost 7 % more reads than one in 24, and no less waiting: bench/replay.py, half in memory.
AHEAD_SHARE, AHEAD_LEAST, AHEAD_MOST = 24, 8, 256
#: So long as nobody waits, new ones are retired when one in so many of these is used up.
AHEAD_BATCH = 4


class ExpertCache:
    """Decides about the slots of one model.

    Args:
        directory: u64[L, E], shared; written here only (rules 4 and 5).
        tables: the slots of each slab.
        slab_of_layer: where each MoE layer lives.
        fence: the full memory fence.
        grace_seconds: how long a retired slot rests before its hazards are scanned (rule 4).
        clean: called with (slab, slot) before a slot becomes free; tests poison the bytes here.
    """

    def __init__(
        self,
        directory: U64,
        tables: Sequence[SlotTable],
        slab_of_layer: Sequence[int],
        policy: EvictionPolicy,
        fence: Callable[[], object],
        *,
        grace_seconds: float = 0.005,
        max_in_flight: int = 4,
        clean: Callable[[int, int], None] | None = None,
    ) -> None:
        self.directory = directory
        self.tables = tuple(tables)
        self.slab_of_layer = tuple(slab_of_layer)
        self.policy = policy
        self.tally = Tally(np.zeros(len(directory), np.int64))
        self.fills: list[FillOrder] = []
        self.answers: list[Answer] = []
        self.holders: dict[SessionId, Holder] = {}
        self._fence = fence
        self._grace = grace_seconds
        self._max_in_flight = max_in_flight
        self._clean = clean
        #: Slot of each expert that is filling, ready or retired; -1 otherwise.
        self._slot_of = np.full(directory.shape, -1, np.int32)
        #: Experts that wait for a free slot, by slab, decode before prefill.
        self._wants: list[dict[Phase, deque[ExpertKey]]] = [
            {Phase.DECODE: deque(), Phase.PREFILL: deque()} for _ in self.tables
        ]
        #: Requests that wait for an expert.
        self._waiters: dict[ExpertKey, list[Waiting]] = {}
        experts = directory.shape[1]
        layers_in = [self.slab_of_layer.count(table.slab) for table in self.tables]
        #: Slabs with room for every expert of their layers: nothing is ever evicted there (rule 20).
        self._whole = [len(t) >= n * experts for t, n in zip(self.tables, layers_in, strict=True)]
        #: In a whole slab every expert has one slot for ever: its layer's first slot + its number.
        self._first_slot = [
            experts * self.slab_of_layer[:layer].count(slab)
            for layer, slab in enumerate(self.slab_of_layer)
        ]
        whole_layers = [n for n, slab in enumerate(self.slab_of_layer) if self._whole[slab]]
        self._unread = itertools.starmap(ExpertKey, itertools.product(whole_layers, range(experts)))

    # --- sessions ----------------------------------------------------------------------------

    def add(self, session: SessionId, holder: Holder) -> None:
        self.holders[session] = holder

    def stop_serving(self, session: SessionId, now: float) -> None:
        """The connection is gone, the process is not: forget requests and grants, keep hazards."""
        holder = self.holders.get(session)
        if holder is None:
            return
        for waiting in list(holder.waiting.values()):
            self._abandon(waiting)
        self._release_grants(holder, None)
        self._settle(now)

    def remove(self, session: SessionId, now: float) -> None:
        """The process is dead or has given its session back: its hazards end (life, design section 2)."""
        self.stop_serving(session, now)
        self.holders.pop(session, None)
        self.policy.forget(session)
        self._settle(now)

    # --- requests ----------------------------------------------------------------------------

    def request(self, session: SessionId, request: Miss, now: float) -> None:
        """Take one miss request. Raises `ProtocolError` and changes nothing when it is not allowed."""
        holder = self.holders[session]
        self._drop_given_up(holder, now)
        self._check(holder, request)
        self._release_grants(holder, request.seq)
        self._look(session, now)
        holder.seq = request.seq
        phase = Phase(request.phase)
        slab = self.slab_of_layer[request.layer]
        table = self.tables[slab]
        waiting = Waiting(session, request, now, set())
        holder.waiting[request.seq] = waiting
        for expert in request.experts:
            key = ExpertKey(request.layer, expert)
            slot = int(self._slot_of[key])
            state = SlotState(table.state[slot]) if slot >= 0 else SlotState.FREE
            if state is SlotState.RETIRED:
                self._resurrect(table, slot, key)
                state = SlotState.READY
            if state is SlotState.READY:
                self._grant(waiting, slab, slot)
                waiting.joined += 1
                continue
            waiting.missing.add(expert)
            if slot >= 0 or key in self._waiters:
                waiting.joined += 1
                self.tally.saved_reads[request.layer] += 1
                self._raise_priority(slab, key, phase)
            else:
                waiting.missed += 1
                self._wants[slab][phase].append(key)
            self._waiters.setdefault(key, []).append(waiting)
        if not waiting.missing:
            self._answer(waiting, now)
        self._settle(now, slab, looked=True)

    def filled(self, order: FillOrder, now: float) -> None:
        """The expert's bytes are complete in its slot: publish it (rule 5) and serve who waits."""
        table = self.tables[order.slab]
        word = pack_word(int(table.generations[order.slot]), order.slab, order.slot)
        self._fence()
        self.directory[order.key] = word
        table.state[order.slot] = SlotState.READY
        for waiting in self._waiters.pop(order.key, ()):
            self._grant(waiting, order.slab, order.slot)
            waiting.missing.discard(order.key.expert)
            if not waiting.missing:
                self._answer(waiting, now)
        self._settle(now, order.slab)

    def failed(self, order: FillOrder, error: ExpertdError, now: float) -> None:
        """The read failed: nothing was published, the slot is free again, waiters get the error."""
        self._slot_of[order.key] = -1
        self.tables[order.slab].release(order.slot)
        for waiting in self._waiters.pop(order.key, ()):
            self._abandon(waiting)
            self._send(waiting, MissError(waiting.request.seq, error.code, error.message), now)
        self._settle(now, order.slab)

    def fail_all(self, error: ExpertdError, now: float) -> None:
        """Answer every waiting request with an error (drain)."""
        for holder in self.holders.values():
            for waiting in list(holder.waiting.values()):
                self._abandon(waiting)
                self._send(waiting, MissError(waiting.request.seq, error.code, error.message), now)

    # --- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Give slots that have rested to whoever waits for one."""
        self._settle(now)

    def next_due(self, now: float) -> float | None:
        """Return when `tick` may help somebody who waits for a slot, or None."""
        due = None
        for table, wants in zip(self.tables, self._wants, strict=True):
            if not any(wants.values()):
                continue
            fresh = (table.state == SlotState.RETIRED) & ~table.deferred
            when = now + self._grace  # a worker's unpin makes no event: look again
            if fresh.any():
                when = min(when, float(table.retired_at[fresh].min()) + self._grace)
            due = when if due is None else min(due, when)
        return due

    def warm(self, most: int) -> None:
        """Order up to `most` experts that nobody asked for yet, of slabs that can hold them all.

        Each is tried once. Does nothing without sessions, and for slabs that must evict.
        """
        if not self.holders:
            return
        session = next(iter(self.holders))
        unread = (k for k in self._unread if self._slot_of[k] < 0 and k not in self._waiters)
        for key in itertools.islice(unread, most):
            self._order(self.tables[self.slab_of_layer[key.layer]], key, None, session)

    # --- what others may know ------------------------------------------------------------------

    def held(self, slab: int) -> int:
        """Return how many slots of a slab are pinned now."""
        return len(self._held(slab))

    @property
    def busy(self) -> bool:
        """Whether an expert is being read or waited for."""
        return bool(self._waiters) or any((t.state == SlotState.FILLING).any() for t in self.tables)

    def check(self) -> None:
        """Assert what must hold between calls (tests)."""
        for table in self.tables:
            table.check()
        for layer, expert in np.argwhere(self.directory != 0):
            table = self.tables[self.slab_of_layer[layer]]
            slot = int(self._slot_of[layer, expert])
            assert table.state[slot] == SlotState.READY
            assert (table.layer[slot], table.expert[slot]) == (layer, expert)
            word = pack_word(int(table.generations[slot]), table.slab, slot)
            assert int(self.directory[layer, expert]) == word

    # --- inside --------------------------------------------------------------------------------

    def _check(self, holder: Holder, request: Miss) -> None:
        layers, experts = self.directory.shape
        check_range("layer", request.layer, 0, layers)
        for expert in request.experts:
            check_range("expert", expert, 0, experts)
        if len(set(request.experts)) != len(request.experts):
            raise ProtocolError(f"an expert stands twice in request {request.seq}")
        if request.seq <= holder.seq:  # else older grants would never end
            raise ProtocolError(f"request {request.seq} came after {holder.seq}; numbers only grow")
        if len(holder.waiting) >= self._max_in_flight:
            raise TooManyInFlight(
                f"{len(holder.waiting)} requests of this session wait already, "
                f"{self._max_in_flight} may"
            )
        asked = sum(len(w.request.experts) for w in holder.waiting.values())
        held = min(count_held(holder.hazards), holder.quota)
        if held + asked + len(request.experts) > holder.quota:
            raise QuotaExceeded(
                f"{len(request.experts)} experts asked for with {held} held and {asked} waited for; "
                f"the session's quota is {holder.quota}"
            )

    def _settle(self, now: float, slab: int | None = None, *, looked: bool = False) -> None:
        for table in self.tables if slab is None else (self.tables[slab],):
            self._assign(table, now, looked)

    def _assign(self, table: SlotTable, now: float, looked: bool) -> None:
        wants = self._wants[table.slab]
        for phase, queue in wants.items():  # everybody who wanted it may be gone
            wants[phase] = deque(key for key in queue if key in self._waiters)
        wanted = sum(len(queue) for queue in wants.values())
        if wanted > len(table.free):
            self._reclaim(table, wanted - len(table.free), now)
        for phase, queue in wants.items():
            while queue and table.free:
                key = queue.popleft()
                self._order(table, key, phase, self._waiters[key][0].session)
        wanted = sum(len(queue) for queue in wants.values())
        resting = int(np.count_nonzero((table.state == SlotState.RETIRED) & ~table.deferred))
        ahead = self._ahead(table)
        short = wanted + ahead - len(table.free) - resting
        # victims are chosen a few at a time: choosing costs the same for one as for ten
        if short > (0 if wanted else ahead // AHEAD_BATCH):
            self._retire(table, short, now, looked)

    def _order(
        self, table: SlotTable, key: ExpertKey, phase: Phase | None, session: SessionId
    ) -> None:
        home = self._first_slot[key.layer] + key.expert if self._whole[table.slab] else None
        slot = self._slot_of[key] = table.start_filling(*key, home)
        self.fills.append(FillOrder(key, table.slab, slot, phase, session))

    def _ahead(self, table: SlotTable) -> int:
        """How many slots to keep free or resting ahead of demand; none when everything fits."""
        if self._whole[table.slab]:
            return 0
        promised = sum(holder.quota for holder in self.holders.values())
        wish = min(max(len(table) // AHEAD_SHARE, AHEAD_LEAST), AHEAD_MOST)
        return max(min(wish, len(table) - promised), 1)

    def _retire(self, table: SlotTable, need: int, now: float, looked: bool) -> None:
        """Rule 4, first half: take the words of victims away; their slots rest.

        Args:
            looked: the policy has just seen the pages.
        """
        candidates = np.flatnonzero(table.state == SlotState.READY)
        if not len(candidates):
            return
        if not looked:
            self._look(None, now)
        for holder in self.holders.values():
            self._release_grants(holder, None, acknowledged_only=True)
            if self._claims_too_much(holder):
                self._revoke(holder, now)
        self._fence()  # an acknowledged reply's hazards are visible from here on
        pinned = np.zeros(len(table), bool)
        pinned[self._held(table.slab)] = True
        candidates = candidates[(table.grants[candidates] == 0) & ~pinned[candidates]]
        layers = table.layer[candidates].astype(np.intp)
        experts = table.expert[candidates].astype(np.intp)
        chosen = self.policy.victims(layers, experts, need, now)
        self.directory[layers[chosen], experts[chosen]] = 0
        self._fence()
        victims = candidates[chosen]
        table.state[victims] = SlotState.RETIRED
        table.retired_at[victims] = now
        table.deferred[victims] = False
        self.tally.evictions += len(victims)

    def _reclaim(self, table: SlotTable, need: int, now: float) -> None:
        """Rule 4, second half: slots that have rested and that no hazard names become free."""
        rested = (table.state == SlotState.RETIRED) & (table.retired_at <= now - self._grace)
        slots = np.flatnonzero(rested)
        if not len(slots):
            return
        self._fence()
        pinned = np.zeros(len(table), bool)
        pinned[self._held(table.slab)] = True
        held = pinned[slots]
        self.tally.deferred_reuses += int(np.count_nonzero(held & ~table.deferred[slots]))
        table.deferred[slots] = held
        slots = slots[~held]
        oldest = slots[np.argsort(table.retired_at[slots], kind="stable")][:need]
        for slot in oldest.tolist():
            self._slot_of[table.layer[slot], table.expert[slot]] = -1
            table.bump_generation(slot)
        self._fence()  # rule 6: who sees new bytes sees the new generation
        for slot in oldest.tolist():
            if self._clean is not None:
                self._clean(table.slab, slot)
            table.release(slot)

    def _resurrect(self, table: SlotTable, slot: int, key: ExpertKey) -> None:
        """A retired slot still has its bytes and its generation: give the word back, read nothing."""
        self.directory[key] = pack_word(int(table.generations[slot]), table.slab, slot)
        table.state[slot] = SlotState.READY
        table.deferred[slot] = False

    def _raise_priority(self, slab: int, key: ExpertKey, phase: Phase) -> None:
        wants = self._wants[slab]
        if phase is Phase.DECODE and key in wants[Phase.PREFILL]:
            wants[Phase.PREFILL].remove(key)
            wants[Phase.DECODE].append(key)

    def _held(self, slab: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        pages = (holder.hazards for holder in self.holders.values())
        return held_slots(pages, slab, self.tables[slab].generations)

    def _look(self, asks: SessionId | None, now: float) -> None:
        """Show the pages to the policy, that of the session that asks last: the others were there before."""
        for session in sorted(self.holders, key=lambda name: name == asks):
            self.policy.observe(session, self.holders[session].uses.copy(), now)

    def _grant(self, waiting: Waiting, slab: int, slot: int) -> None:
        self.tables[slab].grants[slot] += 1
        waiting.granted.append((slab, slot))

    def _answer(self, waiting: Waiting, now: float) -> None:
        holder = self.holders[waiting.session]
        request = waiting.request
        words = self.directory[request.layer, list(request.experts)]
        assert words.all()
        del holder.waiting[request.seq]
        holder.grants.append((request.seq, waiting.granted))
        reply = MissReply(request.seq, tuple(words.tolist()), waiting.joined, waiting.missed)
        self._send(waiting, reply, now)

    def _send(self, waiting: Waiting, message: MissReply | MissError, now: float) -> None:
        self.answers.append(Answer(waiting.session, message, now - waiting.asked_at))

    def _drop_given_up(self, holder: Holder, now: float) -> None:
        """Forget requests that the worker has acknowledged unanswered: its deadline or Ctrl-C came first."""
        acknowledged = int(holder.header[Header.ACK])
        given_up = [w for seq, w in holder.waiting.items() if seq <= acknowledged]
        for waiting in given_up:
            self._abandon(waiting)
        if given_up:
            self._settle(now)

    def _abandon(self, waiting: Waiting) -> None:
        """Forget a request. Reads that have begun go on into the cache (C24)."""
        self.holders[waiting.session].waiting.pop(waiting.request.seq, None)
        for expert in waiting.missing:
            key = ExpertKey(waiting.request.layer, expert)
            others = [w for w in self._waiters.get(key, ()) if w is not waiting]
            if others:
                self._waiters[key] = others
            else:
                self._waiters.pop(key, None)
        for slab, slot in waiting.granted:
            self.tables[slab].grants[slot] -= 1

    def _claims_too_much(self, holder: Holder) -> bool:
        """Tell whether hazards, grants and requests name more experts than the quota: a hostile page.

        An honest worker passes its quota with requests it has given up, and with grants that it
        acknowledged after we looked; neither is worth anything to it.
        """
        granted = [g for _, slots in holder.grants for g in slots]
        granted += [g for w in holder.waiting.values() for g in w.granted]
        missing = sum(len(w.missing) for w in holder.waiting.values())
        hazards = holder.hazards[holder.hazards != 0]
        if len(granted) + missing + len(hazards) <= holder.quota:
            return False
        named = zip(word_slabs(hazards).tolist(), word_slots(hazards).tolist(), strict=True)
        return len({*granted, *named}) + missing > holder.quota

    def _revoke(self, holder: Holder, now: float) -> None:
        """Leave a session only its hazards, so that quotas add up and nobody waits for ever (rule 2)."""
        error = QuotaExceeded("this session holds and waits for more experts than its quota")
        for waiting in list(holder.waiting.values()):
            self._abandon(waiting)
            self._send(waiting, MissError(waiting.request.seq, error.code, error.message), now)
        self._release_grants(holder, None)

    def _release_grants(
        self, holder: Holder, below: int | None, *, acknowledged_only: bool = False
    ) -> None:
        """End grants that the worker has acknowledged, or of requests before `below` (None: all)."""
        acknowledged = int(holder.header[Header.ACK])
        while holder.grants:
            seq, slots = holder.grants[0]
            over = seq <= acknowledged
            if not acknowledged_only:
                over = over or below is None or seq < below
            if not over:
                return
            holder.grants.popleft()
            for slab, slot in slots:
                self.tables[slab].grants[slot] -= 1
