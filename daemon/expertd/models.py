"""The models in the arena: opened once, shared by their sessions, closed when another needs the room.

Joins what `cache/` and `store/` do not know of each other: an order of the cache becomes a read of the
store, and its end becomes a published word. Everything here runs in the event loop's thread, except
what may block: headers are read, and memory is allocated and freed, in threads of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from expertd.cache.arena import Arena
from expertd.cache.budget import (
    ArenaPlan,
    ReadBuffers,
    grant_quota,
    minimum_budget,
    needed_bytes,
    plan_arena,
    read_buffers,
)
from expertd.cache.eviction import NextUse
from expertd.cache.experts import ExpertCache
from expertd.cache.ledger import Ledger
from expertd.cache.requests import FillOrder
from expertd.latency import LatencyHistogram
from expertd.sessions import Session
from expertd.store.index import ExpertIndex, ModelIndex, build_index
from expertd.store.plan import Fill, Piece, Priority
from expertd.store.platform import Source, open_source
from expertd.store.reader import Reader
from expertd.store.tuning import USUAL_THREADS, Tuning, state_file, tuned
from expertd.thread import in_thread
from expertd_protocol.errors import (
    BudgetExhausted,
    BudgetTooSmall,
    Draining,
    ExpertdError,
    ModelChanged,
    ProtocolError,
)
from expertd_protocol.fence import fence
from expertd_protocol.ids import ExpertKey
from expertd_protocol.layout import Part, Phase
from expertd_protocol.messages import Attach, LayerSource
from expertd_protocol.stats import Counters, Prefetched

log = logging.getLogger(__name__)

#: A model that nobody uses may still be read from; how long the next one waits for these reads.
REST_SECONDS = 5.0

ReadWish = Literal["auto", "direct", "buffered"]
#: The end of a read, and why it failed.
Ended = tuple[FillOrder, ExpertdError | None]
_PRIORITY = {
    Phase.DECODE: Priority.DEMAND,
    Phase.PREFILL: Priority.PREFILL,
    None: Priority.PREFETCH,
}


@dataclass(frozen=True)
class ModelOptions:
    """What of the configuration a model needs."""

    read_mode: ReadWish
    #: Readers of each device; None: measured.
    threads: int | None
    grace_seconds: float
    max_in_flight: int
    poison_free_slots: bool


@dataclass(frozen=True)
class Totals:
    """What a model has counted, without its sessions that still live."""

    prefill: Counters = field(default_factory=Counters)
    decode: Counters = field(default_factory=Counters)
    evictions: int = 0
    device_reads: int = 0
    device_read_bytes: int = 0
    saved_reads: int = 0
    saved_bytes: int = 0
    read_errors: int = 0
    prefetch: Prefetched = field(default_factory=Prefetched)

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )


class Model:
    """One model folder with its slabs, its cache and its counters."""

    def __init__(
        self,
        index: ExpertIndex,
        sources: Sequence[Source],
        layers: tuple[LayerSource, ...],
        arena: Arena,
        options: ModelOptions,
    ) -> None:
        self.path: Path = index.index.folder
        self.index = index
        self.sources = tuple(sources)
        self.layers = layers
        self.arena = arena
        self.stale: ModelChanged | None = None
        self.read_errors = 0
        self.latency = LatencyHistogram()
        #: Counters of sessions that are gone.
        self.gone = (Counters(), Counters())
        self.sessions: list[Session] = []
        #: Reads on their way.
        self.reading: dict[ExpertKey, Fill] = {}
        self.cache = ExpertCache(
            arena.directory,
            [slab.table for slab in arena.slabs],
            arena.plan.slab_of_layer,
            NextUse(len(layers), index.experts),
            fence,
            grace_seconds=options.grace_seconds,
            max_in_flight=options.max_in_flight,
            clean=self._poison if options.poison_free_slots else None,
        )

    def _poison(self, slab: int, slot: int) -> None:
        self.arena.slabs[slab].poison(slot)

    @property
    def quotas(self) -> int:
        """Sum of what the sessions may hold; sessions without a connection count until they are dead."""
        return sum(s.page.layout.quota for s in self.sessions if s.page is not None)

    @property
    def totals(self) -> Totals:
        saved = self.cache.tally.saved_reads
        expert_bytes = [self.index.expert_bytes(layer) for layer in range(len(saved))]
        early = self.cache.prefetch
        return Totals(
            *self.gone,
            evictions=self.cache.tally.evictions,
            device_reads=sum(source.reads for source in self.sources),
            device_read_bytes=sum(source.read_bytes for source in self.sources),
            saved_reads=int(saved.sum()),
            saved_bytes=int(saved @ expert_bytes),
            read_errors=self.read_errors,
            prefetch=Prefetched(
                prefetched=int(early.ordered.sum()),
                prefetched_bytes=int(early.ordered @ expert_bytes),
                useful=early.useful,
                late=early.late,
                wasted=early.wasted,
            ),
        )

    def fill(self, order: FillOrder) -> Fill:
        """Turn an order of the cache into the reads of its parts."""
        slab = self.arena.slabs[order.slab]
        ranges = self.index.ranges(order.key.layer, order.key.expert)
        pieces = tuple(
            [
                Piece(self.sources[shard], offset, destination)
                for (shard, offset, _), destination in zip(
                    ranges, slab.destinations(order.slot), strict=True
                )
            ]
        )
        slot = (order.slab, order.slot)
        return Fill(order.key, slot, pieces, _PRIORITY[order.phase], order.session)

    def close(self) -> None:
        """Give memory and files back. No read may be in flight and no session attached."""
        assert not self.sessions
        del self.cache
        self.arena.close()
        for source in self.sources:
            source.close()


class Models:
    """The registry, and the reader threads of each device."""

    def __init__(
        self,
        ledger: Ledger,
        options: ModelOptions,
        loop: asyncio.AbstractEventLoop,
        on_done: Callable[[Model, Sequence[Ended]], None],
    ) -> None:
        self.by_path: dict[Path, Model] = {}
        #: What models counted that are closed: counters of the daemon only grow.
        self.closed = Totals()
        self.closed_latency = LatencyHistogram()
        self._ledger = ledger
        self._options = options
        self._loop = loop
        self._on_done = on_done
        self._readers: dict[int, Reader] = {}
        #: Fills in flight, by identity; a `Fill` holds memoryviews and cannot be hashed.
        self._in_flight: dict[int, tuple[Model, FillOrder, Fill]] = {}
        #: What the reader threads have finished and the loop has not taken yet.
        self._finished: deque[tuple[Fill, ExpertdError | None]] = deque()
        self._opening = asyncio.Lock()

    @property
    def queue_depth(self) -> int:
        return sum(reader.queue_depth for reader in self._readers.values())

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    async def inspect(self, path: Path) -> ModelIndex:
        """Read and check the headers of a folder, in a thread: a sleeping disk stops nobody else."""
        return await in_thread(lambda: build_index(path))

    async def open(self, request: Attach) -> Model:
        """Return the model of `request`, opened now or before.

        Raises:
            ModelError: the folder is not sound, or not what the worker says it streams.
            BudgetTooSmall: not even one worker fits the whole budget.
            BudgetExhausted: other models hold what is missing.
        """
        # outside of the lock: a disk that hangs keeps only those waiting who want something from it
        index = await self.inspect(Path(request.path))
        async with self._opening:
            known = self.by_path.get(index.folder)
            if known is not None and self._usable(known, index, request):
                return known
            if known is not None and not await self._close(known):
                raise ModelChanged(
                    f"{known.path} is still being read as it was before; attach again when these "
                    "reads have ended, or restart expertd if its disk hangs"
                )
            experts = ExpertIndex(index, request.layers, request.experts)
            return await self._open(experts, request)

    def _usable(self, known: Model, index: ModelIndex, request: Attach) -> bool:
        changed = known.stale is not None or known.index.index.shards != index.shards
        if changed and known.sessions:
            raise known.stale or ModelChanged(
                f"{known.path} was changed while {len(known.sessions)} sessions use its old files; "
                "end them, then attach again"
            )
        if changed:
            return False
        same = known.layers == request.layers and known.index.experts == request.experts
        if not same and known.sessions:
            raise ProtocolError(
                f"{known.path} is in use with another list of expert tensors; are all workers "
                "of the same expertd and mlx-lm version?"
            )
        return same

    async def _open(self, experts: ExpertIndex, request: Attach) -> Model:
        layers = [experts.parts(layer) for layer in range(len(request.layers))]
        self._check_budget(experts, layers, request.quota_min)
        for idle in [m for m in self.by_path.values() if not m.sessions]:
            if await self._close(idle):
                log.info("model_closed path=%s reason=room_for_another", idle.path)
        plan, new_buffers = self._plan(experts, layers, request.quota_min)
        self._ledger.take("directory", plan.directory_bytes, "the directory")
        self._ledger.take("slab", plan.slab_bytes, "the slabs")
        devices = self._new_devices(experts)
        planned_bytes = new_buffers.nbytes * len(devices)
        self._ledger.take("read_buffer", planned_bytes, "the read buffers of one more device")
        try:
            arena = await in_thread(lambda: Arena(plan, len(layers), request.experts))
            try:
                sources, ways = await in_thread(
                    lambda: self._open_sources(experts, devices, new_buffers)
                )
            except BaseException:
                arena.close()
                raise
        except BaseException:
            self._ledger.give("directory", plan.directory_bytes)
            self._ledger.give("slab", plan.slab_bytes)
            self._ledger.give("read_buffer", planned_bytes)
            raise
        size = new_buffers.buffer_bytes
        used = {device: ReadBuffers(way.threads, size) for device, way in ways.items()}
        self._ledger.give("read_buffer", planned_bytes - sum(b.nbytes for b in used.values()))
        for device, buffers in used.items():
            self._start_reader(device, buffers, ways[device].straight)
        model = Model(experts, sources, request.layers, arena, self._options)
        self.by_path[model.path] = model
        log.info(
            "model_opened path=%s layers=%d experts=%d slabs=%d slots=%d slab_bytes=%d",
            model.path, len(layers), request.experts, len(plan.slabs),
            sum(s.layout.slots for s in plan.slabs), plan.slab_bytes,
        )  # fmt: skip
        return model

    def _check_budget(
        self, experts: ExpertIndex, layers: list[tuple[Part, ...]], quota_min: int
    ) -> None:
        minimum = minimum_budget(layers, experts.experts, quota_min)
        if self._ledger.budget_bytes < minimum:
            raise BudgetTooSmall(
                f"{experts.index.folder} needs a budget of at least {minimum:,} bytes for one worker "
                f"({quota_min} experts at once), the budget is {self._ledger.budget_bytes:,}; "
                f"start expertd with --budget {minimum} or more"
            )

    def _plan(
        self, experts: ExpertIndex, layers: list[tuple[Part, ...]], quota_min: int
    ) -> tuple[ArenaPlan, ReadBuffers]:
        """Plan slabs and, for devices not read yet, buffers."""
        need = needed_bytes(layers, experts.experts, quota_min)
        free = self._ledger.free_bytes
        buffers = read_buffers(free, need, self._options.threads or USUAL_THREADS)
        free -= buffers.nbytes * len(self._new_devices(experts))
        if free < need:
            holders = ", ".join(
                f"{m.path} ({m.arena.nbytes:,} bytes, {len(m.sessions)} sessions)"
                for m in self.by_path.values()
            )
            raise BudgetExhausted(
                f"{experts.index.folder} needs {need:,} bytes, {free:,} of the budget of "
                f"{self._ledger.budget_bytes:,} are free; held by {holders or 'read buffers'}; "
                "end those sessions or give a larger budget"
            )
        return plan_arena(free, layers, experts.experts, quota_min), buffers

    def _new_devices(self, experts: ExpertIndex) -> set[int]:
        return {shard.identity.dev for shard in experts.index.shards} - self._readers.keys()

    def _open_sources(
        self, experts: ExpertIndex, new_devices: set[int], buffers: ReadBuffers
    ) -> tuple[list[Source], dict[int, Tuning]]:
        """Return the open files, and how each new device is to be read."""
        sources: list[Source] = []
        ways = dict.fromkeys(new_devices, Tuning(buffers.threads))
        try:
            for shard in experts.index.shards:
                sources.append(open_source(shard.path, shard.identity, self._options.read_mode))
            if self._options.threads is None:
                for device in new_devices:
                    files = [source for source in sources if source.device == device]
                    largest = max(files, key=lambda source: source.identity.size)
                    ways[device] = tuned(
                        largest,
                        experts.read_bytes,
                        buffers.buffer_bytes,
                        buffers.threads,
                        state_file(),
                    )
        except BaseException:
            for source in sources:
                source.close()
            raise
        return sources, ways

    def _start_reader(self, device: int, buffers: ReadBuffers, straight: bool) -> None:
        self._readers[device] = Reader(
            threads=buffers.threads,
            buffer_bytes=buffers.buffer_bytes,
            on_done=self._done_in_thread,
            name=f"reader-{device:x}",
            straight=straight,
        )

    def idle_reads(self) -> int:
        """Return how many experts that nobody waits for may be ordered now: a short queue's worth."""
        return max(2 * (self._options.threads or USUAL_THREADS) - len(self._in_flight), 0)

    def spare_reads(self) -> int:
        """Return how many experts may be read ahead now: none while anybody waits, and few at once."""
        if any(model.cache.awaited for model in self.by_path.values()):
            return 0
        return max((self._options.threads or USUAL_THREADS) // 2 - len(self._in_flight), 0)

    # --- reads -------------------------------------------------------------------------------

    def submit(
        self, model: Model, orders: Sequence[FillOrder]
    ) -> list[tuple[FillOrder, ExpertdError]]:
        """Send orders to the readers of their devices; return those that are refused, and why."""
        if model.stale is not None:
            return [(order, model.stale) for order in orders]
        batches: dict[int, list[Fill]] = {}
        for order in orders:
            fill = model.fill(order)
            self._in_flight[id(fill)] = (model, order, fill)
            model.reading[order.key] = fill
            batches.setdefault(fill.pieces[0].source.device, []).append(fill)
        refused: list[tuple[FillOrder, ExpertdError]] = []
        for device, fills in batches.items():
            try:
                self._readers[device].submit(fills)
            except Draining as exc:
                refused += [(self._landed(fill)[1], exc) for fill in fills]
        return refused

    def hurry(self, model: Model, key: ExpertKey, phase: Phase) -> None:
        """Somebody waits by now for a read that was ordered for less: let it overtake others."""
        fill = model.reading[key]
        self._readers[fill.pieces[0].source.device].hurry(fill, _PRIORITY[phase])

    def _done_in_thread(self, fill: Fill, error: ExpertdError | None) -> None:
        self._finished.append((fill, error))
        self._loop.call_soon_threadsafe(self._take_finished)

    def _take_finished(self) -> None:
        """Hand on what the threads have finished since the last time."""
        ended: dict[Model, list[Ended]] = {}
        while self._finished:
            fill, error = self._finished.popleft()
            model, order = self._landed(fill)
            ended.setdefault(model, []).append((order, error))
            if error is not None:
                self._count_error(model, order, error)
        for model, orders in ended.items():
            self._on_done(model, orders)

    def _landed(self, fill: Fill) -> tuple[Model, FillOrder]:
        model, order, _ = self._in_flight.pop(id(fill))
        del model.reading[order.key]
        return model, order

    def _count_error(self, model: Model, order: FillOrder, error: ExpertdError) -> None:
        model.read_errors += 1
        if isinstance(error, ModelChanged) and model.stale is None:
            model.stale = error
            log.error("model_stale path=%s reason=%s", model.path, error)
        else:
            log.warning("read_failed path=%s key=%s reason=%s", model.path, order.key, error)

    # --- sessions ----------------------------------------------------------------------------

    def grant(self, model: Model, request: Attach) -> int:
        """Return the quota of one more session of `model`.

        Raises:
            BudgetExhausted: the quotas of the others leave less than it needs.
        """
        slots = model.arena.plan.smallest_slots
        wanted = min(request.quota_wanted, request.experts)
        least = min(request.quota_min, request.experts)
        quota = grant_quota(slots, model.quotas, least, wanted)
        if quota == 0:
            holders = ", ".join(
                f"pid {s.peer.pid}: {s.page.layout.quota}" for s in model.sessions if s.page
            )
            raise BudgetExhausted(
                f"one more worker of {model.path} needs {least} slots at once; of {slots} slots "
                f"{model.quotas} are promised ({holders}) and 1 is kept in reserve; "
                "end a session or give a larger budget"
            )
        return quota

    async def _close(self, model: Model) -> bool:
        """Give back all of a model without sessions; False, and it stays, when a read of it hangs.

        Only while `_opening` is held: nobody attaches to it meanwhile.
        """
        end = self._loop.time() + REST_SECONDS
        while model.cache.busy:  # reads go on when who asked for them is gone (rule 5)
            if self._loop.time() > end:
                return False
            await asyncio.sleep(0.005)
        del self.by_path[model.path]
        self.closed += model.totals
        self.closed_latency.merge(model.latency)
        plan = model.arena.plan
        await in_thread(
            model.close
        )  # freeing takes longer than allocating: 0.7 s per GiB, measured
        self._ledger.give("slab", plan.slab_bytes)
        self._ledger.give("directory", plan.directory_bytes)
        return True

    def close(self, deadline_seconds: float) -> None:
        """Stop the readers; what they have not begun is abandoned."""
        for reader in self._readers.values():
            reader.close(deadline_seconds)
