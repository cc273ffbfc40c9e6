"""`expertctl pack`: a copy of a model in which one read brings a whole expert."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from expertctl import figures
from expertctl.connection import AsJson

EPILOG = (
    "Examples:\n\n"
    "  expertctl pack mlx-community/Qwen3-30B-A3B-4bit ~/models/qwen3-packed\n\n"
    "  expertctl verify ~/models/qwen3-packed\n\n"
    "  expertctl run ~/models/qwen3-packed -p 'Once upon a time'"
)


def command(
    model: Annotated[str, typer.Argument(help="Model folder, or a Hugging Face id in the cache.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; new, empty, or begun before.")],
    as_json: AsJson = False,
) -> None:
    """Copy a model so that each expert is one record: one read in place of nine.

    expertd streams the copy exactly as the original. Plain mlx-lm cannot read it, so keep the
    original if you need both. Every record has a checksum (`expertctl verify`). Stopped at any
    point, the same command continues. The source is only read.
    """
    from expertctl.packer import Packer, check_source
    from expertctl.progress import byte_bar
    from expertd.store.index import build_index
    from expertd_client.model_folder import model_folder
    from expertd_mlx.load import expert_layers

    # The daemon's parser first: it names a damaged file, mlx-lm only trips over it.
    folder = model_folder(model)
    index = build_index(folder)
    check_source(index)
    layers, experts = expert_layers(folder)
    packer = Packer(index, layers, experts, out)
    total, before = packer.total_bytes, packer.done_bytes
    if before:
        print(f"continuing: {figures.size(before)} are there already", file=sys.stderr)
    began = time.monotonic()
    with byte_bar("packing", total, before) as progress:
        packer.run(progress)
    seconds = time.monotonic() - began
    if as_json:
        result = {
            "path": str(packer.out),
            "layers": len(layers),
            "experts": experts,
            "bytes": total,
            "padding_bytes": packer.padding_bytes,
            "written_bytes": total - before,
            "seconds": round(seconds, 3),
        }
        print(json.dumps(result))
    else:
        print(
            f"{packer.out}: {len(layers)} layers x {experts} experts, {figures.size(total)} "
            f"({figures.size(packer.padding_bytes)} of it padding) in {figures.seconds(seconds)}"
        )
