"""The demo with a real daemon, real workers and the bundled model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from expertctl import bundled, facts
from expertctl.demo.performance import DemoPlan, budget_of
from expertd_protocol.errors import BadBudget

pytestmark = pytest.mark.timeout(300)


@contextmanager
def demo(*args: str, temp: Path | None = None, agents: int = 2) -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if temp is not None:
        env["TMPDIR"] = str(temp)
    command = [sys.executable, "-m", "expertctl", "demo", "--agents", str(agents), *args]
    # tests that run in the background inherit that Ctrl-C is ignored, and so would the demo
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:  # fmt: skip
        try:
            yield process
        finally:  # a test that failed must not wait for a demo that waits for Ctrl-C
            process.terminate()


def wait_for_line(process: subprocess.Popen[str], start: str) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith(start):
            return line
    raise AssertionError(f"no line that starts with {start!r}")


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return [child for child in children(process) if "expertctl.demo.agent" in child.cmdline()]


@pytest.fixture
def temp() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="d-", dir="/tmp") as path:
        yield Path(path)


def test_the_demo_is_exact_and_within_its_budget(temp: Path) -> None:
    with demo("--json", "--tokens", "8", temp=temp) as process:
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    value = json.loads(out.splitlines()[-1])
    found = facts.read_facts(bundled.FOLDER)

    assert out.count("\n") == 1
    assert value["exact"] is True
    assert value["expert_bytes"] == found.all_experts_bytes
    assert value["budget_bytes"] == found.all_experts_bytes // 4
    assert 0 < value["peak_resident_bytes"] <= value["budget_bytes"]
    assert value["hits"] + value["joined_reads"] + value["misses"] == value["lookups"] > 0
    assert value["device_read_bytes"] > 0
    assert value["mismatches"] == 0
    assert [a["tokens"] for a in value["per_agent"]] == [8, 8]
    assert err.splitlines()[-1] == "exact: yes"
    assert list(temp.glob("expertd-*")) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_demo_that_is_ended_leaves_nothing(temp: Path, number: int, code: int) -> None:
    with demo("--tokens", "4096", temp=temp) as process:
        wait_for_line(process, "demo: tokens")
        started = children(process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)

    assert process.returncode == code
    assert "Traceback" not in err
    assert len(started) == 3
    assert not any(child.is_running() for child in started)
    assert list(temp.glob("expertd-*")) == []


def test_a_worker_that_is_killed_is_an_error_with_its_name(temp: Path) -> None:
    with demo("--tokens", "4096", temp=temp) as process:
        wait_for_line(process, "demo: tokens")
        started = children(process)
        victim = workers(process)[0]
        victim.kill()
        out, err = process.communicate(timeout=60)

    assert process.returncode == 1
    assert out == ""
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert f"(pid {victim.pid}) died of signal 9" in error
    assert not any(child.is_running() for child in started)
    assert list(temp.glob("expertd-*")) == []


def test_a_demo_that_is_killed_takes_daemon_and_workers_along(temp: Path) -> None:
    with demo("--tokens", "4096", temp=temp) as process:
        wait_for_line(process, "demo: tokens")
        started = children(process)
        process.kill()
        process.communicate(timeout=60)

    assert len(started) == 3
    _, alive = psutil.wait_procs(started, timeout=30)
    assert alive == []


def test_a_budget_below_the_minimum_is_refused_with_the_bytes(temp: Path) -> None:
    least = facts.minimum_budget(facts.read_facts(bundled.FOLDER))
    assert least is not None
    with demo("--budget", str(least - 1), temp=temp, agents=1) as process:
        _, err = process.communicate(timeout=120)

    assert process.returncode == 4
    assert f"{least:,} bytes" in err
    assert "Traceback" not in err


def test_exactly_the_minimum_is_enough_for_one_agent(temp: Path) -> None:
    least = facts.minimum_budget(facts.read_facts(bundled.FOLDER))
    with demo("--json", "--budget", str(least), "--tokens", "4", temp=temp, agents=1) as process:
        out, err = process.communicate(timeout=240)

    assert process.returncode == 0, err
    value = json.loads(out)
    assert value["exact"] is True
    assert value["peak_resident_bytes"] <= value["budget_bytes"] == least


def test_kept_agents_can_be_looked_at_until_ctrl_c(temp: Path) -> None:
    with demo("--tokens", "4", "--keep", temp=temp) as process:
        run_dir = wait_for_line(process, "  expertctl ps --run-dir ").split()[-1]
        command = [sys.executable, "-m", "expertctl", "ps", "--json", "--run-dir", run_dir]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        seen = json.loads(subprocess.check_output(command, env=env, timeout=60))
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)

    assert sorted(w["name"] for w in seen) == ["agent-1", "agent-2"]
    assert process.returncode == 0
    assert out.splitlines()[-1] == "exact: yes"
    assert list(temp.glob("expertd-*")) == []


def test_stats_are_consistent_while_workers_run(temp: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with demo("--tokens", "4096", temp=temp, agents=3) as process:
        wait_for_line(process, "demo: tokens")
        (run_dir,) = temp.glob("expertd-*")
        command = [sys.executable, "-m", "expertctl", "stats", "--json", "--run-dir", str(run_dir)]
        looks = [json.loads(subprocess.check_output(command, env=env, timeout=60)) for _ in "123"]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)

    for value in looks:
        parts = [value["total"], value["prefill"], value["decode"], *value["derived"]["sessions"]]
        for c in parts:
            assert c["hits"] + c["joins"] + c["misses"] == c["lookups"]
        slots = value["slots"]
        assert sum(slots[k] for k in ("free", "filling", "ready", "retired")) == slots["total"] > 0
        assert value["committed_bytes"] <= value["budget_bytes"]
        assert len(value["sessions"]) == 3
    totals = [value["total"]["lookups"] for value in looks]
    assert totals == sorted(totals)
    assert totals[0] > 0


def test_a_percentage_is_of_the_experts_and_a_size_is_a_size() -> None:
    assert budget_of("25%", 4_423_680) == 1_105_920
    assert budget_of("100%", 1000) == 1000
    assert budget_of("1MiB", 1000) == 1 << 20


@pytest.mark.parametrize("text", ["auto", " AUTO ", "0%", "101%", "huh", "-1", ""])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(BadBudget):
        budget_of(text, 4_423_680)


def test_the_resident_run_gets_the_same_prompts() -> None:
    plan = DemoPlan.make(None, "25%", 3, 64)
    jobs = plan.jobs(Path("/s"))

    assert plan.reference().prompts == tuple(job.prompts[0] for job in jobs)
    assert {job.tokens for job in [*jobs, plan.reference()]} == {64}
    assert plan.reference().socket is None
