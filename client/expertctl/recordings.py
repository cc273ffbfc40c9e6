"""Recordings of running workers: ask for them, wait, and turn what the workers wrote into traces.

The workers write (`expertd_client.recording`); this side makes their files before, and npz files of
them after. Once the workers know, no daemon is needed: one that dies or restarts changes nothing. A
worker's own file is removed when its npz file is complete, and not before.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertctl import figures, render
from expertctl.traces import Trace, recorded_trace, write_trace
from expertd_client.recording import SUFFIX, End, make_recording, progress, read_recording
from expertd_protocol.errors import BadTrace, ExpertdError, NoSpace, UnknownSession
from expertd_protocol.messages import Record
from expertd_protocol.stats import SessionStats, Stats

if TYPE_CHECKING:
    from expertd_client import Admin

#: Seconds between two looks at what the workers have written.
_LOOK_SECONDS = 0.2
#: Shorter words are not taken for the beginning of a session id.
_SESSION_DIGITS = 4

_WHY = {
    End.TOKENS: "--tokens reached",
    End.SECONDS: "--seconds over",
    End.CLOSED: "its model was closed",
    End.BUSY: "it is being recorded already: end that recording, or remove its .recording file",
    End.FAILED: "the worker could not write; its log says why",
}


@dataclass(frozen=True)
class Recording:
    """One worker that is to be recorded into `out`."""

    out: Path
    pid: int
    name: str
    texts: dict[str, str]

    @property
    def file(self) -> Path:
        """What the worker writes."""
        return self.out.with_name(self.out.name + SUFFIX)

    def make(self) -> None:
        """Make the worker's file.

        Raises:
            BadTrace: there are such files, or they cannot be made there.
        """
        if self.out.exists():
            raise BadTrace(f"{self.out} exists and is not overwritten; choose another name")
        make_recording(self.file)

    def progress(self) -> tuple[int, bool]:
        """Return the tokens so far, and whether more may come."""
        if not self.file.exists():
            return 0, False
        tokens, end = progress(self.file)
        return tokens, end is None and _lives(self.pid)

    def finish(self) -> Finished:
        """Write the npz file of what there is, and remove the worker's: then the worker stops, too.

        Raises:
            NoSpace, BadTrace: it cannot be written; the worker's file is kept.
        """
        if not self.file.exists():
            return Finished(self, None, "its .recording file was removed")
        recorded = read_recording(self.file)
        trace = None
        if recorded is not None and len(recorded.rows):
            trace = recorded_trace(self.out.name, recorded, self.texts)
            try:
                write_trace(self.out, trace, new=True)
            except OSError as exc:
                raise NoSpace(
                    f"{self.out} cannot be written: {exc.strerror}; {self.file} is kept, and "
                    "'expertctl trace show' and 'simulate' read it as well"
                ) from exc
        self.file.unlink(missing_ok=True)
        if recorded is not None and recorded.end is not None:
            why = _WHY[recorded.end]
        elif not _lives(self.pid):
            why = "its process ended"
        else:
            why = "stopped" if trace is not None else "no forward pass in that time"
        return Finished(self, trace, why)


@dataclass(frozen=True)
class Finished:
    """What became of a recording; no trace when nothing went through the model."""

    recording: Recording
    trace: Trace | None
    why: str

    def counts(self) -> dict[str, int]:
        """Return tokens, by phase and in all, and the sequences that they belong to."""
        if self.trace is None or self.trace.phase is None:
            return {"tokens": 0, "prefill": 0, "decode": 0, "sequences": 0}
        decode = int(self.trace.phase.sum())
        return {
            "tokens": self.trace.tokens,
            "prefill": self.trace.tokens - decode,
            "decode": decode,
            "sequences": len(self.trace.lengths),
        }

    def as_json(self) -> dict[str, Any]:
        one = self.recording
        file = str(one.out) if self.trace is not None else None
        return {"file": file, "name": one.name, "pid": one.pid, **self.counts(), "end": self.why}

    def summary(self) -> str:
        """Return the file and what is in it."""
        n = {name: figures.count(value) for name, value in self.counts().items()}
        return (
            f"{self.recording.out}: {n['tokens']} tokens ({n['prefill']} prefill, {n['decode']} "
            f"decode) in {n['sequences']} {'sequence' if n['sequences'] == '1' else 'sequences'}"
        )

    def line(self) -> str:
        """Return one line for people: the summary, and why it ended."""
        if self.trace is None:
            return f"{self.recording.name}: nothing was recorded: {self.why}"
        return f"{self.summary()}; {self.why}"


def choose(stats: Stats, wanted: Sequence[str]) -> list[SessionStats]:
    """Return the sessions that are meant: by id (or its beginning), pid or name; all for none.

    Raises:
        UnknownSession: there is no such worker; the sentence has those that there are.
    """
    serving = [s for s in stats.sessions if s.state == "serving"]
    if not serving:
        raise UnknownSession("no worker is attached, so there is nothing to record")
    chosen = {s.session: s for s in serving if not wanted}
    for word in wanted:
        meant = [s for s in serving if _is_meant(s, word)]
        if not meant:
            there = ", ".join(f"{s.pid} {s.name}".strip() for s in serving)
            raise UnknownSession(f"no attached worker is {word!r}; there are: {there}")
        chosen |= {s.session: s for s in meant}
    return list(chosen.values())


def _is_meant(session: SessionStats, word: str) -> bool:
    begins = len(word) >= _SESSION_DIGITS and session.session.startswith(word.lower())
    return begins or word in (str(session.pid), session.name)


def ask(
    admin: Admin, sessions: Sequence[SessionStats], folder: Path, tokens: int, until_ns: int
) -> list[Recording]:
    """Have each session recorded into a file of its own in `folder`; those that end meanwhile are left out.

    Args:
        until_ns: the end, by `time.monotonic_ns`.
    """
    folder = folder.expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise BadTrace(f"{folder} cannot be made: {exc.strerror}; choose another folder") from exc
    asked: list[Recording] = []
    gone: UnknownSession | None = None
    try:
        for session in sessions:
            one = _recording(session, folder)
            one.make()
            asked.append(one)
            try:
                admin.record(
                    Record(
                        session=bytes.fromhex(session.session),
                        path=os.fspath(one.file),
                        tokens=tokens,
                        until_ns=until_ns,
                    )
                )
            except UnknownSession as exc:
                asked.remove(one)
                one.file.unlink()
                gone = exc
        if gone is not None and not asked:
            raise gone
    except BaseException:
        for one in asked:
            one.file.unlink(missing_ok=True)
        raise
    return asked


def _recording(session: SessionStats, folder: Path) -> Recording:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", session.name).strip("-.")[:60] or "worker"
    short = session.session[:8]
    return Recording(
        folder / f"{name}-{session.pid}-{short}.npz",
        session.pid,
        render.session_name(session),
        {
            "model": render.model_name(session.model),
            "source": "expertctl trace record",
            "note": f"live traffic of session {short}, pid {session.pid}, {session.name!r}",
        },
    )


def wait(recordings: Sequence[Recording], until_ns: int, tell: Callable[[int], None]) -> None:
    """Return when every worker has ended its recording, or at `until_ns`.

    Args:
        tell: is told the tokens of all together, a few times a second.
    """
    while time.monotonic_ns() < until_ns:
        looks = [one.progress() for one in recordings]
        tell(sum(tokens for tokens, _ in looks))
        if not any(more for _, more in looks):
            return
        time.sleep(_LOOK_SECONDS)


def finish(recordings: Sequence[Recording]) -> tuple[list[Finished], list[ExpertdError]]:
    """Finish each, whatever happens to the others."""
    finished, errors = [], []
    for one in recordings:
        try:
            finished.append(one.finish())
        except ExpertdError as exc:
            errors.append(exc)
    return finished, errors


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
