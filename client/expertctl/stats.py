"""`expertctl stats`: what the daemon has in memory, what it read, and who waited for it."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.connection import AsJson, RunDir, Socket, connect

if TYPE_CHECKING:
    from expertd_protocol.stats import Stats

EPILOG = (
    "Examples:\n\n"
    "  expertctl stats\n\n"
    "  expertctl stats --watch 2\n\n"
    "  expertctl stats --json | jq .derived.total.wait_seconds"
)

_HOME_AND_CLEAR = "\x1b[H\x1b[J"


def command(
    seconds: Annotated[
        float, typer.Argument(min=0.05, help="Seconds between two looks, with --watch.")
    ] = 1.0,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Look again and again.")] = False,
    as_json: AsJson = False,
    run_dir: RunDir = None,
    socket: Socket = None,
) -> None:
    """Show hits, joins, misses, bytes, waiting time and memory: in total, per model, per worker.

    Prefill and decode are kept apart. A hit rate alone says little: the bytes read and the time
    waited stand beside it. With --watch --json there is one JSON object a line.
    """
    admin = connect(run_dir, socket)
    try:
        while True:
            show(admin.stats(), as_json=as_json, clear=watch and sys.stdout.isatty())
            if not watch:
                return
            time.sleep(seconds)
    finally:
        admin.close()


def show(stats: Stats, *, as_json: bool, clear: bool) -> None:
    """Print one snapshot."""
    from expertctl import render

    text = json.dumps(render.as_json(stats)) if as_json else render.stats_text(stats)
    if clear and not as_json:
        text = _HOME_AND_CLEAR + text
    print(text, flush=True)
