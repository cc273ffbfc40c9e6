"""Sums of the stats stay sums."""

from hypothesis import given
from hypothesis import strategies as st

from expertd_protocol.stats import Counters, SlotCounts

_n = st.integers(0, 1 << 40)


@st.composite
def slot_counts(draw: st.DrawFn) -> SlotCounts:
    free, filling, ready, retired = draw(st.tuples(_n, _n, _n, _n))
    total = free + filling + ready + retired
    return SlotCounts(
        free=free, filling=filling, ready=ready, retired=retired, total=total, pinned=draw(_n)
    )


@given(st.lists(slot_counts(), max_size=6))
def test_slots_by_state_still_add_up_to_the_total(counts: list[SlotCounts]) -> None:
    s = sum(counts, SlotCounts())

    assert s.free + s.filling + s.ready + s.retired == s.total == sum(c.total for c in counts)
    assert s.pinned == sum(c.pinned for c in counts)


@given(st.lists(st.tuples(_n, _n, _n), max_size=6))
def test_hits_joins_and_misses_still_add_up_to_the_lookups(
    each: list[tuple[int, int, int]],
) -> None:
    total = Counters()
    for hits, joins, misses in each:
        total += Counters(hits=hits, joins=joins, misses=misses, lookups=hits + joins + misses)

    assert total.hits + total.joins + total.misses == total.lookups
    assert 0 <= total.hit_rate <= 1
