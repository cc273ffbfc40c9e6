"""An in-process stand-in for `expertd_client.Client`: the same methods over an arena of its own.

It holds fewer slots than experts and is as unkind as the rules allow: a slot that is given back can be
poisoned at once, so that anything evaluated after its pin is gone reads NaN and not luck.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from expertd_client import ModelSource, SlabMap
from expertd_protocol.layout import U64, Ints, Part, Phase, SlabLayout, pack_word, unpack_word
from expertd_protocol.messages import Record


def _tensor_bytes(folder: Path) -> dict[str, tuple[Path, int, int]]:
    """Return (file, offset, bytes) of every tensor."""
    found = {}
    for file in sorted(folder.glob("model*.safetensors")):
        with file.open("rb") as f:
            n = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(n))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = (file, 8 + n + begin, end - begin)
    return found


@dataclass
class FakeSlab:
    """A slab and its writer's side."""

    map: SlabMap
    writable: npt.NDArray[np.uint8]
    owner: list[tuple[int, int] | None]
    used: list[int]

    @classmethod
    def make(cls, parts: tuple[Part, ...], slots: int) -> FakeSlab:
        import mmap

        layout = SlabLayout(parts, slots)
        fd = os.memfd_create("fake-experts")
        os.ftruncate(fd, layout.nbytes)
        writable = np.frombuffer(mmap.mmap(fd, layout.nbytes), np.uint8)
        slab = cls(SlabMap(layout, fd), writable, [None] * slots, [0] * slots)
        for slot in range(slots):
            slab.poison(slot)
        return slab

    def poison(self, slot: int) -> None:
        """0xFF everywhere: NaN as a float, and the highest code of every quantised format."""
        for part in range(len(self.map.layout.parts)):
            offset, n = self.map.layout.row(part, slot)
            self.writable[offset : offset + n] = 0xFF

    def bump(self, slot: int) -> int:
        generations = self.writable[: 8 * self.map.layout.slots].view(np.uint64)
        generations[slot] += np.uint64(1)
        return int(generations[slot])


@dataclass
class FakeArena:
    serial: int
    epoch: int
    slabs: tuple[SlabMap, ...]
    slab_of_layer: tuple[int, ...]
    directory: U64


