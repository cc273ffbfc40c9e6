"""More and more sessions on one daemon, on the same and on different texts.

    python bench/scale.py [--json] [--save] [--traces DIR] [--sessions 1 2 4 8 16]

Worker processes replay real routing through `expertd_client` with half of the expert bytes in memory, as
in bench/replay.py; all rows have about as many tokens, divided by their sessions. One more worker, the
probe, pins and unpins the experts of one layer that stay in memory, ten times every millisecond: before
the others start, and while they miss. Daemon CPU is all its threads' over the misses (reads and joins).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT / folder) for folder in ("protocol", "daemon", "client", "bench")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])

# ruff: noqa: E402
import crew
import numpy as np
import psutil
import texts
from record import circumstances, finish
from session import Spec
from streamed import Streamed, ensure

from expertctl.private_daemon import private_daemon
from expertctl.traces import U16
from expertd_client import Admin, Client
from expertd_protocol.layout import Counter, Phase

SHARE = 0.5
ALONE_SECONDS, PAUSE_SECONDS, BURST = 0.5, 0.001, 10
FEWEST_TOKENS = 10


class HitProbe:
    """Pins the same experts again and again in a thread of its own, and times the hits."""

    def __init__(self, socket: Path, model: Streamed, top_k: int) -> None:
        self.alone: list[float] = []
        self.busy: list[float] = []
        self._socket, self._model, self._top_k = socket, model, top_k
        self._into = self.alone
        self._end = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    @contextlib.contextmanager
    def running(self) -> Iterator[HitProbe]:
        """Measure alone first; then until the end of the block."""
        self._thread.start()
        try:
            self._thread.join(ALONE_SECONDS)
            self._into = self.busy
            yield self
        finally:
            self._end.set()
            self._thread.join(30)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._measure()
        except BaseException as exc:
            self._error = exc

    def _measure(self) -> None:
        experts = np.arange(self._top_k, dtype=np.intp)
        with Client.connect(self._socket, name="probe") as client:
            client.attach(self._model.source, quota_min=self._top_k, quota_wanted=self._top_k)
            counters = client.arena.page.counters[Phase.DECODE]
            while not self._end.is_set():
                asked = int(counters[Counter.REQUESTS])
                began = time.perf_counter_ns()
                for _ in range(BURST):
                    client.pin(0, experts, Phase.DECODE)
                    client.unpin()
                took = (time.perf_counter_ns() - began) / 1e3 / BURST
                if int(counters[Counter.REQUESTS]) == asked:
                    self._into.append(took)
                time.sleep(PAUSE_SECONDS)


def one_run(model: Streamed, sessions: list[U16]) -> dict[str, Any]:
    """Replay the sessions together; returns the row of figures."""
    model.drop_from_page_cache()
    budget = int(SHARE * model.total_bytes)
    top_k = int(sessions[0].shape[2])
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(private_daemon(str(budget)))
        admin = stack.enter_context(Admin.connect(daemon.socket))
        process = psutil.Process(daemon.pid)
        probe = HitProbe(daemon.socket, model, top_k)
        probing = contextlib.ExitStack()
        stack.enter_context(probing)
        cpu: list[float] = []

        def all_ready(pids: list[int]) -> None:
            probing.enter_context(probe.running())
            cpu.append(sum(process.cpu_times()[:2]))

        def all_done() -> None:
            cpu.append(sum(process.cpu_times()[:2]))
            probing.close()

        spec = Spec("shared", str(model.folder), "", "", socket=str(daemon.socket))
        run = crew.run(spec, sessions, all_ready=all_ready, all_done=all_done)
        stats = admin.stats()
    total, seconds = stats.total, max(r.seconds for r in run.results)
    spent = cpu[1] - cpu[0]
    return {
        "sessions": len(sessions),
        "tokens": run.tokens,
        "union_over_sum": round(texts.union_over_sum(sessions), 4),
        "tokens_per_second": round(run.tokens / seconds, 2),
        "requests_per_second": round(total.requests / seconds, 1),
        "stall_ms_per_token": round(run.stall_per_token * 1e3, 3),
        "step_p50_ms": round(run.step_ms(50), 4),
        "step_p99_ms": round(run.step_ms(99), 3),
        "hit_rate": round(1 - stats.device_read_bytes / (run.lookups * model.expert_bytes), 4),
        "found_in_place": None if run.hit_rate is None else round(run.hit_rate, 4),
        "device_bytes_per_token": round(stats.device_read_bytes / run.tokens),
        "saved_reads": stats.saved_reads,
        "daemon_cpu_us_per_miss": round(1e6 * spent / max(total.misses + total.joins, 1), 1),
        "daemon_cpu_share": round(spent / seconds, 3),
        "hit_alone_us": _median(probe.alone),
        "hit_us": _median(probe.busy),
        "hit_p99_us": round(float(np.percentile(probe.busy, 99)), 2) if probe.busy else None,
        "run_seconds": round(seconds, 2),
    }


def _median(samples: list[float]) -> float | None:
    return round(statistics.median(samples), 2) if samples else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="write bench/results/scale.json")
    parser.add_argument("--traces", type=Path, help="folder of .npz traces")
    parser.add_argument("--data", type=Path, default=ROOT / "bench" / "data")
    parser.add_argument("--tokens", type=int, default=400, help="of all sessions together")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    found = texts.find(options.traces)
    options.data.mkdir(parents=True, exist_ok=True)
    model = ensure(options.data, found.layers, found.experts, options.hidden, options.width)
    rows: dict[str, list[dict[str, Any]]] = {"different": [], "identical": []}
    for n in options.sessions:
        for kind, into in rows.items():
            tokens = max(options.tokens // n, FEWEST_TOKENS)
            row = one_run(model, found.sessions(kind, n, tokens))
            into.append(row)
            print(
                f"{n:3} {kind:10} {row['requests_per_second']:8.0f} requests/s "
                f"{row['stall_ms_per_token']:9.2f} ms/token, daemon "
                f"{row['daemon_cpu_us_per_miss']:6.0f} us of CPU per miss, hit {row['hit_us']} us "
                f"(alone {row['hit_alone_us']})",
                file=sys.stderr, flush=True,
            )  # fmt: skip
    figures = rows | {
        "traces": [found.traces[0].name],
        "share_in_memory": SHARE,
        "expert_bytes": model.expert_bytes,
        "layers_experts_k": [found.layers, found.experts, found.top_k],
        **circumstances(load),
    }
    finish("scale", figures, as_json=options.json, save=options.save)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # the processes are gone by now
        raise SystemExit(130) from None
