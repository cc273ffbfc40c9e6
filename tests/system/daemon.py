"""A real daemon process for tests, and the bundled model as a worker without MLX sees it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from expertd.cache.budget import minimum_budget
from expertd.store.index import ExpertIndex, build_index
from expertd_client import Admin, ModelSource
from expertd_protocol.endpoints import Endpoints
from expertd_protocol.messages import LayerSource, PartSource
from expertd_protocol.stats import Stats

ROOT = Path(__file__).resolve().parents[2]
DEMO_MODEL = ROOT / "client" / "expertctl" / "demo_model"
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
TENSORS = ("weight", "scales", "biases")


def environment(**extra: str) -> dict[str, str]:
    """The environment of a child: this one's, without settings of a developer's own daemon."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("EXPERTD_")}
    paths = [str(ROOT / p) for p in ("protocol", "daemon", "client", ".")]
    env["PYTHONPATH"] = os.pathsep.join([*paths, env.get("PYTHONPATH", "")])
    return env | extra


def wait_until(what: str, condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Return when `condition` holds; fail with `what` when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


class RealDaemon:
    """`python -m expertd`, or another `module`, in a run directory of its own."""

    def __init__(self, run_dir: Path, budget: str, *flags: str, module: str = "expertd") -> None:
        self.run_dir = run_dir
        self.endpoints = Endpoints(run_dir)
        self.budget = budget
        self.flags = flags
        self.module = module
        self.log_path = run_dir.parent / f"{run_dir.name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, budget: str | None = None) -> RealDaemon:
        self.budget = budget or self.budget
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.module, "--run-dir", str(self.run_dir),
                 "--budget", self.budget, *self.flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(),
            )  # fmt: skip
        wait_until("the daemon accepts", self._ready)
        return self

    def _ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log
        with contextlib.suppress(Exception), Admin.connect(self.run_dir) as admin:
            admin.ping()
            return True
        return False

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def stats(self) -> Stats:
        with Admin.connect(self.run_dir) as admin:
            return admin.stats()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(20)

    def n_fds(self) -> int:
        return psutil.Process(self.pid).num_fds()

    def shared_bytes(self) -> int:
        """Shared memory that is really there: the pages of every memfd of the daemon, counted once."""
        total = 0
        seen = set()
        for fd in os.listdir(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                path = f"/proc/{self.pid}/fd/{fd}"
                info = os.stat(path)
                if "memfd:expertd" in os.readlink(path) and info.st_ino not in seen:
                    seen.add(info.st_ino)
                    total += info.st_blocks * 512
        return total


@contextlib.contextmanager
def real_daemon(budget: str, *flags: str, module: str = "expertd") -> Iterator[RealDaemon]:
    """Start a daemon and end it with SIGTERM, or SIGKILL when the test has ended it already."""
    where = Path(tempfile.mkdtemp(prefix="xd-"))
    daemon = RealDaemon(where / "run", budget, *flags, module=module)
    try:
        yield daemon.start()
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.process.kill()
            daemon.process.wait(10)
        shutil.rmtree(where, ignore_errors=True)


def demo_source(path: Path = DEMO_MODEL) -> ModelSource:
    """The stacked expert tensors of the bundled model, by its headers."""
    tensors = build_index(path).tensors
    layers = []
    for n in range(6):
        module = f"model.layers.{n}.mlp.switch_mlp"
        parts = []
        for part in (f"{p}.{t}" for p in PROJECTIONS for t in TENSORS):
            info = tensors[f"{module}.{part}"]
            parts.append(
                PartSource(
                    name=part, tensor=info.name, dtype=info.dtype, shape=tuple(info.shape[1:])
                )
            )
        layers.append(LayerSource(path=module, parts=tuple(parts)))
    return ModelSource(path, 32, tuple(layers))


def demo_index(path: Path = DEMO_MODEL) -> ExpertIndex:
    source = demo_source(path)
    return ExpertIndex(build_index(path), source.layers, source.experts)


def demo_minimum(quota: int = 4) -> int:
    """The smallest budget of the bundled model."""
    index = demo_index()
    return minimum_budget([index.parts(n) for n in range(6)], 32, quota)
