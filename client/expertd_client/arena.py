"""The arena as one worker sees it: slabs and directory read-only, its own page read-write.

An `Arena` is what one attach mapped. It never changes and never grows: the next attach makes a new
one with the next `serial`, and the old one stays readable until it is closed. The descriptors of
directory and slabs are open for reading only, so the kernel refuses every writable map of them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass

import numpy as np

from expertd_client.source import ModelSource
from expertd_protocol.errors import ProtocolError
from expertd_protocol.layout import (
    MAX_SLABS,
    MAX_SLOTS_PER_SLAB,
    U8,
    U32,
    U64,
    DirectoryLayout,
    PageLayout,
    Part,
    SlabLayout,
    check_range,
)
from expertd_protocol.messages import Attached


class SlabMap:
    """One mapped slab, read-only. `fd` stays open for whoever must map the slab a second time."""

    def __init__(self, layout: SlabLayout, fd: int) -> None:
        self.layout = layout
        self.fd = fd
        self.buffer = mmap.mmap(fd, layout.nbytes, access=mmap.ACCESS_READ)
        self.generations: U64 = layout.generations(self.buffer)

    def plane(self, part: int) -> U8:
        """Return one plane as bytes, u8[slots, part.nbytes]: a read-only view, no copy."""
        layout, n = self.layout, self.layout.parts[part].nbytes
        plane = np.frombuffer(self.buffer, np.uint8, layout.slots * n, layout.plane_offsets[part])
        return plane.reshape(layout.slots, n)

    def __repr__(self) -> str:
        return f"SlabMap(slots={self.layout.slots}, nbytes={self.layout.nbytes})"


@dataclass(frozen=True, eq=False)
class PageView:
    """This worker's own page: the only memory of the arena that it writes."""

    header: U64
    hazards: U64
    counters: U64
    uses: U32


