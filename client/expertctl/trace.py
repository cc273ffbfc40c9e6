"""`expertctl trace`: record routing, see what traces say, and what a cache would have made of them.

`simulate` and `show` work on files only: no daemon, no model. The format is described in `traces.py`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.connection import AsJson, RunDir, Socket, connect

if TYPE_CHECKING:
    from expertctl.replay.simulator import Workload

app = typer.Typer(
    name="trace",
    help="Routing traces: record them, replay them through replacement policies, or look at them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

#: Of one session: about 30 MB while it is recorded, for 48 layers with 8 experts a token.
RECORD_TOKENS = 20_000
RECORD_SECONDS = 600
_DAY_SECONDS = 24 * 3600

RECORD_EPILOG = (
    "Examples:\n\n"
    "  expertctl trace record --out traces\n\n"
    "  expertctl trace record --out traces --session 4242 --session agent-2 --seconds 60\n\n"
    "  expertctl run MODEL -p 'Hello' --trace hello.npz"
)
SIMULATE_EPILOG = (
    "Examples:\n\n"
    "  expertctl trace simulate chat.npz --capacity 0.1,0.25,0.5 --policy all --json\n\n"
    "  expertctl trace simulate a.npz b.npz --policy lru,default,belady\n\n"
    "  expertctl trace simulate chat.npz --sessions 4 --tokens 600"
)
SHOW_EPILOG = (
    "Examples:\n\n  expertctl trace show chat.npz\n\n  expertctl trace show chat.npz --png chat.png"
)

Files = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Traces of one model (npz).")]
Sessions = Annotated[
    int | None, typer.Option(min=1, help="Cut one file into so many sessions that run at once.")
]


@app.command("record", epilog=RECORD_EPILOG)
def record(
    out: Annotated[Path, typer.Option(help="Folder for the traces, one npz file a session.")],
    session: Annotated[
        list[str] | None,
        typer.Option(help="Session id, pid or name, as 'ps --json' has them; all without."),
    ] = None,
    seconds: Annotated[
        int, typer.Option(min=1, max=_DAY_SECONDS, help="End after so long.")
    ] = RECORD_SECONDS,
    tokens: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="End each after so many tokens.")
    ] = RECORD_TOKENS,
    as_json: AsJson = False,
    run_dir: RunDir = None,
    socket: Socket = None,
) -> None:
    """Record what running workers route: expert ids, router weights and phase, never text.

    Each worker writes FILE.npz.recording, from its next forward pass on; FILE.npz is made of it at the
    end, which is the first of --tokens, --seconds and Ctrl-C. Tokens are changed by nothing. While it is
    recorded, a worker waits once a pass for what it has routed. Should this command be killed, workers end
    by the same limits, and 'show' and 'simulate' read the .recording files.
    """
    from expertctl import recordings

    with connect(run_dir, socket) as admin:
        sessions = recordings.choose(admin.stats(), session or [])
        until_ns = time.monotonic_ns() + seconds * 1_000_000_000
        asked = recordings.ask(admin, sessions, out, tokens, until_ns)
    try:
        _say(
            f"recording {len(asked)} {'worker' if len(asked) == 1 else 'workers'} into {out}, at most "
            f"{tokens:,} tokens each and {seconds:,} s; Ctrl-C ends it"
        )
        recordings.wait(asked, until_ns, _count)
    except KeyboardInterrupt:
        pass  # the usual end
    finally:
        finished, errors = recordings.finish(asked)
    if as_json:
        print(json.dumps([one.as_json() for one in finished]))
    for one in finished:
        if one.trace is None:
            _say(one.line())
        elif not as_json:
            print(one.line())
    for error in errors[1:]:
        _say(f"error: {error}")
    if errors:
        raise errors[0]
    if all(one.trace is None for one in finished):
        raise typer.Exit(1)


@app.command("simulate", epilog=SIMULATE_EPILOG)
def simulate(
    files: Files,
    capacity: Annotated[
        str, typer.Option(help="Shares of all experts that fit, with commas.")
    ] = "0.1,0.25,0.5",
    policy: Annotated[
        str,
        typer.Option(help="all, or some of: lru, lfu, s3fifo, sieve, arc, default, belady."),
    ] = "all",
    sessions: Sessions = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="At most so many tokens of each session.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Replay traces through replacement policies and show the share of look-ups that hit.

    Several files, or the --sessions parts of one, take turns token by token in one shared cache.
    `default` is the policy of the daemon, `belady` the best possible one, which knows the future.
    With --json: {capacity: {policy: hit rate}}.
    """
    from expertctl.replay.simulator import NAMES, hit_rate

    shares = _shares(capacity)
    names = list(NAMES) if policy == "all" else [name.strip() for name in policy.split(",")]
    if unknown := [name for name in names if name not in NAMES]:
        raise typer.BadParameter(f"{', '.join(unknown)}: known are all, {', '.join(NAMES)}")
    work = _workload(files, sessions, tokens)
    rates = {
        text: {name: hit_rate(name, work, work.slots(share)) for name in names}
        for text, share in shares.items()
    }
    if as_json:
        print(json.dumps({text: _rounded(row) for text, row in rates.items()}))
        return
    print(_heading(work))
    print(_rates_table(names, rates))


