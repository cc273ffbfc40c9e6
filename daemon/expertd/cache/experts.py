"""One model's experts in the arena: who is resident, who waits, who leaves.

Synchronous and pure: every call takes `now` and only changes plain state (some of the arrays are
shared memory). What must be done outside is left in three outboxes, `fills` (experts to read),
`hurried` (reads that somebody waits for by now) and `answers` (replies to send); the caller takes them
after each call. The rules are those of daemon/README.md; the ones cited here decide whether a worker can
ever see wrong bytes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from expertd.cache.claims import check_ids, check_request, claims_too_much
from expertd.cache.eviction import EvictionPolicy
from expertd.cache.hazards import held_slots, held_words
from expertd.cache.prefetch import Early, Prefetch
from expertd.cache.requests import Answer, FillOrder, Holder, Tally, Waiting
from expertd.cache.table import SlotState, SlotTable
from expertd_protocol.errors import ExpertdError, QuotaExceeded
from expertd_protocol.ids import ExpertKey, SessionId
from expertd_protocol.layout import (
    U64,
    Header,
    Phase,
    pack_word,
)
from expertd_protocol.messages import Miss, MissError, MissReply, Wish

#: Slots are kept ready for reuse ahead of demand: one in `AHEAD_SHARE`, within these limits. They are
#: retired, not emptied: until they are taken, their experts come back without a read when asked for.
#: One in 16 against one in 24: 2 % more reads and a tenth less waiting, because victims are chosen less
#: often, which takes 8 ms of the loop for four sessions here. One in 8: 7 % more reads, and no less
#: waiting. By bench/replay.py, half in memory.
AHEAD_SHARE, AHEAD_LEAST, AHEAD_MOST = 16, 8, 256
#: So long as nobody waits, new ones are retired when one in so many of these is used up.
AHEAD_BATCH = 2
#: Choosing victims takes the longest of all, and holds Python's lock: the reads that were just ordered
#: begin first.
VICTIMS_AFTER_SECONDS = 0.001
#: Until victims are looked for again where everything was pinned.
LOOK_AGAIN_SECONDS = 0.005


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
        self.slab_of_layer = list(slab_of_layer)
        self.policy = policy
        self.tally = Tally(np.zeros(len(directory), np.int64))
        self.fills: list[FillOrder] = []
        self.hurried: list[tuple[ExpertKey, Phase]] = []
        self.answers: list[Answer] = []
        self.holders: dict[SessionId, Holder] = {}
        self.prefetch = Prefetch(len(directory), self.holders)
        self._fence = fence
        self._grace = grace_seconds
        self._max_in_flight = max_in_flight
        self._clean = clean
        #: Slot of each expert that is filling, ready or retired; -1 otherwise.
        self._slot_of = np.full(directory.shape, -1, np.int32)
        #: Experts that wait for a free slot, by slab, decode before prefill, the first one first.
        self._wants: list[dict[Phase, dict[ExpertKey, None]]] = [
            {Phase.DECODE: {}, Phase.PREFILL: {}} for _ in self.tables
        ]
        #: For whom each expert is being read; None: nobody waited when it was ordered.
        self._reading: dict[ExpertKey, Phase | None] = {}
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
        #: Since when (or from when on, where too much was pinned) victims should be chosen.
        self._short_since: float | None = None
        self._plan_ahead()
        whole_layers = [n for n, slab in enumerate(self.slab_of_layer) if self._whole[slab]]
        self._unread = itertools.starmap(ExpertKey, itertools.product(whole_layers, range(experts)))

    # --- sessions ----------------------------------------------------------------------------

    def add(self, session: SessionId, holder: Holder) -> None:
        self.holders[session] = holder
        self._plan_ahead()

    def stop_serving(self, session: SessionId, now: float) -> None:
        """The connection is gone, the process is not: forget requests and grants, keep hazards."""
        holder = self.holders.get(session)
        if holder is None:
            return
        for waiting in list(holder.waiting.values()):
            self._abandon(waiting)
        self._release_grants(holder, None)
        self.prefetch.take_back(session)
        self._rest(self.prefetch.passed(session), now)
        self.tick(now)

    def remove(self, session: SessionId, now: float) -> None:
        """The process is dead or has given its session back: its hazards end (life, design section 2)."""
        self.stop_serving(session, now)
        self.holders.pop(session, None)
        self._plan_ahead()
        self.policy.forget(session)
        self.tick(now)

    def _plan_ahead(self) -> None:
        """How many slots of each slab to keep free or resting; none where everything fits."""
        promised = sum(holder.quota for holder in self.holders.values())
        self._ahead = [
            max(min(wish, n - promised), 1) if not whole else 0
            for n, whole in zip(map(len, self.tables), self._whole, strict=True)
            for wish in (min(max(n // AHEAD_SHARE, AHEAD_LEAST), AHEAD_MOST),)
        ]

    # --- requests ----------------------------------------------------------------------------

    def request(self, session: SessionId, request: Miss, now: float) -> None:
        """Take one miss request. Raises `ProtocolError` and changes nothing when it is not allowed."""
        holder = self.holders[session]
        self._drop_given_up(holder, now)
        check_request(request, holder, self.directory.shape, self._max_in_flight)
        self._release_grants(holder, request.seq)
        self.prefetch.take_back(session)
        self._rest(self.prefetch.passed(session, request.layer), now)
        if request.layer <= holder.layer:  # a new pass: two in one look cannot be told apart
            self.policy.observe(session, holder.uses.copy(), now)
        holder.seq, holder.layer = request.seq, request.layer
        phase = Phase(request.phase)
        slab = self.slab_of_layer[request.layer]
        table = self.tables[slab]
        waiting = Waiting(session, request, now, set())
        holder.waiting[request.seq] = waiting
        for expert in request.experts:
            key = ExpertKey(request.layer, expert)
            slot = int(self._slot_of[key])
            state = table.state[slot] if slot >= 0 else SlotState.FREE
            self.prefetch.asked(key)
            if state == SlotState.RETIRED:
                self._resurrect(table, slot, key)
                state = SlotState.READY
            if state == SlotState.READY:
                self._grant(waiting, slab, slot)
                waiting.joined += 1
                continue
            waiting.missing.add(expert)
            if slot >= 0 or key in self._waiters:
                waiting.joined += 1
                self.tally.saved_reads[request.layer] += key in self._waiters
                self._hurry(slab, key, phase)
            else:
                waiting.missed += 1
                self._wants[slab][phase][key] = None
            self._waiters.setdefault(key, []).append(waiting)
        if not waiting.missing:
            self._answer(waiting, now)
        if self._short_since == math.inf:
            self._short_since = None
        self._assign(table, now)

    def filled(self, order: FillOrder, now: float) -> None:
        """The expert's bytes are complete in its slot: publish it (rule 5) and serve who waits."""
        table = self.tables[order.slab]
        del self._reading[order.key]
        word = pack_word(int(table.generations[order.slot]), order.slab, order.slot)
        self._fence()
        self.directory[order.key] = word
        table.state[order.slot] = SlotState.READY
        for waiting in self._waiters.pop(order.key, ()):
            self._grant(waiting, order.slab, order.slot)
            waiting.missing.discard(order.key.expert)
            if not waiting.missing:
                self._answer(waiting, now)
        self._rest(self.prefetch.filled(order.key), now)

    def failed(self, order: FillOrder, error: ExpertdError, now: float) -> None:
        """The read failed: nothing was published, the slot is free again, waiters get the error."""
        table = self.tables[order.slab]
        del self._reading[order.key]
        self.prefetch.lost(order.key)
        self._slot_of[order.key] = -1
        table.release(order.slot)
        for waiting in self._waiters.pop(order.key, ()):
            self._abandon(waiting)
            self._send(waiting, MissError(waiting.request.seq, error.code, error.message), now)
        self._assign(table, now)

    def fail_all(self, error: ExpertdError, now: float) -> None:
        """Answer every waiting request with an error (drain)."""
        for holder in self.holders.values():
            for waiting in list(holder.waiting.values()):
                self._abandon(waiting)
                self._send(waiting, MissError(waiting.request.seq, error.code, error.message), now)

    # --- time --------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Give slots that have rested to whoever waits for one; choose victims where slots run out."""
        for table in self.tables:
            self._assign(table, now)
        self._short_since = None
        if any(self._is_short(table) for table in self.tables):
            self._choose_victims(now)
            # too much is pinned, and an unpin makes no event: look again while somebody waits, else
            # when somebody asks next
            if any(self._is_short(table) for table in self.tables):
                waited = any(any(wants.values()) for wants in self._wants)
                self._short_since = now + LOOK_AGAIN_SECONDS if waited else math.inf

    def _choose_victims(self, now: float) -> None:
        for session, holder in self.holders.items():
            self.policy.observe(session, holder.uses.copy(), now)
            self._release_grants(holder, None, acknowledged_only=True)
            if claims_too_much(holder):
                self._revoke(holder, now)
        for table in self.tables:  # of all: for one more the policy is asked at little cost
            need = self._missing(table)
            if need > 0:
                self._retire(table, need, now)

    def next_due(self, now: float) -> float | None:
        """Return when `tick` has something to do, or None."""
        due = []
        for table, wants in zip(self.tables, self._wants, strict=True):
            short, wanted = self._is_short(table), any(wants.values())
            if short:
                self._short_since = self._short_since or now
                due.append(self._short_since + (0 if wanted else VICTIMS_AFTER_SECONDS))
            if wanted:
                due.append(now + self._grace)  # what was deferred may be free by now
                # the first one has rested longest
                due += [t + self._grace for t in itertools.islice(table.resting.values(), 1)]
        when = min(due, default=math.inf)
        return None if when == math.inf else when

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

    # --- slabs -----------------------------------------------------------------------------------

    def move(self, layer: int, slab: int, now: float) -> bool:
        """Let a layer live in another slab with the same planes; it starts there without experts (rule 22).

        What of it is in memory is evicted. Who has pinned some of it may read on, and finds the rest in the
        new slab. False, and nothing is changed, while a reply may still name its slots: an expert of it is
        being read, or granted.
        """
        old = self.tables[self.slab_of_layer[layer]]
        if self._whole[old.slab] or self._whole[slab]:
            raise ValueError(
                f"slab {old.slab} or {slab} has room for all: its slots are used unpinned"
            )
        for holder in self.holders.values():
            self._release_grants(holder, None, acknowledged_only=True)
        mine = np.flatnonzero(old.layer == layer)
        if (old.state[mine] == SlotState.FILLING).any() or old.grants[mine].any():
            return False
        self.directory[layer] = 0
        self._fence()
        ready = mine[old.state[mine] == SlotState.READY]
        old.retire(ready, now)
        self.tally.evictions += len(ready)
        for slot in mine.tolist():
            self.prefetch.lost(ExpertKey(layer, int(old.expert[slot])))
        self._slot_of[layer] = -1
        self.slab_of_layer[layer] = slab
        for phase, queue in self._wants[old.slab].items():
            for key in [key for key in queue if key.layer == layer]:
                del queue[key]
                self._wants[slab][phase][key] = None
        self._assign(self.tables[slab], now)
        return True

    # --- prefetch (rule 21) --------------------------------------------------------------------

    @property
    def takes_wishes(self) -> bool:
        """Whether anything can be read ahead of demand: not where everything fits."""
        return not all(self._whole)

    def wish(self, session: SessionId, wish: Wish, now: float) -> None:
        """Take what a session will probably ask for next. Raises `ProtocolError` and changes nothing."""
        check_ids(wish, self.directory.shape)
        self._rest(self.prefetch.passed(session), now)
        self.prefetch.wish(session, *wish)

    def read_ahead(self, most: int, now: float) -> None:
        """Order up to `most` experts that are wished for, into slots that nobody else needs."""
        self._rest(self.prefetch.overdue(now), now)
        while most > 0 and (wished := self.prefetch.next()) is not None:
            session, key, use = wished
            table = self.tables[self.slab_of_layer[key.layer]]
            if self._slot_of[key] >= 0 or key in self._waiters or not self._has_spare(table, now):
                continue
            self._order(table, key, None, session)
            slot = int(self._slot_of[key])
            self.prefetch.order(Early(key, table.slab, slot, session, use, now))
            most -= 1

    def _has_spare(self, table: SlotTable, now: float) -> bool:
        """Whether a slot can be had without a victim, and enough are left for demand."""
        most = self._ahead[table.slab] // AHEAD_BATCH
        if (
            len(self.prefetch.in_slab(table.slab)) >= most
            or len(table.free) + len(table.resting) <= self._ahead[table.slab] - most
            or any(self._wants[table.slab].values())
        ):
            return False
        if not table.free:
            self._reclaim(table, 1, now)
        return bool(table.free)

    def _early(self, table: SlotTable) -> list[int]:
        """Slots on loan to early experts: they come back to rest, or the miss that they save takes none.

        Never more than may be lent now, which is less when one more session has come: demand goes first.
        """
        if not self.prefetch.early:
            return []
        return self.prefetch.in_slab(table.slab)[: self._ahead[table.slab] // AHEAD_BATCH]

    def _rest(self, unused: Sequence[Early], now: float) -> None:
        """Retire early experts that nobody used: their slots go back where they came from."""
        for early in unused:
            table = self.tables[early.slab]
            if (
                self._slot_of[early.key] == early.slot
                and table.state[early.slot] == SlotState.READY
                and not table.grants[early.slot]
                and early.slot not in self._held(early.slab)
            ):
                self.directory[early.key] = 0
                self._fence()
                table.retire(np.array([early.slot]), now)

    # --- what others may know ------------------------------------------------------------------

    def held(self, slab: int) -> int:
        """Return how many slots of a slab are pinned now."""
        return len(self._held(slab))

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for an expert."""
        return bool(self._waiters)

    @property
    def busy(self) -> bool:
        """Whether an expert is being read or waited for."""
        return bool(self._waiters or self._reading)

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

    def _assign(self, table: SlotTable, now: float) -> None:
        """Give free slots to who waits for one."""
        wants = self._wants[table.slab]
        wanted = sum(map(len, wants.values()))
        if wanted > len(table.free):
            self._reclaim(table, wanted - len(table.free), now)
        for phase, queue in wants.items():
            while queue and table.free:
                key = next(iter(queue))
                del queue[key]
                self._order(table, key, phase, self._waiters[key][0].session)

    def _missing(self, table: SlotTable) -> int:
        """How many slots more should be retired, for who waits and ahead of who will."""
        ahead = self._ahead[table.slab] - len(table.free) - len(table.resting)
        return ahead + sum(map(len, self._wants[table.slab].values())) - len(self._early(table))

    def _is_short(self, table: SlotTable) -> bool:
        """Whether to choose victims now: it costs the same for one as for ten."""
        missing = self._missing(table)
        if any(self._wants[table.slab].values()):
            return missing > 0
        return missing > self._ahead[table.slab] // AHEAD_BATCH - len(self._early(table))

    def _order(
        self, table: SlotTable, key: ExpertKey, phase: Phase | None, session: SessionId
    ) -> None:
        home = self._first_slot[key.layer] + key.expert if self._whole[table.slab] else None
        slot = self._slot_of[key] = table.start_filling(*key, home)
        self._reading[key] = phase
        self.fills.append(FillOrder(key, table.slab, slot, phase, session))

    def _retire(self, table: SlotTable, need: int, now: float) -> None:
        """Rule 4, first half: take the words of victims away; their slots rest."""
        candidates = np.flatnonzero(table.state == SlotState.READY)
        if not len(candidates):
            return
        self._fence()  # an acknowledged reply's hazards are visible from here on
        pinned = np.zeros(len(table), bool)
        pinned[self._held(table.slab)] = True
        pinned[self._early(table)] = True
        candidates = candidates[(table.grants[candidates] == 0) & ~pinned[candidates]]
        layers = table.layer[candidates].astype(np.intp)
        experts = table.expert[candidates].astype(np.intp)
        chosen = self.policy.victims(layers, experts, need, now)
        self.directory[layers[chosen], experts[chosen]] = 0
        self._fence()
        table.retire(candidates[chosen], now)
        self.tally.evictions += len(chosen)

    def _reclaim(self, table: SlotTable, need: int, now: float) -> None:
        """Rule 4, second half: slots that have rested and that no hazard names become free."""
        rested = itertools.takewhile(
            lambda slot: table.resting[slot] <= now - self._grace, list(table.resting)
        )
        self._fence()
        held = held_words(holder.hazards for holder in self.holders.values())
        reusable: list[int] = []
        for slot in itertools.chain(list(table.deferred), rested):
            if len(reusable) == need:
                break
            if pack_word(int(table.generations[slot]), table.slab, slot) not in held:
                reusable.append(slot)
            elif slot in table.resting:
                table.defer(slot)
                self.tally.deferred_reuses += 1
        for slot in reusable:
            key = ExpertKey(int(table.layer[slot]), int(table.expert[slot]))
            if (self.slab_of_layer[key.layer], self._slot_of[key]) == (table.slab, slot):
                self.prefetch.lost(key)
                self._slot_of[key] = -1  # else its layer has moved, and maybe come back
            table.bump_generation(slot)
        self._fence()  # rule 6: who sees new bytes sees the new generation
        for slot in reusable:
            if self._clean is not None:
                self._clean(table.slab, slot)
            table.release(slot)

    def _resurrect(self, table: SlotTable, slot: int, key: ExpertKey) -> None:
        """A retired slot still has its bytes and its generation: give the word back, read nothing."""
        self.directory[key] = pack_word(int(table.generations[slot]), table.slab, slot)
        table.resurrect(slot)

    def _hurry(self, slab: int, key: ExpertKey, phase: Phase) -> None:
        """Somebody joins who may be in more of a hurry than those who wait already."""
        wants = self._wants[slab]
        if key in self._reading:
            reading = self._reading[key]
            if reading is None or phase > reading:
                self._reading[key] = phase
                self.hurried.append((key, phase))
        elif phase is Phase.DECODE and key in wants[Phase.PREFILL]:
            del wants[Phase.PREFILL][key]
            wants[Phase.DECODE][key] = None

    def _held(self, slab: int) -> np.ndarray[tuple[int], np.dtype[np.intp]]:
        pages = (holder.hazards for holder in self.holders.values())
        return held_slots(pages, slab, self.tables[slab].generations)

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
            self.tick(now)

    def _abandon(self, waiting: Waiting) -> None:
        """Forget a request. Reads that have begun go on into the cache (C24)."""
        self.holders[waiting.session].waiting.pop(waiting.request.seq, None)
        for expert in waiting.missing:
            key = ExpertKey(waiting.request.layer, expert)
            others = [w for w in self._waiters.get(key, ()) if w is not waiting]
            if others:
                self._waiters[key] = others
                continue
            self._waiters.pop(key, None)
            for queue in self._wants[self.slab_of_layer[key.layer]].values():
                queue.pop(key, None)
        for slab, slot in waiting.granted:
            self.tables[slab].grants[slot] -= 1

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
