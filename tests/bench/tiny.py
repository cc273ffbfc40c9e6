"""Runs a benchmark as people do, in a size that ends in seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "bench" / "traces"
SHAPE = ("--hidden", "128", "--width", "128")


def bench(script: str, *arguments: str, seconds: float = 100) -> str:
    """Return its stdout; an AssertionError has what it said on stderr."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("EXPERTD_")}
    paths = [str(ROOT / p) for p in ("protocol", "daemon", "client")]
    env["PYTHONPATH"] = os.pathsep.join([*paths, env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(ROOT / "bench" / script), *arguments],
        capture_output=True, text=True, timeout=seconds, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
