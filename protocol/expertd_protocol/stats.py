"""The stats snapshot, and the table of what every number means.

Counters only grow and never change meaning. A hit rate never stands alone: bytes and waiting time
stand beside it, and prefill and decode are kept apart.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


#: Sums stop here: msgpack has 64 bits, and a hostile page may report any number.
COUNTER_MAX = (1 << 63) - 1


class Counters(_Part):
    """What workers report of their lookups; `hits + joins + misses == lookups` always."""

    passes: int = 0
    tokens: int = 0
    lookups: int = 0
    hits: int = 0
    joins: int = 0
    misses: int = 0
    hit_bytes: int = 0
    miss_bytes: int = 0
    wait_ns: int = 0
    requests: int = 0

    def __add__(self, other: Counters) -> Counters:
        mine = self.model_dump()
        return Counters(**{k: min(v + getattr(other, k), COUNTER_MAX) for k, v in mine.items()})

    @property
    def hit_rate(self) -> float:
        """Hits per lookup, 0.0 when nothing was looked up."""
        return self.hits / self.lookups if self.lookups else 0.0


class Latency(_Part):
    """Time from a miss request's arrival at the daemon to its reply, milliseconds."""

    count: int = 0
    p50_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0


class SlotCounts(_Part):
    """Slots by state; `free + filling + ready + retired == total`."""

    free: int = 0
    filling: int = 0
    ready: int = 0
    retired: int = 0
    total: int = 0
    #: Ready or retired slots that at least one worker's hazard names now.
    pinned: int = 0

    def __add__(self, other: SlotCounts) -> SlotCounts:
        mine = self.model_dump()
        return SlotCounts(**{k: v + getattr(other, k) for k, v in mine.items()})


class Prefetched(_Part):
    """Experts read before anybody asked; `useful + late + wasted` is `prefetched` once all is settled."""

    prefetched: int = 0
    prefetched_bytes: int = 0
    useful: int = 0
    late: int = 0
    wasted: int = 0

    def __add__(self, other: Prefetched) -> Prefetched:
        mine = self.model_dump()
        return Prefetched(**{k: v + getattr(other, k) for k, v in mine.items()})


class FileStats(_Part):
    """One shard: how it is really read, and what came from the device."""

    path: str
    #: direct (O_DIRECT), nocache (F_NOCACHE) or buffered (through the page cache).
    mode: str
    reads: int = 0
    read_bytes: int = 0
    errors: int = 0


class SessionStats(_Part):
    """One attached worker."""

    session: str
    name: str
    pid: int
    model: str
    #: serving, or detached (connection closed, process alive: its pins stay).
    state: str
    quota: int
    pinned: int
    in_flight: int
    attached_seconds: float
    reattaches: int
    mismatches: int
    resident_weight_bytes: int
    prefill: Counters
    decode: Counters
    miss_latency: Latency


class ModelStats(_Part):
    """One model in the arena, with the counters of all its sessions, gone ones included."""

    path: str
    state: str
    layers: int
    experts: int
    expert_bytes: int
    total_expert_bytes: int
    slab_bytes: int
    resident_bytes: int
    pinned_bytes: int
    slots: SlotCounts
    evictions: int
    deferred_reuses: int
    device_reads: int
    device_read_bytes: int
    saved_reads: int
    saved_bytes: int
    read_errors: int
    prefetch: Prefetched = Prefetched()
    prefill: Counters
    decode: Counters
    miss_latency: Latency
    files: tuple[FileStats, ...]


class Stats(_Part):
    """One consistent look at the daemon."""

    version: str
    pid: int
    epoch: int
    uptime_seconds: float
    run_dir: str
    budget_bytes: int
    #: Shared memory and read buffers that exist now; never above the budget.
    committed_bytes: int
    peak_committed_bytes: int
    #: Expert bytes that are ready in slots now.
    resident_bytes: int
    pinned_bytes: int
    read_buffer_bytes: int
    directory_bytes: int
    page_bytes: int
    slab_bytes: int
    slots: SlotCounts
    evictions: int
    device_reads: int
    device_read_bytes: int
    saved_reads: int
    saved_bytes: int
    read_errors: int
    prefetch: Prefetched = Prefetched()
    queue_depth: int
    prefill: Counters
    decode: Counters
    total: Counters
    miss_latency: Latency
    models: tuple[ModelStats, ...]
    sessions: tuple[SessionStats, ...]


#: name, type (counter or gauge), meaning: the table in protocol/README.md is checked against this one.
METRICS: tuple[tuple[str, str, str], ...] = (
    ("passes", "counter", "forward passes of a worker"),
    ("tokens", "counter", "tokens that went through a forward pass, batch included"),
    ("lookups", "counter", "experts a worker looked up: one per expert, layer and wave"),
    ("hits", "counter", "lookups that found the expert resident: no message, no wait"),
    (
        "joins",
        "counter",
        "lookups that asked but needed no read of their own: it was under way, or just leaving",
    ),
    ("misses", "counter", "lookups that caused a read"),
    ("hit_bytes", "counter", "expert bytes of hits"),
    ("miss_bytes", "counter", "expert bytes of joins and misses"),
    ("wait_ns", "counter", "nanoseconds a worker was blocked on the daemon"),
    ("requests", "counter", "miss requests: at most one per layer and wave"),
    ("device_reads", "counter", "read calls to the device"),
    ("device_read_bytes", "counter", "bytes the device delivered, alignment included"),
    ("saved_reads", "counter", "experts that one read delivered to more than one waiter"),
    ("saved_bytes", "counter", "their bytes"),
    ("evictions", "counter", "slots taken from a resident expert"),
    ("deferred_reuses", "counter", "times a retired slot was kept because a worker held it"),
    ("read_errors", "counter", "experts that could not be read"),
    ("prefetched", "counter", "experts that were read before anybody asked, into idle device time"),
    ("prefetched_bytes", "counter", "their bytes"),
    ("useful", "counter", "prefetched experts that a worker then found resident"),
    ("late", "counter", "prefetched experts that were asked for while they were being read"),
    ("wasted", "counter", "prefetched experts that the pass they were read for did not use"),
    ("budget_bytes", "gauge", "the limit for everything the daemon keeps in memory for experts"),
    ("committed_bytes", "gauge", "slabs, directories, worker pages and read buffers that exist"),
    ("peak_committed_bytes", "gauge", "the highest committed_bytes since start"),
    ("resident_bytes", "gauge", "expert bytes ready in slots"),
    ("pinned_bytes", "gauge", "expert bytes that a worker holds now"),
    ("queue_depth", "gauge", "reads waiting for a reader thread"),
)
