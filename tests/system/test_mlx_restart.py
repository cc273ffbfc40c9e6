"""Daemons killed under MLX workers: the workers attach again and finish with identical tokens."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

from tests.system.daemon import DEMO_MODEL, real_daemon
from tests.system.test_processes import QUARTER, Worker, workers

PROMPTS = ("Once upon a time there was a fox", "def add(a, b):", "The king had three daughters")
TOKENS = 48


@pytest.fixture(scope="module")
def expected() -> list[list[str]]:
    model, tokenizer = load(str(DEMO_MODEL))
    return [
        [
            f"token {token}"
            for token, _ in generate_step(
                mx.array(tokenizer.encode(text)), model, max_tokens=TOKENS
            )
        ]
        for text in PROMPTS
    ]


def tokens(worker: Worker) -> list[str]:
    return [line for line in worker.lines if line.startswith("token")]


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_workers_finish_with_identical_tokens_when_the_daemon_is_replaced(
    end: str, expected: list[list[str]]
) -> None:
    flags = [("--prompt", text, "--tokens", str(TOKENS)) for text in PROMPTS]
    with (
        real_daemon(QUARTER) as daemon,
        workers(daemon, *flags, module="tests.system.mlx_worker") as started,
    ):
        for worker in started:
            worker.wait_for("token", 60)
        for _ in range(2):
            getattr(daemon, end)()
            daemon.start()
        for worker in started:
            assert worker.end() == 0, worker.lines

        assert [tokens(worker) for worker in started] == expected


def test_a_killed_worker_disturbs_no_other(expected: list[list[str]]) -> None:
    flags = [("--prompt", text, "--tokens", str(TOKENS)) for text in PROMPTS]
    with (
        real_daemon(QUARTER, "--poison-free-slots") as daemon,
        workers(daemon, *flags, module="tests.system.mlx_worker") as started,
    ):
        started[0].wait_for("token", 60)
        started[0].kill()
        for worker in started[1:]:
            assert worker.end() == 0, worker.lines

        assert [tokens(worker) for worker in started[1:]] == expected[1:]
        assert daemon.stats().sessions == ()
