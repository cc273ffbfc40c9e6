"""Pictures of a trace: in the terminal with block characters, and as a PNG with matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from expertctl.replay.facts import DISTANCES, TraceFacts
from expertd_protocol.errors import MissingExtra

_SHADES = " ░▒▓█"
_BAR = 40
#: Experts side by side in the terminal; more are averaged.
_COLUMNS = 64


def text(facts: TraceFacts) -> str:
    """Return the picture for a terminal."""
    layers, experts = facts.uses.shape
    lines = [
        f"{facts.lookups} look-ups of {facts.sessions} "
        f"{'sequence' if facts.sessions == 1 else 'sequences'}, {layers} layers x {experts} experts",
        "",
        "Heat: experts of each layer, busiest first (share of the busiest quarter; uniform is 25 %)",
    ]
    columns = min(experts, _COLUMNS)
    for layer, row in enumerate(np.sort(facts.uses, axis=1)[:, ::-1]):
        cells = np.array([part.mean() for part in np.array_split(row, columns)])
        shades = np.ceil(cells / max(cells.max(), 1) * (len(_SHADES) - 1)).astype(int)
        share = facts.busiest_quarter[layer]
        lines.append(f"{layer:4d} {''.join(_SHADES[s] for s in shades)} {share:4.0%}")
    lines += ["", "Reuse: other experts used in between, as a share of all (what an LRU must hold)"]
    total = max(facts.lookups, 1)
    sofar = 0
    for end, count in zip(DISTANCES, facts.returns, strict=True):
        sofar += count
        bar = "█" * round(_BAR * count / total)
        lines.append(
            f"{'to ' + format(end, '.0%'):>8} {count / total:5.1%} {sofar / total:6.1%} {bar}"
        )
    lines.append(f"{'first':>8} {facts.first_uses / total:5.1%}")
    lines += [
        "",
        f"Overlap: {facts.union} different experts in all; the sequences apart use {facts.sum_of_sets} "
        f"(union / sum = {facts.union / max(facts.sum_of_sets, 1):.2f})",
    ]
    return "\n".join(lines)


def require_matplotlib() -> None:
    """Raise `MissingExtra` when a PNG cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtra(
            "matplotlib, which draws pictures, is not installed; install expertd[plots]"
        ) from None


def draw_png(facts: TraceFacts, path: Path) -> None:
    """Draw heat, reuse and overlap side by side."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    heat, reuse, overlap = figure.subplots(1, 3, width_ratios=(3, 3, 1))
    ordered = np.sort(facts.uses, axis=1)[:, ::-1]
    shares = ordered / np.maximum(ordered.sum(1, keepdims=True), 1)
    image = heat.imshow(shares, aspect="auto", cmap="magma")
    figure.colorbar(image, ax=heat, label="share of the layer's uses")
    heat.set(title="Heat", xlabel="experts, busiest first", ylabel="layer")
    total = max(facts.lookups, 1)
    reuse.plot([d * 100 for d in DISTANCES], np.cumsum(facts.returns) / total * 100, marker="o")
    reuse.set(title="Reuse", xlabel="LRU capacity, % of experts", ylabel="hits, %", ylim=(0, 100))
    overlap.bar(["union", "sum of sets"], [facts.union, facts.sum_of_sets])
    overlap.set(title="Overlap", ylabel="experts")
    figure.savefig(path, dpi=120)
