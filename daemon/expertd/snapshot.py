"""One consistent look at the daemon, as the `Stats` that goes over the wire. Reads, never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from expertd import __version__
from expertd.cache.ledger import Ledger
from expertd.latency import LatencyHistogram
from expertd.models import Model, Models
from expertd.sessions import Session
from expertd_protocol.endpoints import Endpoints
from expertd_protocol.stats import (
    FileStats,
    ModelStats,
    SessionStats,
    SlotCounts,
    Stats,
)


@dataclass(frozen=True)
class Daemon:
    """Who this daemon is; `epoch` differs between any two daemons of one run directory."""

    pid: int
    epoch: int
    endpoints: Endpoints
    started_at: float


def snapshot(
    daemon: Daemon, ledger: Ledger, models: Models, sessions: Sequence[Session], now: float
) -> Stats:
    """Return the numbers as of now."""
    live = [s.snapshot(now) for s in sessions if s.model is not None]
    each = [_model(m, [s for s in live if s.model == str(m.path)]) for m in models.by_path.values()]
    latency = LatencyHistogram()
    latency.merge(models.closed_latency)
    for model in models.by_path.values():
        latency.merge(model.latency)
    closed = models.closed
    prefill = sum((m.prefill for m in each), closed.prefill)
    decode = sum((m.decode for m in each), closed.decode)
    return Stats(
        version=__version__,
        pid=daemon.pid,
        epoch=daemon.epoch,
        uptime_seconds=now - daemon.started_at,
        run_dir=str(daemon.endpoints.run_dir),
        budget_bytes=ledger.budget_bytes,
        committed_bytes=ledger.committed_bytes,
        peak_committed_bytes=ledger.peak_bytes,
        resident_bytes=sum(m.resident_bytes for m in each),
        pinned_bytes=sum(m.pinned_bytes for m in each),
        read_buffer_bytes=ledger.held("read_buffer"),
        directory_bytes=ledger.held("directory"),
        page_bytes=ledger.held("page"),
        slab_bytes=ledger.held("slab"),
        slots=sum((m.slots for m in each), SlotCounts()),
        evictions=closed.evictions + sum(m.evictions for m in each),
        device_reads=closed.device_reads + sum(m.device_reads for m in each),
        device_read_bytes=closed.device_read_bytes + sum(m.device_read_bytes for m in each),
        saved_reads=closed.saved_reads + sum(m.saved_reads for m in each),
        saved_bytes=closed.saved_bytes + sum(m.saved_bytes for m in each),
        read_errors=closed.read_errors + sum(m.read_errors for m in each),
        prefetch=sum((m.prefetch for m in each), closed.prefetch),
        queue_depth=models.queue_depth,
        prefill=prefill,
        decode=decode,
        total=prefill + decode,
        miss_latency=latency.snapshot(),
        models=tuple(each),
        sessions=tuple(live),
    )


def _model(model: Model, sessions: Sequence[SessionStats]) -> ModelStats:
    totals = model.totals
    slabs = model.arena.slabs
    counts = [s.table.counts(model.cache.held(s.table.slab)) for s in slabs]
    pairs = list(zip(slabs, counts, strict=True))
    biggest = max(slab.layout.expert_bytes for slab in slabs)
    files = tuple(
        FileStats(
            path=str(source.path),
            mode=str(source.mode),
            reads=source.reads,
            read_bytes=source.read_bytes,
            errors=source.errors,
        )
        for source in model.sources
    )
    return ModelStats(
        path=str(model.path),
        state="stale" if model.stale is not None else "serving",
        layers=len(model.layers),
        experts=model.index.experts,
        expert_bytes=biggest,
        total_expert_bytes=model.index.total_bytes,
        slab_bytes=sum(slab.layout.nbytes for slab in slabs),
        resident_bytes=sum(c.ready * slab.layout.expert_bytes for slab, c in pairs),
        pinned_bytes=sum(c.pinned * slab.layout.expert_bytes for slab, c in pairs),
        slots=sum(counts, SlotCounts()),
        evictions=totals.evictions,
        deferred_reuses=model.cache.tally.deferred_reuses,
        device_reads=totals.device_reads,
        device_read_bytes=totals.device_read_bytes,
        saved_reads=totals.saved_reads,
        saved_bytes=totals.saved_bytes,
        read_errors=totals.read_errors,
        prefetch=totals.prefetch,
        prefill=sum((s.prefill for s in sessions), totals.prefill),
        decode=sum((s.decode for s in sessions), totals.decode),
        miss_latency=model.latency.snapshot(),
        files=files,
    )
