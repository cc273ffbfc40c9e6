"""`expertctl run`: one prompt, streamed to stdout, then one line of figures on stderr."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from expertctl.connection import RunDir, Socket

EPILOG = (
    "Examples:\n\n"
    "  expertctl run mlx-community/Qwen3-30B-A3B-4bit -p 'Why is the sky blue?'\n\n"
    "  git diff | expertctl run ~/models/Qwen3-30B-A3B-4bit -p - --max-tokens 512\n\n"
    "  expertctl run MODEL -p 'Hello' --budget 24GiB --json | jq .tokens_per_second"
)


def command(
    model: Annotated[str, typer.Argument(help="Model folder, or a Hugging Face id in the cache.")],
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The prompt; - reads stdin.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 256,
    temp: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Nucleus; 0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    budget: Annotated[
        str, typer.Option(help="Of a private daemon: auto, 24GiB, 60% of all memory.")
    ] = "auto",
    arena_view: Annotated[
        Literal["auto", "map", "copy"],
        typer.Option(help="How experts become arrays: map without a copy, or copy."),
    ] = "auto",
    no_chat_template: Annotated[
        bool, typer.Option("--no-chat-template", help="Give the prompt to the model as it is.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Also record what is routed, for 'expertctl trace'; never text."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="No stream; text and figures as one JSON object.")
    ] = False,
    run_dir: RunDir = None,
    socket: Socket = None,
) -> None:
    """Continue one prompt with a model whose experts are streamed.

    Uses the daemon that is running. When there is none, a private one lives as long as this
    command, with --budget.
    """
    from expertctl.generation import Request, generate

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise typer.BadParameter("the prompt is empty", param_hint="--prompt")
    request = Request(
        model=model,
        prompt=text,
        max_tokens=max_tokens,
        temp=temp,
        top_p=top_p,
        seed=seed,
        chat=not no_chat_template,
        arena_view=arena_view,
        trace=trace,
    )
    outcome = generate(request, budget, run_dir, socket, echo=not as_json)
    if as_json:
        print(json.dumps(outcome.as_json()), flush=True)
    else:
        print(outcome.line(), file=sys.stderr, flush=True)
