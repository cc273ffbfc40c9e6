"""The arena of one model: real shared memory, the right rows, and nothing left afterwards."""

from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest

from expertd.cache import arena as arena_module
from expertd.cache.arena import Arena
from expertd.cache.budget import GIB, SlabPlan, plan_arena
from expertd.cache.shm import SharedMemory, create
from expertd_protocol.errors import OutOfMemory
from expertd_protocol.layout import DirectoryLayout, Part, SlabLayout

NARROW = (Part("up.weight", "U32", (4, 8)), Part("up.scales", "BF16", (4, 1)))
WIDE = (Part("up.weight", "U32", (4, 16)), Part("up.scales", "BF16", (4, 2)))
LAYERS, EXPERTS = 4, 8


@pytest.fixture
def plan() -> arena_module.ArenaPlan:
    return plan_arena(GIB, (NARROW, WIDE, NARROW, WIDE), EXPERTS, 2)


def _fds() -> set[int]:
    open_now = set()
    for fd in range(256):
        try:
            os.fstat(fd)
        except OSError:
            continue
        open_now.add(fd)
    return open_now


def test_the_planned_bytes_are_the_bytes_that_exist(plan: arena_module.ArenaPlan) -> None:
    """C03: rounding to pages and alignment of planes are planned, too."""
    arena = Arena(plan, LAYERS, EXPERTS)

    sizes = [os.fstat(fd).st_size for fd in arena.share_fds()]
    assert sizes == [plan.directory_bytes, *(slab.layout.nbytes for slab in plan.slabs)]
    assert sum(sizes) == arena.nbytes == plan.slab_bytes + plan.directory_bytes
    arena.close()


def test_nothing_is_resident_in_a_new_arena(plan: arena_module.ArenaPlan) -> None:
    arena = Arena(plan, LAYERS, EXPERTS)

    assert arena.directory.shape == (LAYERS, EXPERTS)
    assert not arena.directory.any()
    for slab in arena.slabs:
        slab.table.check()
        assert (slab.table.generations == 1).all()
        assert len(slab.table) == slab.layout.slots == slab.info.slots
        assert slab.info.nbytes == slab.layout.nbytes
    arena.close()


def test_a_worker_finds_in_the_planes_what_was_read_into_a_slot(
    plan: arena_module.ArenaPlan,
) -> None:
    arena = Arena(plan, LAYERS, EXPERTS)
    slab = arena.slabs[1]
    weight, scales = slab.destinations(3)
    weight[:] = bytes(range(len(weight)))
    scales[:] = b"s" * len(scales)
    del weight, scales

    layout = slab.layout
    view = mmap.mmap(arena.share_fds()[2], layout.nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
    shape = (layout.slots, *layout.parts[0].shape)
    plane = np.frombuffer(view, np.uint32, int(np.prod(shape)), layout.plane_offsets[0])
    plane = plane.reshape(shape)

    assert plane[3].tobytes() == bytes(range(layout.parts[0].nbytes))
    assert not plane[2].any()
    assert not plane[4].any()
    assert view[layout.row(1, 3)[0] :][: layout.parts[1].nbytes] == b"s" * layout.parts[1].nbytes
    del plane
    view.close()
    arena.close()


def test_poison_reaches_all_of_one_slot_and_nothing_else_B02(
    plan: arena_module.ArenaPlan,
) -> None:
    arena = Arena(plan, LAYERS, EXPERTS)
    slab = arena.slabs[0]
    slab.poison(2)

    for slot in range(slab.layout.slots):
        expected = b"\xff" if slot == 2 else b"\0"
        for row in slab.destinations(slot):
            assert bytes(row) == expected * len(row)
            row.release()
    arena.close()


def test_closing_gives_every_descriptor_back(plan: arena_module.ArenaPlan) -> None:
    gc.collect()  # what other tests left behind must not go in between
    before = _fds()
    arena = Arena(plan, LAYERS, EXPERTS)
    assert _fds() - before

    arena.close()

    assert _fds() == before


def test_an_arena_that_does_not_fit_leaves_nothing_behind_C07(
    plan: arena_module.ArenaPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _fds()
    made: list[int] = []

    def create_until_full(nbytes: int) -> SharedMemory:
        if len(made) == 2:
            raise OutOfMemory("the system has none left")
        made.append(nbytes)
        return create(nbytes)

    monkeypatch.setattr(arena_module, "create", create_until_full)

    with pytest.raises(OutOfMemory):
        Arena(plan, LAYERS, EXPERTS)

    assert len(made) == 2
    assert _fds() == before


def test_a_slab_knows_its_layers(plan: arena_module.ArenaPlan) -> None:
    arena = Arena(plan, LAYERS, EXPERTS)

    assert [slab.layers for slab in arena.slabs] == [(0, 2), (1, 3)]
    assert plan.slabs[0] == SlabPlan(SlabLayout(NARROW, 2 * EXPERTS), (0, 2))
    assert plan.directory_bytes == DirectoryLayout(LAYERS, EXPERTS).nbytes
    arena.close()