@dataclass
class FakeExperts:
    """`slots` per slab; layers of equal experts share a slab."""

    slots: int
    quota: int
    #: Evict and poison every slot the moment its pin ends.
    hostile: bool = False
    #: Numbers of `pin` calls (from 1) whose first slot is reused by someone else right afterwards.
    reused_after_pin: set[int] = field(default_factory=set)
    #: Numbers of `pin` calls before which the daemon is replaced, and the quota the new one grants.
    restart_before_pin: dict[int, int] = field(default_factory=dict)

    #: What the daemon was asked to have recorded.
    wanted: list[Record] = field(default_factory=list)

    #: Whether wishes are taken, and those that came.
    reads_ahead: bool = False
    wishes: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    pins: int = 0
    pinned_experts: list[tuple[int, tuple[int, ...], Phase]] = field(default_factory=list)
    passes: list[tuple[int, Phase]] = field(default_factory=list)
    mismatches: int = 0
    misses: int = 0
    resident_bytes: int = -1
    closed: bool = False
    quota_min: int = 0
    quota_wanted: int = 0

    def attach(self, source: ModelSource, *, quota_min: int, quota_wanted: int) -> FakeArena:
        self.source = source
        self.quota_min, self.quota_wanted = quota_min, quota_wanted
        self._tensors = _tensor_bytes(source.path)
        self._clock = 0
        self._held: list[tuple[int, int, int]] = []  # slab, slot, generation
        self.old_arenas = 0
        self._build(serial=1)
        return self.arena

    def _build(self, serial: int) -> None:
        layouts: dict[tuple[Part, ...], int] = {}
        slab_of_layer = tuple(
            layouts.setdefault(parts, len(layouts)) for parts in self.source.parts
        )
        self._slabs = [FakeSlab.make(parts, self.slots) for parts in layouts]
        directory = np.zeros((len(self.source.layers), self.source.experts), np.uint64)
        maps = tuple(slab.map for slab in self._slabs)
        self.arena = FakeArena(serial, serial, maps, slab_of_layer, directory)

    def resident(self, layer: int) -> npt.NDArray[np.bool_]:
        return self.arena.directory[layer] != 0

    def is_whole(self, layer: int) -> bool:
        return False

    def pin(self, layer: int, experts: Ints, phase: Phase) -> U64:
        self.pins += 1
        assert 0 < len(experts) <= self.quota
        assert len(set(experts.tolist())) == len(experts)
        if (quota := self.restart_before_pin.get(self.pins)) is not None:
            self.restart(quota)
            experts = experts[: self.quota]
        self.pinned_experts.append((layer, tuple(experts.tolist()), phase))
        index = self.arena.slab_of_layer[layer]
        slab = self._slabs[index]
        words = np.zeros(len(experts), np.uint64)
        for resident_first in (True, False):
            for i, expert in enumerate(experts.tolist()):
                word = int(self.arena.directory[layer, expert])
                if bool(word) == resident_first and not words[i]:
                    words[i] = word = word or self._fill(layer, expert, index, slab)
                    generation, _, slot = unpack_word(word)
                    self._held.append((index, slot, generation))
                    self._clock += 1
                    slab.used[slot] = self._clock
        if self.pins in self.reused_after_pin:
            self._reuse(index, unpack_word(int(words[0]))[2])
        return words

    def _fill(self, layer: int, expert: int, index: int, slab: FakeSlab) -> int:
        self.misses += 1
        held = {slot for i, slot, _ in self._held if i == index}
        slot = min((s for s in range(self.slots) if s not in held), key=slab.used.__getitem__)
        self._evict(slab, slot)
        generation = slab.bump(slot)
        for i, part in enumerate(self.source.layers[layer].parts):
            file, begin, nbytes = self._tensors[part.tensor]
            offset, n = slab.map.layout.row(i, slot)
            assert n * self.source.experts == nbytes
            with file.open("rb") as f:
                f.seek(begin + expert * n)
                slab.writable[offset : offset + n] = np.frombuffer(f.read(n), np.uint8)
        word = pack_word(generation, index, slot)
        self.arena.directory[layer, expert] = word
        slab.owner[slot] = (layer, expert)
        return word

    def _evict(self, slab: FakeSlab, slot: int) -> None:
        if (owner := slab.owner[slot]) is not None:
            self.arena.directory[owner] = 0
            slab.owner[slot] = None
        slab.poison(slot)

    def _reuse(self, index: int, slot: int) -> None:
        """Break rule 4 on purpose."""
        self._evict(self._slabs[index], slot)
        self._slabs[index].bump(slot)

    def takes_wishes(self) -> bool:
        return self.reads_ahead

    def wish(self, layer: int, experts: Ints) -> None:
        self.wishes.append((layer, tuple(sorted(set(experts.tolist())))))

    def verify(self) -> bool:
        fresh = all(
            int(self.arena.slabs[i].generations[slot]) == generation
            for i, slot, generation in self._held
        )
        self.mismatches += not fresh
        return fresh

    def unpin(self) -> None:
        if self.hostile:
            for i, slot, _ in self._held:
                self._evict(self._slabs[i], slot)
        self._held.clear()

    def begin_pass(self) -> None:
        assert not self._held

    def records(self) -> list[Record]:
        wanted, self.wanted = self.wanted, []
        return wanted

    def end_pass(self, tokens: int, phase: Phase, hits: int = 0, hit_bytes: int = 0) -> None:
        assert not self._held
        self.passes.append((tokens, phase))

    def restart(self, quota: int) -> None:
        """A new daemon: another arena, cold; the old one stays mapped but is worthless."""
        assert not self._held, "nothing may be pinned in two arenas"
        for slab in self._slabs:
            for slot in range(self.slots):
                slab.poison(slot)
        self.quota = quota
        self.old_arenas += 1
        self._build(self.arena.serial + 1)

    def drop_old_arenas(self) -> None:
        self.old_arenas = 0

    def report_resident_bytes(self, n: int) -> None:
        self.resident_bytes = n

    def close(self) -> None:
        self.closed = True
