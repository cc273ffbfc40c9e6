"""How the demo looks while it runs: live panels on a terminal, a few plain lines in a pipe.

Everything here goes to stderr; stdout is for the result.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Protocol

from expertctl import figures
from expertctl.demo.state import AgentState, DemoState

_BAR_WIDTH = 32
_PLAIN_EVERY_SECONDS = 2.0


class View(Protocol):
    """Shows the demo; `note` is for what happens once, `show` for what goes on."""

    def note(self, text: str) -> None: ...

    def show(self, state: DemoState) -> None: ...

    def __enter__(self) -> View: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


def make_view() -> View:
    """Return the live view when stderr is a terminal that can redraw, else the plain one."""
    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True)
        if not console.is_dumb_terminal:
            from expertctl.demo.live import LiveView

            return LiveView(console)
    return PlainView()


def agent_line(agent: AgentState) -> str:
    """Return the figures of one agent."""
    c = agent.counters
    return (
        f"{len(agent.tokens)} tokens · hits {figures.count(c.hits)} · "
        f"joins {figures.count(c.joins)} · misses {figures.count(c.misses)} · "
        f"hit {figures.size(c.hit_bytes)} · missed {figures.size(c.miss_bytes)} · "
        f"waited {figures.waited(c.wait_ns)}"
    )


def budget_line(state: DemoState) -> str:
    """Return the bar of committed bytes against the budget, and the speed of the device."""
    committed = state.stats.committed_bytes if state.stats else 0
    read = state.stats.device_read_bytes if state.stats else 0
    return (
        f"budget {figures.bar(committed, state.budget_bytes, _BAR_WIDTH)} "
        f"{figures.size(committed)} / {figures.size(state.budget_bytes)} · "
        f"all experts {figures.size(state.expert_bytes)} · "
        f"device {state.device_rate / 1e9:.3f} GB/s, {figures.size(read)} read"
    )


class PlainView:
    """A line when something happens, and one every two seconds."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def show(self, state: DemoState) -> None:
        now = time.monotonic()
        if now - self._last < _PLAIN_EVERY_SECONDS:
            return
        self._last = now
        tokens = " ".join(f"{a.name} {len(a.tokens)}" for a in state.agents)
        self.note(f"demo: tokens {tokens}; {budget_line(state)}")

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass
