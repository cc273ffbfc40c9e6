"""Planes: the arena's slabs as MLX arrays, by platform.

`map` computes on the shared memory itself (macOS: adopted as Metal buffers; Linux: an overlay),
`copy` moves the pinned rows into a bank of the worker's own. Both answer the same two questions, so
that the layer above cannot tell them apart: where do I gather from, and at which row is each
expert?

Promises: no array is made after a view was built; every array is referenced by its view until
`close`, because MLX donates an unreferenced buffer and would write into shared memory.
Never asks MLX to wire the arena (`mx.set_wired_limit`): every worker would wire all of it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol

import mlx.core as mx
import numpy as np

from expertd_protocol.errors import BadConfig, ProtocolError
from expertd_protocol.layout import (
    PLANE_ALIGN_BYTES,
    U8,
    U64,
    Ints,
    Part,
    SlabLayout,
    pack_word,
    round_up,
    unpack_word,
    word_slots,
)

if TYPE_CHECKING:
    from expertd_client import Arena, SlabMap

log = logging.getLogger(__name__)

ARENA_VIEWS = ("auto", "map", "copy")

#: What MLX computes with, by the dtype names of the safetensors format.
MX_DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16,
    "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8,
    "I32": mx.int32, "I16": mx.int16, "I8": mx.int8,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in MX_DTYPES.items()}


def shaped(words: mx.array, part: Part, rows: int) -> mx.array:
    """View the first bytes of a uint32 array as `[rows, *part.shape]`, without a copy."""
    flat = words.view(MX_DTYPES[part.dtype])
    n = rows * int(np.prod(part.shape, dtype=np.int64))
    return flat[:n].reshape(rows, *part.shape)


class PlaneView(Protocol):
    """One arena, as MLX sees it."""

    #: `Arena.serial` this view was built for.
    serial: int
    name: str

    def pinned(self, layer: int, words: U64) -> tuple[Sequence[mx.array], Ints]:
        """Return one array per part of the layer, and the row of each word in them."""
        ...

    def compact(self, layer: int, words: U64) -> Sequence[mx.array]:
        """Return one contiguous array per part whose row i is the expert of `words[i]`."""
        ...

    def whole(self, layer: int) -> Sequence[mx.array] | None:
        """Return one array `[experts, ...]` per part when they lie in order in the slab, else None."""
        ...

    def close(self) -> None:
        """Let go of the memory. Everything computed from it has been evaluated."""
        ...


def _slab(words: U64) -> int:
    """The slab that the pinned experts of a layer are in; they are all in one."""
    return unpack_word(int(words[0]))[1]


class _Layers:
    """Which planes of its slab each layer reads, in the layer's own order of parts."""

    def __init__(self, arena: Arena, part_names: Sequence[Sequence[str]]) -> None:
        self.slab_of = arena.slab_of_layer  # at the start: a layer may move (rule 22)
        self.parts: list[list[int]] = []
        for layer, names in enumerate(part_names):
            found = [part.name for part in arena.slabs[self.slab_of[layer]].layout.parts]
            if sorted(found) != sorted(names):
                raise ProtocolError(
                    f"the daemon's slab of MoE layer {layer} holds {', '.join(found)}, "
                    f"the model has {', '.join(names)}; upgrade both to the same expertd release"
                )
            self.parts.append([found.index(name) for name in names])


