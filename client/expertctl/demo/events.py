"""What a worker process and the command that started it say to each other: JSON, one per line.

The command writes a `Job`, later `go`, and closes the pipe when the worker may leave. The worker
answers `Ready`, one `Text` per token, then `Done`; or `Failed` at any time.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

GO = "go"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Job:
    """What one worker process does: load a model once, continue each prompt."""

    name: str
    model: str
    prompts: tuple[str, ...]
    tokens: int
    #: attach socket of the daemon; None means plain mlx-lm, everything resident.
    socket: str | None
    arena_view: str = "auto"


@dataclass(frozen=True)
class Ready:
    """The model is loaded; the worker waits for `go`."""

    versions: dict[str, str]


@dataclass(frozen=True)
class Text:
    """One token of one prompt."""

    prompt: int
    token: int
    text: str


@dataclass(frozen=True)
class Done:
    """Every prompt has its tokens. Seconds of generation, the prompt's own included."""

    seconds: float


@dataclass(frozen=True)
class Failed:
    """The worker gives up; `message` is one sentence."""

    code: str
    message: str
    exit_code: int


Event = Ready | Text | Done | Failed
_BY_NAME: dict[str, type[Ready] | type[Text] | type[Done] | type[Failed]] = {
    cls.__name__.lower(): cls for cls in (Ready, Text, Done, Failed)
}


def dump(event: Event) -> str:
    return json.dumps({"event": type(event).__name__.lower(), **asdict(event)})


def parse(line: str) -> Event:
    """Return the event of one line.

    Raises:
        ValueError: it is not one.
    """
    value = json.loads(line)
    if not isinstance(value, dict) or value.get("event") not in _BY_NAME:
        raise ValueError(f"not an event: {line[:200]!r}")
    return _make(_BY_NAME[value.pop("event")], value)


def dump_job(job: Job) -> str:
    return json.dumps(asdict(job))


def parse_job(line: str) -> Job:
    value = json.loads(line)
    value["prompts"] = tuple(value["prompts"])
    return _make(Job, value)


def _make(cls: type[_T], value: dict[str, Any]) -> _T:
    names = {f.name for f in fields(cls)}  # type: ignore[arg-type]
    if set(value) - names:
        raise ValueError(f"unknown fields {sorted(set(value) - names)} of {cls.__name__}")
    try:
        return cls(**value)
    except TypeError as exc:
        raise ValueError(str(exc)) from exc
