"""The demo as a sequence: daemon, agents, measure, reference run, result. Prints nothing itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from expertctl import bundled, facts, figures
from expertctl.connection import ANSWER_SECONDS
from expertctl.demo.crew import Crew
from expertctl.demo.events import Job, Text
from expertctl.demo.state import AgentState, DemoResult, DemoState, prompt_of
from expertctl.demo.view import View, make_view
from expertctl.private_daemon import private_daemon
from expertctl.shared_memory import SharedMemoryPeak
from expertd.cache.budget import SystemMemory, parse_budget
from expertd_client.model_folder import model_folder
from expertd_protocol.errors import BadBudget

if TYPE_CHECKING:
    from expertd_client import Admin

LOAD_SECONDS = 180.0
#: Generous: a loaded CI machine, a big model given with --model.
RUN_SECONDS = 1800.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class DemoPlan:
    """What will be run, with every number known."""

    model: Path
    expert_bytes: int
    budget_bytes: int
    tokens: int
    prompts: tuple[str, ...]

    @classmethod
    def make(cls, model: str | None, budget: str, agents: int, tokens: int) -> DemoPlan:
        path = model_folder(model) if model else bundled.FOLDER
        expert_bytes = facts.read_facts(path).all_experts_bytes
        return cls(
            path,
            expert_bytes,
            budget_of(budget, expert_bytes),
            tokens,
            tuple(prompt_of(i) for i in range(agents)),
        )

    def jobs(self, socket: Path) -> list[Job]:
        return [
            Job(f"agent-{i + 1}", str(self.model), (prompt,), self.tokens, str(socket))
            for i, prompt in enumerate(self.prompts)
        ]

    def reference(self) -> Job:
        """One process with plain mlx-lm for all prompts."""
        return Job("resident", str(self.model), self.prompts, self.tokens, None)


def budget_of(text: str, expert_bytes: int) -> int:
    """Return bytes of `25%` (of the model's expert bytes) or of a size.

    Raises:
        BadBudget: it is neither.
    """
    if text.strip().lower() == "auto":
        raise BadBudget("the demo needs a budget that is small on purpose: 25%, or a size as 1MiB")
    # a percentage means a share of the experts here, as the daemon's means one of all memory
    of = expert_bytes if text.strip().endswith("%") else _system_bytes()
    return parse_budget(text, SystemMemory(total=of, available=of))


def _system_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


@contextmanager
def perform(plan: DemoPlan, view: View | None = None) -> Iterator[tuple[DemoResult, Path]]:
    """Run the demo; daemon and agents stay until the `with` block ends.

    Raises:
        ExpertdError: the daemon or a worker failed; everything has been ended.
    """
    from expertd_client import Admin

    with ExitStack() as stack:
        with view or make_view() as shown:
            shown.note(
                f"demo: private daemon, budget {figures.size(plan.budget_bytes)} for "
                f"{figures.size(plan.expert_bytes)} of experts "
                f"({figures.share(plan.budget_bytes, plan.expert_bytes)}); "
                "a running daemon is not used"
            )
            daemon = stack.enter_context(private_daemon(str(plan.budget_bytes)))
            peak = stack.enter_context(SharedMemoryPeak(daemon.pid))
            admin = stack.enter_context(
                Admin.connect(daemon.socket, deadline_seconds=ANSWER_SECONDS)
            )
            crew = stack.enter_context(Crew(plan.jobs(daemon.socket)))
            state = DemoState(
                plan.budget_bytes,
                plan.expert_bytes,
                [AgentState(a.job.name, a.pid, a.job.prompts[0]) for a in crew.agents],
            )
            shown.note(f"demo: {len(crew.agents)} worker processes load {plan.model.name}")
            versions = crew.wait_ready(LOAD_SECONDS)
            seconds = follow(crew, admin, state, shown)
            shown.note("demo: agents done; now a fully resident mlx-lm run of the same prompts")
            reference = resident_tokens(plan.reference())
        result = DemoResult(
            state=state,
            model=str(plan.model),
            tokens_per_agent=plan.tokens,
            seconds=seconds,
            sampled_peak_bytes=peak.peak_bytes,
            samples=peak.samples,
            reference=reference,
            versions=versions,
        )
        yield result, daemon.run_dir


def follow(crew: Crew, admin: Admin, state: DemoState, view: View) -> float:
    """Let the agents write, and look at the daemon ten times a second; return the seconds."""
    agents = {agent.pid: known for agent, known in zip(crew.agents, state.agents, strict=True)}
    started = last_look = time.monotonic()
    crew.go()
    for heard in crew.events(RUN_SECONDS):
        if heard is not None:
            agents[heard[0].pid].hear(heard[1])
        now = time.monotonic()
        if now - last_look >= _LOOK_SECONDS:
            last_look = now
            state.look(admin.stats(), now)
            view.show(state)
    seconds = time.monotonic() - started
    # workers stay attached until they are let go, so their sessions are still in this one
    state.look(admin.stats(), time.monotonic())
    view.show(state)
    return seconds


def resident_tokens(job: Job) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each prompt of a job in a process of its own."""
    tokens: list[list[int]] = [[] for _ in job.prompts]
    with Crew([job]) as crew:
        crew.wait_ready(LOAD_SECONDS)
        crew.go()
        for heard in crew.events(RUN_SECONDS):
            if heard is not None and isinstance(heard[1], Text):
                tokens[heard[1].prompt].append(heard[1].token)
    return tuple(tuple(t) for t in tokens)
