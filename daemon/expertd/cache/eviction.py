"""Who leaves: victim choice over plain arrays. Never touches memory, never blocks, never reads a clock.

`AgedUse`: experts that were used least lately leave first. "Used" counts one per expert, layer and
wave, so a prefill that sweeps a layer once weighs as little as one decode step; "lately" is ageing:
all counts are halved after every `AGE_AFTER` uses per slot. Ties go to the least recent use.
When not to use it: uniform random routing, where no policy beats the cache fraction.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from expertd_protocol.layout import U32, Ints

#: Halve the use counts after this many uses per slot of the model.
AGE_AFTER = 8
#: A worker cannot use one expert more often between two looks; more is a broken or hostile page.
MAX_DELTA = 1 << 16


class EvictionPolicy(ABC):
    """Learns from the workers' pages and orders candidates."""

    @abstractmethod
    def observe(self, uses: U32, seen: U32, last_use: U32, now_ms: int) -> None:
        """Take in one worker's page.

        Args:
            uses: u32[L, E] as read now; `seen` is the array of the previous look.
            last_use: u32[L, E], milliseconds modulo 2^32, 0 = never.
            now_ms: time.monotonic, milliseconds.
        """

    @abstractmethod
    def filled(self, layer: int, expert: int, now_ms: int) -> None:
        """An expert has become resident: it counts as seen now, so that it is not the next victim."""

    @abstractmethod
    def victims(self, layers: Ints, experts: Ints, need: int) -> Ints:
        """Return indices into the candidates `(layers[i], experts[i])`, best victim first, at most `need`."""


class AgedUse(EvictionPolicy):
    """Aged use counts, then recency."""

    def __init__(self, layers: int, experts: int, slots: int) -> None:
        self.heat: npt.NDArray[np.float32] = np.zeros((layers, experts), np.float32)
        self.last_ms: npt.NDArray[np.int64] = np.zeros((layers, experts), np.int64)
        self._since_aged = 0
        self._age_after = AGE_AFTER * slots

    def observe(self, uses: U32, seen: U32, last_use: U32, now_ms: int) -> None:
        # a few of thousands: every look costs the daemon's loop
        used = np.flatnonzero((uses != seen).reshape(-1))
        if not len(used):
            return
        # u32 arithmetic wraps as the counts do
        grown = np.minimum(uses.flat[used] - seen.flat[used], np.uint32(MAX_DELTA))
        self.heat.flat[used] += grown
        ticks = last_use.flat[used]
        # age modulo 2^32 ms; a tick from the future (hostile page) is at most "now"
        age = (np.uint32(now_ms & 0xFFFF_FFFF) - ticks).astype(np.int64)
        age[age > 1 << 31] = 0
        when = np.where(ticks != 0, now_ms - age, 0)
        self.last_ms.flat[used] = np.maximum(self.last_ms.flat[used], when)
        self._since_aged += int(grown.sum())
        halvings, self._since_aged = divmod(self._since_aged, self._age_after)
        if halvings:
            self.heat *= 0.5 ** min(halvings, 64)

    def filled(self, layer: int, expert: int, now_ms: int) -> None:
        self.last_ms[layer, expert] = now_ms

    def victims(self, layers: Ints, experts: Ints, need: int) -> Ints:
        order = np.lexsort((self.last_ms[layers, experts], self.heat[layers, experts]))
        return order[:need]
