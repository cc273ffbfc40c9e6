"""What the sessions of a benchmark say: sequences of real routing, cut from traces.

| text | sessions |
| --- | --- |
| `different` | disjoint parts of one trace |
| `identical` | the same part for all |
| `domains` | parts of several traces of one shape, as many of each |

Traces of real models are no part of this repository: they are looked for in --traces, then in
../shared/traces beside the checkout; else the bundled model's own trace is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from expertctl.traces import NOT_ROUTED, U16, Trace, read_trace

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared" / "traces"
SHIPPED = ROOT / "bench" / "traces"
#: The replacement policy was not tuned on the first one, so the figures that count are of it.
REAL = ("deepseek_v2_lite_esft_translation", "deepseek_v2_lite_esft_intent")
OWN = ("tiny_moe_generate",)
KINDS = ("different", "identical", "domains")


@dataclass(frozen=True)
class Texts:
    """Traces of one model: same layers, same experts."""

    traces: tuple[Trace, ...]

    @property
    def layers(self) -> int:
        return self.traces[0].layers

    @property
    def experts(self) -> int:
        return self.traces[0].num_experts

    @property
    def top_k(self) -> int:
        return int(self.traces[0].ids.shape[2])

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is text for."""
        return KINDS if len(self.traces) > 1 else KINDS[:2]

    def sessions(self, kind: str, n: int, tokens: int) -> list[U16]:
        """Return ids[tokens, layers, k] of each of `n` sessions."""
        if kind == "identical":
            return [self.traces[0].ids[:tokens]] * n
        if kind == "different":
            return [part[:tokens] for part in self.traces[0].parts(n)]
        each = [len(share) for share in np.array_split(np.arange(n), len(self.traces))]
        chosen = [
            part[:tokens]
            for trace, count in zip(self.traces, each, strict=True)
            if count
            for part in trace.parts(count)
        ]
        return chosen


def find(folder: Path | None) -> Texts:
    """Return the traces of `folder`, of ../shared/traces, or the shipped ones."""
    for place in [folder] if folder else [SHARED, SHIPPED]:
        for names in (REAL, OWN):
            paths = [place / f"{name}.npz" for name in names]
            if found := [path for path in paths if path.exists()]:
                return Texts(tuple(read_trace(path) for path in found))
    raise SystemExit(f"{folder or SHIPPED} has none of the traces {', '.join(REAL + OWN)}")


def experts_of(row: U16) -> list[int]:
    """Return the experts of one layer of one token, each once."""
    return sorted({int(e) for e in row if e != NOT_ROUTED})


def expert_set(ids: U16) -> set[tuple[int, int]]:
    """Return every (layer, expert) that a session uses."""
    _, layers, _ = np.nonzero(ids != NOT_ROUTED)
    return set(zip(layers.tolist(), ids[ids != NOT_ROUTED].tolist(), strict=True))


def union_over_sum(sessions: Sequence[U16]) -> float:
    """Return how much of what the sessions use is used by others, too: 1 is nothing, 1/n all."""
    sets = [expert_set(ids) for ids in sessions]
    return len(set().union(*sets)) / sum(len(s) for s in sets)
