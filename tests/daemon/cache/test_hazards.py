"""What workers hold. Their pages are hostile: any 64 bits may stand there (F8)."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expertd.cache.hazards import count_held, held_slots
from expertd_protocol.layout import U64, pack_word, unpack_word

words = st.integers(0, (1 << 64) - 1) | st.builds(
    pack_word, st.integers(0, 3), st.integers(0, 3), st.integers(0, 6)
)


def _page(*values: int) -> U64:
    return np.array(values, np.uint64)


@given(
    st.lists(st.lists(words, max_size=8), max_size=5),
    st.integers(0, 3),
    st.lists(st.integers(0, 3), max_size=6),
)
def test_exactly_the_slots_named_with_their_present_generation_are_held(
    pages: list[list[int]], slab: int, generations: list[int]
) -> None:
    held = held_slots([_page(*page) for page in pages], slab, _page(*generations))

    expected = set()
    for word in (w for page in pages for w in page if w):
        generation, its_slab, slot = unpack_word(word)
        if its_slab == slab and 0 <= slot < len(generations) and generations[slot] == generation:
            expected.add(slot)
    assert held.tolist() == sorted(expected)


def test_two_workers_that_hold_one_slot_count_once() -> None:
    word = pack_word(1, 0, 2)

    assert held_slots([_page(word, 0), _page(0, word)], 0, _page(1, 1, 1)).tolist() == [2]


def test_a_stale_generation_keeps_nothing_alive_B03() -> None:
    assert held_slots([_page(pack_word(1, 0, 0))], 0, _page(2)).tolist() == []


def test_no_pages_hold_nothing() -> None:
    assert held_slots([], 0, _page(1)).tolist() == []


def test_count_held_counts_words_that_are_not_zero() -> None:
    assert count_held(_page(0, 5, 0, 1 << 63)) == 2