@app.command("show", epilog=SHOW_EPILOG)
def show(
    files: Files,
    sessions: Sessions = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="At most so many tokens of each session.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Also draw a picture into this file (needs matplotlib).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how hot experts are per layer, how soon they return, and what sessions share."""
    from expertctl.replay import picture
    from expertctl.replay.facts import trace_facts

    if png is not None:
        picture.require_matplotlib()
    facts = trace_facts(_workload(files, sessions, tokens, by_sequence=True))
    if png is not None:
        picture.draw_png(facts, png)
    print(json.dumps(facts.as_json()) if as_json else picture.text(facts))


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _count(tokens: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{tokens:,} tokens ", end="", file=sys.stderr, flush=True)


def _shares(capacity: str) -> dict[str, float]:
    shares = {}
    for text in capacity.split(","):
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if not 0 < share <= 1:
            raise typer.BadParameter(f"capacity {text.strip()!r} is no share from above 0 to 1")
        shares[text.strip()] = share
    return shares


def _workload(
    files: list[Path], sessions: int | None, tokens: int | None, by_sequence: bool = False
) -> Workload:
    from expertctl.replay.simulator import interleave
    from expertctl.traces import read_trace
    from expertd_protocol.errors import BadTrace

    traces = [read_trace(path) for path in files]
    if len({(t.layers, t.num_experts) for t in traces}) > 1:
        sizes = ", ".join(f"{t.name} {t.layers} x {t.num_experts}" for t in traces)
        raise BadTrace(f"traces of one model are needed; layers x experts differ: {sizes}")
    if sessions is not None and len(traces) > 1:
        raise BadTrace(f"--sessions cuts one file; {len(traces)} files are {len(traces)} sessions")
    if sessions is not None:
        streams = traces[0].parts(sessions)
    elif by_sequence and len(traces) == 1:
        streams = traces[0].sequences()
    else:
        streams = [trace.ids for trace in traces]
    return interleave(streams, traces[0].num_experts, tokens)


def _heading(work: Workload) -> str:
    return (
        f"{work.sessions} {'session' if work.sessions == 1 else 'sessions'}, {work.lookups} look-ups, "
        f"{work.layers} layers x {work.experts} experts. Hit rates:"
    )


def _rates_table(names: list[str], rates: dict[str, dict[str, float]]) -> str:
    from expertctl.table import table

    rows = [[text, *(f"{row[name]:.3f}" for name in names)] for text, row in rates.items()]
    return table(["capacity", *names], rows)


def _rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: round(rate, 6) for name, rate in row.items()}
