"""Load: a drop-in for `mlx_lm.load` whose experts come from the daemon."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_adapters, load_model, load_tokenizer

import expertd_client
from expertd_client.model_folder import model_folder, read_config
from expertd_mlx.models import stream_of, streamed_classes
from expertd_protocol.errors import UnsupportedModel
from expertd_protocol.messages import LayerSource


def load(
    path_or_id: str | Path,
    *,
    socket: Path | None = None,
    arena_view: str = "auto",
    tokenizer_config: dict[str, Any] | None = None,
    model_config: dict[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
    return_config: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    name: str = "",
) -> Any:
    """Load a model with its experts streamed, and its tokenizer.

    The rest of the weights is read into this process exactly as mlx-lm does it. Everything that
    touches the model belongs to the thread that generates; load it there.

    Args:
        path_or_id: a model folder, or a Hugging Face id that is in the cache.
        socket: the daemon's run directory or socket; None for the usual place.
        arena_view: how MLX sees the arena: auto, map (in place) or copy.
        tokenizer_config: passed on to the tokenizer, as mlx-lm does.
        model_config: keys that replace those of config.json.
        adapter_path: a folder of LoRA adapters for what is not streamed.
        lazy: read the weights that are not streamed only when they are used.
        return_config: return the config as well.
        revision: which one of a Hugging Face id.
        trust_remote_code: passed on to the tokenizer. Models with their own code cannot be streamed.
        name: what `expertctl ps` calls this worker.

    Returns:
        (model, tokenizer), with the config as a third when `return_config`.

    Raises:
        ModelError: something is wrong with the folder; the message says what and where.
        BudgetError: the daemon's memory budget does not allow it; the message has the numbers.
        DaemonUnavailable: there is no daemon.
    """
    folder = model_folder(path_or_id, revision)
    _refuse_own_code(folder)
    client = expertd_client.Client.connect(socket, name=name)
    try:
        # First: the daemon names a truncated shard or a git-lfs pointer, mlx-lm only trips over it.
        client.inspect(folder)
        model, config = load_model(
            folder,
            lazy=True,
            model_config=model_config,
            get_model_classes=partial(streamed_classes, path=folder),
        )
        if adapter_path is not None:
            model = load_adapters(model, adapter_path)
            model.eval()
        extra = {**(tokenizer_config or {})}
        if trust_remote_code:
            extra.setdefault("trust_remote_code", True)
        tokenizer: TokenizerWrapper = load_tokenizer(
            folder, extra, eos_token_ids=config.get("eos_token_id")
        )
        stream = stream_of(model)
        stream.arena_view = arena_view
        stream.attach(client, folder)
        if not lazy:
            mx.eval(model.parameters())
    except BaseException:
        client.close()
        raise
    return (model, tokenizer, config) if return_config else (model, tokenizer)


def expert_layers(folder: Path) -> tuple[tuple[LayerSource, ...], int]:
    """Return the layers that would be streamed and their number of experts; reads only headers.

    Raises:
        ModelError: the model cannot be streamed; the message says why.
    """
    _refuse_own_code(folder)
    model, _ = load_model(
        folder, lazy=True, get_model_classes=partial(streamed_classes, path=folder)
    )
    stream = stream_of(model)
    return stream.layers, stream.experts


def _refuse_own_code(folder: Path) -> None:
    if file := read_config(folder).get("model_file"):
        raise UnsupportedModel(
            f"{folder} brings its own code ({file}); only mlx-lm's families can be streamed"
        )


def close(model: nn.Module) -> None:
    """Give everything back to the daemon; the model cannot be used any more."""
    stream_of(model).close()
