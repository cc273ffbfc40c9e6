"""Planes: shared memory as MLX arrays, without a copy and without a trace afterwards."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from expertd_mlx import planes
from expertd_mlx.planes import CopyView, MapView, map_problem, open_view, shaped
from expertd_protocol.errors import BadConfig, ProtocolError
from expertd_protocol.layout import Part, pack_word
from tests.fake_experts import FakeArena, FakeSlab

PARTS = (
    Part("gate.weight", "U32", (6, 4)),
    Part("gate.scales", "BF16", (6, 1)),
    Part("gate.bias", "F16", (7,)),
    Part("down.scales", "U8", (5, 3)),  # 15 bytes: three rows are no whole number of words
    Part("down.global_scale", "F32", ()),
)
NAMES = [part.name for part in PARTS]
SLOTS = 3


@pytest.fixture
def slab() -> FakeSlab:
    slab = FakeSlab.make(PARTS, SLOTS)
    for slot in range(SLOTS):
        write(slab, slot, seed=slot)
    return slab


def write(slab: FakeSlab, slot: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for i in range(len(PARTS)):
        offset, n = slab.map.layout.row(i, slot)
        slab.writable[offset : offset + n] = rng.integers(0, 120, n, np.uint8)


def arena(slab: FakeSlab, serial: int = 1) -> FakeArena:
    return FakeArena(serial, 1, (slab.map,), (0,), np.zeros((1, 4), np.uint64))


def words(*slots: int) -> np.ndarray:
    return np.array([pack_word(1, 0, slot) for slot in slots], np.uint64)


def raw(array: mx.array) -> bytes:
    return np.array(mx.contiguous(array).reshape(-1).view(mx.uint8)).tobytes()


@pytest.mark.parametrize("view", ["map", "copy"])
def test_each_row_is_the_expert_that_was_asked_for(view: str, slab: FakeSlab) -> None:
    """A36: `global_scale` has no inner shape, and MLX computes with it on a GPU only."""
    opened = open_view(view, arena(slab), [NAMES], quota=2)

    arrays, rows = opened.pinned(0, words(2, 0))
    compact = [raw(a) for a in opened.compact(0, words(2, 0))]

    for i, part in enumerate(PARTS):
        wanted = [slab.map.plane(i)[slot].tobytes() for slot in (2, 0)]
        assert arrays[i].shape[1:] == part.shape
        assert [raw(arrays[i][int(row)]) for row in rows] == wanted
        assert compact[i] == b"".join(wanted)


@pytest.mark.parametrize("view", ["map", "copy"])
def test_the_words_say_which_slab_a_layer_is_in(view: str, slab: FakeSlab) -> None:
    """A layer may move while the worker runs (rule 22)."""
    other = FakeSlab.make(PARTS, SLOTS + 1)
    write(other, 3, seed=33)
    two = FakeArena(1, 1, (slab.map, other.map), (0, 1), np.zeros((2, 4), np.uint64))
    opened = open_view(view, two, [NAMES, NAMES], quota=2)
    moved = np.array([pack_word(1, 1, 3)], np.uint64)

    for layer, pinned, held in (
        (0, words(2), slab.map),
        (0, moved, other.map),
        (1, moved, other.map),
    ):
        arrays, rows = opened.pinned(layer, pinned)
        compact = opened.compact(layer, pinned)
        slot = int(pinned[0] & 0xFF) - 1
        for i in range(len(PARTS)):
            assert raw(arrays[i][int(rows[0])]) == held.plane(i)[slot].tobytes()
            assert raw(compact[i]) == held.plane(i)[slot].tobytes()
    opened.close()


@pytest.mark.parametrize("view", ["map", "copy"])
def test_kernels_only_ever_get_row_contiguous_arrays_B06(view: str, slab: FakeSlab) -> None:
    """A sorted gather on a slice of each row is silently wrong on Metal (ml-explore/mlx#4055)."""
    opened = open_view(view, arena(slab), [NAMES], quota=3)

    for arrays in (opened.pinned(0, words(2, 0))[0], opened.compact(0, words(2, 0))):
        mx.eval(arrays)
        for array, part in zip(arrays, PARTS, strict=True):
            if part.dtype != "BF16":  # numpy has none
                assert np.array(array, copy=False).flags.c_contiguous, part.name
    del arrays, array
    opened.close()


def test_map_sees_what_the_daemon_writes_later_because_nothing_is_copied(slab: FakeSlab) -> None:
    view = MapView(arena(slab), [NAMES])
    arrays, _ = view.pinned(0, words(1))
    before = raw(arrays[0][1])

    write(slab, 1, seed=99)

    assert raw(arrays[0][1]) == slab.map.plane(0)[1].tobytes() != before


def test_the_overlay_goes_before_its_memory_does(slab: FakeSlab) -> None:
    def mapped() -> int:
        with open("/proc/self/maps") as maps:
            return sum("fake-experts" in line for line in maps)

    before = mapped()
    view = MapView(arena(slab), [NAMES])
    (gate, *_), _ = view.pinned(0, words(1))
    assert mapped() == before + 1

    view.close()

    assert mapped() == before
    assert not np.array(gate).any()  # its own zero pages again: reading is harmless


def test_the_map_cannot_be_written_through(slab: FakeSlab) -> None:
    from expertd_mlx.overlay import Overlay

    overlay = Overlay(slab.map.fd, slab.map.layout.nbytes)
    address = np.array(overlay.words, copy=False).ctypes.data
    with open("/proc/self/maps") as maps:
        modes = [line.split()[1] for line in maps if int(line.split("-")[0], 16) == address]

    assert modes == ["r--s"]


def test_views_make_no_array_after_they_are_built_C12(
    slab: FakeSlab, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = [MapView(arena(slab), [NAMES]), CopyView(arena(slab), [NAMES], rows=2)]
    first = [view.pinned(0, words(0, 1))[0] for view in views]
    monkeypatch.setattr(planes, "mx", None)

    for _ in range(3):
        assert all(
            view.pinned(0, words(2, 1))[0] is arrays
            for view, arrays in zip(views, first, strict=True)
        )


def test_parts_are_found_by_name_whatever_their_order(slab: FakeSlab) -> None:
    names = NAMES[::-1]
    for view in (MapView(arena(slab), [names]), CopyView(arena(slab), [names], 1)):
        arrays, rows = view.pinned(0, words(1))
        assert [a.shape[1:] for a in arrays] == [p.shape for p in PARTS[::-1]]
        assert raw(arrays[-1][int(rows[0])]) == slab.map.plane(0)[1].tobytes()


def test_a_slab_with_other_parts_is_refused(slab: FakeSlab) -> None:
    with pytest.raises(ProtocolError, match=r"holds gate\.weight"):
        MapView(arena(slab), [["up.weight"]])


def test_map_works_here_and_auto_takes_it(slab: FakeSlab) -> None:
    assert map_problem() is None
    assert open_view("auto", arena(slab), [NAMES], 2).name == "map"


def test_auto_falls_back_to_copy_and_map_says_why(
    slab: FakeSlab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planes, "map_problem", lambda: "the driver said no")

    assert open_view("auto", arena(slab), [NAMES], 2).name == "copy"
    assert "the driver said no" in caplog.text
    with pytest.raises(BadConfig, match="the driver said no; use copy or auto"):
        open_view("map", arena(slab), [NAMES], 2)
    with pytest.raises(BadConfig, match="'mmap' is not one of auto, map, copy"):
        open_view("mmap", arena(slab), [NAMES], 2)


def test_the_self_test_notices_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that silently copies would show stale experts; that is what the test is for."""

    class Copied(MapView):
        def _planes(self, slab: object) -> list[mx.array]:
            return [mx.array(np.array(a)) for a in super()._planes(slab)]  # type: ignore[arg-type]

    monkeypatch.setattr(planes, "MapView", Copied)

    assert map_problem.__wrapped__() == "a gather over shared memory differs from one over a copy"


@pytest.mark.skipif(mx.metal.is_available(), reason="Metal adopts host memory")
def test_adoption_is_refused_without_metal_and_never_copies(slab: FakeSlab) -> None:
    """The macOS path must raise where it cannot adopt: a silent copy would go stale."""
    with pytest.raises(ValueError, match="without a copy"):
        planes._adopted_planes(slab.map)


def test_shaped_shares_memory() -> None:
    memory = mx.zeros((16,), mx.uint32)
    mx.eval(memory)
    view = shaped(memory, Part("x", "U8", (5,)), 3)
    mx.eval(view)

    np.array(memory, copy=False)[0] = 0x01010101

    assert view[0].tolist() == [1, 1, 1, 1, 0]
