"""Worker processes: together at the start, none left at the end. The workers are small scripts."""

from __future__ import annotations

import os
import sys

import pytest

from expertctl.demo.crew import Agent, Crew
from expertctl.demo.events import Done, Event, Job, Text
from expertd_protocol.errors import BudgetTooSmall, DeadlineExceeded, ErrorCode, ExpertdError

PRELUDE = """
import json, os, signal, sys
job = json.loads(sys.stdin.readline())
def say(event, **more):
    print(json.dumps({"event": event, **more}), flush=True)
"""
WRITER = (
    PRELUDE
    + """
say("ready", versions={"mlx": "1"})
assert sys.stdin.readline() == "go\\n"
for i in range(job["tokens"]):
    say("text", prompt=0, token=i, text=job["name"])
say("done", seconds=0.5)
assert sys.stdin.readline() == ""
"""
)


def jobs(n: int, tokens: int = 3) -> list[Job]:
    return [Job(f"agent-{i}", "/m", ("p",), tokens, "/s") for i in range(n)]


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def run_all(crew: Crew, *, interrupt: bool = False) -> None:
    with crew:
        crew.wait_ready(30)
        if interrupt:
            raise KeyboardInterrupt
        crew.go()
        list(crew.events(30))


def gone(agent: Agent) -> bool:
    try:
        os.kill(agent.pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_workers_load_begin_and_end_together() -> None:
    heard: list[tuple[str, Event]] = []
    with Crew(jobs(3), script(WRITER)) as crew:
        assert crew.wait_ready(30) == {"mlx": "1"}
        crew.go()
        heard = [(x[0].job.name, x[1]) for x in crew.events(30) if x is not None]
        assert not any(gone(agent) for agent in crew.agents)
    assert all(gone(agent) for agent in crew.agents)
    for name in ("agent-0", "agent-1", "agent-2"):
        mine = [event for who, event in heard if who == name]
        assert mine == [*(Text(0, i, name) for i in range(3)), Done(0.5)]


def test_a_worker_s_own_error_keeps_its_class_and_exit_code() -> None:
    text = PRELUDE + "say('failed', code='budget_too_small', message='9 bytes', exit_code=4)"
    crew = Crew(jobs(1), script(text))
    with pytest.raises(BudgetTooSmall, match=r"^agent agent-0: 9 bytes$") as caught, crew:
        crew.wait_ready(30)
    assert caught.value.exit_code == 4
    assert gone(crew.agents[0])


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "died of signal 9"),
        ("print('boom', file=sys.stderr); sys.exit(3)", "ended with exit code 3: boom"),
        ("print('garbage')", "not an event|Expecting value"),
    ],
)
def test_a_worker_that_just_dies_is_an_error_and_takes_the_others_along(
    how: str, sentence: str
) -> None:
    text = WRITER.replace('say("done"', f'if job["name"] == "agent-1": {how}\nsay("done"')
    crew = Crew(jobs(3), script(text))
    with pytest.raises(ExpertdError, match=sentence) as caught:
        run_all(crew)
    assert caught.value.code == ErrorCode.INTERNAL
    assert all(gone(agent) for agent in crew.agents)


def test_a_worker_that_hangs_is_given_up_with_its_name_and_killed() -> None:
    text = PRELUDE + "signal.signal(signal.SIGTERM, signal.SIG_DFL); signal.pause()"
    crew = Crew(jobs(1), script(text))
    sentence = r"agent-0 \(pid \d+\) did not load the model"
    with pytest.raises(DeadlineExceeded, match=sentence), crew:
        crew.wait_ready(0.5)
    assert gone(crew.agents[0])


def test_silence_yields_ticks() -> None:
    text = WRITER.replace("for i in", "import select; select.select([], [], [], 0.4)\nfor i in")
    with Crew(jobs(1), script(text)) as crew:
        crew.wait_ready(30)
        crew.go()
        assert None in list(crew.events(30))


def test_an_interrupt_ends_every_worker() -> None:
    crew = Crew(jobs(2), script(WRITER))
    with pytest.raises(KeyboardInterrupt):
        run_all(crew, interrupt=True)
    assert all(gone(agent) for agent in crew.agents)
