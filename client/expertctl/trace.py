"""`expertctl trace`: what routing traces say, and what a cache would have made of them.

Works on files only: no daemon, no model. The format is described in `traces.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expertctl.connection import AsJson

if TYPE_CHECKING:
    from expertctl.replay.simulator import Workload

app = typer.Typer(
    name="trace",
    help="Routing traces: replay them through replacement policies, or look at them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
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
