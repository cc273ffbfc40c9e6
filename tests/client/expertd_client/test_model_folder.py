"""Model folders: where they are, what their config.json is."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from expertctl import bundled
from expertd_client.model_folder import MODEL_KEY, model_folder, read_config
from expertd_protocol.errors import ModelNotFound, NotAModel, UnreadableFile


def made(folder: Path, config: str | bytes = "{}") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    data = config if isinstance(config, bytes) else config.encode()
    (folder / "config.json").write_bytes(data)
    return folder


def test_a_folder_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    for name in ("model", "./model", "link", str(tmp_path / "model"), "~/model"):
        assert model_folder(name) == (tmp_path / "model").resolve()


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./nope", "~/nothing-at-all/x/y", "nothing-here", "a/b/c"]
)
def test_a_path_that_is_not_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="there is no model folder /"):
        model_folder(name)


def test_an_id_that_is_not_in_the_cache_shows_the_hubs_words_A30(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(ModelNotFound, match="neither a folder nor a model in the") as error:
        model_folder("mlx-community/no-such-model-4bit")

    assert "\n" not in error.value.message
    assert "local" in error.value.message
    assert error.value.__notes__ == ["hf download mlx-community/no-such-model-4bit"]


def test_an_id_in_the_cache_is_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "models--org--moe"
    snapshot = made(repo / "snapshots" / "0a1b")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0a1b")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    assert model_folder("org/moe") == snapshot


def test_a_prepared_folder_stands_for_the_model_it_was_made_from(tmp_path: Path) -> None:
    model = made(tmp_path / "model")
    prepared = made(tmp_path / "prepared", json.dumps({MODEL_KEY: str(model)}))

    assert model_folder(prepared) == model


@pytest.mark.parametrize("value", ["/no/such/model", 7, ["/"], ""])
def test_a_prepared_folder_without_its_model_says_so(tmp_path: Path, value: object) -> None:
    prepared = made(tmp_path / "prepared", json.dumps({MODEL_KEY: value}))

    with pytest.raises(ModelNotFound, match="prepare it again"):
        model_folder(prepared)


def test_a_file_is_not_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(NotAModel, match="a model is a folder"):
        model_folder(tmp_path / "model.safetensors")


def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(NotAModel, match=r"has no config\.json"):
        model_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff", "is not JSON"),
        (b"[1]", "no JSON object"),
        (b'"x"', "no JSON object"),
    ],
)
def test_a_config_that_is_none_is_named(tmp_path: Path, text: bytes, why: str) -> None:
    with pytest.raises(NotAModel, match=f"{tmp_path}.*{why}"):
        model_folder(made(tmp_path, text))


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(UnreadableFile, match="cannot be read"):
        read_config(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_config_of_another_user_is_named(tmp_path: Path) -> None:
    (made(tmp_path) / "config.json").chmod(0)
    with pytest.raises(UnreadableFile, match="Permission denied"):
        model_folder(tmp_path)


def test_a_config_of_many_megabytes_is_refused(tmp_path: Path) -> None:
    os.truncate(made(tmp_path) / "config.json", 17 << 20)
    with pytest.raises(NotAModel, match="17,825,792 bytes"):
        read_config(tmp_path)


def test_the_bundled_model_is_complete() -> None:
    index = json.loads((bundled.FOLDER / "model.safetensors.index.json").read_text())

    assert model_folder(bundled.FOLDER) == bundled.FOLDER
    assert {(bundled.FOLDER / name).is_file() for name in index["weight_map"].values()} == {True}
