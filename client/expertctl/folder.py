"""A model folder: where it is and what its config.json says. Reads no weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expertd_protocol.errors import ModelNotFound, NotAModel

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_CONFIG_MAX_BYTES = 16 << 20

#: Config keys of the number of routed experts and of top-k, over all families of mlx-lm 0.32.
EXPERT_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
)
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "top_k_experts",
)
_CONTEXT_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions")
#: These rope types already count their stretching in max_position_embeddings.
_NOT_STRETCHED = ("default", "llama3", "su", "longrope", "mrope", "proportional")


def bundled() -> Path:
    """Return the folder of the demo model."""
    return Path(__file__).resolve().parent / "demo_model"


def resolve(model: str) -> Path:
    """Return the folder of a path, or of a Hugging Face id that is in the cache.

    Raises:
        ModelNotFound: neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.absolute()
    if path.exists():
        raise NotAModel(f"{path} is a file; give the folder that holds config.json and the weights")
    if not _HUB_ID.fullmatch(model):
        raise ModelNotFound(f"there is no folder {path}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (OSError, ValueError) as exc:
        error = ModelNotFound(
            f"{model!r} is neither a folder here nor a model in the Hugging Face cache"
        )
        error.add_note(f"hf download {model}")
        raise error from exc


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json.

    Raises:
        NotAModel: there is none, or it is not a JSON object.
    """
    path = folder / "config.json"
    try:
        if path.stat().st_size > _CONFIG_MAX_BYTES:
            raise NotAModel(f"{path} is {path.stat().st_size:,} bytes; that is no model config")
        config = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as exc:
        raise NotAModel(f"{folder} has no config.json; it is not a model folder") from exc
    except OSError as exc:
        raise NotAModel(f"{path} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise NotAModel(f"{path} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise NotAModel(f"{path} is not a JSON object")
    return config


def _texts(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The config of the language model first where it is nested (vision-language models)."""
    nested = [config.get(key) for key in ("text_config", "language_config", "llm_config")]
    return [*(c for c in nested if isinstance(c, dict)), config]


def _first_int(config: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    for part in _texts(config):
        for key in keys:
            value = part.get(key)
            if isinstance(value, list) and value:  # hunyuan: one number per layer
                value = max((v for v in value if isinstance(v, int)), default=None)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    return None


def experts(config: Mapping[str, Any]) -> int | None:
    """Return the routed experts per layer, None for a dense model."""
    ffn = config.get("ffn_config")
    n = _first_int(config, EXPERT_KEYS) or (
        _first_int(ffn, EXPERT_KEYS) if isinstance(ffn, dict) else None
    )
    return n if n and n > 1 else None


def top_k(config: Mapping[str, Any]) -> int | None:
    return _first_int(config, TOP_K_KEYS)


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens the model can look at, rope scaling included; None when unsaid.

    `original x factor` wins over max_position_embeddings when it is larger: some configs carry
    the stretched length already (deepseek_v3, gpt-oss), others do not (Qwen3 with YaRN).
    """
    length = _first_int(config, _CONTEXT_KEYS)
    if length is None:
        return None
    for part in _texts(config):
        rope = part.get("rope_scaling") or part.get("rope_parameters")
        if not isinstance(rope, dict):
            continue
        kind = rope.get("rope_type") or rope.get("type") or "default"
        factor = rope.get("factor")
        if kind in _NOT_STRETCHED or not isinstance(factor, int | float):
            continue
        original = rope.get("original_max_position_embeddings")
        base = original if isinstance(original, int) else length
        return max(length, int(base * factor))
    return length
