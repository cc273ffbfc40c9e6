"""The command line as a process: output, exit codes, one sentence for every error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertctl.app import error_text
from expertd_protocol.errors import ModelNotFound
from expertd_protocol.stats import Stats

from .conftest import Reporting


def expertctl(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "NO_COLOR": "1", **env}
    return subprocess.run(
        [sys.executable, "-m", "expertctl", *args],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("command", ["demo", "run", "stats", "ps", "ls", "show"])
def test_every_command_has_help_with_examples(command: str) -> None:
    done = expertctl(command, "--help")

    assert done.returncode == 0
    assert f"expertctl {command}" in done.stdout.split("Examples:")[1]
    if command not in ("show", "ls"):
        assert "--json" in done.stdout


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("stats",), 5),
        (("ps", "--json"), 5),
        (("stats", "--socket", "/nope/attach.sock"), 5),
        (("ls", "--run-dir", "/nope"), 5),
        (("stats", "--run-dir", "/" + "x" * 200), 78),
        (("show", "/no/such/model"), 3),
        (("show", "{empty}"), 3),
        (("run", "/no/such/model", "-p", "hi"), 3),
        (("run", "{empty}", "-p", "hi"), 3),
        (("demo", "--budget", "auto"), 4),
        (("demo", "--budget", "120%"), 4),
        (("demo", "--model", "/no/such/model"), 3),
    ],
)
def test_an_error_is_one_sentence_and_its_exit_code(
    args: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    done = expertctl(
        *(a.format(empty=tmp_path) for a in args), EXPERTD_RUN_DIR=str(tmp_path / "none")
    )

    assert done.returncode == code
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[0].startswith("error: ")
    assert all(line.startswith("hint: ") for line in lines[1:])


@pytest.mark.parametrize(
    "args", [("run", "m"), ("stats", "--huh"), ("demo", "--agents", "0"), ("nonsense",)]
)
def test_wrong_usage_is_exit_code_2(args: tuple[str, ...]) -> None:
    done = expertctl(*args)

    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_hint_follows_its_error() -> None:
    error = ModelNotFound("no such model")
    error.add_note("hf download a/b")

    assert error_text(error) == "error: no such model\nhint: hf download a/b"


def test_stats_json_is_alone_on_stdout_and_consistent(daemon: Reporting, stats: Stats) -> None:
    done = expertctl("stats", "--json", "--socket", str(daemon.endpoints.attach))
    value = json.loads(done.stdout)
    total, slots = value["total"], value["slots"]

    assert (done.returncode, done.stderr) == (0, "")
    assert total["hits"] + total["joins"] + total["misses"] == total["lookups"]
    assert sum(slots[k] for k in ("free", "filling", "ready", "retired")) == slots["total"]
    assert value["derived"]["total"]["hit_rate"] == stats.total.hit_rate


def test_stats_and_ps_find_the_daemon_by_its_directory(daemon: Reporting) -> None:
    run_dir = str(daemon.endpoints.run_dir)
    text = expertctl("stats", "--run-dir", run_dir).stdout
    workers = json.loads(expertctl("ps", "--json", EXPERTD_RUN_DIR=run_dir).stdout)

    assert "\x1b" not in text
    assert "org/tiny-moe" in text
    assert [(w["pid"], w["derived"]["lookups"]) for w in workers] == [(4242, 1600), (4243, 0)]


def test_watch_in_a_pipe_prints_one_object_a_line_until_it_is_ended(daemon: Reporting) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "expertctl", "stats", "--watch", "0.05", "--json",
               "--socket", str(daemon.endpoints.attach)]  # fmt: skip
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = [json.loads(process.stdout.readline())["pid"] for _ in range(3)]
        process.terminate()
        code = process.wait(30)

    assert (seen, code) == ([99, 99, 99], 128 + 15)


def test_a_reader_that_leaves_is_no_traceback(daemon: Reporting) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "expertctl", "stats", "--watch", "0.05",
               "--socket", str(daemon.endpoints.attach)]  # fmt: skip
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(30)
        assert process.stderr.read() == ""


def test_stats_imports_nothing_slow(daemon: Reporting) -> None:
    script = (
        "import sys; from expertctl.app import app; app(standalone_mode=False);"
        "print(sorted({m.split('.')[0] for m in sys.modules}"
        " & {'mlx', 'mlx_lm', 'numpy', 'rich', 'transformers', 'huggingface_hub', 'psutil'}),"
        "file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, "stats", "--socket", str(daemon.endpoints.attach)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)

    assert done.stderr == "[]\n"
