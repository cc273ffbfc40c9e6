"""The bytes of shared memory: words, planes, pages. Nothing overlaps, everything is aligned."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertd_protocol.errors import ProtocolError
from expertd_protocol.layout import (
    DTYPE_BYTES,
    MAX_SLABS,
    MAX_SLOTS_PER_SLAB,
    PAGE_BYTES,
    PLANE_ALIGN_BYTES,
    Counter,
    DirectoryLayout,
    Header,
    PageLayout,
    Part,
    SlabLayout,
    check_range,
    pack_word,
    round_up,
    slots_that_fit,
    unpack_word,
    word_generations,
    word_slabs,
    word_slots,
)
from tests.strategies import parts

generations = st.integers(0, (1 << 32) - 1)
slabs = st.integers(0, MAX_SLABS - 1)
slots = st.integers(0, MAX_SLOTS_PER_SLAB - 1)


# --- words ---------------------------------------------------------------------------------------
@given(generations, slabs, slots)
def test_a_word_holds_what_was_packed(generation: int, slab: int, slot: int) -> None:
    word = pack_word(generation, slab, slot)

    assert 0 < word < 1 << 64
    assert unpack_word(word) == (generation, slab, slot)


@given(st.lists(st.tuples(generations, slabs, slots), max_size=20))
def test_the_numpy_functions_agree_with_the_scalar_ones(
    places: list[tuple[int, int, int]],
) -> None:
    words = np.array([pack_word(*place) for place in places], np.uint64)

    unpacked = zip(word_generations(words), word_slabs(words), word_slots(words), strict=True)

    assert [tuple(map(int, place)) for place in unpacked] == places


@given(st.integers(0, (1 << 64) - 1))
def test_any_64_bits_are_read_the_same_way_by_both(word: int) -> None:
    words = np.array([word], np.uint64)

    scalar = unpack_word(word)

    assert scalar == (
        int(word_generations(words)[0]),
        int(word_slabs(words)[0]),
        int(word_slots(words)[0]),
    )


def test_word_0_names_no_slot() -> None:
    assert word_slots(np.zeros(3, np.uint64)).tolist() == [-1, -1, -1]


def test_a_generation_wraps_after_32_bits() -> None:
    assert unpack_word(pack_word(1 << 32 | 7, 0, 0))[0] == 7


@pytest.mark.parametrize(
    ("slab", "slot"), [(MAX_SLABS, 0), (-1, 0), (0, MAX_SLOTS_PER_SLAB), (0, -1)]
)
def test_a_place_that_does_not_fit_a_word_is_refused(slab: int, slot: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        pack_word(1, slab, slot)


# --- slabs ---------------------------------------------------------------------------------------
@given(parts(), st.integers(1, 1000))
def test_planes_are_aligned_disjoint_and_inside_the_slab(
    expert: tuple[Part, ...], n_slots: int
) -> None:
    layout = SlabLayout(expert, n_slots)

    end = n_slots * 8  # the generations come first
    for part, offset in zip(expert, layout.plane_offsets, strict=True):
        assert offset % PLANE_ALIGN_BYTES == 0
        assert offset >= end
        end = offset + n_slots * part.nbytes
    assert end <= layout.nbytes
    assert layout.nbytes % PAGE_BYTES == 0
    assert layout.nbytes % PLANE_ALIGN_BYTES == 0


@given(parts(64), st.integers(1, 50))
def test_the_rows_of_a_plane_follow_each_other_without_a_gap(
    expert: tuple[Part, ...], n_slots: int
) -> None:
    layout = SlabLayout(expert, n_slots)

    for number, part in enumerate(expert):
        at = layout.plane_offsets[number]
        for slot in range(n_slots):
            assert layout.row(number, slot) == (at, part.nbytes)
            at += part.nbytes
    assert layout.expert_bytes == sum(layout.row(n, 0)[1] for n in range(len(expert)))


@given(parts(), st.integers(0, 1 << 40))
def test_slots_that_fit_is_exact(expert: tuple[Part, ...], nbytes: int) -> None:
    n = slots_that_fit(expert, nbytes)

    assert n == 0 or SlabLayout(expert, n).nbytes <= nbytes
    assert n == MAX_SLOTS_PER_SLAB or SlabLayout(expert, n + 1).nbytes > nbytes


@given(parts(), st.integers(1, 5000))
def test_a_slab_of_n_slots_fits_into_exactly_its_own_bytes(
    expert: tuple[Part, ...], n_slots: int
) -> None:
    nbytes = SlabLayout(expert, n_slots).nbytes

    assert slots_that_fit(expert, nbytes) >= n_slots
    assert slots_that_fit(expert, nbytes - 1) < n_slots


def test_generations_lie_at_the_start_of_the_slab() -> None:
    layout = SlabLayout((Part("w", "F32", (4,)),), 5)
    buffer = bytearray(layout.nbytes)

    layout.generations(buffer)[:] = [1, 2, 3, 4, 5]

    assert np.frombuffer(buffer, np.uint64, 5).tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("dtype", "nbytes"), sorted(DTYPE_BYTES.items()))
def test_a_part_counts_bytes_by_its_dtype(dtype: str, nbytes: int) -> None:
    assert Part("w", dtype, (3, 5)).nbytes == 15 * nbytes
    assert Part("global_scale", dtype, ()).nbytes == nbytes


# --- directory and page ----------------------------------------------------------------------------
@given(st.integers(1, 200), st.integers(1, 600))
def test_a_directory_has_one_word_for_each_expert(layers: int, experts: int) -> None:
    layout = DirectoryLayout(layers, experts)
    words = layout.words(bytearray(layout.nbytes))

    assert words.shape == (layers, experts)
    assert words.nbytes <= layout.nbytes < words.nbytes + PAGE_BYTES
    assert layout.nbytes % PAGE_BYTES == 0


@given(st.integers(1, 512), st.integers(1, 100), st.integers(1, 300))
def test_the_regions_of_a_page_are_aligned_disjoint_and_inside(
    quota: int, layers: int, experts: int
) -> None:
    layout = PageLayout(quota, layers, experts)
    buffer = bytearray(layout.nbytes)
    base = np.frombuffer(buffer, np.uint8).ctypes.data

    regions = [
        region(buffer) for region in (layout.header, layout.hazards, layout.counters, layout.uses)
    ]

    end = 0
    for region in regions:
        start = region.ctypes.data - base
        assert start >= end
        assert start % region.itemsize == 0
        end = start + region.nbytes
    assert end <= layout.nbytes
    assert layout.nbytes % PAGE_BYTES == 0


def test_writing_one_region_of_a_page_changes_no_other() -> None:
    layout = PageLayout(3, 3, 5)
    buffer = bytearray(layout.nbytes)
    names = ("header", "hazards", "counters", "uses")

    for name in names:
        region = getattr(layout, name)(buffer)
        region[:] = np.iinfo(region.dtype).max
        others = [getattr(layout, other)(buffer) for other in names if other != name]
        assert not any(other.any() for other in others)
        region[:] = 0


def test_every_header_word_and_counter_has_a_place() -> None:
    layout = PageLayout(1, 1, 1)
    buffer = bytearray(layout.nbytes)

    assert max(Header) < len(layout.header(buffer))
    assert layout.counters(buffer).shape == (2, len(Counter))
    assert sorted(Counter) == list(range(len(Counter)))


# --- checks ----------------------------------------------------------------------------------------
@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_round_up_is_the_next_multiple(n: int, to: int) -> None:
    up = round_up(n, to)

    assert up % to == 0
    assert n <= up < n + to


@pytest.mark.parametrize("value", [-1, 8, 10**9])
def test_a_number_out_of_range_is_refused_with_the_limits_D34(value: int) -> None:
    with pytest.raises(ProtocolError, match=f"layer is {value}, allowed are 0 to 7"):
        check_range("layer", value, 0, 8)


@pytest.mark.parametrize("value", [0, 7])
def test_the_first_and_the_last_allowed_number_pass(value: int) -> None:
    assert check_range("layer", value, 0, 8) == value
