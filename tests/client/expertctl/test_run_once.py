"""One generation: what is checked before anything is generated."""

from __future__ import annotations

from pathlib import Path

import pytest

from expertctl.run_once import (
    Outcome,
    check_context,
    daemon_for,
    own_counters,
    tokens_left,
)
from expertd_protocol.errors import ContextExceeded, DaemonUnavailable
from expertd_protocol.stats import Counters, Stats


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(ContextExceeded, match=r"2,002 tokens.* 1,024; .* by 978 tokens"):
        check_context(2002, 1024)


@pytest.mark.parametrize(("tokens", "context"), [(1024, 1024), (1, 1024), (10**6, None)])
def test_a_prompt_that_fits_is_accepted(tokens: int, context: int | None) -> None:
    check_context(tokens, context)


@pytest.mark.parametrize(
    ("wanted", "prompt", "context", "left"),
    [(256, 10, None, 256), (256, 10, 1024, 256), (256, 1000, 1024, 25), (256, 1024, 1024, 1)],
)
def test_no_more_is_written_than_the_context_holds(
    wanted: int, prompt: int, context: int | None, left: int
) -> None:
    assert tokens_left(wanted, prompt, context) == left


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
