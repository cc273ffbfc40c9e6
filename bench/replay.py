"""Four worker processes replay real routing with real reads: one shared cache against three others.

    python bench/replay.py [--json] [--save] [--traces DIR] [--tokens N] [--rounds N]

In the same memory, from the same packed file (random bytes, the trace's layers and experts), the same
tokens: `shared` is one daemon for all, `private` four LRU caches of a quarter each, `pread` and `mmap`
the page cache of a control group with that limit (ways.py says how each works). Arms take turns within
a round; the files are dropped from the page cache before each, and every daemon and cache starts empty,
so the first reads of everything are part of the figures.

Between asking for the experts of a layer and letting go of them a worker sleeps for a millisecond, as
if a GPU computed (26 layers: 38 tokens/s without any waiting). It stalls from asking until it has them
all, hits included, and while it lets go of them. The headline is measured once more without that pause:
then four workers, the daemon and the kernel share the CPUs, and what counts is who needs less of them.
Bytes of the device are the daemon's own count for `shared`, the reader's for `private`, the kernel's
(/proc/PID/io) for the page cache. `hit_rate` is the share of the bytes looked up that the device did
not deliver.

The first line of figures is for different texts of one model, half of the expert bytes in memory; it has
the most tokens and rounds. The other lines are shorter, so more of them is the cold start. Real traces
are taken from --traces or ../shared/traces; without them the bundled model's trace is replayed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PATHS = [str(ROOT / folder) for folder in ("protocol", "daemon", "client", "bench")]
sys.path[:0] = PATHS
os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, os.environ.get("PYTHONPATH", "")])

# ruff: noqa: E402
import crew
import memory_group
import psutil
import texts
import ways
from record import circumstances, finish
from session import Spec
from streamed import Streamed, ensure

from expertctl.private_daemon import private_daemon
from expertctl.traces import U16
from expertd_client import Admin

SESSIONS = 4
SHARES = (0.5, 0.25, 0.1)
#: What a worker of the page cache may grow by beside it; the tables of its maps come on top.
GROWTH_BYTES, TABLE_SHARE = 1 << 20, 512
PAGE_CACHE = ("pread", "mmap")
#: It takes as long as all others together, and is never the best of them.
MMAP_ROUNDS = 1

Figures = dict[str, Any]


def one_run(way: str, model: Streamed, sessions: list[U16], budget: int, spec: Spec) -> Figures:
    """Replay once, cold; returns the figures of the run."""
    model.drop_from_page_cache()
    if way == "shared":
        return _shared(model, sessions, budget, spec)
    if way == "private":
        own = replace(spec, way=way, cache_bytes=budget // len(sessions))
        return _figures(crew.run(own, sessions), model)
    tables = model.total_bytes // TABLE_SHARE if way == "mmap" else 0
    limit = budget + (GROWTH_BYTES + tables) * len(sessions)
    with memory_group.memory_group(way, 1 << 40) as group:

        def confine(pids: list[int]) -> None:
            for pid in pids:
                group.add(pid)
            group.set_limit(limit)

        run = crew.run(replace(spec, way=way), sessions, all_ready=confine)
        return _figures(run, model) | {"group_peak_bytes": group.peak_bytes()}


def _shared(model: Streamed, sessions: list[U16], budget: int, spec: Spec) -> Figures:
    with private_daemon(str(budget)) as daemon, Admin.connect(daemon.socket) as admin:
        process = psutil.Process(daemon.pid)
        before: list[float] = []

        def all_ready(pids: list[int]) -> None:
            before.append(sum(process.cpu_times()[:2]))

        own = replace(spec, way="shared", socket=str(daemon.socket))
        run = crew.run(own, sessions, all_ready=all_ready)
        cpu = sum(process.cpu_times()[:2]) - before[0]
        stats = admin.stats()
    figures = _figures(run, model, stats.device_read_bytes)
    lookups = stats.total.lookups
    return figures | {
        "joins": round(stats.total.joins / lookups, 4),
        "daemon_cpu_seconds": round(cpu, 2),
        "daemon_cpu_us_per_miss": round(1e6 * cpu / max(stats.total.misses, 1), 1),
        "request_p50_ms": stats.miss_latency.p50_ms,
        "request_p99_ms": stats.miss_latency.p99_ms,
        "peak_committed_bytes": stats.peak_committed_bytes,
        "deferred_reuses": sum(m.deferred_reuses for m in stats.models),
    }


def _figures(run: crew.Run, model: Streamed, device_bytes: int | None = None) -> Figures:
    nbytes = run.device_bytes if device_bytes is None else device_bytes
    found = run.hit_rate
    return {
        "stall_ms_per_token": round(run.stall_per_token * 1e3, 3),
        "device_bytes_per_token": round(nbytes / run.tokens),
        "hit_rate": round(1 - nbytes / (run.lookups * model.expert_bytes), 4),
        "found_in_place": None if found is None else round(found, 4),
        "step_p50_ms": round(run.step_ms(50), 4),
        "step_p95_ms": round(run.step_ms(95), 3),
        "step_p99_ms": round(run.step_ms(99), 3),
        "run_seconds": round(max(r.seconds for r in run.results), 2),
        "worker_cpu_seconds": round(run.cpu_seconds, 2),
        "device_bytes": nbytes,
    }


def medians(rounds: list[Figures]) -> Figures:
    """Return the median of each figure, and each round's stall."""
    together = {
        key: None if rounds[0][key] is None else statistics.median(r[key] for r in rounds)
        for key in rounds[0]
    }
    return together | {"rounds_stall_ms_per_token": [r["stall_ms_per_token"] for r in rounds]}


