"""Recordings of workers: who is meant, what becomes of each file, and what is said about it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from expertctl import recordings
from expertctl.recordings import Recording
from expertctl.traces import read_trace
from expertd_client.recording import End, RecordingFile, Shape
from expertd_protocol.errors import BadTrace, NoSpace, UnknownSession
from expertd_protocol.messages import Record
from expertd_protocol.stats import SessionStats, Stats

SHAPE = Shape(layers=1, k=2, experts=4, expert_bytes=(100,))
FOREVER = 1 << 62


class Asked:
    """Stands for the admin's client; sessions in `gone` are not known any more."""

    def __init__(self, *gone: str) -> None:
        self.gone = gone
        self.records: list[Record] = []

    def record(self, record: Record) -> None:
        if record.session.hex() in self.gone:
            raise UnknownSession("no attached worker has this session")
        self.records.append(record)


def ask(
    sessions: list[SessionStats], folder: Path, *gone: str
) -> tuple[list[Recording], list[Record]]:
    asked = Asked(*gone)
    begun = recordings.ask(asked, sessions, folder, 7, 99)  # type: ignore[arg-type]
    return begun, asked.records


def routed(recording: Recording, tokens: int, end: End | None = None) -> None:
    """Do what a worker does."""
    file = RecordingFile(recording.file)
    file.begin(SHAPE)
    rows = SHAPE.rows(tokens)
    rows["ids"], rows["phase"] = [[0, 3]], np.arange(tokens) > 1
    file.append(rows)
    if end is not None:
        file.end(end)
    file.close()


@pytest.fixture
def recording(tmp_path: Path) -> Recording:
    one = Recording(tmp_path / "a.npz", os.getpid(), "agent", {"model": "m"})
    one.make()
    return one


@pytest.fixture
def dead_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def both(stats: Stats) -> Stats:
    return stats.model_copy(
        update={
            "sessions": tuple(s.model_copy(update={"state": "serving"}) for s in stats.sessions)
        }
    )


def test_sessions_are_meant_by_id_pid_or_name_and_all_without_a_word(stats: Stats) -> None:
    two = both(stats)

    assert [s.session for s in recordings.choose(two, [])] == ["53aa", "53bb"]
    for words in (["53aa"], ["53AA"], ["4242"], ["agent-1"], ["agent-1", "4242"]):
        assert [s.session for s in recordings.choose(two, words)] == ["53aa"], words
    assert len(recordings.choose(two, ["4243", "agent-1"])) == 2
    with pytest.raises(UnknownSession, match="is '53a'; there are: 4242 agent-1, 4243"):
        recordings.choose(two, ["53a"])


def test_a_worker_that_is_not_served_any_more_is_not_meant(stats: Stats) -> None:
    assert [s.session for s in recordings.choose(stats, [])] == ["53aa"]
    with pytest.raises(UnknownSession, match="4243"):
        recordings.choose(stats, ["4243"])
    with pytest.raises(UnknownSession, match="no worker is attached"):
        recordings.choose(stats.model_copy(update={"sessions": ()}), [])


