"""`expertctl prepare`: a folder of links through which the unchanged mlx-lm streams."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

EPILOG = (
    "Examples:\n\n"
    "  expertctl prepare mlx-community/Qwen3-30B-A3B-4bit ~/streamed/qwen3\n\n"
    "  mlx_lm.generate --model ~/streamed/qwen3 --trust-remote-code --prompt 'Hello'\n\n"
    "  mlx_lm.server --model ~/streamed/qwen3 --trust-remote-code"
)


def command(
    model: Annotated[str, typer.Argument(help="Model folder, or a Hugging Face id in the cache.")],
    out: Annotated[Path, typer.Argument(help="Folder to write: links and a small config.")],
) -> None:
    """Make a folder that mlx_lm.generate, chat and server run streamed, unpatched.

    It uses mlx-lm's own `model_file` hook, hence --trust-remote-code; the code in it is two lines
    that import expertd_mlx. A daemon must be running. The model's own folder is not changed.
    """
    from expertd_mlx import prepare

    folder = prepare(model, out)
    print(folder)
    print(
        "with a daemon running (expertd), for example:\n"
        f"  mlx_lm.generate --model {shlex.quote(str(folder))} --trust-remote-code --prompt Hello",
        file=sys.stderr,
    )
