"""Size arithmetic: what text means, what `auto` leaves, and plans that never pass their budget."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from expertd.cache.budget import (
    GIB,
    KIB,
    MAX_BUFFER_BYTES,
    MIB,
    MIN_BUFFER_BYTES,
    PLANE_MAX_ELEMENTS,
    RESERVE_SLOTS,
    SLAB_MAX_BYTES,
    SLABS_MAX,
    SLABS_WANTED,
    ArenaPlan,
    SystemMemory,
    auto_budget,
    grant_quota,
    minimum_budget,
    needed_bytes,
    parse_budget,
    plan_arena,
    read_buffers,
)
from expertd_protocol.errors import BadBudget, BudgetTooSmall, ProtocolError
from expertd_protocol.layout import (
    DTYPE_BYTES,
    MAX_SLOTS_PER_SLAB,
    DirectoryLayout,
    PageLayout,
    Part,
    SlabLayout,
)
from tests.strategies import model_layers

MEMORY = SystemMemory(total=64 * GIB, available=48 * GIB)
TIB = 1 << 40

Layers = tuple[tuple[Part, ...], ...]

#: qwen3-30b-a3b at 4 bits: 48 layers of 128 experts, 2.5 MB each, 16 GB in all.
BIG_EXPERT = tuple(
    part
    for name, out, wide in (
        ("gate_proj", 768, 2048),
        ("up_proj", 768, 2048),
        ("down_proj", 2048, 768),
    )
    for part in (
        Part(f"{name}.weight", "U32", (out, wide // 8)),
        Part(f"{name}.scales", "BF16", (out, wide // 64)),
        Part(f"{name}.biases", "BF16", (out, wide // 64)),
    )
)
SMALL_EXPERT = (Part("up_proj.weight", "U32", (32, 8)), Part("up_proj.scales", "BF16", (32, 1)))


# --- text ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("auto", auto_budget(MEMORY)),
        (" AUTO ", auto_budget(MEMORY)),
        ("24GiB", 24 * GIB),
        ("24gib", 24 * GIB),
        ("24Gi", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("24 GB", 24 * 10**9),
        ("1.5g", 1_500_000_000),
        ("1.5GiB", 3 * GIB // 2),
        ("300MiB", 300 * MIB),
        ("64KiB", 64 * KIB),
        ("123456", 123_456),
        ("123456b", 123_456),
        ("60%", 64 * GIB * 60 // 100),
        ("0.5%", 64 * GIB // 200),
        ("100%", 64 * GIB),
        ("64GiB", 64 * GIB),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, nbytes: int) -> None:
    assert parse_budget(text, MEMORY) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "x", "NaN", "nan", "inf", "-1", "-1GiB", "+1GiB", "1e9", "0x10", "1GiB 2GiB", "GiB",
        "1,5GiB", "24XB", "%", "x%", "nan%", "inf%", "-5%", "0%", "101%", "1e400%", "autos",
    ],
)  # fmt: skip
def test_a_text_that_is_no_size_is_refused_and_quoted_B04(text: str) -> None:
    with pytest.raises(BadBudget) as caught:
        parse_budget(text, MEMORY)

    assert repr(text.strip()) in caught.value.message


@pytest.mark.parametrize(
    "text",
    ["0", "0GiB", "0.0000000001%", "0.1", "64.1GiB", "65GiB", "1TiB", "9" * 400, "9" * 400 + "TiB"],
)
def test_a_size_that_this_machine_cannot_have_is_refused(text: str) -> None:
    with pytest.raises(BadBudget, match="68,719,476,736"):
        parse_budget(text, MEMORY)


@pytest.mark.parametrize("total", [8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("in_use", [0.05, 0.2, 0.4, 0.45])
def test_auto_leaves_a_real_reserve(total: int, in_use: float) -> None:
    memory = SystemMemory(total * GIB, int(total * GIB * (1 - in_use)))

    budget = auto_budget(memory)

    assert 0 < budget <= memory.total // 2
    assert memory.available - budget >= max(memory.total // 4, 4 * GIB) or budget == 64 * MIB
    assert parse_budget("auto", memory) == budget


def test_auto_takes_half_of_an_idle_big_machine() -> None:
    assert auto_budget(SystemMemory(128 * GIB, 120 * GIB)) == 64 * GIB


def test_auto_is_small_but_legal_when_nothing_is_free() -> None:
    assert auto_budget(SystemMemory(8 * GIB, 100 * MIB)) == 64 * MIB


# --- plans ---------------------------------------------------------------------------------------
def _check(plan: ArenaPlan, free: int, layers: Layers, experts: int, quota_min: int) -> None:
    """Assert everything a plan promises."""
    least = min(quota_min, experts)
    quota = grant_quota(plan.smallest_slots, 0, least, experts)
    page = PageLayout(quota, len(layers), experts).nbytes
    assert plan.directory_bytes == DirectoryLayout(len(layers), experts).nbytes
    assert plan.slab_bytes + plan.directory_bytes + page <= free

    assert len(plan.slab_of_layer) == len(layers)
    assert 0 < len(plan.slabs) <= SLABS_MAX

    housed = [layer for slab in plan.slabs for layer in slab.layers]
    assert sorted(housed) == list(range(len(layers)))
    for number, slab in enumerate(plan.slabs):
        assert slab.layers
        for layer in slab.layers:
            assert plan.slab_of_layer[layer] == number
            assert slab.layout.parts == layers[layer]
        slots = slab.layout.slots
        assert slots >= least + RESERVE_SLOTS
        assert slots <= max(len(slab.layers) * experts, least + RESERVE_SLOTS)
        assert slots <= MAX_SLOTS_PER_SLAB
        for part in slab.layout.parts:
            elements = slots * part.nbytes // DTYPE_BYTES[part.dtype]
            assert elements <= PLANE_MAX_ELEMENTS


def _a_plane_can_hold(layers: Layers, experts: int, quota_min: int) -> bool:
    widest = max(p.nbytes // DTYPE_BYTES[p.dtype] for parts in layers for p in parts)
    return (min(quota_min, experts) + RESERVE_SLOTS) * widest <= PLANE_MAX_ELEMENTS


budgets_above_minimum = st.one_of(
    st.integers(0, 1 << 16), st.integers(0, GIB), st.integers(0, 4 * TIB)
)


@given(
    model_layers(),
    st.integers(1, 300),
    st.integers(1, 400),
    budgets_above_minimum,
    st.integers(1, 16),
)
def test_a_plan_with_buffers_directory_and_a_page_never_passes_the_budget(
    layers: Layers, experts: int, quota_min: int, more: int, threads: int
) -> None:
    assume(_a_plane_can_hold(layers, experts, quota_min))
    budget = minimum_budget(layers, experts, quota_min) + more

    buffers = read_buffers(budget, needed_bytes(layers, experts, quota_min), threads)
    free = budget - buffers.nbytes

    assert 1 <= buffers.threads <= threads
    assert buffers.buffer_bytes <= MAX_BUFFER_BYTES
    assert buffers.buffer_bytes % MIN_BUFFER_BYTES == 0
    _check(plan_arena(free, layers, experts, quota_min), free, layers, experts, quota_min)


@given(model_layers(64), st.integers(1, 300), st.integers(1, 16), budgets_above_minimum)
def test_tiny_experts_whose_slots_are_less_than_a_page_fit_too(
    layers: Layers, experts: int, quota_min: int, more: int
) -> None:
    free = needed_bytes(layers, experts, quota_min) + more

    _check(plan_arena(free, layers, experts, quota_min), free, layers, experts, quota_min)


@given(model_layers(), st.integers(1, 300), st.integers(1, 400))
def test_exactly_the_minimum_works_and_one_byte_less_is_refused_with_the_minimum(
    layers: Layers, experts: int, quota_min: int
) -> None:
    assume(_a_plane_can_hold(layers, experts, quota_min))
    minimum = minimum_budget(layers, experts, quota_min)
    need = needed_bytes(layers, experts, quota_min)

    buffers = read_buffers(minimum, need, 8)
    assert (buffers.threads, buffers.nbytes) == (1, MIN_BUFFER_BYTES)
    free = minimum - buffers.nbytes
    _check(plan_arena(free, layers, experts, quota_min), free, layers, experts, quota_min)
    with pytest.raises(BudgetTooSmall, match=f"{need:,} bytes are needed, {free - 1:,} are free"):
        plan_arena(free - 1, layers, experts, quota_min)


def test_a_working_set_beyond_2_to_31_elements_of_a_plane_is_refused_with_the_numbers() -> None:
    wide = (Part("up_proj.weight", "F32", (1 << 15, 1 << 12)),)  # 2^27 elements: 15 fit

    assert plan_arena(TIB, (wide,), 64, 14).smallest_slots == 15
    with pytest.raises(ProtocolError, match="16 experts at once are wanted, a plane holds 15"):
        plan_arena(TIB, (wide,), 64, 15)


@given(model_layers(512), st.integers(1, 64), st.integers(1, 16))
@example(((Part("w", "BF16", (1570, 3053)),),) * 2, 14, 1)
def test_with_memory_to_spare_every_expert_has_a_slot(
    layers: Layers, experts: int, quota_min: int
) -> None:
    plan = plan_arena(1024 * TIB, layers, experts, quota_min)

    for slab in plan.slabs:
        assert slab.layout.slots >= len(slab.layers) * experts


def test_a_big_model_in_a_big_budget_gets_several_slabs_of_about_1_gib() -> None:
    plan = plan_arena(12 * GIB, (BIG_EXPERT,) * 48, 128, 8)

    assert 11 * GIB < plan.slab_bytes <= 12 * GIB
    assert len(plan.slabs) == 12
    assert max(s.layout.nbytes for s in plan.slabs) <= SLAB_MAX_BYTES * 1.01
    assert {len(slab.layers) for slab in plan.slabs} == {4}


def test_a_smaller_budget_still_gets_a_few_slabs_so_that_one_can_be_given_back() -> None:
    plan = plan_arena(1 * GIB, (BIG_EXPERT,) * 48, 128, 8)

    assert len(plan.slabs) == SLABS_WANTED


def test_a_tiny_model_is_one_slab_and_not_larger_than_its_experts() -> None:
    plan = plan_arena(8 * GIB, (SMALL_EXPERT,) * 4, 8, 2)

    assert [slab.layout for slab in plan.slabs] == [SlabLayout(SMALL_EXPERT, 32)]


def test_a_whole_big_model_is_resident_when_it_fits() -> None:
    plan = plan_arena(64 * GIB, (BIG_EXPERT,) * 48, 128, 8)

    assert sum(slab.layout.slots for slab in plan.slabs) == 48 * 128


def test_layers_with_equal_bytes_but_other_names_do_not_share_a_slab() -> None:
    renamed = tuple(Part("other_" + p.name, p.dtype, p.shape) for p in SMALL_EXPERT)

    plan = plan_arena(1 * GIB, (SMALL_EXPERT, renamed, SMALL_EXPERT), 8, 2)

    assert plan.slab_of_layer[0] == plan.slab_of_layer[2] != plan.slab_of_layer[1]


def test_a_share_goes_by_bytes() -> None:
    wide = tuple(Part(p.name, p.dtype, (*p.shape[:-1], p.shape[-1] * 3)) for p in BIG_EXPERT)
    layers = (BIG_EXPERT,) * 12 + (wide,) * 12

    plan = plan_arena(4 * GIB, layers, 128, 8)

    narrow = sum(s.layout.nbytes for s in plan.slabs if s.layout.parts == BIG_EXPERT)
    assert narrow / plan.slab_bytes == pytest.approx(1 / 4, abs=0.02)


# --- quotas ----------------------------------------------------------------------------------------
@given(
    st.integers(1, 5000),
    st.lists(st.tuples(st.integers(1, 200), st.integers(1, 600)), max_size=40),
)
@example(9, [(8, 128)])
def test_the_quotas_of_all_sessions_and_the_reserve_fit_the_slots(
    slots: int, wishes: list[tuple[int, int]]
) -> None:
    granted: list[int] = []
    for quota_min, quota_wanted in wishes:
        quota = grant_quota(slots, sum(granted), quota_min, quota_wanted)
        if quota:
            assert quota_min <= quota <= max(quota_wanted, quota_min)
            granted.append(quota)
        else:
            assert slots - RESERVE_SLOTS - sum(granted) < quota_min

    assert sum(granted) + RESERVE_SLOTS <= max(slots, RESERVE_SLOTS)


def test_several_agents_fit_beside_each_other() -> None:
    granted: list[int] = []
    while quota := grant_quota(800, sum(granted), 8, 128):
        granted.append(quota)

    assert granted[:7] == [100] * 7
    assert sum(granted) <= 799


def test_the_largest_machine_gets_larger_slabs_and_not_more_than_one_message_can_bring() -> None:
    plan = plan_arena(384 * GIB, (BIG_EXPERT,) * 1500, 128, 8)

    assert plan.slab_bytes > 380 * GIB
    assert 100 < len(plan.slabs) <= SLABS_MAX
    assert max(s.layout.nbytes for s in plan.slabs) < 4 * GIB


def test_more_kinds_of_layers_than_slabs_can_be_handed_out_are_refused() -> None:
    layers = tuple((Part(f"p{n}", "U8", (1,)),) for n in range(SLABS_MAX + 1))

    assert len(plan_arena(1 * GIB, layers[:-1], 1, 1).slabs) == SLABS_MAX
    with pytest.raises(ProtocolError, match="252 slabs are needed, 251 are possible"):
        plan_arena(1 * GIB, layers, 1, 1)
