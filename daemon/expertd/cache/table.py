"""The slots of one slab: which state each is in, and which expert it belongs to.

Invariants (checked by `check`): a slot is in exactly one state; the free list holds exactly the free
slots; the counts by state add up to the slots of the slab.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from expertd_protocol.layout import GENERATION_MASK, U64, Ints
from expertd_protocol.stats import SlotCounts


class SlotState(IntEnum):
    """free -> filling -> ready -> retired -> free; retired -> ready when it is wanted again in time."""

    FREE = 0
    FILLING = 1
    READY = 2
    RETIRED = 3


class SlotTable:
    """Plain arrays; `generations` may be shared memory."""

    def __init__(self, slab: int, generations: U64) -> None:
        n = len(generations)
        self.slab = slab
        self.generations = generations
        self.state = np.zeros(n, np.uint8)
        self.layer = np.full(n, -1, np.int32)
        self.expert = np.full(n, -1, np.int32)
        #: Replies that named the slot and are not yet acknowledged: not evictable (rule 2).
        self.grants = np.zeros(n, np.int32)
        #: Retired slots and since when, the longest first.
        self.resting: dict[int, float] = {}
        #: Retired, grace over, but a hazard still named it at the last scan; the longest first.
        self.deferred: dict[int, None] = {}
        #: Free slots, the longest free first (a dict keeps order and gives up any one in O(1)).
        self.free: dict[int, None] = dict.fromkeys(range(n))

    def __len__(self) -> int:
        return len(self.state)

    def start_filling(self, layer: int, expert: int, slot: int | None = None) -> int:
        """Take a free slot for an expert and return it: `slot`, or else the longest free one."""
        if not self.free:
            raise IndexError(f"slab {self.slab} has no free slot")
        slot = next(iter(self.free)) if slot is None else slot
        del self.free[slot]
        self.state[slot] = SlotState.FILLING
        self.layer[slot] = layer
        self.expert[slot] = expert
        return slot

    def release(self, slot: int) -> None:
        """Put a slot whose bytes nobody can see back on the free list."""
        self._end_rest(slot)
        self.state[slot] = SlotState.FREE
        self.layer[slot] = self.expert[slot] = -1
        self.free[slot] = None

    def retire(self, slots: Ints, now: float) -> None:
        """Nobody finds the experts of these ready slots any more; who found them may still read."""
        self.state[slots] = SlotState.RETIRED
        self.resting.update(dict.fromkeys(slots.tolist(), now))

    def defer(self, slot: int) -> None:
        """A retired slot has rested, and a hazard names it."""
        del self.resting[slot]
        self.deferred[slot] = None

    def resurrect(self, slot: int) -> None:
        """A retired slot still has its bytes: it is ready again."""
        self._end_rest(slot)
        self.state[slot] = SlotState.READY

    def _end_rest(self, slot: int) -> None:
        self.resting.pop(slot, None)
        self.deferred.pop(slot, None)

    def bump_generation(self, slot: int) -> None:
        """A reused slot is a new thing: words and checks of the old generation no longer match."""
        self.generations[slot] = (int(self.generations[slot]) + 1) & GENERATION_MASK

    def counts(self, pinned: int) -> SlotCounts:
        n = np.bincount(self.state, minlength=len(SlotState))
        free, filling, ready, retired = (int(x) for x in n)
        return SlotCounts(
            free=free, filling=filling, ready=ready, retired=retired, total=len(self), pinned=pinned
        )

    def check(self) -> None:
        """Assert the invariants (tests)."""
        assert sorted(self.free) == np.flatnonzero(self.state == SlotState.FREE).tolist()
        retired = sorted([*self.resting, *self.deferred])
        assert retired == np.flatnonzero(self.state == SlotState.RETIRED).tolist()
        assert (self.grants >= 0).all()
        assert ((self.layer >= 0) == (self.state != SlotState.FREE)).all()

    def __repr__(self) -> str:
        c = self.counts(0)
        return (
            f"<SlotTable slab={self.slab} free={c.free} filling={c.filling} "
            f"ready={c.ready} retired={c.retired}>"
        )
