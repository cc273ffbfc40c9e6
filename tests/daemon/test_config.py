"""Settings: file < environment < flags, and nothing that is wrong is ever ignored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from expertd.config import CONFIG_ENV, WORKER_ENV, DaemonConfig, config_path, load_config
from expertd_protocol.errors import BadConfig, ExitCode


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The TOML file of this test, which does not exist yet."""
    for name in [n for n in os.environ if n.startswith("EXPERTD_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "config.toml"
    monkeypatch.setenv(CONFIG_ENV, str(path))
    return path


def test_every_key_has_a_default_and_a_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTD_RUN_DIR", "/run/x")
    config = load_config([])

    assert config.budget == "auto"
    assert config.run_dir == Path("/run/x")
    for name, field in DaemonConfig.model_fields.items():
        assert field.description, name
        assert not field.is_required(), name


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("reader_threads = 1\nmax_sessions = 1\nmax_in_flight = 1\n")
    monkeypatch.setenv("EXPERTD_MAX_SESSIONS", "2")
    monkeypatch.setenv("EXPERTD_MAX_IN_FLIGHT", "2")

    config = load_config(["--max-in-flight", "3"])

    assert (config.reader_threads, config.max_sessions, config.max_in_flight) == (1, 2, 3)


def test_the_file_is_where_the_environment_says(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config_path() == file

    monkeypatch.delenv(CONFIG_ENV)
    assert config_path().parts[-2:] == ("expertd", "config.toml")


def test_a_run_directory_is_made_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")

    assert load_config(["--run-dir", "~/run"]).run_dir == Path("/home/a/run")
    assert load_config(["--run-dir", "run"]).run_dir == Path.cwd() / "run"


def test_flags_without_a_value_switch_on() -> None:
    assert load_config(["--poison-free-slots"]).poison_free_slots
    assert not load_config([]).poison_free_slots


def test_an_unknown_key_in_the_file_is_refused_and_named_B04(file: Path) -> None:
    file.write_text('bugdet = "1GiB"\n')

    with pytest.raises(BadConfig, match="bugdet") as caught:
        load_config([])

    assert str(file) in caught.value.message
    assert caught.value.exit_code == ExitCode.CONFIG == 78


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("reader_threads", ["0", "-1", "65", "x", "nan", "1.5", ""]),
        ("max_sessions", ["0", "-1", "x"]),
        ("max_in_flight", ["0", "-1", "x"]),
        ("grace_ms", ["-1", "NaN", "inf", "x", "1001"]),
        ("drain_seconds", ["-1", "NaN", "inf", "x"]),
        ("read_mode", ["", "x", "mmap"]),
        ("log_level", ["x", "LOUD"]),
        ("poison_free_slots", ["x", "2"]),
        ("lifeline_fd", ["2", "-1", "x"]),
    ],
)
def test_a_wrong_value_is_refused_and_its_key_named_from_every_source_B04(
    key: str, values: list[str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in values:
        if key != "poison_free_slots":  # a flag without a value; argparse refuses one
            with pytest.raises(BadConfig, match=key):
                load_config([f"--{key.replace('_', '-')}={value}"])
        with monkeypatch.context() as env:
            env.setenv(f"EXPERTD_{key.upper()}", value)
            with pytest.raises(BadConfig, match=key):
                load_config([])
        file.write_text(f'{key} = "{value}"\n')
        with pytest.raises(BadConfig, match=key):
            load_config([])
        file.unlink()


def test_numbers_that_are_not_finite_are_refused_in_the_file_too_B04(file: Path) -> None:
    for value in ("nan", "inf", "-1"):
        file.write_text(f"grace_ms = {value}\n")
        with pytest.raises(BadConfig, match="grace_ms"):
            load_config([])


@pytest.mark.parametrize("content", [b"budget = ", b"[[[", b'budget = "\xff\xfe"\n'])
def test_a_file_that_is_not_toml_is_named(content: bytes, file: Path) -> None:
    file.write_bytes(content)

    with pytest.raises(BadConfig, match="cannot be read") as caught:
        load_config([])

    assert str(file) in caught.value.message


# --- as a process --------------------------------------------------------------------------------------
def _expertd(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "expertd", *args],
        env=os.environ | env, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("value", ["NaN", "-1", "x"])
def test_expertd_exits_78_with_one_sentence_when_a_setting_is_wrong_B04(
    value: str, short_dir: Path
) -> None:
    done = _expertd("--run-dir", str(short_dir / "run"), EXPERTD_GRACE_MS=value)

    assert done.returncode == ExitCode.CONFIG
    assert done.stdout == ""
    assert done.stderr.startswith("expertd: error: configuration is wrong: grace_ms")
    assert len(done.stderr.splitlines()) == 1
    assert not (short_dir / "run").exists()


@pytest.mark.parametrize("value", ["NaN", "-1", "x"])
def test_expertd_does_not_start_without_a_budget_that_it_understands_B04(
    value: str, short_dir: Path
) -> None:
    done = _expertd("--run-dir", str(short_dir / "run"), f"--budget={value}")

    assert done.returncode == ExitCode.BUDGET
    assert done.stderr.startswith(f"expertd: error: budget {value!r} is not a size")
    assert not (short_dir / "run").exists()


def test_help_shows_every_flag_with_its_meaning() -> None:
    done = _expertd("--help")

    assert done.returncode == 0
    shown = " ".join(done.stdout.split())
    hidden = {"poison_free_slots", "lifeline_fd"}  # of tests and of expertctl
    for name in DaemonConfig.model_fields.keys() - hidden:
        assert f"--{name.replace('_', '-')}" in shown
    assert "a percentage of all memory" in shown
    assert "%%" not in shown


def test_a_flag_that_does_not_exist_is_a_usage_error() -> None:
    done = _expertd("--bugdet", "1GiB")

    assert done.returncode == ExitCode.USAGE
    assert "--bugdet" in done.stderr


def test_an_unknown_variable_is_an_error_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPERTD_BUDGETT", "1GiB")

    with pytest.raises(
        BadConfig, match=r"EXPERTD_BUDGETT is not a setting; did you mean EXPERTD_BUDGET\?"
    ):
        load_config([])


def test_the_variables_of_workers_are_known_to_the_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WORKER_ENV:
        monkeypatch.setenv(name, "1")

    assert load_config([]).budget == "auto"
