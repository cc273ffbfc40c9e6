"""Duel: which of two orders of victims is right, found out while it runs.

Two rankings name who should leave. Where they differ, their choices are paired and remembered; the
one whose victim is used again first was wrong. The newcomer is trusted when it has won clearly
more often than it lost, and until then the old way decides: so a good guess that does not fit a model
costs nothing but this bookkeeping. Plain arrays of a fixed size, no clock.
"""

from __future__ import annotations

import numpy as np

from expertd_protocol.layout import Ints

#: Pairs that are remembered; the oldest give way.
PAIRS = 256
#: Most victims of one decision that are compared, the first ones.
PAIRS_OF_ONE = 8
#: The newcomer decides when it has won this many times more than it lost, and the lead is capped.
TRUSTED_FROM, LEAD_MOST = 16, 200


class Duel:
    """Pairs of keys, one evicted by each ranking, that wait for the first use of either."""

    def __init__(self) -> None:
        self.lead = 0
        self._old = np.zeros(PAIRS, np.intp)
        self._new = np.zeros(PAIRS, np.intp)
        self._born = np.full(PAIRS, -1, np.int64)  # -1: no pair
        self._at = 0

    @property
    def trusts_new(self) -> bool:
        return self.lead >= TRUSTED_FROM

    def meet(self, old: Ints, new: Ints, tick: int) -> None:
        """Remember where the choices of the rankings differ at time `tick`."""
        named = old[:PAIRS_OF_ONE].tolist(), new[:PAIRS_OF_ONE].tolist()
        only_old = [key for key in named[0] if key not in named[1]]
        only_new = [key for key in named[1] if key not in named[0]]
        n = min(len(only_old), len(only_new))
        if not n:
            return
        places = (self._at + np.arange(n)) % PAIRS
        self._at = (self._at + n) % PAIRS
        self._old[places], self._new[places] = only_old[:n], only_new[:n]
        self._born[places] = tick

    def settle(self, last_tick: Ints) -> None:
        """Decide the pairs of which one was used: `last_tick` is the last use of every key."""
        waiting = self._born >= 0
        old, new = last_tick.take(self._old), last_tick.take(self._new)
        over = waiting & (np.maximum(old, new) > self._born)
        if not over.any():
            return
        # the one that was not used since the pair was made is used later
        old_later = (old <= self._born) | ((new > self._born) & (old > new))
        new_later = (new <= self._born) | ((old > self._born) & (new > old))
        won = int(np.count_nonzero(over & new_later & ~old_later))
        lost = int(np.count_nonzero(over & old_later & ~new_later))
        self.lead = max(min(self.lead + won - lost, LEAD_MOST), -LEAD_MOST)
        self._born[over] = -1
