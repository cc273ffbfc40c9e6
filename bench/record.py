"""What every benchmark says beside its figures: machine, versions, command, and where results go."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = ("expertd", "mlx", "mlx-lm", "numpy", "pyzmq")


def processor() -> str:
    """Return the name of the CPU."""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return None


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.stdout.strip() or None


def circumstances(load_before: float) -> dict[str, object]:
    """Return what a figure means nothing without."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{processor()}, {os.cpu_count()} CPUs, {memory / 2**30:.1f} GiB",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average_before": round(load_before, 2),
        "versions": {"python": platform.python_version()}
        | {p: v for p in PACKAGES if (v := _version(p))},
    }


def finish(name: str, figures: Mapping[str, object], *, as_json: bool, save: bool) -> None:
    """Print the figures, the JSON object as the last line, and keep them when asked to."""
    if save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n")
    if as_json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key}: {value}")