def test_each_worker_gets_a_private_file_of_its_own_whatever_its_name(
    stats: Stats, tmp_path: Path
) -> None:
    agent, other = both(stats).sessions
    odd = agent.model_copy(update={"name": "../Once upon\n"})
    folder = tmp_path / "new" / "traces"

    begun, records = ask([odd, other], folder)

    assert [one.out.name for one in begun] == ["Once-upon-4242-53aa.npz", "worker-4243-53bb.npz"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [Path(r.path) for r in records] == [one.file for one in begun]
    assert [(r.session.hex(), r.tokens, r.until_ns) for r in records] == [
        ("53aa", 7, 99),
        ("53bb", 7, 99),
    ]
    for one in begun:
        assert one.file.parent == folder
        assert stat.S_IMODE(one.file.stat().st_mode) == 0o600


def test_nothing_is_overwritten_and_nobody_is_asked_in_vain(stats: Stats, tmp_path: Path) -> None:
    sessions = list(both(stats).sessions)
    taken = tmp_path / "worker-4243-53bb.npz"
    taken.write_text("mine")
    with pytest.raises(BadTrace, match=r"worker-4243-53bb\.npz exists"):
        ask(sessions, tmp_path)
    assert list(tmp_path.iterdir()) == [taken]  # so the first worker stops, too

    taken.rename(tmp_path / (taken.name + ".recording"))
    with pytest.raises(BadTrace, match=r"\.recording exists: another recording"):
        ask(sessions, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(BadTrace, match="cannot be made: Not a directory"):
        ask(sessions, tmp_path / "file" / "folder")


def test_a_worker_that_ends_meanwhile_is_left_out(stats: Stats, tmp_path: Path) -> None:
    sessions = list(both(stats).sessions)

    begun, _ = ask(sessions, tmp_path, "53aa")
    assert [one.pid for one in begun] == [4243]
    assert [path.name for path in tmp_path.iterdir()] == ["worker-4243-53bb.npz.recording"]
    with pytest.raises(UnknownSession):
        ask(sessions[:1], tmp_path, "53aa")


def test_a_finished_recording_is_a_trace_and_the_workers_file_is_gone(recording: Recording) -> None:
    routed(recording, 5, End.TOKENS)
    assert recording.progress() == (5, False)

    finished = recording.finish()
    trace = read_trace(recording.out)

    assert trace.ids.tolist() == [[[0, 3]]] * 5
    assert trace.texts == {"model": "m"}
    assert stat.S_IMODE(recording.out.stat().st_mode) == 0o600
    assert not recording.file.exists()
    assert finished.as_json() == {
        "file": str(recording.out), "name": "agent", "pid": os.getpid(),
        "tokens": 5, "prefill": 2, "decode": 3, "sequences": 1, "end": "--tokens reached",
    }  # fmt: skip
    assert finished.line() == (
        f"{recording.out}: 5 tokens (2 prefill, 3 decode) in 1 sequence; --tokens reached"
    )


@pytest.mark.parametrize("tokens", [0, 2])
def test_why_it_ended_is_said(recording: Recording, dead_pid: int, tokens: int) -> None:
    dead = Recording(recording.out, dead_pid, "agent", {})
    if tokens:
        routed(recording, tokens)
    assert recording.progress() == (tokens, True)
    assert dead.progress() == (tokens, False)
    finished = dead.finish()

    assert finished.why == "its process ended"
    assert (finished.trace is not None) == recording.out.exists() == bool(tokens)
    assert not recording.file.exists()


def test_a_recording_of_nothing_says_what_to_do(recording: Recording) -> None:
    routed(recording, 0, End.BUSY)
    assert "end that recording" in recording.finish().line()
    recording.make()
    assert recording.finish().line() == (
        "agent: nothing was recorded: no forward pass in that time"
    )
    assert recording.finish().why == "its .recording file was removed"
    assert not recording.out.exists()


def test_a_trace_that_cannot_be_written_leaves_what_the_worker_wrote(
    recording: Recording, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = Recording(tmp_path / "b.npz", os.getpid(), "other", {})
    other.make()
    for one in (recording, other):
        routed(one, 3)
    save = np.savez_compressed

    def full(file: object, **arrays: np.ndarray) -> None:
        if "model" in arrays:
            raise OSError(28, "No space left on device")
        save(file, **arrays)  # type: ignore[arg-type]

    monkeypatch.setattr(np, "savez_compressed", full)
    finished, errors = recordings.finish([recording, other])

    assert [one.recording for one in finished] == [other]
    assert [type(error) for error in errors] == [NoSpace]
    assert "a.npz.recording is kept" in str(errors[0])
    assert read_trace(recording.file).tokens == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz.recording", "b.npz"]


def test_waiting_ends_with_the_last_worker(recording: Recording) -> None:
    routed(recording, 4, End.SECONDS)
    told: list[int] = []

    recordings.wait([recording], FOREVER, told.append)

    assert told == [4]


def test_waiting_ends_at_its_time(recording: Recording) -> None:
    recordings.wait([recording], 0, lambda tokens: pytest.fail("it is over"))
