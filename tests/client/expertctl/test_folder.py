"""Model folders: where they are, what their config says."""

import json
from pathlib import Path
from typing import Any

import pytest

from expertctl import folder
from expertd_protocol.errors import ModelNotFound, NotAModel


def test_a_folder_is_found_by_its_path(tmp_path: Path) -> None:
    assert folder.resolve(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["no/such", "nothing-here", "/no/such/folder", "./nope", "a/b/c"])
def test_what_is_neither_folder_nor_cached_model_is_not_found(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ModelNotFound):
        folder.resolve(name)


def test_a_file_is_not_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(NotAModel, match="is a file"):
        folder.resolve(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("text", [None, "", "{", "[1]", '"x"', "\xff"])
def test_a_folder_without_a_config_is_not_a_model(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(NotAModel, match=str(tmp_path)):
        folder.read_config(tmp_path)


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(NotAModel, match="cannot be read"):
        folder.read_config(tmp_path)


def test_a_config_of_many_megabytes_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(NotAModel, match="17,825,792 bytes"):
        folder.read_config(tmp_path)


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": 1024}, 1024),
        ({"max_position_embeddings": "1024"}, None),
        ({"text_config": {"max_position_embeddings": 262144}}, 262144),
        ({"max_position_embeddings": 8, "text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 1024, "rope_scaling": None}, 1024),
        # Qwen3 with YaRN: the stretched length is not in the config
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        # deepseek_v3: it is
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {
                    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                },
            },
            163840,
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}},
            8192,
        ),
        # llama3 scaling: max_position_embeddings is already the long one
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
    ],
)  # fmt: skip
def test_the_context_counts_nesting_and_rope_scaling(
    config: dict[str, Any], length: int | None
) -> None:
    assert folder.context_length(config) == length


@pytest.mark.parametrize(
    ("config", "experts", "top_k"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8}, 128, 8),
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, 8, 2),
        ({"n_routed_experts": None, "num_experts_per_tok": None}, None, None),
        ({"num_experts": 1}, None, None),
        ({"num_experts": 0, "num_experts_per_tok": 0}, None, None),
        ({"text_config": {"moe_num_experts": 288, "moe_top_k": 8}}, 288, 8),
        ({"num_experts": [16, 64], "moe_topk": [1, 8]}, 64, 8),
        ({"ffn_config": {"moe_num_experts": 16}}, 16, None),
        ({"hidden_size": 64}, None, None),
    ],
)
def test_experts_and_top_k_are_found_under_every_family_s_name(
    config: dict[str, Any], experts: int | None, top_k: int | None
) -> None:
    assert (folder.experts(config), folder.top_k(config)) == (experts, top_k)


def test_the_bundled_model_is_complete() -> None:
    path = folder.bundled()
    config = folder.read_config(path)

    assert (folder.experts(config), folder.top_k(config)) == (32, 4)
    assert folder.context_length(config) == 1024
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert {(path / name).is_file() for name in index["weight_map"].values()} == {True}
