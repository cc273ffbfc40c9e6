"""The recorder: what it writes is plain mlx-lm's routing, and nothing else changes."""

from __future__ import annotations

import gc
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache

from expertd_client.recording import (
    NOT_ROUTED,
    End,
    Recorded,
    RecordingFile,
    make_recording,
    read_recording,
)
from expertd_mlx import stream_of
from expertd_mlx.recorder import Recorder, gate_weights, starts_anew
from expertd_protocol.layout import Phase
from expertd_protocol.messages import Record
from tests.client.expertd_mlx.conftest import Budget
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.client.expertd_mlx.plain_routing import PlainRouting
from tests.fake_experts import FakeExperts
from tests.tiny_models import TinyModel

FOREVER = 1 << 62
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "nemotron_h", "gemma4")


def wanted(path: Path, tokens: int = 1000, until_ns: int = FOREVER) -> Record:
    make_recording(path)
    return Record(session=b"s", path=str(path), tokens=tokens, until_ns=until_ns)


def recorded(path: Path) -> Recorded:
    found = read_recording(path)
    assert found is not None
    return found


@pytest.mark.parametrize("budget", [Budget.MINIMUM, Budget.QUARTER])
@pytest.mark.parametrize("family", FAMILIES)
def test_ids_weights_and_phase_are_those_of_plain_mlx_lm_in_every_family(
    family: str,
    budget: Budget,
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    experts: Callable[[TinyModel, Budget], Any],
    streamed: Callable[..., nn.Module],
    tmp_path: Path,
) -> None:
    """A prefill goes through in waves, a decode step in one pin; both are recorded, in order."""
    model = tiny(family)
    client = experts(model, budget)
    ours, plain = streamed(model, client), resident(model.path)
    client.wanted.append(wanted(tmp_path / "a"))

    logits = greedy(ours, prompt(40, 1), 5)
    theirs = PlainRouting(plain, partial(greedy, plain, prompt(40, 1), 5))
    found = recorded(tmp_path / "a")

    assert first_difference(logits, greedy(plain, prompt(40, 1), 5)) is None
    assert (found.shape.layers, found.shape.experts) == (model.layers, model.experts)
    assert (found.shape.k, found.end) == (model.top_k, None)
    assert np.array_equal(found.rows["ids"], theirs.ids)
    np.testing.assert_allclose(found.rows["weights"], theirs.weights, atol=2e-3)
    assert found.rows["weights"].min() > 0
    assert found.rows["phase"].tolist() == [Phase.PREFILL] * 40 + [Phase.DECODE] * 5
    assert set(found.rows["sequence"].tolist()) == {0}


def test_a_batch_takes_turns_and_each_of_its_rows_is_a_sequence(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
    tmp_path: Path,
) -> None:
    model = tiny("qwen3_moe")
    client = FakeExperts(16, 16)
    ours, plain = streamed(model, client), resident(model.path)
    client.wanted.append(wanted(tmp_path / "a"))

    greedy(ours, prompt(4, 3), 2)
    greedy(ours, prompt(2, 3), 0)  # an empty cache: other texts
    greedy(ours, prompt(3, 1), 1)
    rows = recorded(tmp_path / "a").rows

    assert rows["sequence"].tolist() == [
        *[0] * 4, *[1] * 4, *[2] * 4, 0, 1, 2, 0, 1, 2, 3, 3, 4, 4, 5, 5, *[6] * 4,
    ]  # fmt: skip
    alone = PlainRouting(plain, partial(greedy, plain, prompt(4, 3)[1:2], 2))
    assert np.array_equal(rows["ids"][rows["sequence"] == 1], alone.ids)


def test_a_pass_that_is_done_again_is_recorded_once(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
    tmp_path: Path,
) -> None:
    model = tiny("qwen3_moe")
    client = FakeExperts(32, 16, reused_after_pin={2, 5})
    ours, plain = streamed(model, client), resident(model.path)
    client.wanted.append(wanted(tmp_path / "a"))

    greedy(ours, prompt(5, 1), 3)

    assert client.mismatches == 2
    theirs = PlainRouting(plain, partial(greedy, plain, prompt(5, 1), 3))
    assert np.array_equal(recorded(tmp_path / "a").rows["ids"], theirs.ids)


