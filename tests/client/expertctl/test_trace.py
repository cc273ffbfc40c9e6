"""`expertctl trace`: its JSON, its pictures and its refusals."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from expertctl.replay.facts import trace_facts
from expertctl.replay.simulator import NAMES, interleave
from expertctl.trace import app
from expertctl.traces import Trace, write_trace
from expertd_protocol.errors import BadTrace, MissingExtra


@pytest.fixture
def file(tmp_path: Path) -> Path:
    ids = np.random.default_rng(0).integers(0, 8, (20, 3, 2)).astype(np.uint16)
    write_trace(tmp_path / "a.npz", Trace("a.npz", ids, 8, lengths=(5, 5, 10)))
    return tmp_path / "a.npz"


def _run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_json_is_capacity_to_policy_to_hit_rate(file: Path) -> None:
    rates = json.loads(_run("simulate", file, "--capacity", "0.1,0.25,0.5", "--json"))

    assert list(rates) == ["0.1", "0.25", "0.5"]
    assert all(set(row) == set(NAMES) for row in rates.values())
    assert {"lru", "lfu", "s3fifo", "sieve", "arc", "belady", "default"} == set(NAMES)
    assert all(0 <= rate <= row["belady"] for row in rates.values() for rate in row.values())


def test_only_the_policies_asked_for_are_played(file: Path) -> None:
    assert json.loads(_run("simulate", file, file, "--policy", "lru,belady", "--json"))[
        "0.5"
    ].keys() == {
        "lru",
        "belady",
    }


def test_the_table_says_what_was_played(file: Path) -> None:
    text = _run("simulate", file, "--sessions", 2, "--policy", "lru", "--tokens", 4)

    assert "2 sessions" in text
    assert text.splitlines()[1].split() == ["capacity", "lru"]


@pytest.mark.parametrize(
    "arguments", [("--capacity", "2"), ("--capacity", "x"), ("--policy", "mru")]
)
def test_what_cannot_be_played_is_a_usage_error(file: Path, arguments: tuple[str, str]) -> None:
    result = CliRunner().invoke(app, ["simulate", str(file), *arguments])

    assert result.exit_code == 2


def test_traces_of_different_models_are_refused(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "b.npz"
    write_trace(other, Trace("b.npz", np.zeros((2, 3, 1), np.uint16), 4))

    with pytest.raises(BadTrace, match=r"a\.npz 3 x 8, b\.npz 3 x 4"):
        _run("simulate", file, other)
    with pytest.raises(BadTrace, match="--sessions"):
        _run("simulate", file, file, "--sessions", 2)


def test_facts_of_a_trace_that_was_counted_by_hand() -> None:
    one = np.array([[[0, 1]], [[0, 1]], [[2, 3]], [[0, 1]]], np.uint16)
    facts = trace_facts(interleave([one, one[:1]], 4))

    assert facts.uses.tolist() == [[4, 4, 1, 1]]
    assert (facts.union, facts.sum_of_sets, facts.first_uses) == (4, 6, 4)
    # 0 and 1 return at once twice, and once after 2 and 3, a half of all experts
    assert facts.returns[0] == 4
    assert facts.returns[9] == 2
    assert sum(facts.returns) + facts.first_uses == facts.lookups
    assert facts.busiest_quarter.tolist() == [0.4]


def test_show_draws_heat_reuse_and_overlap(file: Path) -> None:
    text = _run("show", file)

    assert "3 sequences" in text
    assert all(word in text for word in ("Heat", "Reuse", "Overlap", "union / sum"))
    facts = json.loads(_run("show", file, "--json"))
    assert facts["sessions"] == 3
    assert sum(facts["reuse"].values()) + facts["first_uses"] == facts["lookups"]


def test_without_matplotlib_a_png_is_refused_with_the_extra_to_install(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(MissingExtra, match=r"expertd\[plots\]"):
        _run("show", file, "--png", tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_png_is_drawn(file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is the optional extra plots")
    _run("show", file, "--png", tmp_path / "a.png")

    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
