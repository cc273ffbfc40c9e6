"""bench/replay.py in a size that ends in seconds: the keys are there and the figures can be true."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from bench import memory_group

from tests.bench.tiny import SHAPE, SHIPPED, bench

BUDGET = "0.5"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    data = tmp_path_factory.mktemp("data")
    done = bench(
        "replay.py", "--json", "--traces", str(SHIPPED), "--data", str(data), "--tokens", "12",
        "--rounds", "1", "--budgets", BUDGET, "--texts", "different", *SHAPE,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(done.splitlines()[-1])
    return found


def test_ours_and_private_caches_are_measured_and_compared(figures: dict[str, Any]) -> None:
    row = figures["texts"]["different"][BUDGET]
    for way in ("shared", "private"):
        assert row[way]["device_bytes"] > 0
        assert row[way]["stall_ms_per_token"] > 0
        assert 0 <= row[way]["found_in_place"] <= 1
        assert row[way]["step_p50_ms"] <= row[way]["step_p95_ms"] <= row[way]["step_p99_ms"]
    assert 0 < figures["stall_ratio"] < math.inf
    assert 0 < figures["bytes_ratio_private"] < math.inf
    assert figures["stall_ratio_against"] in row["stall_ratios"]
    assert row["shared"]["peak_committed_bytes"] <= float(BUDGET) * figures["model_bytes"]
    assert 0.25 <= figures["texts"]["different"]["union_over_sum"] <= 1


def test_the_page_cache_is_measured_within_its_limit(figures: dict[str, Any]) -> None:
    if reason := memory_group.why_not():
        assert set(figures["skipped"]) == {"pread", "mmap"}
        assert figures["bytes_ratio_page_cache"] is None
        pytest.skip(reason)
    row = figures["texts"]["different"][BUDGET]
    for way in ("pread", "mmap"):
        assert row[way]["device_bytes"] > 0
        assert row[way]["group_peak_bytes"] < figures["model_bytes"] + (8 << 20)
    assert 0 < figures["bytes_ratio_page_cache"] < math.inf


def test_the_traces_of_a_folder_without_any_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="has none of the traces"):
        bench("replay.py", "--traces", str(tmp_path), "--data", str(tmp_path))
