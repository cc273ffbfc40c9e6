"""The bytes of shared memory: directory words, worker pages, slabs and planes.

This is the only module that knows offsets. Every shared entry is one aligned, native 8-byte word
(or a 4-byte hint); never a struct, because anything wider than a word was measured to tear.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd_protocol.errors import ProtocolError

U64 = npt.NDArray[np.uint64]
U32 = npt.NDArray[np.uint32]
U8 = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.intp]

#: Planes start on this boundary: the page size of Apple silicon, a multiple of Linux's.
PLANE_ALIGN_BYTES = 16 * 1024
#: Mappings and shared-memory objects are rounded to the system's page.
PAGE_BYTES = mmap.PAGESIZE

# --- directory words -----------------------------------------------------------------------------
# generation (32 bits) | slab (12 bits) | slot + 1 (20 bits); 0 means "not resident".
SLOT_BITS = 20
SLAB_BITS = 12
MAX_SLOTS_PER_SLAB = (1 << SLOT_BITS) - 1
MAX_SLABS = 1 << SLAB_BITS
GENERATION_MASK = 0xFFFF_FFFF

_SLOT_MASK = np.uint64((1 << SLOT_BITS) - 1)
_SLAB_MASK = np.uint64((1 << SLAB_BITS) - 1)
_SLOT_SHIFT = np.uint64(SLOT_BITS)
_GENERATION_SHIFT = np.uint64(SLOT_BITS + SLAB_BITS)


def pack_word(generation: int, slab: int, slot: int) -> int:
    """Return the directory word of a resident expert."""
    if not (0 <= slot < MAX_SLOTS_PER_SLAB and 0 <= slab < MAX_SLABS):
        raise ValueError(f"slab {slab} or slot {slot} does not fit a directory word")
    return (
        (generation & GENERATION_MASK) << (SLOT_BITS + SLAB_BITS) | slab << SLOT_BITS | (slot + 1)
    )


def unpack_word(word: int) -> tuple[int, int, int]:
    """Return (generation, slab, slot) of one non-zero word."""
    return (
        word >> (SLOT_BITS + SLAB_BITS),
        word >> SLOT_BITS & (MAX_SLABS - 1),
        (word & MAX_SLOTS_PER_SLAB) - 1,
    )


def word_slots(words: U64) -> Ints:
    """Slot of each word, -1 where the word is 0. Shape as `words`."""
    return (words & _SLOT_MASK).astype(np.intp) - 1


def word_slabs(words: U64) -> Ints:
    """Slab of each word. Shape as `words`."""
    return (words >> _SLOT_SHIFT & _SLAB_MASK).astype(np.intp)


def word_generations(words: U64) -> U64:
    """Generation of each word. Shape as `words`."""
    return words >> _GENERATION_SHIFT


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


# --- parts, slabs, planes ------------------------------------------------------------------------
#: Bytes of one element, by the dtype names of the safetensors format that a whole byte count has.
DTYPE_BYTES = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "U8": 1, "I8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One tensor of one expert, for example (gate_proj, scales): name, dtype and shape without E."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class SlabLayout:
    """A slab of `slots` slots: a generation word per slot, then one plane `[slots, *shape]` per part."""

    parts: tuple[Part, ...]
    slots: int

    @cached_property
    def plane_offsets(self) -> tuple[int, ...]:
        """Byte offset of each plane; each is a multiple of `PLANE_ALIGN_BYTES`."""
        offsets, at = [], round_up(self.slots * 8, PLANE_ALIGN_BYTES)
        for part in self.parts:
            offsets.append(at)
            at = round_up(at + self.slots * part.nbytes, PLANE_ALIGN_BYTES)
        return tuple(offsets)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the shared-memory object, whole pages."""
        last = self.plane_offsets[-1] + self.slots * self.parts[-1].nbytes
        return round_up(last, max(PLANE_ALIGN_BYTES, PAGE_BYTES))

    @cached_property
    def expert_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def generations(self, buffer: Any) -> U64:
        """The slot generations, u64[slots], over a mapped slab."""
        return np.frombuffer(buffer, np.uint64, self.slots)

    def row(self, part: int, slot: int) -> tuple[int, int]:
        """(byte offset, bytes) of one part of one slot."""
        n = self.parts[part].nbytes
        return self.plane_offsets[part] + slot * n, n


