"""A model folder: from what a user types to the folder that the daemon reads, and its config.json.

A local folder, a folder made by `expertctl prepare`, or a Hugging Face id that is in the cache
already. Never downloads, never writes, reads no weights. Imports nothing heavy: the hub's library only
when there is an id to look up.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from expertd_protocol.errors import ModelNotFound, NotAModel, UnreadableFile

#: config.json of a folder made by `expertctl prepare` names the model it stands for here.
MODEL_KEY = "expertd_model"
#: What mlx-lm downloads of a model; more need not be in the cache.
HUB_PATTERNS = (
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_CONFIG_MAX_BYTES = 16 << 20


def model_folder(path_or_id: str | Path, revision: str | None = None) -> Path:
    """Return the absolute folder of a model; for a prepared one, the folder it stands for.

    Raises:
        ModelNotFound: no such folder, and no such id in the cache; with the hub's own words.
        NotAModel: there is something else than a folder with a config.json.
    """
    path = Path(path_or_id).expanduser()
    if path.exists():
        folder = path.resolve()
    elif _HUB_ID.fullmatch(str(path_or_id)):
        folder = _cached(str(path_or_id), revision)
    else:
        raise ModelNotFound(f"there is no model folder {path.absolute()}")
    prepared_from = read_config(folder).get(MODEL_KEY)
    if prepared_from is None:
        return folder
    original = Path(prepared_from) if isinstance(prepared_from, str) else Path()
    if not original.is_absolute() or not original.is_dir():
        raise ModelNotFound(
            f"{folder} was prepared from {prepared_from}, where there is no folder any more; "
            "prepare it again from where the model is now"
        )
    return original


def _cached(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(
            snapshot_download(
                hub_id, revision=revision, local_files_only=True, allow_patterns=list(HUB_PATTERNS)
            )
        )
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as exc:
        error = ModelNotFound(
            f"{hub_id} is neither a folder nor a model in the Hugging Face cache: "
            f"{' '.join(str(exc).split())}"
        )
        error.add_note(f"hf download {hub_id}")
        raise error from exc


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json as it is in the file.

    Raises:
        NotAModel: there is none, or it is not a JSON object.
        UnreadableFile: it may not be read.
    """
    file = folder / "config.json"
    try:
        if (size := file.stat().st_size) > _CONFIG_MAX_BYTES:
            raise NotAModel(f"{file} is {size:,} bytes; that is no model config")
        config = json.loads(file.read_bytes())
    except FileNotFoundError as exc:
        raise NotAModel(f"{folder} has no config.json, so it is not a model folder") from exc
    except NotADirectoryError as exc:
        raise NotAModel(
            f"{folder} is a file, a model is a folder; give the one that holds config.json"
        ) from exc
    except OSError as exc:
        raise UnreadableFile(f"{file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise NotAModel(f"{file} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise NotAModel(f"{file} holds no JSON object")
    return config
