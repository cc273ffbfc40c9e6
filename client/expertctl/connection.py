"""Connection: which daemon a command talks to, and for how long it waits for an answer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from expertd_client import Admin

#: A daemon that is up answers in milliseconds, even with every reader thread blocked; a machine that
#: is busy with something else may keep it waiting.
ANSWER_SECONDS = 10.0

RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir",
        help="Run directory of the daemon.",
        show_default="EXPERTD_RUN_DIR, else per user",
    ),
]
Socket = Annotated[
    Path | None,
    typer.Option("--socket", help="Attach socket of the daemon, instead of --run-dir."),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]


def attach_socket(run_dir: Path | None, socket: Path | None) -> Path:
    """Return the attach socket that these options name, else the user's own."""
    from expertd_protocol.endpoints import Endpoints, default_run_dir

    if socket is not None:
        return socket.expanduser().absolute()
    if run_dir is not None:
        return Endpoints(run_dir.expanduser().absolute()).attach
    return Endpoints(default_run_dir()).attach


def connect(run_dir: Path | None, socket: Path | None) -> Admin:
    """Connect to the daemon.

    Raises:
        DaemonUnavailable: no daemon listens there.
    """
    from expertd_client import Admin

    return Admin.connect(attach_socket(run_dir, socket), deadline_seconds=ANSWER_SECONDS)