def compare(arms: dict[str, Figures]) -> Figures:
    """Return ours against the others; None against what was not run."""
    ours = arms["shared"]
    others = {name: figures for name, figures in arms.items() if name != "shared"}
    best = min(others, key=lambda name: float(others[name]["stall_ms_per_token"]))

    def ratio(key: str, other: str) -> float | None:
        if other not in arms or not arms[other][key]:
            return None
        return round(ours[key] / arms[other][key], 4)

    return {
        "stall_ratio": ratio("stall_ms_per_token", best),
        "stall_ratio_against": best,
        "bytes_ratio_private": ratio("device_bytes", "private"),
        "bytes_ratio_page_cache": ratio("device_bytes", "pread"),
        "stall_ratios": {name: ratio("stall_ms_per_token", name) for name in others},
    }


def measure(options: argparse.Namespace, arms: tuple[str, ...]) -> Figures:
    found = texts.find(options.traces)
    model = ensure(options.data, found.layers, found.experts, options.hidden, options.width)
    spec = Spec("", str(model.folder), "", "", threads=8, compute_ms=options.compute_ms)
    hurried: Figures = {}
    table: dict[str, Figures] = {}
    for kind in found.kinds if options.texts is None else options.texts:
        if kind not in found.kinds:
            continue
        whole = found.sessions(kind, SESSIONS, options.tokens)
        rows: Figures = {"union_over_sum": round(texts.union_over_sum(whole), 4)}
        table[kind] = rows
        for share in options.budgets:
            budget = int(share * model.total_bytes)
            headline = kind == "different" and share == max(options.budgets)
            sessions = whole if headline else [ids[: options.other_tokens] for ids in whole]
            samples: dict[str, list[Figures]] = defaultdict(list)
            for n in range(options.rounds if headline else options.other_rounds):
                for way in arms[n % len(arms) :] + arms[: n % len(arms)]:
                    if way == "mmap" and n >= MMAP_ROUNDS:
                        continue
                    figures = one_run(way, model, sessions, budget, spec)
                    samples[way].append(figures)
                    say(kind, share, way, figures)
            by_way = {way: medians(samples[way]) for way in arms}
            tokens = sum(len(ids) for ids in sessions)
            rows[str(share)] = by_way | compare(by_way) | {"tokens": tokens}
            if headline and options.compute_ms:
                hurried = without_pause(model, sessions, budget, spec, arms, options.rounds)
    return {
        "no_compute": hurried,
        "texts": table,
        "traces": [trace.name for trace in found.traces],
        "sessions": SESSIONS,
        "tokens_per_session": options.tokens,
        "other_tokens_per_session": options.other_tokens,
        "expert_bytes": model.expert_bytes,
        "model_bytes": model.total_bytes,
        "layers_experts_k": [found.layers, found.experts, found.top_k],
        "compute_ms_per_layer": options.compute_ms,
        "rounds": options.rounds,
        "other_rounds": options.other_rounds,
    }


