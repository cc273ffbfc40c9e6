"""20,000 requests, one after another: does anything grow or slow down? (case E12)

    python bench/soak.py [--json] [--save] [--requests N]

Two workers take turns on one daemon with the bundled model, half of its expert bytes in memory, and
pin sets of experts from a fixed random sequence until so many of their pins needed the daemon. Reported
are the median time of these pins and the hits between them in the first and the last tenth, and what the
daemon and this process hold after a tenth and at the end: resident bytes, descriptors, reads in the queue,
memory committed. `latency_ratio` is last over first; 1 is flat.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT / folder) for folder in ("protocol", "daemon", "client", "bench")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])

# ruff: noqa: E402
import numpy as np
import psutil
from record import circumstances, finish
from streamed import Streamed

from expertctl.bundled import FOLDER
from expertctl.private_daemon import private_daemon
from expertd_client import Admin, Client
from expertd_protocol.layout import Counter, Phase

SHARE = 0.5
TOP_K = 4
#: Zipf exponent: a few experts are wanted often, most now and then.
SKEW = 1.1


class Worker:
    """One attached client and its own sequence of wishes."""

    def __init__(self, client: Client, model: Streamed, seed: int) -> None:
        self.client = client
        client.attach(model.source, quota_min=TOP_K, quota_wanted=TOP_K)
        self._model = model
        self._random = np.random.default_rng(seed)
        weights = 1 / np.arange(1, model.experts + 1) ** SKEW
        self._chances = weights / weights.sum()
        self._layer = 0

    @property
    def requests(self) -> int:
        return int(self.client.arena.page.counters[Phase.DECODE][Counter.REQUESTS])

    def step(self) -> tuple[float, bool]:
        """Pin one layer's experts; returns the seconds it took, and whether the daemon was asked."""
        experts = self._random.choice(self._model.experts, TOP_K, replace=False, p=self._chances)
        before = self.requests
        began = time.perf_counter()
        self.client.pin(self._layer, experts.astype(np.intp), Phase.DECODE)
        seconds = time.perf_counter() - began
        if not self.client.verify():
            raise SystemExit("a pinned slot changed under the worker")
        self.client.unpin()
        self._layer = (self._layer + 1) % self._model.layers
        if not self._layer:
            self.client.end_pass(1, Phase.DECODE)
        return seconds, self.requests > before


def holdings(admin: Admin, daemon_pid: int) -> dict[str, int]:
    """Return what would grow if something leaked."""
    daemon, own = psutil.Process(daemon_pid), psutil.Process()
    stats = admin.stats()
    return {
        "daemon_rss_bytes": daemon.memory_info().rss,
        "worker_rss_bytes": own.memory_info().rss,
        "daemon_descriptors": daemon.num_fds(),
        "worker_descriptors": own.num_fds(),
        "committed_bytes": stats.committed_bytes,
        "queue_depth": stats.queue_depth,
    }


def soak(requests: int) -> dict[str, object]:
    model = Streamed(FOLDER)
    budget = int(SHARE * model.total_bytes)
    with (
        private_daemon(str(budget)) as daemon,
        Admin.connect(daemon.socket) as admin,
        Client.connect(daemon.socket, name="soak-1") as one,
        Client.connect(daemon.socket, name="soak-2") as two,
    ):
        workers = [Worker(one, model, 1), Worker(two, model, 2)]
        waits: list[float] = []
        hits: list[float] = []
        early: dict[str, int] = {}
        began = time.perf_counter()
        while len(waits) < requests:
            for worker in workers:
                seconds, asked = worker.step()
                (waits if asked else hits).append(seconds)
            if not early and len(waits) >= requests // 10:
                early = holdings(admin, daemon.pid)
        elapsed = time.perf_counter() - began
        late = holdings(admin, daemon.pid)
        stats = admin.stats()
    tenth = requests // 10
    first, last = statistics.median(waits[:tenth]), statistics.median(waits[-tenth:])
    few = len(hits) // 10
    first_hit, last_hit = statistics.median(hits[:few]), statistics.median(hits[-few:])
    return {
        "latency_ratio": round(last / first, 3),
        "hit_ratio": round(last_hit / first_hit, 3),
        "request_us_first_tenth": round(first * 1e6, 1),
        "request_us_last_tenth": round(last * 1e6, 1),
        "hit_us_first_tenth": round(first_hit * 1e6, 2),
        "hit_us_last_tenth": round(last_hit * 1e6, 2),
        "grown": {key: late[key] - early[key] for key in late},
        "after_a_tenth": early,
        "at_the_end": late,
        "requests": len(waits),
        "pins_without_a_request": len(hits),
        "mismatches": sum(session.mismatches for session in stats.sessions),
        "seconds": round(elapsed, 1),
        "budget_bytes": budget,
        "peak_committed_bytes": stats.peak_committed_bytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="write it to bench/results/")
    parser.add_argument("--requests", type=int, default=20_000)
    options = parser.parse_args()
    if options.requests < 100:
        parser.error("--requests: at least 100")
    load = os.getloadavg()[0]
    figures = soak(options.requests) | circumstances(load)
    finish("soak", figures, as_json=options.json, save=options.save)


if __name__ == "__main__":
    main()
