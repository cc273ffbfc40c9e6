"""The histogram of waiting times: within 5 % of the truth, in constant memory."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.latency import LatencyHistogram

times = st.lists(st.floats(1e-5, 600), min_size=1, max_size=200)


def _of(seconds: list[float]) -> LatencyHistogram:
    histogram = LatencyHistogram()
    for s in seconds:
        histogram.add(s)
    return histogram


def test_without_data_everything_is_0() -> None:
    snapshot = LatencyHistogram().snapshot()

    assert set(snapshot.model_dump().values()) == {0}


@given(times, st.sampled_from((0.5, 0.95, 0.99, 1.0)))
def test_a_percentile_is_within_5_percent(seconds: list[float], share: float) -> None:
    true = sorted(seconds)[math.ceil(share * len(seconds)) - 1]

    estimate = _of(seconds).percentile(share)

    assert true * (1 - 1e-9) <= estimate <= true * 1.0501


@given(times)
def test_percentiles_grow_and_never_pass_the_maximum(seconds: list[float]) -> None:
    s = _of(seconds).snapshot()

    assert s.count == len(seconds)
    assert 0 < s.p50_ms <= s.p95_ms <= s.p99_ms <= s.max_ms == max(seconds) * 1e3


@given(times, times)
def test_merging_is_the_same_as_counting_together(a: list[float], b: list[float]) -> None:
    merged = _of(a)
    merged.merge(_of(b))

    assert merged.snapshot() == _of(a + b).snapshot()


@pytest.mark.parametrize("seconds", [0.0, -1e-9, 1e-9])
def test_less_than_10_us_counts_as_that(seconds: float) -> None:
    assert _of([seconds]).percentile(0.5) <= 1.05e-5


def test_more_than_10_minutes_is_counted_and_its_maximum_kept() -> None:
    snapshot = _of([3600.0]).snapshot()

    assert (snapshot.count, snapshot.max_ms) == (1, 3_600_000)
    assert snapshot.p50_ms >= 600_000
