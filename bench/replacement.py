"""Hit rates of the daemon's replacement policy between LRU and the best possible one.

    python bench/replacement.py [--traces DIR] [--json] [--save] [--tokens N]

Replays routing traces through `expertctl.replay`: one session, and four that are parts of the same trace
(cut between sequences) and take turns token by token. `closed` is (default - LRU) / (Belady - LRU).

DIR holds the traces of real models, which are not part of this repository; without it only the traces
of the bundled model under bench/traces/ are played. The policy's constants were chosen on the traces
in TUNED; the others were not replayed until they stood, and are reported apart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("client", "daemon", "protocol")]

# ruff: noqa: E402
import numpy as np

from expertctl.replay.simulator import Workload, hit_rate, interleave
from expertctl.traces import read_trace

CAPACITIES = (0.1, 0.25, 0.5)
POLICIES = ("lru", "lfu", "s3fifo", "sieve", "arc", "default", "belady")
TUNED = ("deepseek_v2_lite_esft_intent", "tiny_moe", "tiny_moe_generate")
SHIPPED = ROOT / "bench" / "traces"


def measure(work: Workload) -> dict[str, dict[str, float]]:
    """Return {capacity: {policy: hit rate, "closed": share of the gap}}."""
    result = {}
    for share in CAPACITIES:
        row = {name: hit_rate(name, work, work.slots(share)) for name in POLICIES}
        row["closed"] = (row["default"] - row["lru"]) / max(row["belady"] - row["lru"], 1e-12)
        result[str(share)] = {name: round(value, 4) for name, value in row.items()}
    return result


def mean_closed(results: dict[str, dict[str, dict[str, dict[str, float]]]]) -> float | None:
    closed = [
        row["closed"]
        for by_sessions in results.values()
        for by_capacity in by_sessions.values()
        for row in by_capacity.values()
    ]
    return round(statistics.mean(closed), 3) if closed else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, help="folder of .npz traces")
    parser.add_argument("--only", default="", help="names of traces, with commas")
    parser.add_argument("--tokens", type=int, default=2400, help="most tokens of a trace")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", type=Path, help="write the result into this file")
    options = parser.parse_args()

    began, cpu = time.monotonic(), time.process_time()
    paths = sorted((options.traces or SHIPPED).glob("*.npz"))
    wanted = options.only.split(",") if options.only else [path.stem for path in paths]
    results: dict[str, dict[str, dict[str, dict[str, float]]]] = {}
    for path in paths:
        if path.stem not in wanted:
            continue
        trace = read_trace(path)
        results[path.stem] = {}
        for sessions in (1, 4):
            work = interleave(trace.parts(sessions), trace.num_experts, options.tokens // sessions)
            results[path.stem][str(sessions)] = rows = measure(work)
            if not options.json:
                for share, row in rows.items():
                    print(path.stem, f"{sessions} sessions, {share}:", row, flush=True)
    tuned = {name: rows for name, rows in results.items() if name in TUNED}
    held_out = {name: rows for name, rows in results.items() if name not in TUNED}
    report = {
        "closed_tuned": mean_closed(tuned),
        "closed_held_out": mean_closed(held_out),
        "closed": mean_closed(results),
        "tuned_on": sorted(tuned),
        "held_out": sorted(held_out),
        "tokens": options.tokens,
        "traces": results,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "machine": f"{platform.processor() or platform.machine()}, {platform.system()}",
        "cpus": os.cpu_count(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "command": " ".join(["python bench/replacement.py", *_shown(sys.argv[1:])]),
        "date": datetime.now(UTC).date().isoformat(),
    }
    if options.save:
        options.save.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))


def _shown(arguments: list[str]) -> list[str]:
    """Paths of this machine say nothing to others."""
    return [Path(a).name if os.sep in a else a for a in arguments]


if __name__ == "__main__":
    main()
