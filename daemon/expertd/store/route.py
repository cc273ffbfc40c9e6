"""Which way a large aligned read goes: straight into the slots, or through the reader's own buffer.

Straight costs no copy. But slots are shared memory of small pages, the buffer has huge ones, and some
devices are slower for every page. Measured on a virtio disk, 2.5 MiB records, 8 threads: straight
0.90 GB/s at 0.23 CPU seconds per GB, through the buffer 1.33 GB/s at 0.33. A disk that takes a list of
pages in its stride has nothing to gain. So each reader finds out, while it works: pure arithmetic on
what reads took, no start-up measurement, nothing to configure.
"""

from __future__ import annotations

#: Smaller reads go straight: one copy less is all that matters there.
LARGE_BYTES = 256 * 1024
#: Reads that alternate before anything is decided, and how often the other way is tried afterwards.
FIRST_READS = 16
TRY_EVERY = 32
#: The copy costs CPU time that workers want: it must be worth this much.
WORTH = 1.15
#: One read that hung must not decide: it counts at most this many times the usual.
OUTLIER = 2.0
#: Weight of the newest read in the average.
NEWEST = 1 / 16


class Route:
    """The choice of one device. A lost update between threads does no harm."""

    def __init__(self) -> None:
        self._reads = 0
        #: Seconds per byte: through the buffer, straight.
        self._cost = [0.0, 0.0]

    def __repr__(self) -> str:
        return f"<Route {'straight' if self.prefers_straight else 'buffer'} {self._cost}>"

    @property
    def prefers_straight(self) -> bool:
        """Say which way is better by what is known; straight while nothing is."""
        buffer, straight = self._cost
        return not buffer or not straight or straight <= buffer * WORTH

    def goes_straight(self, nbytes: int) -> bool:
        """Choose for the next read."""
        if nbytes < LARGE_BYTES:
            return True
        self._reads += 1
        if self._reads <= FIRST_READS:
            return self._reads % 2 == 1
        return self.prefers_straight != (self._reads % TRY_EVERY == 0)

    def took(self, straight: bool, seconds: float, nbytes: int) -> None:
        """Learn from a read that was done."""
        if nbytes < LARGE_BYTES:
            return
        known, now = self._cost[straight], seconds / nbytes
        self._cost[straight] = (
            known + (min(now, OUTLIER * known) - known) * NEWEST if known else now
        )