def slots_that_fit(parts: Sequence[Part], nbytes: int) -> int:
    """Return the most slots whose slab takes at most `nbytes`; 0 when not even one fits."""
    expert_bytes = sum(part.nbytes for part in parts)
    high = min(nbytes // (expert_bytes + 8), MAX_SLOTS_PER_SLAB)
    low = 0
    while low < high:  # rounding makes the size a staircase, still monotonic in slots
        middle = (low + high + 1) // 2
        if SlabLayout(tuple(parts), middle).nbytes <= nbytes:
            low = middle
        else:
            high = middle - 1
    return low


# --- directory -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class DirectoryLayout:
    """`u64[layers][experts]`: where each expert of a model is. The daemon writes, workers read."""

    layers: int
    experts: int

    @property
    def nbytes(self) -> int:
        return round_up(self.layers * self.experts * 8, PAGE_BYTES)

    def words(self, buffer: Any) -> U64:
        """u64[layers, experts] over the mapped directory."""
        n = self.layers * self.experts
        return np.frombuffer(buffer, np.uint64, n).reshape(self.layers, self.experts)


# --- worker page ---------------------------------------------------------------------------------
class Phase(IntEnum):
    """Counters are kept apart: a prefill hit and a decode hit are different news."""

    PREFILL = 0
    DECODE = 1


class Counter(IntEnum):
    """Columns of the worker's counters, `u64[2 phases][len(Counter)]`; they only grow."""

    PASSES = 0
    TOKENS = 1
    LOOKUPS = 2
    HITS = 3
    JOINS = 4
    MISSES = 5
    HIT_BYTES = 6
    MISS_BYTES = 7
    WAIT_NS = 8
    REQUESTS = 9


class Header(IntEnum):
    """Words of the page header, `u64[8]`."""

    #: Highest request number whose reply the worker has pinned or given up (releases grants).
    ACK = 0
    #: Odd while the counters are being written: a reader of an odd or changed version reads again.
    COUNTER_VERSION = 1
    #: Generation checks that failed (pin rule 6); must stay 0.
    MISMATCHES = 2
    #: How often the worker attached again after its daemon went away.
    REATTACHES = 3
    #: Bytes of weights the worker keeps for itself, as reported by MLX.
    RESIDENT_BYTES = 4
    #: How many recordings were asked of this worker. The daemon writes this word and the next.
    RECORDS = 5
    #: 0: the daemon takes no wishes; else 1 + how many of this session it has taken (rule 21).
    WISHES = 6


_HEADER_WORDS = 8


@dataclass(frozen=True)
class PageLayout:
    """One worker's page: it writes, the daemon reads and trusts nothing in it.

    header u64[8] | hazards u64[quota] | counters u64[2][len(Counter)] | uses u32[layers][experts]
    """

    quota: int
    layers: int
    experts: int

    @cached_property
    def _offsets(self) -> tuple[int, int, int, int]:
        hazards = _HEADER_WORDS * 8
        counters = hazards + self.quota * 8
        uses = counters + 2 * len(Counter) * 8
        return hazards, counters, uses, uses + self.layers * self.experts * 4

    @property
    def nbytes(self) -> int:
        return round_up(self._offsets[3], PAGE_BYTES)

    def header(self, buffer: Any) -> U64:
        return np.frombuffer(buffer, np.uint64, _HEADER_WORDS)

    def hazards(self, buffer: Any) -> U64:
        """u64[quota]: the words of the experts this worker may be reading; 0 = unused."""
        return np.frombuffer(buffer, np.uint64, self.quota, self._offsets[0])

    def counters(self, buffer: Any) -> U64:
        """u64[2 phases, len(Counter)]."""
        n = len(Counter)
        return np.frombuffer(buffer, np.uint64, 2 * n, self._offsets[1]).reshape(2, n)

    def uses(self, buffer: Any) -> U32:
        """u32[layers, experts]: the pin that used it last, counted from 1 modulo 2^32; 0 = none."""
        n = self.layers * self.experts
        table = np.frombuffer(buffer, np.uint32, n, self._offsets[2])
        return table.reshape(self.layers, self.experts)


def check_range(name: str, value: int, low: int, high: int) -> int:
    """Return `value`, or raise `ProtocolError` naming the limits when it is outside [low, high)."""
    if not low <= value < high:
        raise ProtocolError(f"{name} is {value}, allowed are {low} to {high - 1}")
    return value
