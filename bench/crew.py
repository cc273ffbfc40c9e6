"""Starts the worker processes of one run together, and collects what they measured.

Owns the processes: whatever happens, Ctrl-C included, none is left behind. A run has a deadline.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from session import Result, Spec

from expertctl.traces import U16

SCRIPT = Path(__file__).with_name("session.py")
RUN_SECONDS = 900.0


@dataclass(frozen=True)
class Run:
    """What all workers of a run measured."""

    results: list[Result]
    #: Seconds of every layer step of every worker.
    steps: npt.NDArray[np.float32]

    @property
    def tokens(self) -> int:
        return sum(r.tokens for r in self.results)

    @property
    def lookups(self) -> int:
        return sum(r.lookups for r in self.results)

    @property
    def device_bytes(self) -> int:
        return sum(r.device_bytes for r in self.results)

    @property
    def cpu_seconds(self) -> float:
        return sum(r.cpu_seconds for r in self.results)

    @property
    def hit_rate(self) -> float | None:
        """Look-ups that found their expert in place, where a worker knows."""
        hits = [r.hits for r in self.results if r.hits is not None]
        return sum(hits) / self.lookups if hits else None

    @property
    def stall_per_token(self) -> float:
        return sum(r.stall_seconds for r in self.results) / self.tokens

    def step_ms(self, q: float) -> float:
        return float(np.percentile(self.steps, q)) * 1e3


def run(
    spec: Spec,
    sessions: Sequence[U16],
    *,
    all_ready: Callable[[list[int]], object] = lambda pids: None,
    all_done: Callable[[], object] = lambda: None,
    deadline_seconds: float = RUN_SECONDS,
) -> Run:
    """Replay each session in a process of its own.

    Args:
        spec: of all workers, but for the files.
        all_ready: called with the processes' ids before the first step.
        all_done: called when all have measured, and not ended yet only by chance.
    """
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="expertd-bench-") as folder:
        files = [(Path(folder, f"{n}.npy"), Path(folder, f"{n}-steps.npy")) for n in _n(sessions)]
        late = threading.Event()

        def give_up() -> None:
            late.set()
            for process in processes:
                process.kill()

        watchdog = threading.Timer(deadline_seconds, give_up)
        watchdog.start()
        try:
            for ids, (routing, steps) in zip(sessions, files, strict=True):
                np.save(routing, ids)
                own = replace(spec, routing=str(routing), steps=str(steps))
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(SCRIPT), json.dumps(own.__dict__)],
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                    )
                )  # fmt: skip
            for process in processes:
                _line(process)
            all_ready([process.pid for process in processes])
            for process in processes:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            results = [Result(**json.loads(_line(process))) for process in processes]
            all_done()
            for process in processes:
                process.wait(30)
            return Run(results, np.concatenate([np.load(steps) for _, steps in files]))
        except RuntimeError as exc:
            late_text = f" (the run took more than {deadline_seconds:g} s)" if late.is_set() else ""
            raise SystemExit(f"{exc}{late_text}") from exc
        finally:
            watchdog.cancel()
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait(30)


def _n(sessions: Sequence[U16]) -> range:
    return range(len(sessions))


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        code = process.wait(30)
        raise RuntimeError(f"a worker ended with exit code {code}; what it said is above")
    return line
