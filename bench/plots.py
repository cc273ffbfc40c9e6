"""Draw bench/results/*.json as bench/results/*.png.

    python bench/plots.py [--results DIR]

Needs matplotlib (`pip install 'expertd[plots]'`); without it nothing is drawn and one line says so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
COLOURS = {"shared": "#0b6e4f", "private": "#c8553d", "pread": "#588bae", "mmap": "#a9a9a9"}
NAMES = {
    "shared": "expertd, shared", "private": "private caches", "pread": "pread, page cache",
    "mmap": "mmap, page cache",
}  # fmt: skip


def replay(figures: dict[str, Any], plt: Any) -> Any:
    """Stall and device bytes per token, by text and memory, for each way."""
    kinds = figures["texts"]
    fig, axes = plt.subplots(
        2, len(kinds), figsize=(4 * len(kinds), 6), sharey="row", squeeze=False
    )
    for column, (kind, rows) in enumerate(kinds.items()):
        shares = sorted((s for s in rows if s != "union_over_sum"), key=float)
        for row, (key, unit, what) in enumerate(
            [
                ("stall_ms_per_token", 1.0, "stall per token, ms"),
                ("device_bytes_per_token", 1e6, "device bytes per token, MB"),
            ]
        ):
            axis = axes[row][column]
            ways = [way for way in NAMES if way in rows[shares[0]]]
            for n, way in enumerate(ways):
                at = [x + n * 0.8 / len(ways) for x in range(len(shares))]
                heights = [rows[share][way][key] / unit for share in shares]
                axis.bar(at, heights, 0.8 / len(ways), label=NAMES[way], color=COLOURS[way])
            axis.set_xticks([x + 0.3 for x in range(len(shares))])
            axis.set_xticklabels([f"{float(share):.0%}" for share in shares])
            axis.set_title(f"{kind} texts" if row == 0 else "")
            axis.set_xlabel("expert bytes in memory" if row else "")
            if column == 0:
                axis.set_ylabel(what)
    axes[0][0].legend(fontsize=8)
    return fig


def scale(figures: dict[str, Any], plt: Any) -> Any:
    """Requests, stall and the cost of a hit against the number of sessions."""
    fig, axes = plt.subplots(1, 3, figsize=(12, 3.4))
    for axis, (key, what) in zip(
        axes,
        [
            ("requests_per_second", "miss requests per second"),
            ("stall_ms_per_token", "stall per token, ms"),
            ("hit_us", "a hit while others miss, us"),
        ],
        strict=True,
    ):
        for kind, style in (("different", "-o"), ("identical", "--s")):
            rows = figures[kind]
            axis.plot([r["sessions"] for r in rows], [r[key] for r in rows], style, label=kind)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("sessions")
        axis.set_ylabel(what)
    axes[0].legend()
    return fig


DRAWN: dict[str, Callable[[dict[str, Any], Any], Any]] = {"replay": replay, "scale": scale}


def draw(results: Path, plt: Any) -> list[Path]:
    """Draw what there is; returns the pictures."""
    made = []
    for name, function in DRAWN.items():
        source = results / f"{name}.json"
        if not source.exists():
            continue
        fig = function(json.loads(source.read_text()), plt)
        fig.tight_layout()
        picture = source.with_suffix(".png")
        fig.savefig(picture, dpi=120)
        plt.close(fig)
        made.append(picture)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    try:
        import matplotlib
    except ImportError:
        print("no plots: matplotlib is not installed (pip install 'expertd[plots]')")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    for picture in draw(options.results, pyplot):
        print(picture)


if __name__ == "__main__":
    main()
