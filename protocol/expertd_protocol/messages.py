"""Every request and reply, tagged by `kind`.

Two channels carry them. The attach socket (AF_UNIX stream) takes `Hello`, `Inspect`, `Attach` and
`Detach`, each a u32 big-endian length and a msgpack map; `Attached` brings file descriptors along.
ZeroMQ takes `StatsRequest`, `Ping`, `Record` and `RecordsRequest` as msgpack maps, and the miss path
as small fixed msgpack arrays (`Miss`, `MissReply`, `MissError`, `Wish`), which pydantic would only slow
down.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from expertd_protocol.stats import Stats

PROTOCOL_VERSION = 2


class Message(BaseModel):
    """Immutable; unknown fields are errors, so that a typo never passes silently."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Hello(Message):
    """First message on the attach socket. The daemon checks `version` before anything else."""

    kind: Literal["hello"] = "hello"
    version: int = PROTOCOL_VERSION
    role: Literal["worker", "admin"]
    pid: PositiveInt
    name: str = Field(default="", max_length=200)


class Welcome(Message):
    """Answer to `Hello`: who the daemon is and how to reach its ROUTER."""

    kind: Literal["welcome"] = "welcome"
    version: int = PROTOCOL_VERSION
    daemon_version: str
    daemon_pid: PositiveInt
    epoch: NonNegativeInt
    session: bytes
    endpoint: str
    max_in_flight: PositiveInt


class Inspect(Message):
    """Read and check the headers of a model folder. Answered by `Inspected` or `Failure`."""

    kind: Literal["inspect"] = "inspect"
    path: str = Field(min_length=1, max_length=4096)


class Inspected(Message):
    """The folder is complete and its headers are sound. `warnings` are sentences for people."""

    kind: Literal["inspected"] = "inspected"
    path: str
    shards: PositiveInt
    tensors: PositiveInt
    nbytes: NonNegativeInt
    warnings: tuple[str, ...] = ()


class PartSource(Message):
    """One part of the experts of a layer, stacked in one tensor of shape `[E, *shape]` (layout A).

    `dtype` is what the worker computes with; the daemon only checks that the bytes are as many.
    """

    name: str
    tensor: str
    dtype: str
    shape: tuple[PositiveInt, ...]


class LayerSource(Message):
    """One MoE layer, found by walking the mlx-lm model: its module path and its parts."""

    path: str
    parts: Annotated[tuple[PartSource, ...], Field(min_length=1, max_length=32)]


class Attach(Message):
    """Attach to a model. The worker says what it streams; the daemon checks it against the headers.

    `quota_min` is the fewest experts the worker must hold at once (its top-k), `quota_wanted` the most
    it can use; the daemon grants something between or refuses with the numbers. `replaces` is the
    worker's own lost session, when it holds nothing there any more: it ends before this one begins,
    so that a worker never competes with itself.
    """

    kind: Literal["attach"] = "attach"
    path: str = Field(min_length=1, max_length=4096)
    experts: PositiveInt
    layers: Annotated[tuple[LayerSource, ...], Field(min_length=1, max_length=4096)]
    quota_min: PositiveInt
    quota_wanted: PositiveInt
    replaces: bytes = b""


class SlabInfo(Message):
    """One slab; its layout follows from the parts of its layers and `slots`."""

    slots: PositiveInt
    nbytes: PositiveInt


class Attached(Message):
    """Answer to `Attach`; carries fds in this order: directory (read-only), page (read-write), slabs.

    `slab_of_layer[l]` is the slab that MoE layer l lives in.
    """

    kind: Literal["attached"] = "attached"
    model: NonNegativeInt
    quota: PositiveInt
    slabs: tuple[SlabInfo, ...]
    slab_of_layer: tuple[NonNegativeInt, ...]
    budget_bytes: PositiveInt


class Detach(Message):
    """The worker holds nothing any more and gives its session back. Answered by `Detached`."""

    kind: Literal["detach"] = "detach"


class Detached(Message):
    kind: Literal["detached"] = "detached"


class Failure(Message):
    """Any request that was refused: a stable code and one sentence."""

    kind: Literal["failure"] = "failure"
    code: str
    message: str


class Ping(Message):
    kind: Literal["ping"] = "ping"


class Pong(Message):
    kind: Literal["pong"] = "pong"
    epoch: NonNegativeInt


class StatsRequest(Message):
    kind: Literal["stats_request"] = "stats_request"


class StatsReply(Message):
    kind: Literal["stats_reply"] = "stats_reply"
    stats: Stats


class Record(Message):
    """Ask a worker to record what it routes. Answered by `Noted`, or `Failure` for an unknown session.

    The daemon only passes it on. `path` is an empty file that the sender made; the worker fills it
    until `tokens` went through the model, until `until_ns` (CLOCK_MONOTONIC, which all processes of a
    machine share) or until the file is removed.
    """

    kind: Literal["record"] = "record"
    session: bytes
    path: str = Field(min_length=1, max_length=4096)
    tokens: PositiveInt
    until_ns: PositiveInt


class Noted(Message):
    """Answer to `Record`: it waits for the worker's next forward pass."""

    kind: Literal["noted"] = "noted"


class RecordsRequest(Message):
    """A worker whose page says that recordings are wanted asks which. Answered by `Records`."""

    kind: Literal["records_request"] = "records_request"


class Records(Message):
    """What is wanted of this worker since it asked last."""

    kind: Literal["records"] = "records"
    wanted: tuple[Record, ...]


AnyMessage = Annotated[
    Hello | Welcome | Inspect | Inspected | Attach | Attached | Detach | Detached
    | Failure | Ping | Pong | StatsRequest | StatsReply | Record | Noted | RecordsRequest | Records,
    Field(discriminator="kind"),
]  # fmt: skip


class Miss(NamedTuple):
    """Ask for experts of one layer. `seq` grows by one per request of a session."""

    seq: int
    layer: int
    phase: int
    experts: tuple[int, ...]


class MissReply(NamedTuple):
    """All experts asked for are resident and granted until the worker acknowledges `seq` in its page.

    `words` are their directory words in the order asked; `joined` were already being read or had
    become resident meanwhile, `missed` were read for this request.
    """

    seq: int
    words: tuple[int, ...]
    joined: int
    missed: int


class Wish(NamedTuple):
    """Experts that the session will probably ask for next: not answered, replaces its last one (rule 21)."""

    layer: int
    experts: tuple[int, ...]


class MissError(NamedTuple):
    """The request failed; nothing is granted. `seq` is 0 when the request could not be parsed."""

    seq: int
    code: str
    message: str
