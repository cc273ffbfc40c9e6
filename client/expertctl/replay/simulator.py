"""Play traces, interleaved as sessions, through a policy and count hits.

One step is one layer of one token of one session: its experts are looked up together, a hit is an
expert that is resident at that moment, and what is missing is read before the step ends. Sessions
take turns token by token until each is at its end. Capacity counts slots of the whole model, in one
pool. Prefill tokens of a trace are played like all others, one after another.

The daemon's own policy class is run as `default`, and told what the daemon would know: the pages of
all sessions, whenever somebody misses. It is not told the step that is being looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from expertctl.replay.policies import (
    Arc,
    Belady,
    LeastFrequent,
    LeastRecent,
    Policy,
    S3Fifo,
    Sieve,
)
from expertctl.traces import NOT_ROUTED, U16
from expertd.cache.eviction import EvictionPolicy, NextUse
from expertd_protocol.errors import BadTrace
from expertd_protocol.ids import SessionId
from expertd_protocol.layout import Ints

#: Names as they stand in the JSON.
TEXTBOOK: dict[str, Callable[[int], Policy]] = {
    "lru": LeastRecent,
    "lfu": LeastFrequent,
    "s3fifo": S3Fifo,
    "sieve": Sieve,
    "arc": Arc,
}
NAMES = (*TEXTBOOK, "default", "belady")
#: Pretended time between two steps; only idle sessions depend on it.
STEP_SECONDS = 0.001


@dataclass(frozen=True)
class Step:
    """One layer of one token of one session."""

    session: int
    layer: int
    #: Expert numbers, all different.
    experts: Ints


@dataclass(frozen=True)
class Workload:
    """Steps in the order they are played, for a model of `layers` x `experts`."""

    steps: tuple[Step, ...]
    layers: int
    experts: int
    sessions: int

    @property
    def total(self) -> int:
        return self.layers * self.experts

    @property
    def lookups(self) -> int:
        return sum(len(step.experts) for step in self.steps)

    def keys(self) -> list[list[int]]:
        """Return the keys of each step: layer * experts + expert."""
        return [(step.layer * self.experts + step.experts).tolist() for step in self.steps]

    def slots(self, share: float) -> int:
        """Return how many slots a share of all experts is; at least those of the largest step."""
        return max(int(share * self.total), max(len(step.experts) for step in self.steps), 1)


def interleave(sessions: Sequence[U16], num_experts: int, limit: int | None = None) -> Workload:
    """Let sessions take turns token by token.

    Args:
        sessions: ids u16[tokens, layers, k] of each session.
        limit: at most so many tokens of each session.
    """
    if not sessions:
        raise BadTrace("no session to play")
    layers = {ids.shape[1] for ids in sessions}
    if len(layers) > 1:
        raise BadTrace(f"sessions of one model have the same layers; these have {sorted(layers)}")
    steps = []
    longest = max(len(ids) for ids in sessions)
    for token in range(min(longest, limit or longest)):
        for session, ids in enumerate(sessions):
            if token < len(ids):
                for layer, row in enumerate(ids[token]):
                    experts = np.unique(row[row != NOT_ROUTED]).astype(np.intp)
                    if len(experts):
                        steps.append(Step(session, layer, experts))
    return Workload(tuple(steps), layers.pop(), num_experts, len(sessions))


def hit_rate(name: str, work: Workload, slots: int) -> float:
    """Play `work` through the policy called `name` with so many slots."""
    if name == "default":
        policy = NextUse(work.layers, work.experts)
        return replay_daemon(policy, work, slots) / work.lookups
    keys = work.keys()
    textbook = Belady(slots, keys) if name == "belady" else TEXTBOOK[name](slots)
    return sum(textbook.step(step) for step in keys) / work.lookups


def replay_daemon(policy: EvictionPolicy, work: Workload, slots: int) -> int:
    """Play `work` through a policy of the daemon, and return the hits."""
    resident = np.zeros(work.total, bool)
    uses = np.zeros((work.sessions, work.layers, work.experts), np.uint32)
    names = [SessionId(n.to_bytes(16, "big")) for n in range(work.sessions)]
    moved: set[int] = set()  # the other pages are as they were
    hits = held = 0
    for at, step in enumerate(work.steps):
        now = at * STEP_SECONDS
        keys = step.layer * work.experts + step.experts
        here = resident[keys]
        hits += int(np.count_nonzero(here))
        missing = keys[~here]
        if len(missing):  # a request: the daemon looks at all pages, the asker's last
            moved.discard(step.session)
            for n in (*moved, step.session):
                policy.observe(names[n], uses[n], now)
            moved.clear()
        need = held + len(missing) - slots
        if need > 0:
            resident[keys] = False  # a step's own experts are pinned
            candidates = np.flatnonzero(resident)
            layers, experts = np.divmod(candidates, work.experts)
            chosen = candidates[policy.victims(layers, experts, need, now)]
            resident[chosen] = False
            held -= len(chosen)
        resident[keys] = True
        held += len(missing)
        uses[step.session, step.layer, step.experts] += np.uint32(1)
        moved.add(step.session)
    return hits
