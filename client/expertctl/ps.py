"""`expertctl ps`: the workers that are attached now."""

from __future__ import annotations

import json

from expertctl.connection import AsJson, RunDir, Socket, connect

EPILOG = "Examples:\n\n  expertctl ps\n\n  expertctl ps --json | jq '.[].pid'"


def command(as_json: AsJson = False, run_dir: RunDir = None, socket: Socket = None) -> None:
    """List attached workers: pid, model, quota, pins, bytes hit and missed, time waited."""
    from expertctl import render

    admin = connect(run_dir, socket)
    try:
        stats = admin.stats()
    finally:
        admin.close()
    if as_json:
        rates = render.derived(stats)["sessions"]
        workers = [s.model_dump(mode="json") for s in stats.sessions]
        print(json.dumps([{**w, "derived": r} for w, r in zip(workers, rates, strict=True)]))
    else:
        print(render.workers_text(stats))
