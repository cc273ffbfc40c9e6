"""`expertctl trace record` with a real daemon and real workers, against mlx-lm's own routing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.utils import load_model
from typer.testing import CliRunner

from expertctl.trace import app
from expertctl.traces import Trace, read_trace
from expertd_client import Client
from expertd_client.recording import progress
from expertd_mlx import stream_of, streamed_classes
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.client.expertd_mlx.plain_routing import PlainRouting
from tests.system.daemon import RealDaemon, environment, real_daemon, wait_until
from tests.tiny_models import TinyModel, write_tiny_model

#: All 32 experts, and 16 of them.
ROOMY, TIGHT = "32MiB", "400KiB"
LENGTH, STEPS = 20, 6
TOKENS = LENGTH + STEPS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    mx.random.seed(7)
    return write_tiny_model(tmp_path_factory.mktemp("olmoe"), "olmoe", "affine4")


@contextmanager
def worker(model: TinyModel, daemon: RealDaemon, name: str) -> Iterator[nn.Module]:
    classes = partial(streamed_classes, path=model.path)
    ours = load_model(model.path, lazy=True, get_model_classes=classes)[0]
    stream_of(ours).attach(Client.connect(daemon.run_dir, name=name), model.path)
    try:
        yield ours
    finally:
        stream_of(ours).close()


class Command:
    """`expertctl trace record` as a user runs it, and the files that its workers write."""

    def __init__(self, daemon: RealDaemon, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "expertctl", "trace", "record", "--out", str(folder),
             "--run-dir", str(daemon.run_dir), "--json", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), text=True,
        )  # fmt: skip
        assert self.process.stderr is not None
        self.first_line = self.process.stderr.readline()  # said when every worker was asked

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.recording"))

    def end(self, how: signal.Signals | None = None) -> list[dict[str, Any]]:
        """Wait until it ends, by itself or by a signal, and return what it prints."""
        if how is not None:
            self.process.send_signal(how)
        out, err = self.process.communicate(timeout=60)
        assert "Traceback" not in err
        found: list[dict[str, Any]] = json.loads(out) if out else []
        return found

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=60)


@contextmanager
def recording(daemon: RealDaemon, folder: Path, *flags: str) -> Iterator[Command]:
    command = Command(daemon, folder, *flags)
    try:
        yield command
    finally:
        command.kill()


def simulate(path: Path) -> dict[str, dict[str, float]]:
    done = CliRunner().invoke(app, ["simulate", str(path), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    rates: dict[str, dict[str, float]] = json.loads(done.stdout)
    return rates


def assert_is(trace: Trace, theirs: PlainRouting) -> None:
    assert np.array_equal(trace.ids, theirs.ids)
    assert trace.weights is not None
    np.testing.assert_allclose(trace.weights, theirs.weights, atol=2e-3)


@pytest.mark.parametrize("budget", [ROOMY, TIGHT])
def test_each_session_becomes_a_trace_of_mlx_lms_own_routing_until_ctrl_c(
    budget: str, model: TinyModel, tmp_path: Path
) -> None:
    """Once with every layer complete, whose ids nobody reads back, and once with few experts in memory."""
    plain = load_model(model.path)[0]
    with (
        real_daemon(budget) as daemon,
        worker(model, daemon, "one") as one,
        worker(model, daemon, "two") as two,
    ):
        if budget == ROOMY:
            stats = daemon.stats
            wait_until("all are resident", lambda: stats().resident_bytes >= _all_bytes(stats()))
        before = daemon.stats()
        with recording(daemon, tmp_path / "traces") as command:
            assert "recording 2 workers" in command.first_line
            logits = greedy(one, prompt(LENGTH, 1), STEPS)
            greedy(two, prompt(5, 3), 2)
            assert first_difference(logits, greedy(plain, prompt(LENGTH, 1), STEPS)) is None
            found = command.end(signal.SIGINT)
            assert command.process.returncode == 0
        after = daemon.stats()
        assert (after.evictions > before.evictions) == (budget == TIGHT)
        assert (after.total.requests > before.total.requests) == (budget == TIGHT)
        greedy(one, prompt(3, 1), 1)  # goes on, and is not recorded any more
        assert stream_of(one).recorder is None

    traces = {row["name"]: read_trace(Path(row["file"])) for row in found}
    assert [(r["name"], r["tokens"], r["prefill"], r["sequences"]) for r in found] == [
        ("one", TOKENS, LENGTH, 1),
        ("two", 21, 15, 3),
    ]
    assert_is(traces["one"], PlainRouting(plain, lambda: greedy(plain, prompt(LENGTH, 1), STEPS)))
    assert_is(traces["two"], PlainRouting(plain, lambda: greedy(plain, prompt(5, 3), 2)))
    assert sorted(p.suffix for p in (tmp_path / "traces").iterdir()) == [".npz", ".npz"]
    for row in found:
        rates = simulate(Path(row["file"]))
        assert 0 < rates["0.5"]["lru"] <= rates["0.5"]["belady"] < 1


def _all_bytes(stats: Any) -> int:
    (model,) = stats.models
    return int(model.total_expert_bytes)


def test_only_who_is_meant_is_recorded_and_no_longer_than_wanted(
    model: TinyModel, tmp_path: Path
) -> None:
    with (
        real_daemon(TIGHT) as daemon,
        worker(model, daemon, "one") as one,
        worker(model, daemon, "two") as two,
        recording(daemon, tmp_path, "--session", "two", "--tokens", "10") as command,
    ):
        greedy(one, prompt(4, 1), 0)
        greedy(two, prompt(LENGTH, 1), STEPS)
        (found,) = command.end()

    assert (found["name"], found["tokens"], found["end"]) == ("two", 10, "--tokens reached")


def test_a_second_recording_of_a_worker_says_so_and_the_first_goes_on(
    model: TinyModel, tmp_path: Path
) -> None:
    with (
        real_daemon(TIGHT) as daemon,
        worker(model, daemon, "one") as one,
        recording(daemon, tmp_path / "a") as first,
        recording(daemon, tmp_path / "b") as second,
    ):
        greedy(one, prompt(4, 1), 0)
        (refused,) = second.end()
        greedy(one, prompt(4, 1), 0)
        printed = first.end(signal.SIGTERM)

    assert second.process.returncode == 1
    assert (refused["tokens"], refused["file"]) == (0, None)
    assert "recorded already" in refused["end"]
    assert (printed, first.process.returncode) == ([], 128 + signal.SIGTERM)
    (trace,) = map(read_trace, (tmp_path / "a").iterdir())  # SIGTERM keeps what there is, too
    assert trace.tokens == 8


def test_it_outlives_the_daemon_and_a_killed_command_leaves_what_can_be_read(
    model: TinyModel, tmp_path: Path
) -> None:
    plain = load_model(model.path)[0]
    with real_daemon(TIGHT) as daemon, worker(model, daemon, "one") as one:
        with recording(daemon, tmp_path, "--tokens", str(2 * TOKENS)) as command:
            greedy(one, prompt(LENGTH, 1), STEPS)
            daemon.kill()
            daemon.start()
            command.kill()
            greedy(one, prompt(LENGTH, 1), STEPS)
            greedy(one, prompt(LENGTH, 1), STEPS)  # over the limit that the worker knows
            (file,) = command.files

        assert stream_of(one).recorder is None
    trace = read_trace(file)
    assert progress(file)[0] == trace.tokens == 2 * TOKENS
    theirs = PlainRouting(plain, lambda: greedy(plain, prompt(LENGTH, 1), STEPS))
    for ids in trace.sequences():
        assert np.array_equal(ids, theirs.ids)
    assert simulate(file)["0.5"]["belady"] > 0


def test_a_worker_that_is_killed_leaves_the_tokens_of_its_whole_passes(tmp_path: Path) -> None:
    with real_daemon("1105920") as daemon:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.system.mlx_worker", str(daemon.run_dir),
             "--tokens", "900"],
            stdout=subprocess.DEVNULL, env=environment(),
        )  # fmt: skip
        try:
            wait_until("it is attached", lambda: daemon.stats().sessions, 60)
            with recording(daemon, tmp_path) as command:
                (file,) = command.files
                wait_until("it is recorded", lambda: progress(file)[0] > 10, 60)
                process.kill()
                process.wait(10)
                (found,) = command.end()
        finally:
            process.kill()
            process.wait(10)

    assert (found["end"], found["pid"]) == ("its process ended", process.pid)
    trace = read_trace(Path(found["file"]))
    assert trace.tokens == found["tokens"] > 10
    assert (trace.layers, trace.num_experts, trace.ids.shape[2]) == (6, 32, 4)
    assert (trace.ids < 32).all()
    assert os.listdir(tmp_path) == [Path(found["file"]).name]


def test_an_idle_worker_is_nothing_recorded_and_the_exit_code_says_so(
    model: TinyModel, tmp_path: Path
) -> None:
    with real_daemon(TIGHT) as daemon, worker(model, daemon, "idle") as idle:
        with recording(daemon, tmp_path, "--seconds", "1") as command:
            (found,) = command.end()
        greedy(idle, prompt(3, 1), 0)  # learns of it now, when nobody wants it any more

        assert stream_of(idle).recorder is None
    assert command.process.returncode == 1
    assert (found["file"], found["end"]) == (None, "no forward pass in that time")
    assert os.listdir(tmp_path) == []
