"""One hand-made snapshot, and a daemon that reports it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from expertd_client.testing import FakeDaemon
from expertd_protocol.stats import (
    Counters,
    FileStats,
    Latency,
    ModelStats,
    SessionStats,
    SlotCounts,
    Stats,
)

PREFILL = Counters(
    passes=2, tokens=20, lookups=100, hits=60, joins=10, misses=30,
    hit_bytes=60 * 1024, miss_bytes=40 * 1024, wait_ns=20_000_000, requests=12,
)  # fmt: skip
DECODE = Counters(
    passes=64, tokens=64, lookups=1500, hits=1200, joins=100, misses=200,
    hit_bytes=1200 * 1024, miss_bytes=300 * 1024, wait_ns=1_500_000_000, requests=90,
)  # fmt: skip
LATENCY = Latency(count=102, p50_ms=0.21, p95_ms=0.84, p99_ms=1.5, max_ms=3.25)
MODEL = "/cache/models--org--tiny-moe/snapshots/abc123"


@pytest.fixture
def stats() -> Stats:
    """One model, one worker with a name and a detached one without."""
    slots = SlotCounts(free=3, filling=1, ready=43, retired=1, total=48, pinned=8)
    session = SessionStats(
        session="53aa", name="agent-1", pid=4242, model=MODEL, state="serving", quota=8, pinned=4,
        in_flight=1, attached_seconds=75.2, reattaches=0, mismatches=0,
        resident_weight_bytes=900_000, prefill=PREFILL, decode=DECODE, miss_latency=LATENCY,
    )  # fmt: skip
    idle = SessionStats(
        session="53bb", name="", pid=4243, model=MODEL, state="detached", quota=8, pinned=0,
        in_flight=0, attached_seconds=3.0, reattaches=1, mismatches=0, resident_weight_bytes=0,
        prefill=Counters(), decode=Counters(), miss_latency=Latency(),
    )  # fmt: skip
    model = ModelStats(
        path=MODEL, state="ready", layers=6, experts=32, expert_bytes=1024,
        total_expert_bytes=6 * 32 * 1024, slab_bytes=65536, resident_bytes=43 * 1024,
        pinned_bytes=8 * 1024, slots=slots, evictions=187, deferred_reuses=2, device_reads=230,
        device_read_bytes=512 * 1024, saved_reads=110, saved_bytes=110 * 1024, read_errors=0,
        prefill=PREFILL, decode=DECODE, miss_latency=LATENCY,
        files=(FileStats(path=f"{MODEL}/model.safetensors", mode="direct", reads=230,
                         read_bytes=512 * 1024),),
    )  # fmt: skip
    return Stats(
        version="0.1.0", pid=99, epoch=7, uptime_seconds=185.0, run_dir="/run/user/1/expertd",
        budget_bytes=128 * 1024, committed_bytes=96 * 1024, peak_committed_bytes=112 * 1024,
        resident_bytes=43 * 1024, pinned_bytes=8 * 1024, read_buffer_bytes=16384,
        directory_bytes=4096, page_bytes=12288, slab_bytes=65536, slots=slots, evictions=187,
        device_reads=230, device_read_bytes=512 * 1024, saved_reads=110, saved_bytes=110 * 1024,
        read_errors=0, queue_depth=2, prefill=PREFILL, decode=DECODE, total=PREFILL + DECODE,
        miss_latency=LATENCY, models=(model,), sessions=(session, idle),
    )  # fmt: skip


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a socket path of 103 bytes."""
    path = Path(tempfile.mkdtemp(prefix="ctl-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class Reporting(FakeDaemon):
    """Answers stats requests with one snapshot."""

    snapshot: Stats

    def _stats(self) -> Stats:
        return self.snapshot


@pytest.fixture
def daemon(short_dir: Path, stats: Stats) -> Iterator[Reporting]:
    with Reporting(short_dir) as fake:
        fake.snapshot = stats
        yield fake
