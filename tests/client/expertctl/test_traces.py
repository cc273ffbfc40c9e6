"""The trace format: what is written is read, and nothing else is believed."""

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertctl.traces import NOT_ROUTED, Trace, read_trace, write_trace
from expertd_client.recording import RecordingFile, Shape, make_recording
from expertd_protocol.errors import BadTrace


def _ids(tokens: int = 6, layers: int = 2, k: int = 2) -> np.ndarray:
    return np.arange(tokens * layers * k, dtype=np.uint16).reshape(tokens, layers, k) % 8


def _save(path: Path, **changes: Any) -> Path:
    arrays = {"ids": _ids().astype(np.uint8), "num_experts": np.int64(8), **changes}
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.mark.parametrize("experts", [8, 256])
def test_what_is_written_is_read_back(tmp_path: Path, experts: int) -> None:
    ids = _ids()
    ids[0, 0, 0], ids[1, 1, 1] = NOT_ROUTED, experts - 1
    trace = Trace(
        "a.npz", ids, experts, np.full(ids.shape, 0.5, np.float16), np.ones(6, np.uint8), (4, 2),
        np.array([10, 20], np.int64), {"model": "m", "licence": "Apache-2.0"},
    )  # fmt: skip
    write_trace(tmp_path / "a.npz", trace)
    again = read_trace(tmp_path / "a.npz")

    assert (again.ids == ids).all()
    assert (again.num_experts, again.lengths, again.texts) == (experts, (4, 2), trace.texts)
    for name in ("weights", "phase", "expert_bytes"):
        assert (getattr(again, name) == getattr(trace, name)).all()
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_a_stream_number_per_token_makes_sequences(tmp_path: Path) -> None:
    path = _save(tmp_path / "a.npz", stream=np.array([0, 0, 0, 1, 1, 2], np.uint8))

    assert [len(ids) for ids in read_trace(path).sequences()] == [3, 2, 1]


def test_sequences_may_take_turns(tmp_path: Path) -> None:
    path = _save(tmp_path / "a.npz", stream=np.array([7, 3, 7, 3, 7, 9], np.int32))
    trace = read_trace(path)
    ids = _ids()

    assert trace.lengths == (3, 2, 1)
    for found, tokens in zip(trace.sequences(), ([0, 2, 4], [1, 3], [5]), strict=True):
        assert (found == ids[tokens]).all()
    assert [len(part) for part in trace.parts(2)] == [3, 3]
    assert (trace.ids == ids).all()  # the order of time

    write_trace(tmp_path / "b.npz", trace)
    again = read_trace(tmp_path / "b.npz")
    assert again.stream is not None
    assert again.stream.tolist() == [0, 1, 0, 1, 0, 2]
    assert again.lengths == trace.lengths


def test_a_new_trace_is_for_its_owner_alone_and_replaces_nothing(tmp_path: Path) -> None:
    trace = read_trace(_save(tmp_path / "old.npz"))
    write_trace(tmp_path / "new.npz", trace, new=True)

    assert stat.S_IMODE((tmp_path / "new.npz").stat().st_mode) == 0o600
    before = (tmp_path / "old.npz").read_bytes()
    with pytest.raises(BadTrace, match=r"old\.npz exists and is not overwritten"):
        write_trace(tmp_path / "old.npz", trace, new=True)
    assert (tmp_path / "old.npz").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new.npz", "old.npz"]


def test_a_recording_that_nobody_finished_is_read_as_well(tmp_path: Path) -> None:
    path = tmp_path / "a.npz.recording"
    make_recording(path)
    file = RecordingFile(path)
    shape = Shape(layers=2, k=2, experts=8, expert_bytes=(10, 20))
    file.begin(shape)
    with pytest.raises(BadTrace, match="has no token yet"):
        read_trace(path)
    rows = shape.rows(6)
    rows["ids"], rows["phase"] = _ids(), [0, 0, 0, 0, 1, 1]
    rows["sequence"] = [0, 0, 1, 1, 0, 1]
    file.append(rows)
    trace = read_trace(path)

    assert (trace.ids == _ids()).all()
    assert trace.phase is not None
    assert trace.phase.tolist() == [0, 0, 0, 0, 1, 1]
    assert trace.weights is None  # nobody saw one
    assert trace.stream is not None
    assert trace.stream.tolist() == [0, 0, 1, 1, 0, 1]
    assert (trace.lengths, trace.num_experts) == ((3, 3), 8)
    assert trace.expert_bytes is not None
    assert trace.expert_bytes.tolist() == [10, 20]


def test_parts_are_cut_between_sequences_when_there_are_enough(tmp_path: Path) -> None:
    path = _save(tmp_path / "a.npz", seq_len=np.array([1, 3, 1, 1], np.int32))
    trace = read_trace(path)

    assert [len(ids) for ids in trace.parts(2)] == [4, 2]
    assert [len(ids) for ids in trace.parts(6)] == [1] * 6
    with pytest.raises(BadTrace, match="6 tokens"):
        trace.parts(7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ids": None}, "no `ids`"),
        ({"num_experts": None}, "no `num_experts`"),
        ({"ids": _ids().astype(np.int64)}, "int64"),
        ({"ids": np.zeros((3, 2), np.uint8)}, r"\[3, 2\]"),
        ({"ids": np.zeros((0, 2, 2), np.uint8)}, r"\[0, 2, 2\]"),
        ({"ids": np.full((3, 2, 2), 255, np.uint8)}, "routes nothing"),
        ({"num_experts": np.int64(7)}, "names expert 7; the model has 7"),
        ({"num_experts": np.array([8])}, "one number"),
        ({"num_experts": np.float64(8)}, "one number"),
        ({"weights": np.zeros((6, 2), np.float16)}, "`weights`"),
        ({"phase": np.zeros(5, np.uint8)}, "`phase`"),
        ({"seq_len": np.array([4, 3], np.int32)}, "add up to the 6 tokens"),
        ({"seq_len": np.array([7, -1], np.int32)}, "add up"),
        ({"stream": np.zeros(5, np.uint8)}, "`stream`"),
        ({"expert_bytes": np.zeros(3, np.int64)}, "`expert_bytes`"),
        ({"ids": np.array([{}, 1], dtype=object)}, "pickle"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path: Path, changes: Any, words: str) -> None:
    path = _save(tmp_path / "bad.npz", **changes)

    with pytest.raises(BadTrace, match=words) as caught:
        read_trace(path)
    assert "bad.npz" in str(caught.value)


def test_files_that_are_no_npz_are_named(tmp_path: Path) -> None:
    text = tmp_path / "text.npz"
    text.write_text("not a zip")
    whole = _save(tmp_path / "whole.npz").read_bytes()
    short = tmp_path / "short.npz"
    short.write_bytes(whole[: len(whole) // 2])

    for path in (text, short, tmp_path, tmp_path / "missing.npz"):
        with pytest.raises(BadTrace, match=path.name):
            read_trace(path)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    path = _save(tmp_path / "a.npz")
    data = bytearray(path.read_bytes())
    data[200] ^= 0xFF
    path.write_bytes(data)

    with pytest.raises(BadTrace, match=r"a\.npz"):
        read_trace(path)
