"""bench/scale.py in a size that ends in seconds."""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.tiny import SHAPE, SHIPPED, bench


def test_more_sessions_are_measured_on_the_same_and_on_different_texts(tmp_path: Path) -> None:
    done = bench(
        "scale.py", "--json", "--traces", str(SHIPPED), "--data", str(tmp_path), "--tokens", "20",
        "--sessions", "1", "2", *SHAPE,
    )  # fmt: skip
    figures = json.loads(done.splitlines()[-1])

    for kind in ("different", "identical"):
        assert [row["sessions"] for row in figures[kind]] == [1, 2]
        for row in figures[kind]:
            assert row["tokens"] == 20
            assert row["requests_per_second"] > 0
            assert row["stall_ms_per_token"] > 0
            assert row["daemon_cpu_us_per_miss"] > 0
            assert 0 < row["hit_alone_us"] < 1e5
            assert row["device_bytes_per_token"] > 0
    assert figures["identical"][1]["union_over_sum"] == 0.5
