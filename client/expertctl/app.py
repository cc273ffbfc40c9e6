"""The command line: which commands there are, and how every error ends.

An `ExpertdError` is one line `error: ...` on stderr and its own exit code; never a traceback.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import typer

from expertctl import models, pack, prepare, ps, run, stats, trace, verify
from expertctl.demo import command as demo

# Nearly all of `expertctl stats` is imports. Measured on its cold start, CPU time: collecting
# garbage while modules load takes 25 of 265 ms, pydantic's search for plugins up to 30.
gc.set_threshold(50_000)
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

app = typer.Typer(
    name="expertctl",
    help="Mixture-of-Experts models larger than RAM, for several agents at once.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from expertd_protocol import __version__

        print(f"expertctl {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command("demo", epilog=demo.EPILOG)(demo.command)
app.command("run", epilog=run.EPILOG)(run.command)
app.command("prepare", epilog=prepare.EPILOG)(prepare.command)
app.command("pack", epilog=pack.EPILOG)(pack.command)
app.command("verify", epilog=verify.EPILOG)(verify.command)
app.command("stats", epilog=stats.EPILOG)(stats.command)
app.command("ps", epilog=ps.EPILOG)(ps.command)
app.command("ls", epilog=models.LS_EPILOG)(models.ls)
app.command("show", epilog=models.SHOW_EPILOG)(models.show)
app.add_typer(trace.app)


def _end(signum: int, frame: FrameType | None) -> NoReturn:
    # unwinds the stack, so that a private daemon and its directory go too
    raise SystemExit(128 + signum)


def main() -> None:
    """Run `expertctl`."""
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    try:
        app()
    except OSError as error:  # what it prints to is full or gone
        print(f"error: {error.strerror or error}: {error.filename or 'output'}", file=sys.stderr)
        raise SystemExit(1) from None
    except Exception as error:
        from expertd_protocol.errors import ExpertdError

        if not isinstance(error, ExpertdError):
            raise
        sys.stdout.flush()
        print(error_text(error), file=sys.stderr)
        raise SystemExit(int(error.exit_code)) from None


def error_text(error: BaseException) -> str:
    """Return `error: ...` and, where the error has notes, a `hint: ...` line for each."""
    hints = [f"hint: {note}" for note in getattr(error, "__notes__", ())]
    return "\n".join([f"error: {error}", *hints])
