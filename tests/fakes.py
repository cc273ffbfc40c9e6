"""Fakes for tests: a cache over plain arrays, and workers that follow the pin protocol step by step."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from expertd.cache.eviction import EvictionPolicy, NextUse
from expertd.cache.experts import ExpertCache
from expertd.cache.requests import FillOrder, Holder
from expertd.cache.table import SlotTable
from expertd_protocol.errors import ReadFailed
from expertd_protocol.ids import SessionId
from expertd_protocol.layout import Header, PageLayout, Phase, unpack_word
from expertd_protocol.messages import Miss, MissError, MissReply, Wish

GRACE = 0.005


class FakeArena:
    """A cache whose slots hold a value instead of bytes: (layer, expert) once filled, None when free."""

    def __init__(
        self,
        *,
        layers: int = 2,
        experts: int = 8,
        slots: int = 4,
        slab_of_layer: tuple[int, ...] | None = None,
        policy: EvictionPolicy | None = None,
        fence: Callable[[], object] = lambda: None,
    ) -> None:
        self.layers, self.experts = layers, experts
        slab_of_layer = slab_of_layer or (0,) * layers
        self.directory = np.zeros((layers, experts), np.uint64)
        self.tables = [
            SlotTable(n, np.ones(slots, np.uint64)) for n in range(max(slab_of_layer) + 1)
        ]
        self.bytes: list[list[tuple[int, int] | None]] = [[None] * slots for _ in self.tables]
        self.cache = ExpertCache(
            self.directory,
            self.tables,
            slab_of_layer,
            policy or NextUse(layers, experts),
            fence,
            grace_seconds=GRACE,
            clean=self._clean,
        )
        self.now = 1000.0
        self.reading: list[FillOrder] = []
        #: Most reads at once while nobody waits, as `Models.spare_reads` has it.
        self.spare = 4
        self.workers: dict[SessionId, FakeWorker] = {}

    def _clean(self, slab: int, slot: int) -> None:
        self.bytes[slab][slot] = None

    def worker(self, quota: int) -> FakeWorker:
        worker = FakeWorker(self, SessionId(bytes([len(self.workers) + 1]) * 16), quota)
        self.workers[worker.id] = worker
        self.cache.add(worker.id, worker.holder)
        return worker

    def pump(self) -> None:
        """Do what the server does after each call: begin reads, deliver answers, and soon `tick`."""
        spare = 0 if self.cache.awaited else self.spare - len(self.reading)
        self.cache.read_ahead(spare, self.now)
        self._deliver()
        self.cache.tick(self.now)
        self._deliver()

    def _deliver(self) -> None:
        self.reading += self.cache.fills
        self.cache.fills = []
        answers, self.cache.answers = self.cache.answers, []
        for answer in answers:
            self.workers[answer.session].receive(answer.message)

    def finish_read(self, which: int = 0) -> None:
        order = self.reading.pop(which)
        self.bytes[order.slab][order.slot] = order.key
        self.cache.filled(order, self.now)
        self.pump()

    def fail_read(self, which: int = 0) -> None:
        self.cache.failed(self.reading.pop(which), ReadFailed("the disk is gone"), self.now)
        self.pump()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        self.cache.tick(self.now)
        self.pump()

    def settle(self, limit: int = 1000) -> None:
        """Finish every read and let time pass until nothing waits."""
        for _ in range(limit):
            while self.reading:
                self.finish_read()
            if not any(w.asked for w in self.workers.values()):
                return
            self.advance(GRACE)
        raise AssertionError(f"still waiting: {self.tables}")

    def kill(self, worker: FakeWorker) -> None:
        del self.workers[worker.id]
        self.cache.remove(worker.id, self.now)
        self.pump()


class FakeWorker:
    """One worker: pins by rules 1-3. `use` checks that what it holds is what it asked for."""

    def __init__(self, arena: FakeArena, session: SessionId, quota: int) -> None:
        self.arena = arena
        self.id = session
        layout = PageLayout(quota, arena.layers, arena.experts)
        self.page = bytearray(layout.nbytes)
        self.hazards = layout.hazards(self.page)
        self.header = layout.header(self.page)
        self.uses = layout.uses(self.page)
        self.holder = Holder(quota, self.header, self.hazards, self.uses)
        self.seq = 0
        self.layer = -1
        self.wanted: tuple[int, ...] = ()
        self.pinned: dict[int, int] = {}
        self.asked = False
        self.error: MissError | None = None
        self.last_reply: MissReply | None = None

    @property
    def complete(self) -> bool:
        return bool(self.wanted) and len(self.pinned) == len(self.wanted)

    def publish(self, layer: int, experts: tuple[int, ...]) -> dict[int, int]:
        """Rule 1, first half: read the words and store them as hazards."""
        words = {e: int(self.arena.directory[layer, e]) for e in experts}
        self.hazards[:] = 0
        for i, word in enumerate(words.values()):
            self.hazards[i] = word
        self.layer, self.wanted, self.pinned = layer, experts, {}
        return words

    def recheck(self, words: dict[int, int]) -> tuple[int, ...]:
        """Rule 1, second half: words that changed are misses; returns the missing experts."""
        for i, (expert, word) in enumerate(words.items()):
            if word and int(self.arena.directory[self.layer, expert]) == word:
                self._hold(expert, word)
            else:
                self.hazards[i] = 0
        return tuple(e for e in self.wanted if e not in self.pinned)

    def pin(self, layer: int, experts: tuple[int, ...], phase: Phase = Phase.DECODE) -> None:
        """Look up, and ask for what is missing (rule 2)."""
        missing = self.recheck(self.publish(layer, experts))
        if missing:
            self.ask(missing, phase)

    def ask(self, missing: tuple[int, ...], phase: Phase = Phase.DECODE) -> None:
        self.seq += 1
        self.asked = True
        request = Miss(self.seq, self.layer, phase, missing)
        self.arena.cache.request(self.id, request, self.arena.now)
        self.arena.pump()

    def wish(self, layer: int, experts: tuple[int, ...]) -> None:
        """Say what it will probably want next (rule 21)."""
        self.arena.cache.wish(self.id, Wish(layer, experts), self.arena.now)
        self.arena.pump()

    def receive(self, message: MissReply | MissError) -> None:
        assert message.seq == self.seq
        self.asked = False
        if isinstance(message, MissError):
            self.error = message
            self.unpin()
            return
        self.last_reply = message
        missing = [e for e in self.wanted if e not in self.pinned]
        for expert, word in zip(missing, message.words, strict=True):
            assert int(self.arena.directory[self.layer, expert]) == word
            self.hazards[int(np.flatnonzero(self.hazards == 0)[0])] = word
            self._hold(expert, word)
        self.header[Header.ACK] = message.seq
        self._drop_what_moved(unpack_word(message.words[0])[1])

    def _drop_what_moved(self, slab: int) -> None:
        """The layer has moved between the look and the reply: all of it must be in one slab (rule 22)."""
        moved = [e for e, word in self.pinned.items() if unpack_word(word)[1] != slab]
        for expert in moved:
            self.hazards[self.hazards == self.pinned.pop(expert)] = 0
        if moved:
            self.ask(tuple(moved))

    def _hold(self, expert: int, word: int) -> None:
        self.pinned[expert] = word
        self.uses[self.layer, expert] += 1

    def use(self) -> None:
        """Read the bytes of everything held: each must be the expert that was asked for."""
        for expert, word in self.pinned.items():
            generation, slab, slot = unpack_word(word)
            assert self.arena.bytes[slab][slot] == (self.layer, expert)
            assert int(self.arena.tables[slab].generations[slot]) == generation

    def unpin(self) -> None:
        """Rule 3: the layer was evaluated."""
        self.hazards[:] = 0
        self.wanted, self.pinned = (), {}
