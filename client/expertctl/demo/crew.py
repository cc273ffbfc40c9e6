"""The crew: worker processes that run at once, and one queue of what they say.

Owns the processes: whatever happens, none is left behind when the `with` block ends. Every process
is spawned, never forked, because MLX and ZeroMQ do not survive a fork.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import IO

from expertctl.demo.events import GO, Done, Event, Failed, Job, Ready, dump_job, parse
from expertctl.private_daemon import last_sentence, stop
from expertd_protocol.errors import DeadlineExceeded, ErrorCode, ExitCode, ExpertdError, from_wire

#: `-P` keeps modules of the current directory out of the worker.
AGENT_COMMAND = (sys.executable, "-P", "-m", "expertctl.demo.agent")
LEAVE_SECONDS = 5.0
#: How long `events` is silent before it yields None, so that a display can be refreshed.
TICK_SECONDS = 0.1

#: Set for every worker: the model is on disk, and nothing but errors belongs on a terminal.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Agent:
    """One worker process."""

    def __init__(
        self, job: Job, command: Sequence[str], said: queue.SimpleQueue[tuple[Agent, Event]]
    ) -> None:
        self.job = job
        self._said = said
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in leave()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **_ENVIRONMENT},
            # its own session: Ctrl-C reaches only the command, which then ends the workers
            start_new_session=True,
        )
        self._thread = threading.Thread(target=self._listen, name=job.name, daemon=True)
        self._thread.start()
        self.tell(dump_job(job))

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has died; _listen says how
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        last: Event | None = None
        for line in self._process.stdout:
            try:
                last = parse(line.decode("utf-8", "replace"))
            except ValueError as error:
                last = Failed(ErrorCode.INTERNAL, str(error), int(ExitCode.FAILURE))
            self._said.put((self, last))
        if not isinstance(last, Done | Failed):
            self._said.put((self, self._death()))

    def _death(self) -> Failed:
        try:
            code = self._process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            how = "closed its output without a result"
        else:
            how = f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"
        said = last_sentence(self._log)
        return Failed(
            ErrorCode.INTERNAL,
            f"worker {self.job.name} (pid {self.pid}) {how}" + (f": {said}" if said else ""),
            int(ExitCode.FAILURE),
        )

    def let_go(self) -> None:
        """Close its orders: it detaches and ends, or has ended already."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def leave(self, seconds: float) -> None:
        """Wait for its end, then make it end."""
        try:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        finally:
            stop(self._process, LEAVE_SECONDS)
            self._thread.join(LEAVE_SECONDS)
            if self._process.stdout is not None:
                self._process.stdout.close()
            self._log.close()


class Crew:
    """Workers that are started together, and told together when to begin."""

    def __init__(self, jobs: Sequence[Job], command: Sequence[str] = AGENT_COMMAND) -> None:
        self.agents: list[Agent] = []
        self._said: queue.SimpleQueue[tuple[Agent, Event]] = queue.SimpleQueue()
        self._jobs = jobs
        self._command = command

    def __enter__(self) -> Crew:
        try:
            for job in self._jobs:
                self.agents.append(Agent(job, self._command, self._said))
        except BaseException:
            self._end(0.0)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(LEAVE_SECONDS if error is None else 0.0)

    def _end(self, patience: float) -> None:
        for agent in self.agents:
            agent.let_go()
        for agent in self.agents:
            agent.leave(patience)

    def wait_ready(self, seconds: float) -> dict[str, str]:
        """Wait until every worker has loaded its model; return the versions one of them reports."""
        waiting = set(self.agents)
        versions: dict[str, str] = {}
        deadline = time.monotonic() + seconds
        while waiting:
            heard = self._hear(deadline, f"load the model within {seconds:g} s", waiting)
            if heard is not None and isinstance(heard[1], Ready):
                waiting.discard(heard[0])
                versions = heard[1].versions
        return versions

    def go(self) -> None:
        for agent in self.agents:
            agent.tell(GO)

    def events(self, seconds: float) -> Iterator[tuple[Agent, Event] | None]:
        """Yield what workers say until all are done, and None now and then when they are silent.

        Raises:
            ExpertdError: a worker failed, or `seconds` are over.
        """
        waiting = set(self.agents)
        deadline = time.monotonic() + seconds
        while waiting:
            heard = self._hear(deadline, f"finish within {seconds:g} s", waiting)
            if heard is not None and isinstance(heard[1], Done):
                waiting.discard(heard[0])
            yield heard

    def _hear(self, deadline: float, what: str, waiting: set[Agent]) -> tuple[Agent, Event] | None:
        """Return the next event, None after a tick of silence."""
        left = deadline - time.monotonic()
        if left <= 0:
            names = ", ".join(sorted(f"{a.job.name} (pid {a.pid})" for a in waiting))
            raise DeadlineExceeded(f"{names} did not {what}")
        try:
            agent, event = self._said.get(timeout=min(left, TICK_SECONDS))
        except queue.Empty:
            return None
        if isinstance(event, Failed):
            raise failure(agent, event)
        return agent, event


def failure(agent: Agent, event: Failed) -> ExpertdError:
    """Return the worker's error as one of ours, with the worker's exit code."""
    error = from_wire(event.code, f"agent {agent.job.name}: {event.message}")
    if error.exit_code != event.exit_code:
        error.exit_code = ExitCode(event.exit_code)
    return error
