"""The slots of one slab: each in one state, and back on the free list in the end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd.cache.table import SlotState, SlotTable
from expertd_protocol.layout import GENERATION_MASK


def _table(slots: int = 3) -> SlotTable:
    return SlotTable(0, np.ones(slots, np.uint64))


def test_the_oldest_free_slot_is_taken_first() -> None:
    table = _table()
    table.release(table.start_filling(0, 5))  # slot 0 goes to the end of the list

    assert [table.start_filling(1, e) for e in range(3)] == [1, 2, 0]
    with pytest.raises(IndexError):
        table.start_filling(1, 3)
    table.check()


def test_a_slot_knows_its_expert_until_it_is_released() -> None:
    table = _table()
    slot = table.start_filling(2, 7)
    assert (table.state[slot], table.layer[slot], table.expert[slot]) == (SlotState.FILLING, 2, 7)

    table.release(slot)

    assert (table.state[slot], table.layer[slot], table.expert[slot]) == (SlotState.FREE, -1, -1)
    table.check()


def test_retired_slots_rest_in_the_order_they_were_retired_until_they_end_it() -> None:
    table = _table(4)
    for expert in range(4):
        table.state[table.start_filling(0, expert)] = SlotState.READY

    table.retire(np.array([2, 0]), 1.0)
    table.retire(np.array([3]), 2.0)
    assert list(table.resting.items()) == [(2, 1.0), (0, 1.0), (3, 2.0)]
    table.check()

    table.defer(2)
    table.resurrect(0)
    table.release(3)
    assert (list(table.resting), list(table.deferred), list(table.free)) == ([], [2], [3])
    table.check()

    table.resurrect(2)
    assert not table.deferred
    table.check()


def test_a_generation_wraps_to_what_a_word_can_hold() -> None:
    table = _table(1)
    table.generations[0] = GENERATION_MASK - 1
    seen = []
    for _ in range(3):
        table.bump_generation(0)
        seen.append(int(table.generations[0]))

    assert seen == [GENERATION_MASK, 0, 1]


@given(st.lists(st.sampled_from(SlotState), min_size=1, max_size=50), st.integers(0, 50))
def test_the_counts_by_state_add_up_to_the_slots(states: list[SlotState], pinned: int) -> None:
    table = _table(len(states))
    table.state[:] = states

    counts = table.counts(pinned)

    assert counts.free + counts.filling + counts.ready + counts.retired == counts.total
    assert counts.total == len(table) == len(states)
    assert counts.ready == states.count(SlotState.READY)
    assert counts.pinned == pinned


def test_a_broken_table_is_noticed() -> None:
    table = _table()
    table.state[1] = SlotState.READY  # but it is still on the free list

    with pytest.raises(AssertionError):
        table.check()


def test_a_table_shows_its_state() -> None:
    table = _table()
    table.start_filling(0, 0)

    assert repr(table) == "<SlotTable slab=0 free=2 filling=1 ready=0 retired=0>"
