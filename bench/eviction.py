"""What one decision of the replacement policy costs the daemon, for the largest models.

    python bench/eviction.py [--json]

Four sessions of 94 layers x 128 experts, 8 used a layer, 8,000 slots, half of each pass repeated from
earlier ones. One sample is one miss: the four pages are looked at (`observe_us`), then four victims are
chosen (`victims_us`). Medians and p95 of the process's CPU time, so that a busy machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("daemon", "protocol")]

# ruff: noqa: E402
import numpy as np

from expertd.cache.eviction import NextUse
from expertd_protocol.ids import SessionId

LAYERS, EXPERTS, USED, SLOTS, SESSIONS, PASSES = 94, 128, 8, 8_000, 4, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.parse_args()

    rng = np.random.default_rng(0)
    policy = NextUse(LAYERS, EXPERTS)
    names = [SessionId(bytes([n]) * 16) for n in range(SESSIONS)]
    uses = np.zeros((SESSIONS, LAYERS, EXPERTS), np.uint32)
    known = rng.permuted(np.tile(np.arange(EXPERTS), (20, LAYERS, 1)), axis=2)[:, :, :USED]
    resident = rng.permutation(LAYERS * EXPERTS)[:SLOTS]
    layers, experts = np.divmod(resident, EXPERTS)
    observe, victims = [], []
    for _ in range(PASSES):
        passes = known[rng.integers(0, len(known), SESSIONS)]
        for layer in range(LAYERS):
            for session in range(SESSIONS):
                uses[session, layer, passes[session, layer]] += np.uint32(1)
            began = time.thread_time_ns()
            for session, name in enumerate(names):
                policy.observe(name, uses[session].copy(), 0.0)
            looked = time.thread_time_ns()
            policy.victims(layers, experts, 4, 0.0)
            observe.append((looked - began) / 1000)
            victims.append((time.thread_time_ns() - looked) / 1000)
        policy.duel.lead = 200  # as in use: the policy decides
    settled = len(observe) // 2
    report = {
        f"{name}_{what}_us": round(value, 1)
        for name, samples in (("observe", observe[settled:]), ("victims", victims[settled:]))
        for what, value in (
            ("median", statistics.median(samples)),
            ("mean", statistics.mean(samples)),
            ("p95", sorted(samples)[len(samples) * 95 // 100]),
        )
    }
    report |= {"layers": LAYERS, "experts": EXPERTS, "slots": SLOTS, "sessions": SESSIONS}
    report |= {
        "machine": f"{platform.machine()}, {platform.system()}, {os.cpu_count()} CPUs",
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "command": "python bench/eviction.py --json",
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
