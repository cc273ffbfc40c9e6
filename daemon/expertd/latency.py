"""A histogram of waiting times in constant memory: 5 % wide buckets from 10 us to 10 minutes."""

from __future__ import annotations

import math

import numpy as np

from expertd_protocol.stats import Latency

_LOWEST_SECONDS = 1e-5
_STEP = math.log(1.05)
_BUCKETS = 368  # 1.05**367 * 10 us > 600 s


class LatencyHistogram:
    """Counts only grow; percentiles are the upper edge of their bucket."""

    def __init__(self) -> None:
        self._counts = np.zeros(_BUCKETS, np.int64)
        self._max = 0.0

    def add(self, seconds: float) -> None:
        bucket = int(math.log(max(seconds, _LOWEST_SECONDS) / _LOWEST_SECONDS) / _STEP)
        self._counts[min(bucket, _BUCKETS - 1)] += 1
        self._max = max(self._max, seconds)

    def merge(self, other: LatencyHistogram) -> None:
        self._counts += other._counts
        self._max = max(self._max, other._max)

    def percentile(self, share: float) -> float:
        """Return seconds below which `share` (0..1) of the times lie; 0.0 without any."""
        total = int(self._counts.sum())
        if not total:
            return 0.0
        bucket = int(np.searchsorted(np.cumsum(self._counts), math.ceil(share * total)))
        return min(_LOWEST_SECONDS * math.exp((bucket + 1) * _STEP), self._max)

    def snapshot(self) -> Latency:
        return Latency(
            count=int(self._counts.sum()),
            p50_ms=self.percentile(0.50) * 1e3,
            p95_ms=self.percentile(0.95) * 1e3,
            p99_ms=self.percentile(0.99) * 1e3,
            max_ms=self._max * 1e3,
        )
