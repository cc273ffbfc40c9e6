"""What the demo knows, and what it says at the end."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from expertctl.demo.events import Done, Text
from expertctl.demo.live import picture
from expertctl.demo.state import AgentState, DemoResult, DemoState, prompt_of, result_text
from expertctl.demo.view import PlainView, agent_line, budget_line
from expertd_protocol.stats import Stats

KEYS = {
    "exact", "agents", "tokens_per_agent", "budget_bytes", "peak_resident_bytes", "expert_bytes",
    "hit_rate", "device_read_bytes", "joined_reads", "seconds", "versions", "platform",
}  # fmt: skip


@pytest.fixture
def result(stats: Stats) -> DemoResult:
    """Two agents of three tokens; the first is agent-1 of the snapshot."""
    agents = [AgentState("agent-1", 4242, "Once"), AgentState("agent-2", 4243, "def f(")]
    for agent in agents:
        for token in (5, 6, 7):
            agent.hear(Text(0, token, f" t{token}"))
        agent.hear(Done(2.0))
    state = DemoState(128 * 1024, 192 * 1024, agents)
    state.look(stats, now=10.0)
    reference = ((5, 6, 7), (5, 6, 7))
    return DemoResult(state, "/m", 3, 2.5, 100 * 1024, 40, reference, {"mlx": "0.32.4"})


def test_json_has_the_promised_keys_and_sums(result: DemoResult) -> None:
    value = json.loads(json.dumps(result.as_json()))

    assert value.keys() >= KEYS
    assert value["exact"] is True
    assert value["hits"] + value["joined_reads"] + value["misses"] == value["lookups"] == 1600
    assert value["hit_rate"] == 1260 / 1600
    assert value["versions"] == {"expertd": "0.1.0", "mlx": "0.32.4"}
    assert [a["tokens_per_second"] for a in value["per_agent"]] == [1.5, 1.5]


def test_the_peak_is_the_larger_of_counted_and_sampled(result: DemoResult) -> None:
    assert result.peak_resident_bytes == 112 * 1024
    assert replace(result, sampled_peak_bytes=120 * 1024).peak_resident_bytes == 120 * 1024
    assert replace(result, sampled_peak_bytes=None).peak_resident_bytes == 112 * 1024


@pytest.mark.parametrize(
    ("reference", "sentence"),
    [
        (((5, 6, 7), (5, 9, 7)), "agent-2: 3 tokens, resident run 3; they differ from token 1 on"),
        (((5, 6, 7), (5, 6)), "agent-2: 3 tokens, resident run 2; they differ from token 2 on"),
        (((), (5, 6, 7)), "agent-1: 3 tokens, resident run 0; they differ from token 0 on"),
    ],
)
def test_one_other_token_is_not_exact_and_is_told(
    result: DemoResult, reference: tuple[tuple[int, ...], ...], sentence: str
) -> None:
    other = replace(result, reference=reference)

    assert not other.exact
    assert sentence in result_text(other)
    assert result_text(other).splitlines()[-1] == "exact: no"


def test_too_few_tokens_are_not_exact_even_when_both_runs_agree(result: DemoResult) -> None:
    assert not replace(result, tokens_per_agent=4).exact


def test_the_table_ends_with_the_proof(result: DemoResult) -> None:
    lines = result_text(result).splitlines()

    assert lines[0].split()[0] == "agent"
    assert [line.split()[0] for line in lines[1:4]] == ["agent-1", "agent-2", "total"]
    assert lines[-1] == "exact: yes"
    assert any("112 KiB committed by the daemon, 100 KiB sampled" in line for line in lines)


def test_the_device_rate_is_between_two_looks(stats: Stats) -> None:
    state = DemoState(1, 1, [])
    state.look(stats, now=1.0)
    assert state.device_rate == 0.0
    more = stats.device_read_bytes + 3000
    state.look(stats.model_copy(update={"device_read_bytes": more}), now=1.5)

    assert state.device_rate == 6000


def test_the_peak_does_not_fall_when_memory_is_given_back(stats: Stats) -> None:
    state = DemoState(1, 1, [])
    state.look(stats, now=1.0)
    state.look(stats.model_copy(update={"committed_bytes": 1, "peak_committed_bytes": 1}), now=2.0)

    assert state.peak_committed_bytes == stats.peak_committed_bytes


def test_a_session_that_is_gone_keeps_its_last_figures(result: DemoResult, stats: Stats) -> None:
    result.state.look(stats.model_copy(update={"sessions": ()}), now=11.0)

    assert result.state.agents[0].counters.hits == 1260


def test_agents_have_different_prompts() -> None:
    assert len({prompt_of(i) for i in range(6)}) == 6
    assert prompt_of(6) == prompt_of(0)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_picture_shows_every_agent_and_the_budget(result: DemoResult, width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(picture(result.state, width))
    text = console.export_text()
    console.file.close()

    assert "agent-1" in text
    assert "agent-2" in text
    assert "budget" in text
    assert "t5 t6 t7" in text
    assert all(len(line) <= width for line in text.splitlines())


def test_the_picture_keeps_its_height_while_text_grows(result: DemoResult) -> None:
    def height() -> int:
        console = Console(width=60, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(picture(result.state, 60))
        console.file.close()
        return len(console.export_text().splitlines())

    before = height()
    result.state.agents[0].text += " many more words\n\n" * 50

    assert height() == before


def test_live_figures_have_bytes_and_waiting(result: DemoResult) -> None:
    line = agent_line(result.state.agents[0])

    assert "hits 1,260" in line
    assert "missed 340 KiB" in line
    assert "waited 1.52 s" in line
    assert "96.0 KiB / 128 KiB" in budget_line(result.state)


def test_plain_progress_is_on_stderr_alone(capsys: pytest.CaptureFixture[str]) -> None:
    PlainView().note("hello")
    captured = capsys.readouterr()

    assert (captured.out, captured.err) == ("", "hello\n")
