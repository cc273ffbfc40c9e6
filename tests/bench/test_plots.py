"""bench/plots.py: pictures where matplotlib is, one line where it is not."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

from tests.bench.tiny import bench

WAY = {"stall_ms_per_token": 1.5, "device_bytes_per_token": 2_000_000}
SCALE = {"sessions": 2, "requests_per_second": 10.0, "stall_ms_per_token": 3.0, "hit_us": 4.0}


def test_results_become_pictures_or_one_line_says_what_is_missing(tmp_path: Path) -> None:
    texts = {"different": {"union_over_sum": 0.5, "0.5": {"shared": WAY, "private": WAY}}}
    (tmp_path / "replay.json").write_text(json.dumps({"texts": texts}))
    (tmp_path / "scale.json").write_text(json.dumps({"different": [SCALE], "identical": [SCALE]}))

    said = bench("plots.py", "--results", str(tmp_path))

    if importlib.util.find_spec("matplotlib") is None:
        assert said == "no plots: matplotlib is not installed (pip install 'expertd[plots]')\n"
        return
    assert {p.name for p in tmp_path.glob("*.png")} == {"replay.png", "scale.png"}
