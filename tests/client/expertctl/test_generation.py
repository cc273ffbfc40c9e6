"""One generation: what is checked before anything is generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertctl.generation import Outcome, daemon_for, own_counters
from expertd_protocol.errors import DaemonUnavailable
from expertd_protocol.stats import Counters, Stats


def test_a_run_counts_only_its_own_sessions(stats: Stats) -> None:
    assert own_counters(stats, 4242).lookups == 1600
    assert own_counters(stats, 1) == Counters()


def test_a_daemon_that_was_named_must_be_there(short_dir: Path) -> None:
    with pytest.raises(DaemonUnavailable), daemon_for("auto", short_dir, None):
        pass


def test_a_running_daemon_is_used_and_its_budget_kept(
    daemon: object, short_dir: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("EXPERTD_RUN_DIR", str(short_dir))
    with daemon_for("1GiB", None, None) as (socket, which):
        assert (socket, which) == (short_dir / "attach.sock", "shared")
    assert "--budget has no effect" in capsys.readouterr().err


def test_nothing_generated_is_still_one_line() -> None:
    assert Outcome("", None, Counters(), 1, "private").line() == "0 tokens"
