"""What a trace says about caching: heat per layer, reuse distance, and what sessions share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertctl.replay.simulator import Workload

#: Upper ends of the reuse-distance classes, as shares of all experts.
DISTANCES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.75, 1.0)


@dataclass(frozen=True)
class TraceFacts:
    """Figures of one workload."""

    sessions: int
    lookups: int
    #: Uses of each expert, u64[layers, experts].
    uses: npt.NDArray[np.int64]
    #: Look-ups whose expert returned after that many other experts, by `DISTANCES`; first uses apart.
    returns: tuple[int, ...]
    first_uses: int
    #: Different experts over all sessions, and the sum of what each session alone uses.
    union: int
    sum_of_sets: int

    @property
    def busiest_quarter(self) -> npt.NDArray[np.float64]:
        """Share of each layer's uses that its busiest quarter of experts takes."""
        ordered = np.sort(self.uses, axis=1)[:, ::-1]
        quarter = ordered[:, : max(self.uses.shape[1] // 4, 1)].sum(1)
        share: npt.NDArray[np.float64] = quarter / np.maximum(ordered.sum(1), 1)
        return share

    def as_json(self) -> dict[str, object]:
        return {
            "sessions": self.sessions,
            "lookups": self.lookups,
            "layers": self.uses.shape[0],
            "experts": self.uses.shape[1],
            "busiest_quarter": [round(float(x), 4) for x in self.busiest_quarter],
            "reuse": {str(d): n for d, n in zip(DISTANCES, self.returns, strict=True)},
            "first_uses": self.first_uses,
            "union": self.union,
            "sum_of_sets": self.sum_of_sets,
        }


def trace_facts(work: Workload) -> TraceFacts:
    """Count what there is to know. The reuse distance is the LRU stack distance, exactly."""
    uses = np.zeros((work.layers, work.experts), np.int64)
    used_by = np.zeros((work.sessions, work.layers, work.experts), bool)
    for step in work.steps:
        uses[step.layer, step.experts] += 1
        used_by[step.session, step.layer, step.experts] = True
    distances, first_uses = _stack_distances(work)
    ends = np.array(DISTANCES) * work.total
    classes = np.bincount(np.searchsorted(ends, distances), minlength=len(ends) + 1)
    return TraceFacts(
        work.sessions,
        work.lookups,
        uses,
        tuple(classes[: len(ends)].tolist()),
        first_uses,
        int(np.count_nonzero(used_by.any(0))),
        int(np.count_nonzero(used_by)),
    )


def _stack_distances(work: Workload) -> tuple[npt.NDArray[np.int64], int]:
    """Different keys touched since the last use of each look-up's key; a step's keys count as one time."""
    last = np.full(work.total, -1, np.int64)
    distances: list[npt.NDArray[np.int64]] = []
    first_uses = 0
    for at, step in enumerate(work.steps):
        keys = step.layer * work.experts + step.experts
        before = last[keys]
        again = before[before >= 0]
        first_uses += len(keys) - len(again)
        if len(again):
            distances.append(np.count_nonzero(last[None, :] > again[:, None], axis=1))
        last[keys] = at
    return (np.concatenate(distances) if distances else np.zeros(0, np.int64)), first_uses
