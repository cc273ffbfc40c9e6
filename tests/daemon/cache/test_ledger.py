"""The account of the budget: never overdrawn, and it remembers its peak."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.cache.ledger import Kind, Ledger
from expertd_protocol.errors import BudgetExhausted

KINDS: tuple[Kind, ...] = ("slab", "directory", "page", "read_buffer")


@given(
    st.integers(0, 1000),
    st.lists(st.tuples(st.booleans(), st.sampled_from(KINDS), st.integers(0, 600)), max_size=40),
)
def test_the_sum_never_passes_the_budget_C02(
    budget: int, steps: list[tuple[bool, Kind, int]]
) -> None:
    ledger = Ledger(budget)
    held = dict.fromkeys(KINDS, 0)
    peak = 0
    for takes, kind, nbytes in steps:
        if takes and nbytes <= budget - sum(held.values()):
            ledger.take(kind, nbytes, "a slab")
            held[kind] += nbytes
        elif takes:
            with pytest.raises(BudgetExhausted):
                ledger.take(kind, nbytes, "a slab")
        elif nbytes <= held[kind]:
            ledger.give(kind, nbytes)
            held[kind] -= nbytes
        else:
            with pytest.raises(ValueError, match="given back"):
                ledger.give(kind, nbytes)
        peak = max(peak, sum(held.values()))

        assert {kind: ledger.held(kind) for kind in KINDS} == held
        assert ledger.committed_bytes == sum(held.values()) <= budget
        assert ledger.free_bytes == budget - ledger.committed_bytes
        assert ledger.peak_bytes == peak


def test_the_last_byte_is_given_and_one_more_is_refused_C02() -> None:
    ledger = Ledger(10_000)
    ledger.take("slab", 4_000, "a slab")

    with pytest.raises(BudgetExhausted, match="6,001 bytes, 6,000 of"):
        ledger.take("page", 6_001, "a page")
    ledger.take("page", 6_000, "a page")

    assert (ledger.free_bytes, ledger.peak_bytes) == (0, 10_000)


def test_a_refusal_says_what_is_wanted_free_and_held() -> None:
    ledger = Ledger(10_000)
    ledger.take("slab", 8_000, "the slabs")
    ledger.take("page", 500, "a page")

    with pytest.raises(BudgetExhausted) as caught:
        ledger.take("page", 2_000, "the page of one more worker")

    assert caught.value.message.startswith(
        "the page of one more worker needs 2,000 bytes, 1,500 of the budget of 10,000 are free "
        "(held: page 500, slab 8,000)"
    )
