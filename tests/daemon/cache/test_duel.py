"""Two rankings, one of which names what is needed later."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expertd.cache.duel import LEAD_MOST, PAIRS, TRUSTED_FROM, Duel
from expertd_protocol.layout import Ints


def _keys(*keys: int) -> Ints:
    return np.array(keys, np.intp)


def test_the_ranking_whose_victim_is_used_first_loses() -> None:
    duel = Duel()
    last = np.zeros(10, np.int64)
    duel.meet(_keys(1, 2), _keys(3, 2), tick=5)  # 2 is named by both

    last[2] = 6
    duel.settle(last)
    assert duel.lead == 0

    last[1] = 7
    duel.settle(last)
    assert duel.lead == 1

    last[3] = 8
    duel.settle(last)
    assert duel.lead == 1  # a pair is decided once

    duel.meet(_keys(1), _keys(3), tick=8)
    last[3], last[1] = 9, 10
    duel.settle(last)
    assert duel.lead == 0


def test_a_pair_that_is_used_at_once_is_a_draw() -> None:
    duel = Duel()
    duel.meet(_keys(1), _keys(3), tick=5)
    last = np.zeros(10, np.int64)
    last[[1, 3]] = 6
    duel.settle(last)

    assert duel.lead == 0
    last[1] = 7
    duel.settle(last)
    assert duel.lead == 0


def test_trust_takes_a_clear_lead_and_is_lost_again() -> None:
    duel = Duel()
    last = np.zeros(10, np.int64)
    leads = []
    for tick, old_is_needed in enumerate([True] * (LEAD_MOST + 50) + [False] * LEAD_MOST):
        duel.meet(_keys(1), _keys(3), tick)
        last[1 if old_is_needed else 3] = tick + 1
        duel.settle(last)
        leads.append(duel.lead)
        assert duel.trusts_new == (duel.lead >= TRUSTED_FROM)

    assert max(leads) == LEAD_MOST
    assert not duel.trusts_new


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 19), min_size=1, max_size=20, unique=True),
            st.lists(st.integers(0, 19), min_size=1, max_size=20, unique=True),
        ),
        max_size=PAIRS,
    )
)
def test_its_size_and_its_lead_are_bounded(choices: list[tuple[list[int], list[int]]]) -> None:
    duel = Duel()
    last = np.zeros(20, np.int64)
    for tick, (old, new) in enumerate(choices):
        duel.meet(_keys(*old), _keys(*new), tick)
        last[old[0]] = tick + 1
        duel.settle(last)

        assert abs(duel.lead) <= LEAD_MOST
