"""The live display of the demo: a panel per agent and a budget bar."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from expertctl.demo.state import AgentState, DemoState
from expertctl.demo.view import agent_line, budget_line

_REFRESHES_PER_SECOND = 12
#: Panels keep one height, so that the display does not jump while text grows.
_TEXT_LINES = 6
_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


class LiveView:
    """rich.Live on stderr. It stays on the screen when the demo is over."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(
            console=console, refresh_per_second=_REFRESHES_PER_SECOND, transient=False
        )

    def note(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False)

    def show(self, state: DemoState) -> None:
        self._live.update(picture(state, self._console.width))

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()


def picture(state: DemoState, width: int) -> RenderableType:
    """Return the whole display for one moment."""
    panels = [
        _panel(agent, _COLOURS[i % len(_COLOURS)], width) for i, agent in enumerate(state.agents)
    ]
    return Group(*panels, Text(budget_line(state), style="bold", no_wrap=True, overflow="ellipsis"))


def _panel(agent: AgentState, colour: str, width: int) -> Panel:
    story = Text(agent.prompt, style="dim")
    separator = "" if agent.prompt[-1:].isspace() or not agent.text else " "
    story.append(separator + agent.text, style="not dim")
    # the end of the text is the news: keep the last lines that fit
    lines = story.wrap(Console(width=max(width - 4, 20)), max(width - 4, 20))[-_TEXT_LINES:]
    lines.extend(Text("") for _ in range(_TEXT_LINES - len(lines)))
    return Panel(
        Text("\n").join(lines),
        title=f"{agent.name} · pid {agent.pid}",
        title_align="left",
        subtitle=agent_line(agent),
        subtitle_align="right",
        border_style=colour,
    )
