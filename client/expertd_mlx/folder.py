"""Folder: from what a user types to the model folder that the daemon reads.

A local folder, or a Hugging Face id that is in the cache already. Never downloads, never writes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from mlx_lm.utils import DEFAULT_ALLOW_PATTERNS

from expertd_protocol.errors import ModelNotFound, NotAModel, UnreadableFile

#: config.json of a folder made by `prepare` names the model it stands for here.
MODEL_KEY = "expertd_model"

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


def model_folder(path_or_id: str | Path, revision: str | None = None) -> Path:
    """Return the absolute folder of a model; for a prepared one, the folder it stands for.

    Raises:
        ModelNotFound: no such folder, and no such id in the cache; with the hub's own words.
    """
    path = Path(path_or_id).expanduser()
    if path.exists():
        folder = path.resolve()
    elif not _HUB_ID.fullmatch(str(path_or_id)):
        raise ModelNotFound(f"there is no model folder {path.absolute()}")
    else:
        try:
            folder = Path(
                snapshot_download(
                    str(path_or_id),
                    revision=revision,
                    local_files_only=True,
                    allow_patterns=DEFAULT_ALLOW_PATTERNS,
                )
            )
        except (OSError, ValueError, HfHubHTTPError, HFValidationError) as exc:
            raise ModelNotFound(
                f"{path_or_id} is neither a folder nor a model in the Hugging Face cache: "
                f"{' '.join(str(exc).split())}"
            ) from exc
    if prepared_from := read_config(folder).get(MODEL_KEY):
        return Path(prepared_from)
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """Return config.json as it is in the file."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError as exc:
        raise NotAModel(f"{folder} has no config.json, so it is not a model folder") from exc
    except NotADirectoryError as exc:
        raise NotAModel(f"{folder} is a file, a model is a folder") from exc
    except OSError as exc:
        raise UnreadableFile(f"{file} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise NotAModel(f"{file} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise NotAModel(f"{file} holds no JSON object")
    return config