def test_without_a_recording_nothing_is_seen_evaluated_or_asked_more(
    tiny: Callable[..., TinyModel],
    streamed: Callable[..., nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before one, and after it: the same evaluations of the same number of arrays, and no frame read."""
    model = tiny("qwen3_moe")
    client = FakeExperts(16, 16)
    ours = streamed(model, client)
    evaluated: list[int] = []
    evaluate = mx.eval

    def count(*args: Any) -> None:
        evaluated.append(sum(len(a) if isinstance(a, list) else 1 for a in args))
        evaluate(*args)

    def evaluations() -> list[int]:
        evaluated.clear()
        with monkeypatch.context() as patched:
            patched.setattr("expertd_mlx.stream.mx.eval", count)
            greedy(ours, prompt(70, 1), 2)
        return list(evaluated)

    def never(*args: Any) -> None:
        raise AssertionError("a block was looked into")

    with monkeypatch.context() as patched:
        patched.setattr("expertd_mlx.switch.gate_weights", never)
        before = evaluations()
    client.wanted.append(wanted(tmp_path / "a", tokens=10))
    during = evaluations()
    assert stream_of(ours).recorder is None
    with monkeypatch.context() as patched:
        patched.setattr("expertd_mlx.switch.gate_weights", never)
        after = evaluations()

    assert before == after
    assert sum(during) > sum(before)


def test_a_layer_that_is_complete_is_recorded_too_and_stays_lazy_until_the_end_of_the_pass(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny("mixtral")
    client = FakeExperts(16, 8)
    ours, plain = streamed(model, client), resident(model.path)
    stream = stream_of(ours)
    client.wanted.append(wanted(tmp_path / "a"))
    # complete: the layer's own weights, as plain mlx-lm holds them
    arrays = [[module[name] for module, name in _targets(layer)] for layer in plain.model.layers]
    monkeypatch.setattr(stream, "whole", lambda layer: arrays[layer])
    monkeypatch.setattr(stream, "read_back", lambda indices: pytest.fail("ids were read back"))

    logits = greedy(ours, prompt(9, 2), 3)
    theirs = PlainRouting(plain, partial(greedy, plain, prompt(9, 2), 3))

    assert first_difference(logits, greedy(plain, prompt(9, 2), 3)) is None
    assert np.array_equal(recorded(tmp_path / "a").rows["ids"], theirs.ids)
    np.testing.assert_allclose(recorded(tmp_path / "a").rows["weights"], theirs.weights, atol=2e-3)


def _targets(layer: nn.Module) -> list[tuple[nn.Module, str]]:
    switch = layer.block_sparse_moe.switch_mlp
    return [(switch[name], "weight") for name in ("gate_proj", "up_proj", "down_proj")]


# --- the end -------------------------------------------------------------------------------------
def test_it_ends_after_its_tokens_in_the_middle_of_a_prefill_if_need_be(
    tiny: Callable[..., TinyModel], streamed: Callable[..., nn.Module], tmp_path: Path
) -> None:
    client = FakeExperts(16, 8)
    ours = streamed(tiny("mixtral"), client)
    client.wanted.append(wanted(tmp_path / "a", tokens=7))

    greedy(ours, prompt(5, 1), 0)
    greedy(ours, prompt(5, 1), 1)
    found = recorded(tmp_path / "a")

    assert (len(found.rows), found.end) == (7, End.TOKENS)
    assert found.rows["sequence"].tolist() == [0] * 5 + [1] * 2
    assert np.array_equal(found.rows["ids"][5:], found.rows["ids"][:2])
    assert stream_of(ours).recorder is None


def test_it_ends_when_its_file_is_removed_and_with_the_model(
    tiny: Callable[..., TinyModel], streamed: Callable[..., nn.Module], tmp_path: Path
) -> None:
    client = FakeExperts(16, 8)
    ours = streamed(tiny("mixtral"), client)
    client.wanted.append(wanted(tmp_path / "a"))
    greedy(ours, prompt(3, 1), 0)
    assert len(recorded(tmp_path / "a").rows) == 3
    (tmp_path / "a").unlink()
    greedy(ours, prompt(3, 1), 0)
    assert stream_of(ours).recorder is None

    client.wanted.append(wanted(tmp_path / "b"))
    greedy(ours, prompt(3, 1), 0)
    stream_of(ours).close()
    found = recorded(tmp_path / "b")

    assert (len(found.rows), found.end) == (3, End.CLOSED)
    assert not (tmp_path / "a").exists()


def test_one_recording_at_a_time_and_the_second_says_why_it_is_empty(
    tiny: Callable[..., TinyModel], streamed: Callable[..., nn.Module], tmp_path: Path
) -> None:
    client = FakeExperts(16, 8)
    ours = streamed(tiny("mixtral"), client)
    client.wanted += [wanted(tmp_path / "a"), wanted(tmp_path / "b")]

    greedy(ours, prompt(3, 1), 0)

    assert len(recorded(tmp_path / "a").rows) == 3
    assert (len(recorded(tmp_path / "b").rows), recorded(tmp_path / "b").end) == (0, End.BUSY)

    (tmp_path / "a").unlink()
    client.wanted.append(wanted(tmp_path / "c"))
    greedy(ours, prompt(3, 1), 0)

    assert len(recorded(tmp_path / "c").rows) == 3


def test_what_cannot_be_opened_is_said_in_the_log_and_fails_no_pass(
    tiny: Callable[..., TinyModel],
    streamed: Callable[..., nn.Module],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "letter").write_text("dear")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    os.mkfifo(tmp_path / "pipe")
    client = FakeExperts(16, 8)
    ours = streamed(tiny("mixtral"), client)
    paths = [tmp_path / name for name in ("letter", "link", "pipe", "nowhere")]
    client.wanted += [Record(session=b"s", path=str(p), tokens=9, until_ns=9) for p in paths]

    greedy(ours, prompt(3, 1), 0)

    assert stream_of(ours).recorder is None
    assert [r.getMessage().split()[2] for r in caplog.records] == [f"path={p}" for p in paths]
    assert (tmp_path / "letter").read_text() == "dear"
    assert (tmp_path / "empty").stat().st_size == 0


def test_a_full_disk_ends_the_recording_and_no_pass(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny("mixtral")
    client = FakeExperts(16, 8)
    ours, plain = streamed(model, client), resident(model.path)
    client.wanted.append(wanted(tmp_path / "a"))
    write = os.write

    def until_full(fd: int, data: memoryview) -> int:
        room = 1000 - os.fstat(fd).st_size
        if room <= 0:
            raise OSError(28, "No space left on device")
        return write(fd, data[:room])

    monkeypatch.setattr("expertd_client.recording.os.write", until_full)
    logits = greedy(ours, prompt(30, 1), 60)
    found = recorded(tmp_path / "a")

    assert first_difference(logits, greedy(plain, prompt(30, 1), 60)) is None
    assert 30 <= len(found.rows) < 90
    assert (found.rows["ids"] != NOT_ROUTED).all()
    assert found.end is End.FAILED  # the last token made room for this
    assert "No space left on device" in caplog.text
    assert stream_of(ours).recorder is None


# --- the recorder alone --------------------------------------------------------------------------
class Pass:
    """Says to a recorder what a pass of two layers of four experts routed."""

    def __init__(self, path: Path, tokens: int = 100) -> None:
        make_recording(path)
        self.now = 0
        self.path = path
        self.recorder = Recorder(
            RecordingFile(path), 4, (10, 20), tokens=tokens, until_ns=5, clock=lambda: self.now
        )

    def __call__(
        self, ids: list[mx.array], *, batch: int = 1, fresh: bool = False, weights: bool = True
    ) -> None:
        self.recorder.begin(fresh)
        for layer, one in enumerate(ids):
            gates = one.astype(mx.bfloat16) / 8 if weights else None
            self.recorder.see(layer, one, gates)
        self.recorder.commit(ids[0].shape[0], batch, Phase.DECODE)


def test_it_ends_at_its_time_and_says_so_once(tmp_path: Path) -> None:
    one = Pass(tmp_path / "a")
    one([mx.array([[0, 1]]), mx.array([[2, 3]])])
    assert one.recorder.goes_on()
    one.now = 5

    assert not one.recorder.goes_on()
    assert not one.recorder.goes_on()
    one.recorder.end(End.CLOSED)
    found = recorded(tmp_path / "a")

    assert (len(found.rows), found.end) == (1, End.SECONDS)
    assert found.shape.expert_bytes == (10, 20)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


def test_a_recording_of_no_pass_still_says_why_it_ended(tmp_path: Path) -> None:
    one = Pass(tmp_path / "a")
    one.recorder.end(End.CLOSED)

    assert recorded(tmp_path / "a").end is End.CLOSED


def test_layers_with_fewer_experts_a_token_leave_the_rest_not_routed(tmp_path: Path) -> None:
    one = Pass(tmp_path / "a")
    one([mx.array([[3, 1]]), mx.array([[2]])])
    (row,) = recorded(tmp_path / "a").rows

    assert row["ids"].tolist() == [[3, 1], [2, NOT_ROUTED]]
    assert row["weights"][0].tolist() == [0.375, 0.125]
    assert row["weights"][1, 0] == 0.25
    assert np.isnan(row["weights"][1, 1])


def test_a_layer_that_saw_other_tokens_than_the_pass_is_not_guessed_at(tmp_path: Path) -> None:
    one = Pass(tmp_path / "a")
    one([mx.array([[0, 1], [2, 3]]), mx.array([[2, 3]])])
    one([mx.array([[0, 1]])])

    ids = recorded(tmp_path / "a").rows["ids"]
    assert ids[:, 0].tolist() == [[0, 1], [2, 3], [0, 1]]
    assert (ids[:, 1] == NOT_ROUTED).all()


def test_weights_that_no_block_shows_are_not_known_and_the_ids_are(tmp_path: Path) -> None:
    one = Pass(tmp_path / "a")
    one([mx.array([[0, 1]])] * 2, weights=False)
    rows = recorded(tmp_path / "a").rows

    assert np.isnan(rows["weights"]).all()
    assert rows["ids"].tolist() == [[[0, 1], [0, 1]]]


def test_nothing_of_a_pass_is_kept_after_it(tmp_path: Path) -> None:
    """A prefill's ids and weights are bounded by the pass, not by the recording."""
    one = Pass(tmp_path / "a", tokens=10_000)
    pair = [mx.zeros((500, 2), mx.uint32), mx.zeros((500, 2), mx.uint32)]
    one(pair)
    gc.collect()
    before = mx.get_active_memory()
    for _ in range(10):
        one(pair)

    assert mx.get_active_memory() == before
    assert len(recorded(tmp_path / "a").rows) == 5500


def test_the_last_weights_that_a_block_names_are_taken() -> None:
    import sys

    indices = mx.array([[0, 1]])
    frames: list[Any] = []

    def block() -> None:
        logits = mx.array([[0.5, 0.25]])
        weights = mx.softmax(logits)
        names = [mx.array([[1, 2]]), logits[..., None], indices, "text", weights]
        del names
        frames.append(gate_weights(sys._getframe(), indices))

    def nothing() -> None:
        scores = mx.zeros((1, 3))
        del scores
        frames.append(gate_weights(sys._getframe(), indices))

    block()
    nothing()

    assert mx.array_equal(frames[0], mx.softmax(mx.array([[0.5, 0.25]])))
    assert frames[1] is None


def test_a_text_begins_with_an_empty_cache(tiny: Callable[..., TinyModel]) -> None:
    kv = BatchKVCache([0, 1])
    assert starts_anew(None)
    assert starts_anew([kv, None])
    kv.update_and_fetch(mx.zeros((2, 1, 3, 4)), mx.zeros((2, 1, 3, 4)))

    assert not starts_anew([kv, None])
    assert not starts_anew([object()])
