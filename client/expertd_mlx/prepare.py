"""Prepare: a folder that stock mlx-lm runs streamed, through its `model_file` hook.

    mlx_lm.generate --model OUT --trust-remote-code --prompt ...

It holds links to everything of the model, a config.json with two more keys, and two lines of
Python. The model's own folder is never written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from expertd_client.model_folder import MODEL_KEY, model_folder, read_config
from expertd_mlx.models import Classes, streamed_classes
from expertd_protocol.errors import BadConfig

MODEL_FILE = "streamed.py"

_SOURCE = """\
from expertd_mlx import prepared
Model, ModelArgs = prepared(__file__)
"""


def prepare(model_path: str | Path, out: str | Path) -> Path:
    """Write the folder `out` for the model at `model_path` and return it.

    Run again, it refreshes a folder of its own; any other folder must be empty or new.
    """
    model = model_folder(model_path)
    config = read_config(model)
    folder = Path(out).expanduser().absolute()
    if folder.resolve().is_relative_to(model):
        raise BadConfig(f"{folder} lies inside the model's own folder; choose another one")
    try:
        _write(folder, model, config)
    except OSError as exc:
        raise BadConfig(f"{folder} cannot be written: {exc.strerror}; choose another one") from exc
    return folder


def _write(folder: Path, model: Path, config: dict[str, Any]) -> None:
    if folder.exists() and any(folder.iterdir()) and not _is_ours(folder):
        raise BadConfig(f"{folder} is not empty and not made by prepare; choose another folder")
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if old.is_symlink():
            old.unlink()
    for entry in sorted(model.iterdir()):
        if entry.name not in ("config.json", MODEL_FILE) and not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    (folder / MODEL_FILE).write_text(_SOURCE)
    config |= {"model_file": MODEL_FILE, MODEL_KEY: str(model)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _is_ours(folder: Path) -> bool:
    file = folder / MODEL_FILE
    return file.is_file() and file.read_text() == _SOURCE


def prepared(file: str) -> Classes:
    """Return (Model, ModelArgs) for the prepared folder that `file` is in; called from there."""
    config = read_config(Path(file).parent)
    path = Path(config[MODEL_KEY])
    return streamed_classes(config, path)
