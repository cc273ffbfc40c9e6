"""Size arithmetic of the one budget: pure functions from bytes to slabs.

Everything counts: slabs rounded to pages, directories, worker pages and read buffers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from expertd_protocol.errors import BadBudget, BudgetTooSmall, ProtocolError
from expertd_protocol.layout import (
    MAX_SLOTS_PER_SLAB,
    DirectoryLayout,
    PageLayout,
    Part,
    SlabLayout,
    slots_that_fit,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

#: Slots that no session may count on, so that one can always be emptied ahead of the next miss.
RESERVE_SLOTS = 1
#: A slab is the unit by which budget will move between models; above this size it is split.
SLAB_MAX_BYTES = 1 * GIB
#: A model gets a few slabs, so that it can give one back, once each is at least this large.
SLAB_USEFUL_BYTES = 64 * MIB
SLABS_WANTED = 4
#: Room for worker pages is planned for this many sessions where the budget allows it.
SESSIONS_PLANNED = 8
#: A model's descriptors go in one message, and Linux takes 253 (SCM_MAX_FD): directory, page, slabs.
SLABS_MAX = 251
#: Above this many slabs they get larger instead.
SLABS_USUAL_MAX = 128
#: A plane of 2^31 words overflows the int index of MLX's CPU kernels (measured: SIGSEGV).
PLANE_MAX_ELEMENTS = (1 << 31) - 1

#: The smallest read buffers that work: one reader thread.
MIN_BUFFER_BYTES = 16 * KIB
MAX_BUFFER_BYTES = 4 * MIB

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


@dataclass(frozen=True)
class SystemMemory:
    """What the machine has, bytes."""

    total: int
    available: int


def auto_budget(memory: SystemMemory) -> int:
    """Return the budget for `auto`, bytes.

    Half of the memory at most, and it leaves a quarter of it (4 GiB at least) of what is available
    now to the workers' own weights and KV, the system and its page cache. Bigger is not better:
    peers lost 30-70 % of their speed by oversizing (mlx-lm#1438, flash-moe).
    """
    reserve = max(memory.total // 4, 4 * GIB)
    return max(min(memory.total // 2, memory.available - reserve), 64 * MIB)


def parse_budget(text: str, memory: SystemMemory) -> int:
    """Return bytes for `auto`, `60%` (of all memory), `24GiB`, `24GB` or plain bytes.

    Raises:
        BadBudget: the text is none of these, or not between 1 byte and the machine's memory.
    """
    text = text.strip()
    if text.lower() == "auto":
        return auto_budget(memory)
    if text.endswith("%"):
        try:
            percent = float(text[:-1])
        except ValueError:
            percent = math.nan
        if not 0 < percent <= 100:
            raise BadBudget(f"budget {text!r} is not a percentage between 0 and 100")
        nbytes = memory.total * percent / 100
    else:
        match = _SIZE.fullmatch(text)
        if not match:
            raise BadBudget(
                f"budget {text!r} is not a size; write auto, 24GiB, 60% or a number of bytes"
            )
        number, unit, binary = match.groups()
        power = " kmgt".index(unit.lower() or " ")
        nbytes = float(number) * (1024 if binary else 1000) ** power
    if not 1 <= nbytes <= memory.total:
        raise BadBudget(
            f"budget {text!r} is {nbytes:,.0f} bytes, this machine has {memory.total:,}; "
            "choose at least 1 and at most that"
        )
    return int(nbytes)


@dataclass(frozen=True)
class ReadBuffers:
    """Bounce buffers of the reader threads of one device."""

    threads: int
    buffer_bytes: int

    @property
    def nbytes(self) -> int:
        return self.threads * self.buffer_bytes


def read_buffers(free_bytes: int, need_bytes: int, threads: int) -> ReadBuffers:
    """Choose buffers: at most 1/16 of the free budget, and never what `need_bytes` must have."""
    spare = max(min(free_bytes // 16, free_bytes - need_bytes), MIN_BUFFER_BYTES)
    threads = max(min(threads, spare // MIN_BUFFER_BYTES), 1)
    each = min(spare // threads // MIN_BUFFER_BYTES * MIN_BUFFER_BYTES, MAX_BUFFER_BYTES)
    return ReadBuffers(threads, max(each, MIN_BUFFER_BYTES))


@dataclass(frozen=True)
class SlabPlan:
    """One slab to make: its layout and the MoE layers that live in it."""

    layout: SlabLayout
    layers: tuple[int, ...]


@dataclass(frozen=True)
class ArenaPlan:
    """The slabs of one model, and which one each layer lives in (one layer, one slab)."""

    slabs: tuple[SlabPlan, ...]
    slab_of_layer: tuple[int, ...]
    directory_bytes: int

    @property
    def slab_bytes(self) -> int:
        return sum(slab.layout.nbytes for slab in self.slabs)

    @property
    def smallest_slots(self) -> int:
        """Slots of the smallest slab: what all quotas and the reserve must fit into."""
        return min(slab.layout.slots for slab in self.slabs)


def _groups(layers: Sequence[tuple[Part, ...]]) -> dict[tuple[Part, ...], list[int]]:
    """Layers by equal parts: only those can share the slots of a slab."""
    groups: dict[tuple[Part, ...], list[int]] = {}
    for layer, parts in enumerate(layers):
        # names matter too: equal bytes of differently named parts are different planes
        groups.setdefault(parts, []).append(layer)
    return groups


def needed_bytes(layers: Sequence[tuple[Part, ...]], experts: int, quota_min: int) -> int:
    """Return the bytes one worker cannot do without: slabs, directory, one page; no read buffers.

    The page is that of the largest quota: rounding may give a small slab more slots than were asked
    for, and the quota grows with them.
    """
    slots = min(quota_min, experts) + RESERVE_SLOTS
    slabs = sum(SlabLayout(parts, slots).nbytes for parts in _groups(layers))
    page = PageLayout(experts, len(layers), experts).nbytes
    return slabs + DirectoryLayout(len(layers), experts).nbytes + page


def minimum_budget(layers: Sequence[tuple[Part, ...]], experts: int, quota_min: int) -> int:
    """Return the smallest budget, bytes, with which one worker can run this model."""
    return needed_bytes(layers, experts, quota_min) + MIN_BUFFER_BYTES


def plan_arena(
    free_bytes: int, layers: Sequence[tuple[Part, ...]], experts: int, quota_min: int
) -> ArenaPlan:
    """Divide `free_bytes` (read buffers already taken off) into the slabs of a model.

    Every group of equal layers gets its share by bytes, never less than one worker needs, and not
    more than all its experts take.

    Raises:
        BudgetTooSmall: `free_bytes` is below `needed_bytes`.
        ProtocolError: `quota_min` experts at once are more than one plane can hold, or there are
            more kinds of layers than slabs can be handed out.
    """
    need = needed_bytes(layers, experts, quota_min)
    if free_bytes < need:
        raise BudgetTooSmall(f"{need:,} bytes are needed, {free_bytes:,} are free")
    groups = _groups(layers)
    directory = DirectoryLayout(len(layers), experts).nbytes
    page = PageLayout(experts, len(layers), experts).nbytes
    pages = min(max(free_bytes // 32, page), SESSIONS_PLANNED * page)
    least = {p: SlabLayout(p, min(quota_min, experts) + RESERVE_SLOTS).nbytes for p in groups}
    spare = max(free_bytes - directory - pages - sum(least.values()), 0)
    total = sum(_all_bytes(parts, n, experts) for parts, n in groups.items())
    slabs: list[SlabPlan] = []
    slab_max = max(SLAB_MAX_BYTES, min(free_bytes, total) // SLABS_USUAL_MAX)
    for parts, members in groups.items():
        share = least[parts] + spare * _all_bytes(parts, members, experts) // total
        slabs += _split(parts, members, share, experts, quota_min, slab_max)
    if len(slabs) > SLABS_MAX:
        raise ProtocolError(f"{len(slabs)} slabs are needed, {SLABS_MAX} are possible")
    slab_of_layer = [0] * len(layers)
    for number, slab in enumerate(slabs):
        for layer in slab.layers:
            slab_of_layer[layer] = number
    return ArenaPlan(tuple(slabs), tuple(slab_of_layer), directory)


def _all_bytes(parts: tuple[Part, ...], members: Sequence[int], experts: int) -> int:
    return sum(part.nbytes for part in parts) * experts * len(members)


def _split(
    parts: tuple[Part, ...],
    members: list[int],
    share: int,
    experts: int,
    quota_min: int,
    slab_max: int,
) -> list[SlabPlan]:
    """Cut one group's share into slabs of about equal size, each with a run of its layers."""
    least = min(quota_min, experts) + RESERVE_SLOTS
    widest = max(math.prod(part.shape) for part in parts)
    most = min(MAX_SLOTS_PER_SLAB, PLANE_MAX_ELEMENTS // widest)
    if most < least:
        raise ProtocolError(
            f"{least} experts at once are wanted, a plane holds {most} parts of {widest:,} elements"
        )
    useful = min(share, _all_bytes(parts, members, experts) + SLAB_USEFUL_BYTES)
    count = -(-useful // slab_max)
    if useful // SLABS_WANTED >= SLAB_USEFUL_BYTES:
        count = max(count, SLABS_WANTED)
    count = max(count, -(-useful // (most * sum(part.nbytes for part in parts))))
    count = max(min(count, len(members)), 1)
    if share >= useful > _all_bytes(parts, members, experts):  # whole layers, and no plane too long
        count = max(count, -(-len(members) // max(most // experts, 1)))
    while count > 1 and slots_that_fit(parts, useful // count) < 4 * least:
        count -= 1
    cuts = [len(members) * i // count for i in range(count + 1)]
    runs = [tuple(members[a:b]) for a, b in itertools.pairwise(cuts)]
    slots = [max(min(len(run) * experts, most), least) for run in runs]  # all experts resident
    if sum(SlabLayout(parts, n).nbytes for n in slots) > share:
        fit = [slots_that_fit(parts, share * len(run) // len(members)) for run in runs]
        slots = [max(min(n, whole), least) for n, whole in zip(fit, slots, strict=True)]
    return [SlabPlan(SlabLayout(parts, n), run) for n, run in zip(slots, runs, strict=True)]


def grant_quota(slots: int, in_use: int, quota_min: int, quota_wanted: int) -> int:
    """Return the quota of one more session, or 0 when even `quota_min` does not fit.

    An eighth of the slots each, so that several agents fit, at least `quota_min`, at most what the
    worker can use; the sum of all quotas and the reserve never exceeds the slots (rule 2).
    """
    free = slots - RESERVE_SLOTS - in_use
    if free < quota_min:
        return 0
    return min(max(slots // 8, quota_min), max(quota_wanted, quota_min), free)
