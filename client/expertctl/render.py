"""The stats snapshot as text and as JSON. Pure functions of `Stats`.

A hit rate never stands alone here: bytes and waiting time stand in the same row.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from expertctl import figures
from expertctl.table import table
from expertd_protocol.stats import Counters, Latency, ModelStats, SessionStats, SlotCounts, Stats

_LOOKUPS = (
    "of", "phase", "tokens", "lookups", "hits", "joins", "misses", "hit rate",
    "hit bytes", "miss bytes", "waited",
)  # fmt: skip
_LATENCY = ("of", "requests", "p50", "p95", "p99", "max")
_MODELS = (
    "model", "state", "layers", "experts", "expert", "all experts", "resident", "pinned",
    "slots", "evictions", "device reads", "device bytes", "saved reads", "saved bytes",
)  # fmt: skip
_FILES = ("file", "read mode", "reads", "bytes", "errors")
_WORKERS = (
    "name", "model", "state", "pid", "quota", "pinned", "tokens", "hit bytes", "miss bytes",
    "waited", "age",
)  # fmt: skip


def counters_of(part: SessionStats | ModelStats) -> Counters:
    """Return prefill and decode together."""
    return part.prefill + part.decode


def model_name(path: str) -> str:
    """Return a short name: the folder's, or `owner/name` in the Hugging Face cache."""
    pure = PurePath(path)
    for folder in pure.parents:
        if folder.name == "snapshots" and folder.parent.name.startswith("models--"):
            return folder.parent.name.removeprefix("models--").replace("--", "/")
    return pure.name or path


def session_name(session: SessionStats) -> str:
    return session.name or f"pid {session.pid}"


def derived(stats: Stats) -> dict[str, Any]:
    """Return what follows from the counters; keys are stable."""
    return {
        "budget_used": stats.committed_bytes / stats.budget_bytes if stats.budget_bytes else 0.0,
        "total": _rates(stats.total),
        "prefill": _rates(stats.prefill),
        "decode": _rates(stats.decode),
        "models": [{"path": m.path, **_rates(counters_of(m))} for m in stats.models],
        "sessions": [
            {"pid": s.pid, "session": s.session, "name": s.name, **_rates(counters_of(s))}
            for s in stats.sessions
        ],
    }


def _rates(c: Counters) -> dict[str, Any]:
    wanted = c.hit_bytes + c.miss_bytes
    return {
        **c.model_dump(),
        "hit_rate": c.hit_rate,
        "byte_hit_rate": c.hit_bytes / wanted if wanted else 0.0,
        "wait_seconds": c.wait_ns / 1e9,
    }


def as_json(stats: Stats) -> dict[str, Any]:
    """Return the snapshot as it came, and `derived` beside it."""
    return {**stats.model_dump(mode="json"), "derived": derived(stats)}


def stats_text(stats: Stats) -> str:
    """Return the whole snapshot for people."""
    blocks = [_summary(stats), table(_LOOKUPS, list(_lookup_rows(stats)), left=2)]
    blocks.append("time of a miss, at the daemon\n" + table(_LATENCY, list(_latency_rows(stats))))
    if stats.models:
        blocks.append(table(_MODELS, [_model_row(m) for m in stats.models], left=2))
        blocks.append(table(_FILES, _file_rows(stats.models), left=2))
    if stats.sessions:
        blocks.append(workers_text(stats))
    return "\n\n".join(blocks)


def workers_text(stats: Stats) -> str:
    """Return one row per attached worker."""
    if not stats.sessions:
        return "no worker is attached"
    return table(_WORKERS, [_worker_row(s) for s in stats.sessions], left=3)


