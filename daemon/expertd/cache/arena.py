"""The arena of one model: its slabs and its directory as shared memory, and the tables over them.

Owns the mappings; hands out destinations for reads and descriptors for workers. One layer lives in one
slab, so that a layer is one gather per projection; planes, not records, because Metal's sorted kernel
copies a strided view whole.
"""

from __future__ import annotations

from expertd.cache.budget import ArenaPlan, SlabPlan
from expertd.cache.shm import SharedMemory, create
from expertd.cache.table import SlotTable
from expertd_protocol.layout import U64, DirectoryLayout, SlabLayout
from expertd_protocol.messages import SlabInfo


class Slab:
    """Equal slots of one expert layout, one plane per part."""

    def __init__(self, number: int, plan: SlabPlan, memory: SharedMemory) -> None:
        self.layout: SlabLayout = plan.layout
        self.layers = plan.layers
        self.memory = memory
        self.table = SlotTable(number, self.layout.generations(memory.buffer))
        self._planes = [self.layout.row(part, 0) for part in range(len(self.layout.parts))]
        # generations start at 1: an all-zero page never names a slot by accident
        self.table.generations[:] = 1

    def destinations(self, slot: int) -> tuple[memoryview, ...]:
        """Where each part of a slot's expert is written."""
        view = memoryview(self.memory.buffer)
        return tuple([view[at + slot * n : at + slot * n + n] for at, n in self._planes])

    def poison(self, slot: int) -> None:
        """Fill a slot with 0xFF: NaN in every float type, so that a use after free shows (B02)."""
        for row in self.destinations(slot):
            row[:] = b"\xff" * len(row)

    @property
    def info(self) -> SlabInfo:
        return SlabInfo(slots=self.layout.slots, nbytes=self.layout.nbytes)


class Arena:
    """All shared memory of one model."""

    def __init__(self, plan: ArenaPlan, layers: int, experts: int) -> None:
        """Allocate it all. Takes about 0.3 s per GiB (the pages are really made): call it in a thread.

        Raises:
            OutOfMemory: the system has less than the plan; nothing is left behind.
        """
        self.plan = plan
        layout = DirectoryLayout(layers, experts)
        self._directory = create(layout.nbytes)
        self.directory: U64 = layout.words(self._directory.buffer)
        self.slabs: list[Slab] = []
        try:
            for number, slab in enumerate(plan.slabs):
                self.slabs.append(Slab(number, slab, create(slab.layout.nbytes)))
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return self._directory.nbytes + sum(slab.memory.nbytes for slab in self.slabs)

    def share_fds(self) -> list[int]:
        """Directory first, then every slab, all read-only."""
        return [self._directory.share_fd, *(slab.memory.share_fd for slab in self.slabs)]

    def close(self) -> None:
        """Give the memory back; workers that still map it keep it until they unmap."""
        del self.directory
        for slab in self.slabs:
            del slab.table.generations
            slab.memory.close()
        self.slabs.clear()
        self._directory.close()
