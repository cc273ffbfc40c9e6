"""load, close, prepare: what people call, with the bundled model and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

import expertd_mlx
from expertd_client.model_folder import HUB_PATTERNS, model_folder
from expertd_protocol.errors import (
    BadConfig,
    TruncatedFile,
    UnsupportedModel,
)
from expertd_protocol.messages import Inspected
from tests.fake_experts import FakeExperts

MODEL = Path(__file__).resolve().parents[3] / "client" / "expertctl" / "demo_model"
PROMPT = "The daemon"


class Daemon:
    """Stands for `expertd_client.Client`: connect gives a client with an arena of its own."""

    def __init__(self) -> None:
        self.clients: list[Any] = []
        self.inspected: list[Path] = []
        self.problem: Exception | None = None

    def connect(self, socket: Path | None = None, *, name: str = "", **_: Any) -> Any:
        client = FakeExperts(12, 12)
        client.inspect = self._inspect  # type: ignore[attr-defined]
        client.asked = (socket, name)  # type: ignore[attr-defined]
        self.clients.append(client)
        return client

    def _inspect(self, path: Path) -> Inspected:
        self.inspected.append(path)
        if self.problem is not None:
            raise self.problem
        return Inspected(path=str(path), shards=1, tensors=1, nbytes=1)


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    daemon = Daemon()
    monkeypatch.setattr("expertd_client.Client", daemon, raising=False)
    yield daemon
    for client in daemon.clients:
        client.close()


def generated(model: Any, tokenizer: Any) -> list[int]:
    responses = mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=24)
    return [int(r.token) for r in responses]


def test_load_is_a_drop_in_for_mlx_lm_load(daemon: Daemon) -> None:
    plain, tokenizer = mlx_lm.load(str(MODEL))[:2]
    theirs = generated(plain, tokenizer)

    model, own_tokenizer, config = expertd_mlx.load(
        str(MODEL), socket=Path("run"), name="agent 1", return_config=True
    )

    assert generated(model, own_tokenizer) == theirs
    (client,) = daemon.clients
    assert daemon.inspected == [MODEL]
    assert client.asked == (Path("run"), "agent 1")
    assert config["model_type"] == "qwen3_moe"
    assert client.resident_bytes > 0
    expertd_mlx.close(model)
    assert client.closed


def test_texts_of_one_batch_equal_a_resident_batch(daemon: Daemon) -> None:
    """mlx-lm's server batches requests: other caches, padded prompts, texts that end early."""
    texts = []
    for model, tokenizer in (mlx_lm.load(str(MODEL))[:2], expertd_mlx.load(MODEL)):
        prompts = [tokenizer.encode(t) for t in (PROMPT, "Once upon a time there was a", "A")]
        texts.append(mlx_lm.batch_generate(model, tokenizer, prompts, max_tokens=[20, 3, 12]).texts)

    assert texts[0] == texts[1]
    assert daemon.clients[0].misses > 0


def test_the_pool_of_freed_memory_is_bounded_C18(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPERTD_MLX_CACHE_MB", "64")
    expertd_mlx.load(MODEL)
    assert mx.set_cache_limit(64 << 20) == 64 << 20

    monkeypatch.setenv("EXPERTD_MLX_CACHE_MB", "64 MB")
    with pytest.raises(BadConfig, match="wanted a whole number of megabytes"):
        expertd_mlx.load(MODEL)
    assert daemon.clients[-1].closed


def test_a_bad_folder_is_reported_by_the_daemon_before_mlx_lm_trips_over_it(
    daemon: Daemon, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    daemon.problem = TruncatedFile("model.safetensors ends after 3 bytes")

    with pytest.raises(TruncatedFile, match="ends after 3 bytes"):
        expertd_mlx.load(tmp_path)

    assert daemon.clients[0].closed


def test_what_must_be_in_the_hub_s_cache_is_what_mlx_lm_downloads() -> None:
    assert list(HUB_PATTERNS) == DEFAULT_ALLOW_PATTERNS


def test_a_model_that_brings_its_own_code_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_file": "mine.py"}')

    with pytest.raises(UnsupportedModel, match=r"brings its own code \(mine\.py\)"):
        expertd_mlx.load(tmp_path)


def test_stock_mlx_lm_streams_a_prepared_folder(daemon: Daemon, tmp_path: Path) -> None:
    plain, tokenizer = mlx_lm.load(str(MODEL))[:2]
    theirs = generated(plain, tokenizer)

    out = expertd_mlx.prepare(MODEL, tmp_path / "streamed")
    model, own_tokenizer = mlx_lm.load(str(out), trust_remote_code=True)[:2]

    assert daemon.clients == []  # attached at the first token, where the generation is
    assert generated(model, own_tokenizer) == theirs
    assert len(daemon.clients) == 1
    assert daemon.clients[0].source.path == MODEL  # shares the arena of the original
    assert daemon.clients[0].misses > 0
    expertd_mlx.close(model)


def test_a_prepared_folder_is_links_a_config_and_two_lines(tmp_path: Path) -> None:
    before = sorted((f.name, f.stat().st_mtime_ns) for f in MODEL.iterdir())
    out = expertd_mlx.prepare(MODEL, tmp_path / "out")
    again = expertd_mlx.prepare(MODEL, tmp_path / "out")

    assert out == again
    own = sorted(f.name for f in out.iterdir() if not f.is_symlink())
    assert own == ["config.json", "streamed.py"]
    assert len((out / "streamed.py").read_text().splitlines()) == 2
    links = {f.name: f.resolve() for f in out.iterdir() if f.is_symlink()}
    assert links["model.safetensors"] == MODEL / "model.safetensors"
    config = json.loads((out / "config.json").read_text())
    assert config["model_file"] == "streamed.py"
    assert sorted((f.name, f.stat().st_mtime_ns) for f in MODEL.iterdir()) == before
    assert model_folder(out) == MODEL


def test_prepare_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("keep")

    with pytest.raises(BadConfig, match="is not empty"):
        expertd_mlx.prepare(MODEL, tmp_path / "mine")
    with pytest.raises(BadConfig, match="inside the model's own folder"):
        expertd_mlx.prepare(MODEL, MODEL / "streamed")

    assert (tmp_path / "mine" / "notes").read_text() == "keep"
    assert not (MODEL / "streamed").exists()