class Arena:
    """Everything that one attach mapped."""

    def __init__(
        self, source: ModelSource, attached: Attached, fds: list[int], *, serial: int, epoch: int
    ) -> None:
        """Map what `attached` describes, and take over `fds`: directory, page, slabs.

        Raises:
            ProtocolError: the reply does not fit the model or the descriptors; `fds` are closed.
        """
        self.serial = serial
        self.epoch = epoch
        self.source = source
        self.quota = attached.quota
        self.budget_bytes = attached.budget_bytes
        self.slab_of_layer = attached.slab_of_layer
        self.slabs: tuple[SlabMap, ...] = ()
        self._fds = list(fds)
        self._maps: list[mmap.mmap] = []
        self._objects = {(info.st_dev, info.st_ino) for info in map(os.fstat, fds)}
        try:
            layouts = _slab_layouts(source, attached)
            directory = DirectoryLayout(len(source.layers), source.experts)
            page = PageLayout(attached.quota, len(source.layers), source.experts)
            if len(fds) != 2 + len(layouts):
                raise ProtocolError(
                    f"the daemon sent {len(fds)} descriptors for a directory, a page "
                    f"and {len(layouts)} slabs"
                )
            for what, fd, nbytes in zip(
                ("directory", "page", *(f"slab {i}" for i in range(len(layouts)))),
                fds,
                (directory.nbytes, page.nbytes, *(layout.nbytes for layout in layouts)),
                strict=True,
            ):
                _check_size(what, fd, nbytes)
            self._maps.append(mmap.mmap(fds[0], directory.nbytes, access=mmap.ACCESS_READ))
            self._maps.append(mmap.mmap(fds[1], page.nbytes))
            self.directory: U64 = directory.words(self._maps[0])
            own = self._maps[1]
            self.page = PageView(
                page.header(own),
                page.hazards(own),
                page.counters(own),
                page.uses(own),
            )
            for layout, fd in zip(layouts, fds[2:], strict=True):
                slab = SlabMap(layout, fd)
                self.slabs += (slab,)
                self._maps.append(slab.buffer)
            if hasattr(mmap, "MADV_DONTFORK"):  # Linux
                for mapped in self._maps:
                    mapped.madvise(mmap.MADV_DONTFORK)
        except (OSError, ValueError, LookupError, MemoryError) as exc:
            self.close()
            raise ProtocolError(f"what the daemon sent cannot be mapped: {exc}") from exc
        except BaseException:
            self.close()
            raise

    @property
    def directory_fd(self) -> int:
        return self._fds[0]

    def first_slot(self, layer: int) -> int | None:
        """Return the slot of expert 0 of a layer whose slab has room for all its experts (rule 20).

        Expert e of the layer then lives in slot `first_slot + e` for as long as this arena does. None
        for a slab that evicts.
        """
        slab, experts = self.slab_of_layer[layer], self.source.experts
        if self.slabs[slab].layout.slots < self.slab_of_layer.count(slab) * experts:
            return None
        return self.slab_of_layer[:layer].count(slab) * experts

    def close_in_child(self) -> None:
        """Let a forked child keep no memory alive: its maps are gone already, its descriptors go now.

        Without this a child that outlives its parent would hold slabs that the daemon has given up
        and counts no more. A view that the child still has must not be touched. Descriptors are
        replaced and not closed: `mmap` objects have duplicates of their own, and close them later.
        """
        nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # the listing's own descriptor is gone by now
                info = os.fstat(fd := int(name))
                if (info.st_dev, info.st_ino) in self._objects:
                    os.dup2(nothing, fd, inheritable=False)
        os.close(nothing)

    def close(self) -> None:
        """Give everything back: arrays, then maps, then descriptors; idempotent and silent.

        A map that someone still views lives until the last view is gone (D16).
        """
        for slab in self.slabs:
            del slab.generations
        self.slabs = ()
        for name in ("directory", "page"):
            self.__dict__.pop(name, None)
        while self._maps:
            with contextlib.suppress(BufferError):
                self._maps.pop().close()
        while self._fds:
            os.close(self._fds.pop())

    def __repr__(self) -> str:
        return (
            f"Arena(serial={self.serial}, epoch={self.epoch}, quota={self.quota}, "
            f"slabs={list(self.slabs)})"
        )


def _slab_layouts(source: ModelSource, attached: Attached) -> list[SlabLayout]:
    """Return the layout of each slab; it follows from the parts of the layers that live in it."""
    if len(attached.slab_of_layer) != len(source.layers):
        raise ProtocolError(
            f"the daemon placed {len(attached.slab_of_layer)} layers, "
            f"the model has {len(source.layers)}"
        )
    check_range("the number of slabs", len(attached.slabs), 1, MAX_SLABS + 1)
    parts_of: dict[int, tuple[Part, ...]] = {}
    for layer, slab in enumerate(attached.slab_of_layer):
        check_range(f"the slab of layer {layer}", slab, 0, len(attached.slabs))
        parts = source.parts[layer]
        if parts_of.setdefault(slab, parts) != parts:
            raise ProtocolError(f"slab {slab} holds layers whose experts have different parts")
    layouts = []
    for i, info in enumerate(attached.slabs):
        if i not in parts_of:
            raise ProtocolError(f"slab {i} holds no layer")
        check_range(f"the slots of slab {i}", info.slots, 1, MAX_SLOTS_PER_SLAB + 1)
        layout = SlabLayout(parts_of[i], info.slots)
        if layout.nbytes != info.nbytes:
            raise ProtocolError(
                f"slab {i} of {info.slots} slots is {layout.nbytes} bytes by its layers, "
                f"the daemon says {info.nbytes}; run the same expertd release on both sides"
            )
        layouts.append(layout)
    return layouts


def _check_size(what: str, fd: int, nbytes: int) -> None:
    """A map beyond the end of its object would end the process with SIGBUS."""
    size = os.fstat(fd).st_size
    if size < nbytes:
        raise ProtocolError(f"the {what} is {size} bytes, its layout needs {nbytes}")
