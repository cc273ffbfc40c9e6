"""The recording's file: every whole row is read back, whatever happened to its end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from expertd_client.recording import (
    NOT_ROUTED,
    End,
    RecordingFile,
    Shape,
    is_recording,
    make_recording,
    progress,
    read_recording,
)
from expertd_protocol.errors import BadTrace

SHAPE = Shape(layers=2, k=3, experts=300, expert_bytes=(64, 32))


def some_rows(n: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    rows = SHAPE.rows(n)
    rows["ids"] = random.integers(0, 300, rows["ids"].shape)
    rows["weights"] = random.random(rows["weights"].shape)
    rows["phase"] = random.integers(0, 2, n)
    rows["sequence"] = np.arange(n) // 3
    return rows


@pytest.fixture
def file(tmp_path: Path) -> RecordingFile:
    make_recording(tmp_path / "a.recording")
    return RecordingFile(tmp_path / "a.recording")


def test_what_is_appended_is_read_back(file: RecordingFile) -> None:
    assert read_recording(file.path) is None
    assert progress(file.path) == (0, None)
    assert not is_recording(file.path)

    file.begin(SHAPE)
    assert progress(file.path) == (0, None)
    file.append(some_rows(4))
    file.append(some_rows(2, seed=1))
    assert progress(file.path) == (6, None)
    file.end(End.TOKENS)
    found = read_recording(file.path)

    assert found is not None
    assert is_recording(file.path)
    assert (found.shape, found.end) == (SHAPE, End.TOKENS)
    assert progress(file.path) == (6, End.TOKENS)
    assert found.rows.tobytes() == np.concatenate((some_rows(4), some_rows(2, seed=1))).tobytes()


def test_a_new_row_routes_nothing_with_weights_that_nobody_knows() -> None:
    (row,) = SHAPE.rows(1)

    assert (row["ids"] == NOT_ROUTED).all()
    assert np.isnan(row["weights"]).all()


def test_a_file_cut_anywhere_still_has_its_whole_rows(file: RecordingFile) -> None:
    file.begin(SHAPE)
    start = file.path.stat().st_size
    file.append(some_rows(3))
    file.end(End.CLOSED)
    data, each = file.path.read_bytes(), SHAPE.row.itemsize

    for size in range(start, len(data)):
        file.path.write_bytes(data[:size])
        found = read_recording(file.path)
        assert found is not None
        assert found.end is None
        assert found.rows.tobytes() == some_rows(3)[: (size - start) // each].tobytes()
    for size in range(1, start):
        file.path.write_bytes(data[:size])
        with pytest.raises(BadTrace, match=r"a\.recording is no recording"):
            read_recording(file.path)


def test_a_write_that_fails_half_way_is_taken_back(
    file: RecordingFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.begin(SHAPE)
    file.append(some_rows(2))
    size, write = file.path.stat().st_size, os.write

    def half(fd: int, data: memoryview) -> int:
        if os.fstat(fd).st_size > size:
            raise OSError(28, "No space left on device")
        return write(fd, data[: SHAPE.row.itemsize + 5])

    with monkeypatch.context() as patched:
        patched.setattr("expertd_client.recording.os.write", half)
        with pytest.raises(OSError, match="No space left"):
            file.append(some_rows(3))
        assert file.path.stat().st_size == size
    file.end(End.FAILED)

    assert progress(file.path) == (2, End.FAILED)


def test_removing_the_file_ends_the_recording(file: RecordingFile) -> None:
    file.begin(SHAPE)
    assert not file.removed()
    file.path.unlink()

    assert file.removed()
    file.end(End.CLOSED)
    file.end(End.CLOSED)
    assert file.removed()
    assert not file.path.exists()


def test_the_file_is_for_its_owner_alone_and_made_once(tmp_path: Path) -> None:
    path = tmp_path / "a.recording"
    make_recording(path)

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(BadTrace, match=r"a\.recording exists"):
        make_recording(path)
    with pytest.raises(BadTrace, match="cannot be made: No such file or directory"):
        make_recording(tmp_path / "no" / "a.recording")


def test_a_worker_writes_only_into_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    (tmp_path / "folder").mkdir()
    for name in ("letter", "folder", "nowhere"):
        with pytest.raises(OSError, match=name):
            RecordingFile(tmp_path / name)

    assert (tmp_path / "letter").read_text() == "dear"


@pytest.mark.parametrize(
    "line",
    [
        b"PK\x03\x04",
        b'{"expertd_recording": 1, "layers": 2}\n',
        b'{"expertd_recording": 1, "layers": 2, "k": 9, "experts": 8, "expert_bytes": [1, 1]}\n',
        b'{"expertd_recording": 1, "layers": 2, "k": 1, "experts": 8, "expert_bytes": [1]}\n',
        b'{"expertd_recording": 1, "layers": 1, "k": 1, "experts": 8, "expert_bytes": 5}\n',
        b'{"expertd_recording": 1, "layers": 0, "k": 1, "experts": 8, "expert_bytes": []}\n',
        b'{"expertd_recording": 1, "layers": 1e9, "k": 1, "experts": 8, "expert_bytes": []}\n',
        b'{"expertd_recording": 2, "layers": 1, "k": 1, "experts": 8, "expert_bytes": [1]}\n',
    ],
)
def test_another_first_line_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad"
    path.write_bytes(line)

    with pytest.raises(BadTrace, match="bad is no recording"):
        read_recording(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="nowhere cannot be read"):
        progress(tmp_path / "nowhere")
    assert not is_recording(tmp_path / "nowhere")
