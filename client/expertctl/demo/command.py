"""`expertctl demo`: several agents, one small budget, one real model, exact tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from expertctl.demo.state import DemoResult

EPILOG = (
    "Examples:\n\n"
    "  expertctl demo\n\n"
    "  expertctl demo --agents 4 --tokens 128 --budget 50%\n\n"
    "  expertctl demo --json 2>/dev/null | jq .exact\n\n"
    "Exit code 7: the tokens of an agent are not those of the fully resident run."
)


def command(
    as_json: Annotated[
        bool, typer.Option("--json", help="The result as one JSON object on stdout.")
    ] = False,
    budget: Annotated[
        str, typer.Option(help="Share of the model's expert bytes (25%), or a size (1MiB).")
    ] = "25%",
    agents: Annotated[int, typer.Option(min=1, max=16, help="Worker processes at once.")] = 3,
    tokens: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of each agent.")] = 64,
    model: Annotated[
        str | None,
        typer.Option(help="Another MoE model: a folder, or an id in the Hugging Face cache.",
                     show_default="the bundled one"),
    ] = None,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Afterwards keep daemon and agents until Ctrl-C, to look at."),
    ] = False,
) -> None:  # fmt: skip
    """Run agents on one shared expert cache, and prove that their tokens are exact.

    Always starts a private daemon, because its budget is part of the point; a daemon that is
    running is left alone. The display goes to stderr, the result to stdout.
    """
    from expertctl.demo.performance import DemoPlan, perform
    from expertd_protocol.errors import ExitCode

    plan = DemoPlan.make(model, budget, agents, tokens)
    with perform(plan) as (result, run_dir):
        report(result, as_json=as_json)
        if keep:
            hold(run_dir)
    raise typer.Exit(int(ExitCode.OK if result.exact else ExitCode.INEXACT))


def report(result: DemoResult, *, as_json: bool) -> None:
    """Print the result: JSON alone on stdout, or the table there."""
    from expertctl.demo.state import result_text

    print(result_text(result), file=sys.stderr if as_json else sys.stdout, flush=True)
    if as_json:
        print(json.dumps(result.as_json()), flush=True)


def hold(run_dir: Path) -> None:
    """Wait for Ctrl-C."""
    import threading

    print(
        "demo: daemon and agents stay until Ctrl-C; look at them with\n"
        f"  expertctl stats --run-dir {run_dir}\n  expertctl ps --run-dir {run_dir}",
        file=sys.stderr,
        flush=True,
    )
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        print("demo: ending", file=sys.stderr)