def _summary(stats: Stats) -> str:
    size = figures.size
    errors = f", {figures.count(stats.read_errors)} read errors" if stats.read_errors else ""
    lines = [
        (
            "daemon",
            f"{stats.version}, pid {stats.pid}, up {figures.seconds(stats.uptime_seconds)}, "
            f"in {stats.run_dir}",
        ),
        (
            "budget",
            f"{size(stats.budget_bytes)}: {size(stats.committed_bytes)} committed "
            f"({figures.share(stats.committed_bytes, stats.budget_bytes)}), "
            f"{size(stats.peak_committed_bytes)} at most so far",
        ),
        (
            "memory",
            f"slabs {size(stats.slab_bytes)}, read buffers {size(stats.read_buffer_bytes)}, "
            f"directories {size(stats.directory_bytes)}, worker pages {size(stats.page_bytes)}",
        ),
        (
            "experts",
            f"{size(stats.resident_bytes)} resident, {size(stats.pinned_bytes)} pinned, "
            f"{figures.count(stats.evictions)} evictions",
        ),
        ("slots", _slots(stats.slots)),
        (
            "device",
            f"{figures.count(stats.device_reads)} reads, {size(stats.device_read_bytes)}; "
            f"saved by sharing {figures.count(stats.saved_reads)} reads, "
            f"{size(stats.saved_bytes)}; {stats.queue_depth} queued{errors}",
        ),
    ]
    if (early := stats.prefetch).prefetched:
        text = (
            f"{figures.count(early.prefetched)} experts, {size(early.prefetched_bytes)}: "
            f"{figures.count(early.useful)} useful, {figures.count(early.late)} late, "
            f"{figures.count(early.wasted)} wasted"
        )
        lines.append(("prefetch", text))
    return "\n".join(f"{name:<8} {text}" for name, text in lines)


def _slots(s: SlotCounts) -> str:
    return (
        f"{s.total}: {s.ready} ready, {s.filling} filling, {s.retired} retired, {s.free} free; "
        f"{s.pinned} pinned"
    )


def _lookup_rows(stats: Stats) -> Iterable[tuple[str, ...]]:
    yield from _phases("total", stats.prefill, stats.decode, stats.total)
    for m in stats.models:
        yield from _phases(model_name(m.path), m.prefill, m.decode, counters_of(m))
    for s in stats.sessions:
        yield from _phases(session_name(s), s.prefill, s.decode, counters_of(s))


def _phases(of: str, prefill: Counters, decode: Counters, both: Counters) -> list[tuple[str, ...]]:
    return [
        (name, phase, figures.count(c.tokens), figures.count(c.lookups), figures.count(c.hits),
         figures.count(c.joins), figures.count(c.misses), figures.share(c.hits, c.lookups),
         figures.size(c.hit_bytes), figures.size(c.miss_bytes), figures.waited(c.wait_ns))
        for name, phase, c in (
            (of, "all", both), ("", "prefill", prefill), ("", "decode", decode)
        )
    ]  # fmt: skip


def _latency_rows(stats: Stats) -> Iterable[tuple[str, ...]]:
    yield _latency("total", stats.miss_latency)
    for m in stats.models:
        yield _latency(model_name(m.path), m.miss_latency)
    for s in stats.sessions:
        yield _latency(session_name(s), s.miss_latency)


def _latency(of: str, t: Latency) -> tuple[str, ...]:
    times = (t.p50_ms, t.p95_ms, t.p99_ms, t.max_ms)
    return (of, figures.count(t.count), *(f"{ms:.2f} ms" if t.count else "-" for ms in times))


def _model_row(m: ModelStats) -> tuple[str, ...]:
    size, count = figures.size, figures.count
    return (
        model_name(m.path), m.state, count(m.layers), count(m.experts), size(m.expert_bytes),
        size(m.total_expert_bytes), size(m.resident_bytes), size(m.pinned_bytes),
        f"{m.slots.ready}/{m.slots.total}", count(m.evictions), count(m.device_reads),
        size(m.device_read_bytes), count(m.saved_reads), size(m.saved_bytes),
    )  # fmt: skip


def _file_rows(models: Iterable[ModelStats]) -> list[tuple[str, ...]]:
    return [
        (
            f.path,
            f.mode,
            figures.count(f.reads),
            figures.size(f.read_bytes),
            figures.count(f.errors),
        )
        for m in models
        for f in m.files
    ]


def _worker_row(s: SessionStats) -> tuple[str, ...]:
    c = counters_of(s)
    return (
        s.name or "-", model_name(s.model), s.state, str(s.pid), str(s.quota), str(s.pinned),
        figures.count(c.tokens), figures.size(c.hit_bytes), figures.size(c.miss_bytes),
        figures.waited(c.wait_ns), figures.seconds(s.attached_seconds),
    )  # fmt: skip
