"""One worker process of bench/replay.py and bench/scale.py; not run by hand.

    python bench/session.py SPEC

SPEC is JSON (`Spec`). Says `ready` when it has opened everything, starts at `go` on stdin, and ends with
one JSON object (`Result`). Ends also when stdin does, so it never outlives who started it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("protocol", "daemon", "client", "bench")]

# ruff: noqa: E402
import numpy as np
import ways
from streamed import Streamed
from texts import experts_of


@dataclass(frozen=True)
class Spec:
    """What one worker does."""

    way: str
    folder: str
    #: .npy with ids u16[tokens, layers, k].
    routing: str
    #: .npy to write: seconds of each layer step.
    steps: str
    socket: str | None = None
    cache_bytes: int = 0
    threads: int = 8
    compute_ms: float = 0.0


@dataclass(frozen=True)
class Result:
    """What one worker measured. `stall_seconds` is all time but that of the pretended compute."""

    tokens: int
    lookups: int
    hits: int | None
    stall_seconds: float
    seconds: float
    device_bytes: int
    kernel_read_bytes: int
    cpu_seconds: float


def replay(spec: Spec) -> Result:
    model = Streamed(Path(spec.folder))
    ids = np.load(spec.routing)
    passes = [
        [(layer, np.array(e, np.intp)) for layer, row in enumerate(token) if (e := experts_of(row))]
        for token in ids
    ]
    socket = Path(spec.socket) if spec.socket else None
    with ways.opened(
        spec.way, model, socket=socket, nbytes=spec.cache_bytes, threads=spec.threads,
        top_k=int(ids.shape[2]),
    ) as way:  # fmt: skip
        print("ready", flush=True)
        if sys.stdin.readline() != "go\n":
            raise SystemExit("nobody said go")
        threading.Thread(target=_end_with_parent, daemon=True).start()
        before, kernel, cpu = way.device_bytes(), ways.process_read_bytes(), time.process_time()
        clock, compute = time.perf_counter, spec.compute_ms / 1e3
        fetch, release = way.fetch, way.release
        steps, lookups = [], 0
        began = clock()
        for token in passes:
            for layer, experts in token:
                started = clock()
                fetch(layer, experts)
                ready = clock()
                if compute:
                    time.sleep(compute)
                computed = clock()
                release()
                steps.append(ready - started + clock() - computed)
                lookups += len(experts)
            way.token_done()
        result = Result(
            tokens=len(passes),
            lookups=lookups,
            hits=way.hits,
            stall_seconds=sum(steps),
            seconds=clock() - began,
            device_bytes=way.device_bytes() - before,
            kernel_read_bytes=ways.process_read_bytes() - kernel,
            cpu_seconds=time.process_time() - cpu,
        )
    np.save(spec.steps, np.array(steps, np.float32))
    return result


def _end_with_parent() -> None:
    if not sys.stdin.read(1):
        os._exit(1)


def main() -> None:
    result = replay(Spec(**json.loads(sys.argv[1])))
    print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