# --- map -----------------------------------------------------------------------------------------
def _adopted_planes(slab: SlabMap) -> list[mx.array]:
    """Adopt each plane of a mapped slab as a buffer of its own (macOS; not run on macOS yet).

    One buffer per plane and not per slab: the driver wires whole buffers, and a view of a bigger
    buffer is one more thing to keep contiguous. Whole pages, because Metal's rule for
    `bytesNoCopy` asks for them; the slab is rounded up to pages, so the last plane has them too.
    """
    start = np.frombuffer(slab.buffer, np.uint8).ctypes.data
    planes = []
    for part, offset in zip(slab.layout.parts, slab.layout.plane_offsets, strict=True):
        nbytes = round_up(slab.layout.slots * part.nbytes, PLANE_ALIGN_BYTES)
        # From the address, because numpy refuses to export the read-only view by DLPack. The map
        # stays read-only; nothing writes as long as the array is referenced (see the module text).
        memory = (ctypes.c_uint32 * (nbytes // 4)).from_address(start + offset)
        # copy=False or nothing: copy=None would silently copy the slab.
        words = mx.from_dlpack(np.ctypeslib.as_array(memory), copy=False)
        planes.append(shaped(words, part, slab.layout.slots))
    return planes


class MapView:
    """Compute on shared memory in place."""

    name = "map"

    def __init__(self, arena: Arena, part_names: Sequence[Sequence[str]]) -> None:
        self.serial = arena.serial
        self._arena = arena
        self._overlays: list[object] = []
        self._layers = _Layers(arena, part_names)
        self._slabs = [self._planes(slab) for slab in arena.slabs]
        mx.eval(self._slabs)
        #: By layer and slab, made once: the layer above binds them by identity.
        self._arrays: dict[tuple[int, int], tuple[mx.array, ...]] = {}
        #: The layers' own rows of the planes; made once, when a layer is first found complete.
        self._whole: list[Sequence[mx.array] | None] = [None] * len(part_names)

    def _planes(self, slab: SlabMap) -> list[mx.array]:
        if sys.platform == "darwin":
            return _adopted_planes(slab)
        from expertd_mlx.overlay import Overlay

        layout = slab.layout
        overlay = Overlay(slab.fd, layout.nbytes)
        self._overlays.append(overlay)
        planes = []
        for part, offset in zip(layout.parts, layout.plane_offsets, strict=True):
            n = round_up(layout.slots * part.nbytes, 4) // 4
            planes.append(shaped(overlay.words[offset // 4 : offset // 4 + n], part, layout.slots))
        return planes

    def _in_slab(self, layer: int, slab: int) -> tuple[mx.array, ...]:
        arrays = self._arrays.get((layer, slab))
        if arrays is None:
            planes = self._slabs[slab]
            arrays = self._arrays[layer, slab] = tuple(planes[i] for i in self._layers.parts[layer])
        return arrays

    def pinned(self, layer: int, words: U64) -> tuple[Sequence[mx.array], Ints]:
        return self._in_slab(layer, _slab(words)), word_slots(words)

    def whole(self, layer: int) -> Sequence[mx.array] | None:
        if self._whole[layer] is None and (first := self._arena.first_slot(layer)) is not None:
            stop = first + self._arena.directory.shape[1]
            planes = self._in_slab(layer, self._layers.slab_of[layer])
            arrays = tuple(plane[first:stop] for plane in planes)
            mx.eval(arrays)
            self._whole[layer] = arrays
        return self._whole[layer]

    def compact(self, layer: int, words: U64) -> Sequence[mx.array]:
        rows = mx.array(word_slots(words).astype(np.uint32))
        return [mx.take(plane, rows, axis=0) for plane in self._in_slab(layer, _slab(words))]

    def close(self) -> None:
        self._arrays = {}
        self._slabs = []
        self._whole = []
        del self._arena
        for overlay in self._overlays:
            overlay.undo()  # type: ignore[attr-defined]
        self._overlays = []


# --- copy ----------------------------------------------------------------------------------------
class _Bank:
    """Room for `rows` experts of one layout, in memory of the worker's own."""

    def __init__(self, parts: Sequence[Part], rows: int) -> None:
        self.arrays: list[mx.array] = []
        self.bytes: list[U8] = []
        words = [mx.zeros((round_up(rows * p.nbytes, 4) // 4,), mx.uint32) for p in parts]
        mx.eval(words)
        for part, memory in zip(parts, words, strict=True):
            view = np.array(memory, copy=False).view(np.uint8)[: rows * part.nbytes]
            self.bytes.append(view.reshape(rows, part.nbytes))
            self.arrays.append(shaped(memory, part, rows))
        mx.eval(self.arrays)
        self._memory = words


class CopyView:
    """Copy the pinned rows into a bank, and compute on the bank.

    The bank is rewritten by the next pin only, and what was computed from it is evaluated before
    that.
    """

    name = "copy"

    def __init__(self, arena: Arena, part_names: Sequence[Sequence[str]], rows: int) -> None:
        self.serial = arena.serial
        self.rows = rows
        self._arena = arena
        self._layers = _Layers(arena, part_names)
        layouts = {slab.layout.parts for slab in arena.slabs}
        self._banks = {parts: _Bank(parts, rows) for parts in layouts}
        self._arrays_of_layer = [
            tuple(self._bank(layer).arrays[i] for i in parts)
            for layer, parts in enumerate(self._layers.parts)
        ]

    def _bank(self, layer: int) -> _Bank:
        return self._banks[self._arena.slabs[self._layers.slab_of[layer]].layout.parts]

    def _fill(self, layer: int, words: U64) -> int:
        slab = self._arena.slabs[_slab(words)]
        slots = word_slots(words)
        for i, rows in enumerate(self._bank(layer).bytes):
            # mode="clip" lets numpy write straight into `out`; the slots are in range by rule 1.
            np.take(slab.plane(i), slots, axis=0, out=rows[: len(slots)], mode="clip")
        return len(slots)

    def pinned(self, layer: int, words: U64) -> tuple[Sequence[mx.array], Ints]:
        n = self._fill(layer, words)
        return self._arrays_of_layer[layer], np.arange(n, dtype=np.intp)

    def compact(self, layer: int, words: U64) -> Sequence[mx.array]:
        n = self._fill(layer, words)
        return [array[:n] for array in self._arrays_of_layer[layer]]  # leading rows: contiguous

    def whole(self, layer: int) -> Sequence[mx.array] | None:
        return None  # its bank is smaller than the layer, and rewritten by the next pin

    def close(self) -> None:
        self._arrays_of_layer = []
        self._banks = {}
        del self._arena


# --- choice --------------------------------------------------------------------------------------
def open_view(
    kind: str, arena: Arena, part_names: Sequence[Sequence[str]], quota: int
) -> PlaneView:
    """Build the view that `--arena-view` asks for; `auto` is `map` where that works here."""
    if kind not in ARENA_VIEWS:
        raise BadConfig(f"arena view {kind!r} is not one of {', '.join(ARENA_VIEWS)}")
    problem = map_problem() if kind != "copy" else "copy was asked for"
    if problem is None:
        return MapView(arena, part_names)
    if kind == "map":
        raise BadConfig(f"arena view map does not work here: {problem}; use copy or auto")
    if kind == "auto":
        log.warning("arena view falls back to copy: %s", problem)
    return CopyView(arena, part_names, quota)


class _Sample:
    """A private slab of four slots with known bytes, for the self-test; duck-typed `SlabMap`."""

    def __init__(self) -> None:
        parts = (Part("w", "U32", (8, 8)), Part("s", "F32", (8, 1)), Part("b", "F32", (8, 1)))
        self.layout = SlabLayout(parts, 4)
        if sys.platform == "darwin":
            self.fd = -1
            self.buffer = mmap.mmap(-1, self.layout.nbytes)
        else:
            self.fd = os.memfd_create("expertd-self-test")
            os.ftruncate(self.fd, self.layout.nbytes)
            self.buffer = mmap.mmap(self.fd, self.layout.nbytes)
        self.fill(1)

    def fill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for i, part in enumerate(self.layout.parts):
            data = rng.integers(0, 1 << 32, (4, 8, 8), np.uint64).astype(np.uint32)
            row = data if part.dtype == "U32" else rng.random((4, 8, 1), np.float32)
            offset, n = self.layout.row(i, 0)
            self.buffer[offset : offset + 4 * n] = row.tobytes()

    def plane(self, part: int) -> U8:
        offset, n = self.layout.row(part, 0)
        return np.frombuffer(self.buffer, np.uint8, 4 * n, offset).reshape(4, n)

    def product(self, planes: Sequence[mx.array]) -> mx.array:
        x = mx.arange(64, dtype=mx.float32).reshape(1, 1, 64)
        ids = mx.array([3, 1, 2], mx.uint32)
        w, scales, biases = planes
        return mx.gather_qmm(
            x, w, scales, biases, rhs_indices=ids, transpose=True, group_size=64, bits=4
        )


class _SampleArena:
    serial, slab_of_layer = 0, (0,)

    def __init__(self, sample: _Sample) -> None:
        self.slabs = (sample,)


@cache
def map_problem() -> str | None:
    """Say why `map` cannot be used here, or None: a tiny gather must equal one on a copy, twice."""
    sample = _Sample()
    try:
        view = MapView(_SampleArena(sample), [["w", "s", "b"]])  # type: ignore[arg-type]
    except Exception as exc:  # whatever the driver or MLX says, `copy` still works
        return f"{type(exc).__name__}: {exc}"
    planes, _ = view.pinned(0, np.array([pack_word(1, 0, 0)], np.uint64))
    for seed in (1, 2):  # the second time: does the array see what the daemon writes later?
        sample.fill(seed)
        own = [
            shaped(mx.array(sample.plane(i).reshape(-1).view(np.uint32)), part, 4)
            for i, part in enumerate(sample.layout.parts)
        ]
        if not mx.array_equal(sample.product(planes), sample.product(own)):
            return "a gather over shared memory differs from one over a copy"
    del planes
    view.close()
    if sample.fd >= 0:
        os.close(sample.fd)
    return None
