"""`expertctl run` with a real daemon and the bundled model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from expertctl import bundled, facts
from expertctl.demo.crew import Crew
from expertctl.demo.events import Job, Text
from expertctl.private_daemon import private_daemon
from expertctl.traces import read_trace

pytestmark = pytest.mark.timeout(300)

MODEL = str(bundled.FOLDER)
PROMPT = "Once upon a time"


def run(*args: str, given: str = "", run_dir: Path) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "EXPERTD_RUN_DIR": str(run_dir),
    }
    return subprocess.run(
        [sys.executable, "-m", "expertctl", "run", *args],
        env=env, input=given, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


def resident_text(tokens: int) -> str:
    text = ""
    with Crew([Job("resident", MODEL, (PROMPT,), tokens, None)]) as crew:
        crew.wait_ready(120)
        crew.go()
        for heard in crew.events(120):
            if heard is not None and isinstance(heard[1], Text):
                text += heard[1].text
    return text


def test_a_private_daemon_serves_one_run_and_the_text_is_the_resident_one(short_dir: Path) -> None:
    done = run(MODEL, "-p", PROMPT, "--max-tokens", "12", "--budget", "1MiB", run_dir=short_dir)
    first, figures = done.stderr.splitlines()

    assert done.returncode == 0
    assert done.stdout == resident_text(12) + "\n"
    assert first.startswith("run: no daemon is running; a private one with budget 1MiB")
    assert figures.startswith("12 tokens · ")
    for part in (
        "hits ",
        "joins ",
        "misses ",
        " read",
        "waited ",
        "private daemon, budget 1.00 MiB",
    ):
        assert part in figures


def test_a_running_daemon_is_used_and_json_is_alone_on_stdout(short_dir: Path) -> None:
    with private_daemon("1MiB") as daemon:
        args = (MODEL, "-p", "-", "--max-tokens", "6", "--json", "--arena-view", "copy")
        done = run(*args, given=PROMPT, run_dir=daemon.run_dir)
    value = json.loads(done.stdout)

    assert (done.returncode, done.stderr) == (0, "")
    assert value["daemon"] == "shared"
    assert (value["prompt_tokens"], value["tokens"], value["budget_bytes"]) == (4, 6, 1 << 20)
    assert value["hits"] + value["joins"] + value["misses"] == value["lookups"] > 0
    assert resident_text(6) == value["text"]


def test_a_run_can_be_recorded_and_is_the_same_run(short_dir: Path) -> None:
    out = short_dir / "a.npz"
    with private_daemon("1MiB") as daemon:
        args = (MODEL, "-p", PROMPT, "--max-tokens", "12", "--trace", str(out))
        done = run(*args, run_dir=daemon.run_dir)
        again = run(*args, run_dir=daemon.run_dir)
    trace = read_trace(out)

    assert done.returncode == 0
    assert done.stdout == resident_text(12) + "\n"
    # the last prompt token goes through alone, and mlx-lm computes one token ahead
    assert f"run: {out}: 16 tokens (3 prefill, 13 decode) in 1 sequence\n" in done.stderr
    assert (trace.tokens, trace.layers, trace.ids.shape[2], trace.num_experts) == (16, 6, 4, 32)
    assert trace.weights is not None
    np.testing.assert_allclose(trace.weights.sum(-1, dtype=float), 1, atol=2e-3)
    assert trace.texts["model"] == "demo_model"
    assert PROMPT not in out.read_bytes().decode(errors="replace")
    assert (again.returncode, again.stdout) == (2, "")
    assert again.stderr == f"error: {out} exists and is not overwritten; choose another name\n"
    assert [path.name for path in short_dir.iterdir()] == ["a.npz"]


def test_a_prompt_longer_than_the_context_is_refused_before_anything_is_written(
    short_dir: Path,
) -> None:
    done = run(MODEL, "-p", "-", "--budget", "1MiB", given="word " * 1500, run_dir=short_dir)

    assert done.returncode == 2
    assert done.stdout == ""
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: the prompt has 1,50")
    assert "the context of this model is 1,024" in error


@pytest.mark.parametrize(
    ("args", "code", "sentence"),
    [
        (("--budget", "64KiB"), 4, f"{facts.minimum_budget(facts.read_facts(bundled.FOLDER)):,}"),
        (("--budget", "lots"), 4, "is not a size"),
        (("--run-dir", "/nope"), 5, "no daemon"),
    ],
)
def test_what_cannot_work_is_one_sentence(
    args: tuple[str, ...], code: int, sentence: str, short_dir: Path
) -> None:
    done = run(MODEL, "-p", PROMPT, *args, run_dir=short_dir)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("run: ")]

    assert done.returncode == code
    assert done.stdout == ""
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert sentence in errors[0]
