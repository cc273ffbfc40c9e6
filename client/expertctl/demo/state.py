"""What the demo knows while it runs and when it is over. Plain state: no process, no terminal."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any

from expertctl import figures, render
from expertctl.demo.events import Done, Event, Text
from expertctl.table import table
from expertd_protocol.stats import Counters, SessionStats, Stats

#: Different openings, so that the agents want different experts; the last ones repeat the first.
PROMPTS = (
    "Once upon a time there was a little fox who",
    "def count_words(text):\n    ",
    "The old king had three daughters, and the youngest",
    "One morning Tom found a small door in the garden wall.",
    "class Stack:\n    def __init__(self",
    "Far away by the sea lived a fisherman and his wife.",
)


def prompt_of(agent: int) -> str:
    return PROMPTS[agent % len(PROMPTS)]


@dataclass
class AgentState:
    """One agent: what it wrote, and what the daemon knows of it."""

    name: str
    pid: int
    prompt: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    seconds: float | None = None
    session: SessionStats | None = None

    def hear(self, event: Event) -> None:
        if isinstance(event, Text):
            self.tokens.append(event.token)
            self.text += event.text
        elif isinstance(event, Done):
            self.seconds = event.seconds

    @property
    def counters(self) -> Counters:
        return render.counters_of(self.session) if self.session else Counters()

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds if self.seconds else 0.0


@dataclass
class DemoState:
    """The whole demo at one moment."""

    budget_bytes: int
    expert_bytes: int
    agents: list[AgentState]
    stats: Stats | None = None
    peak_committed_bytes: int = 0
    #: Device bytes per second between the last two looks.
    device_rate: float = 0.0
    _last_look: float = 0.0

    def look(self, stats: Stats, now: float) -> None:
        """Take in a snapshot of the daemon."""
        if self.stats is not None and now > self._last_look:
            delta = stats.device_read_bytes - self.stats.device_read_bytes
            self.device_rate = delta / (now - self._last_look)
        self.stats, self._last_look = stats, now
        self.peak_committed_bytes = max(
            self.peak_committed_bytes, stats.committed_bytes, stats.peak_committed_bytes
        )
        by_pid = {s.pid: s for s in stats.sessions}
        for agent in self.agents:
            agent.session = by_pid.get(agent.pid, agent.session)


@dataclass(frozen=True)
class DemoResult:
    """The outcome, with the tokens of both runs."""

    state: DemoState
    model: str
    tokens_per_agent: int
    seconds: float
    #: Largest shared memory of the daemon that the kernel reported; None where it does not.
    sampled_peak_bytes: int | None
    samples: int
    reference: tuple[tuple[int, ...], ...]
    versions: dict[str, str]

    @property
    def exact(self) -> bool:
        """Every agent wrote as many tokens as asked, the same as the resident run."""
        agents = self.state.agents
        return len(agents) == len(self.reference) and all(
            len(agent.tokens) == self.tokens_per_agent and tuple(agent.tokens) == tokens
            for agent, tokens in zip(agents, self.reference, strict=True)
        )

    @property
    def peak_resident_bytes(self) -> int:
        return max(self.state.peak_committed_bytes, self.sampled_peak_bytes or 0)

    @property
    def total(self) -> Counters:
        return sum((a.counters for a in self.state.agents), Counters())

    def as_json(self) -> dict[str, Any]:
        """Return the machine-readable outcome; keys are stable."""
        stats, total = self.state.stats, self.total
        assert stats is not None
        return {
            "exact": self.exact,
            "agents": len(self.state.agents),
            "tokens_per_agent": self.tokens_per_agent,
            "budget_bytes": self.state.budget_bytes,
            "peak_resident_bytes": self.peak_resident_bytes,
            "peak_committed_bytes": self.state.peak_committed_bytes,
            "peak_sampled_bytes": self.sampled_peak_bytes,
            "samples": self.samples,
            "expert_bytes": self.state.expert_bytes,
            "hit_rate": total.hit_rate,
            "hit_bytes": total.hit_bytes,
            "miss_bytes": total.miss_bytes,
            "wait_seconds": total.wait_ns / 1e9,
            "lookups": total.lookups,
            "hits": total.hits,
            "joined_reads": total.joins,
            "misses": total.misses,
            "saved_reads": stats.saved_reads,
            "saved_bytes": stats.saved_bytes,
            "device_reads": stats.device_reads,
            "device_read_bytes": stats.device_read_bytes,
            "evictions": stats.evictions,
            "mismatches": sum(a.session.mismatches for a in self.state.agents if a.session),
            "seconds": self.seconds,
            "per_agent": [
                {
                    "name": a.name,
                    "prompt": a.prompt,
                    "text": a.text,
                    "tokens": len(a.tokens),
                    "tokens_per_second": a.tokens_per_second,
                    "exact": tuple(a.tokens) == tokens,
                    "hit_rate": a.counters.hit_rate,
                    "wait_seconds": a.counters.wait_ns / 1e9,
                    **{
                        k: v
                        for k, v in a.counters.model_dump().items()
                        if k in ("lookups", "hits", "joins", "misses", "hit_bytes", "miss_bytes")
                    },
                }
                for a, tokens in zip(self.state.agents, self.reference, strict=True)
            ],
            "model": self.model,
            "platform": platform.platform(),
            "versions": {"expertd": stats.version, **self.versions},
        }


def result_text(result: DemoResult) -> str:
    """Return the table and the proof."""
    size, count = figures.size, figures.count
    stats, state = result.state.stats, result.state
    assert stats is not None
    headers = (
        "agent", "tokens", "tokens/s", "hits", "joins", "misses", "hit rate",
        "hit bytes", "miss bytes", "waited",
    )  # fmt: skip

    def row(name: str, tokens: int, rate: float, c: Counters) -> tuple[str, ...]:
        return (
            name, count(tokens), f"{rate:.1f}", count(c.hits), count(c.joins), count(c.misses),
            figures.share(c.hits, c.lookups), size(c.hit_bytes), size(c.miss_bytes),
            figures.waited(c.wait_ns),
        )  # fmt: skip

    rows = [row(a.name, len(a.tokens), a.tokens_per_second, a.counters) for a in state.agents]
    tokens = sum(len(a.tokens) for a in state.agents)
    rows.append(row("total", tokens, tokens / result.seconds, result.total))
    sampled = (
        f"{size(result.sampled_peak_bytes)} sampled from the kernel {result.samples} times"
        if result.sampled_peak_bytes is not None
        else "this system has no figure to sample"
    )
    used = figures.share(result.peak_resident_bytes, state.budget_bytes)
    lines = [
        table(headers, rows),
        "",
        f"budget    {size(state.budget_bytes)} for {size(state.expert_bytes)} of experts "
        f"({figures.share(state.budget_bytes, state.expert_bytes)})",
        f"peak      {size(result.peak_resident_bytes)} ({used} of the budget): "
        f"{size(state.peak_committed_bytes)} committed by the daemon, {sampled}",
        f"device    {count(stats.device_reads)} reads, {size(stats.device_read_bytes)}; "
        f"saved by sharing {count(stats.saved_reads)} reads, {size(stats.saved_bytes)}",
        f"proof     {len(state.agents)} fully resident mlx-lm runs of the same prompts, "
        f"{result.tokens_per_agent} tokens each",
        *differences(result),
        f"exact: {'yes' if result.exact else 'no'}",
    ]
    return "\n".join(lines)


def differences(result: DemoResult) -> list[str]:
    """Return one line for each agent whose tokens are not those of the resident run."""
    lines = []
    for agent, want in zip(result.state.agents, result.reference, strict=True):
        got = tuple(agent.tokens)
        if got == want:
            continue
        pairs = zip(got, want, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(want)))
        lines.append(
            f"          {agent.name}: {len(got)} tokens, resident run {len(want)}; "
            f"they differ from token {first} on"
        )
    return lines
