"""bench/prefetch.py in a size that ends in seconds."""

from __future__ import annotations

import json

from tests.bench.tiny import bench


def test_every_arm_decodes_and_every_early_expert_is_counted() -> None:
    done = bench("prefetch.py", "--json", "--rounds", "2", "--tokens", "12")
    figures = json.loads(done.splitlines()[-1])

    for arm in ("off", "on", "auto"):
        assert figures[f"{arm}_tokens_per_second"] > 0
        assert 0 < figures[f"{arm}_wait_share"] < 1
    assert 0.25 < figures["right"] <= 1  # 4 of 32 by chance: 0.125
    assert figures["prefetched"] > 0
    settled = figures["useful"] + figures["late"] + figures["wasted"]
    assert settled <= figures["prefetched"]