def without_pause(
    model: Streamed,
    sessions: list[U16],
    budget: int,
    spec: Spec,
    arms: tuple[str, ...],
    rounds: int,
) -> Figures:
    """Measure the headline for workers that compute nothing."""
    samples: dict[str, list[Figures]] = defaultdict(list)
    for _ in range(rounds):
        for way in arms:
            if way == "mmap":  # never the best
                continue
            figures = one_run(way, model, sessions, budget, replace(spec, compute_ms=0.0))
            samples[way].append(figures)
            say("no compute", budget / model.total_bytes, way, figures)
    by_way = {way: medians(runs) for way, runs in samples.items()}
    return by_way | compare(by_way)


def say(kind: str, share: float, way: str, figures: Figures) -> None:
    print(
        f"{kind:10} {share:4.0%} {way:8} {figures['stall_ms_per_token']:9.2f} ms/token "
        f"{figures['device_bytes'] / 1e9:7.2f} GB  hit rate {figures['hit_rate']:.2f}  "
        f"step p50 {figures['step_p50_ms']:.2f} p99 {figures['step_p99_ms']:.1f} ms",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="write it to bench/results/")
    parser.add_argument("--name", default="replay", help="of the result file, with --save")
    parser.add_argument("--traces", type=Path, help="folder of .npz traces")
    parser.add_argument("--data", type=Path, default=ROOT / "bench" / "data")
    parser.add_argument("--tokens", type=int, default=150, help="of each session, first line")
    parser.add_argument("--rounds", type=int, default=3, help="of the first line")
    parser.add_argument("--other-tokens", type=int, default=50, help="of all other lines")
    parser.add_argument("--other-rounds", type=int, default=1, help="of all other lines")
    parser.add_argument("--budgets", type=float, nargs="+", default=list(SHARES))
    parser.add_argument("--texts", nargs="+", choices=texts.KINDS, help="default: all there is")
    parser.add_argument("--ways", nargs="+", choices=ways.NAMES, default=list(ways.NAMES))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--compute-ms", type=float, default=1.0, help="pretended, per layer")
    options = parser.parse_args()
    reason = memory_group.why_not()
    arms = tuple(w for w in options.ways if reason is None or w not in PAGE_CACHE)
    skipped = {w: reason for w in options.ways if w not in arms}
    if "shared" not in arms or len(arms) < 2:
        raise SystemExit(f"nothing to compare: shared and another way are needed {skipped or ''}")
    load = os.getloadavg()[0]
    options.data.mkdir(parents=True, exist_ok=True)
    figures = measure(options, arms)
    headline = figures["texts"].get("different", {}).get(str(max(options.budgets)), {})
    keys = ("stall_ratio", "stall_ratio_against", "bytes_ratio_private", "bytes_ratio_page_cache")
    figures = (
        {key: headline.get(key) for key in keys}
        | {"stall_ratio_no_compute": figures["no_compute"].get("stall_ratio")}
        | figures
        | {"skipped": skipped}
        | circumstances(load)
    )
    finish(options.name, figures, as_json=options.json, save=options.save)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # processes and groups are gone by now
        raise SystemExit(130) from None
