"""A small daemon for tests of clients: real sockets, real shared memory, correct grants, no disk.

`FakeDaemon` serves a run directory from a thread; its experts are `pattern` bytes, so that a test
can tell whose bytes it sees. Override `attached` or `answer` to misbehave. It follows the pin rules by never
reusing a slot that a hazard or an open grant names, except in `evict`, which does what it is told.
`python -m expertd_client.testing RUN_DIR [silent]` serves from a process of its own, to be killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import select
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import zmq

from expertd_client.arena import Arena, PageView
from expertd_client.source import ModelSource
from expertd_protocol import codec, errors
from expertd_protocol.endpoints import Endpoints
from expertd_protocol.fence import fence
from expertd_protocol.layout import (
    DirectoryLayout,
    Header,
    PageLayout,
    SlabLayout,
    pack_word,
    unpack_word,
)
from expertd_protocol.messages import (
    AnyMessage,
    Attach,
    Attached,
    Detach,
    Detached,
    Failure,
    Hello,
    Inspect,
    Inspected,
    LayerSource,
    Message,
    Miss,
    MissReply,
    PartSource,
    Ping,
    Pong,
    SlabInfo,
    StatsReply,
    StatsRequest,
    Welcome,
)
from expertd_protocol.stats import Counters, Latency, Prefetched, SlotCounts, Stats

Key = tuple[int, int]  # layer, expert


def pattern(layer: int, expert: int, part: int, nbytes: int) -> bytes:
    """Bytes of one part that no other part has: its numbers, over and over."""
    unit = b"".join(n.to_bytes(2, "little") for n in (layer, expert, part, 0xE5E5))
    return (unit * (nbytes // len(unit) + 1))[:nbytes]


def tiny_source(
    path: Path = Path("/models/tiny"), *, layers: int = 3, experts: int = 16, width: int = 64
) -> ModelSource:
    """Return a model of two parts per expert, `width` u32 and `width` f32 wide."""
    return ModelSource(
        path,
        experts,
        tuple(
            LayerSource(
                path=f"model.layers.{i}.mlp.switch_mlp",
                parts=(
                    PartSource(name="w", tensor=f"{i}.w", dtype="U32", shape=(4, width)),
                    PartSource(name="s", tensor=f"{i}.s", dtype="F32", shape=(width,)),
                ),
            )
            for i in range(layers)
        ),
    )


def holds(arena: Arena, layer: int, expert: int, word: int) -> bool:
    """Tell whether the slot that `word` names has the bytes of this expert in every plane."""
    _, slab, slot = unpack_word(int(word))
    return all(
        arena.slabs[slab].plane(i)[slot].tobytes() == pattern(layer, int(expert), i, part.nbytes)
        for i, part in enumerate(arena.source.parts[layer])
    )


class Shared:
    """One shared-memory object: `fd` reads and writes, `read_only()` cannot be mapped writable."""

    def __init__(self, nbytes: int) -> None:
        if sys.platform == "linux":
            self.fd = os.memfd_create("expertd-fake", os.MFD_CLOEXEC)
            self._path = f"/proc/self/fd/{self.fd}"
            os.ftruncate(self.fd, nbytes)
            self._reader = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        else:
            self.fd, name = tempfile.mkstemp()
            os.ftruncate(self.fd, nbytes)
            self._reader = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
            os.unlink(name)
        self.map = mmap.mmap(self.fd, nbytes)

    def read_only(self) -> int:
        return self._reader

    def close(self) -> None:
        os.close(self.fd)
        os.close(self._reader)
        with contextlib.suppress(BufferError):  # a view of it lives on in a test
            self.map.close()


class FakeModel:
    """The arena of one model: slabs of `slots` slots, `layers_per_slab` layers in each."""

    def __init__(self, attach: Attach, slots: int | None, layers_per_slab: int) -> None:
        source = ModelSource(Path(attach.path), attach.experts, attach.layers)
        self.source = source
        groups: list[list[int]] = []
        for layer, parts in enumerate(source.parts):
            fits = groups and source.parts[groups[-1][0]] == parts
            if fits and len(groups[-1]) < layers_per_slab:
                groups[-1].append(layer)
            else:
                groups.append([layer])
        self.slab_of_layer = tuple(i for i, group in enumerate(groups) for _ in group)
        self.layouts = [
            SlabLayout(source.parts[g[0]], min(slots or 1 << 20, len(g) * source.experts))
            for g in groups
        ]
        directory = DirectoryLayout(len(source.layers), source.experts)
        self.shared = Shared(directory.nbytes)
        self.directory = directory.words(self.shared.map)
        self.slabs = [Shared(layout.nbytes) for layout in self.layouts]
        self.generations = [
            layout.generations(slab.map)
            for layout, slab in zip(self.layouts, self.slabs, strict=True)
        ]
        self.free = [list(range(layout.slots)) for layout in self.layouts]
        self.words: dict[Key, int] = {}

    def fill(self, layer: int, expert: int, busy: set[int]) -> int:
        """Make one expert resident, if need be in the slot of another whose word is not `busy`."""
        if word := self.words.get((layer, expert)):
            return word
        i = self.slab_of_layer[layer]
        if not self.free[i]:
            victims = (
                key
                for key, word in self.words.items()
                if self.slab_of_layer[key[0]] == i and word not in busy
            )
            if (victim := next(victims, None)) is None:
                raise errors.BudgetExhausted(f"all {self.layouts[i].slots} slots are pinned")
            self.evict(*victim)
        slot = self.free[i].pop(0)
        for part, spec in enumerate(self.layouts[i].parts):
            at, n = self.layouts[i].row(part, slot)
            self.slabs[i].map[at : at + n] = pattern(layer, expert, part, spec.nbytes)
        word = pack_word(int(self.generations[i][slot]), i, slot)
        fence()
        self.directory[layer, expert] = self.words[layer, expert] = word
        return word

    def evict(self, layer: int, expert: int) -> None:
        """Take an expert's slot away and make it free, whoever holds it."""
        word = self.words.pop((layer, expert))
        self.directory[layer, expert] = 0
        fence()
        _, slab, slot = unpack_word(word)
        self.generations[slab][slot] += np.uint64(1)
        self.free[slab].insert(0, slot)

    def close(self) -> None:
        del self.directory, self.generations
        for shared in (self.shared, *self.slabs):
            shared.close()


class FakeSession:
    """One connection: its page and its open grants."""

    def __init__(self, conn: socket.socket) -> None:
        self.conn = conn
        self.id = b"S" + secrets.token_bytes(15)
        self.hello: Hello | None = None
        self.attach: Attach | None = None
        self.model: FakeModel | None = None
        self.page: PageView | None = None
        self.shared: Shared | None = None
        self.grants: dict[int, tuple[int, ...]] = {}

    def busy(self) -> set[int]:
        """Words that this worker holds: hazards, and grants that it has not acknowledged."""
        if self.page is None:
            return set()
        ack = int(self.page.header[Header.ACK])
        self.grants = {seq: words for seq, words in self.grants.items() if seq > ack}
        held = {word for words in self.grants.values() for word in words}
        return held | {int(word) for word in self.page.hazards if word}

    def close(self) -> None:
        self.conn.close()
        self.page = None
        if self.shared is not None:
            self.shared.close()


class FakeDaemon:
    """Serves `run_dir` from a thread until `stop`. Use it as a context manager.

    Attributes:
        requests: every miss request, in order.
        refuse: raised at every attach when it is set.
        lock: held while a message is handled; hold it to change models from a test.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        slots: int | None = None,
        quota: int | None = None,
        layers_per_slab: int = 2,
    ) -> None:
        self.endpoints = Endpoints(run_dir)
        self.slots, self.quota, self.layers_per_slab = slots, quota, layers_per_slab
        self.epoch = secrets.randbits(48)
        self.requests: list[Miss] = []
        self.sessions: dict[bytes, FakeSession] = {}
        self.models: dict[str, FakeModel] = {}
        self.refuse: errors.ExpertdError | None = None
        self.lock = threading.RLock()
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self.endpoints.attach, self.endpoints.router):
            path.unlink(missing_ok=True)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.MAXMSGSIZE, codec.ROUTER_MAX_BYTES)
        self._router.bind(self.endpoints.router_url)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(self.endpoints.attach))
        self._listener.listen(64)
        self._stop, self._wake = socket.socketpair()
        self._thread = threading.Thread(target=self._serve, name="fake-daemon", daemon=True)
        self._thread.start()

    # --- for tests -------------------------------------------------------------------------------
    @property
    def model(self) -> FakeModel:
        """The only model."""
        (model,) = self.models.values()
        return model

    @property
    def worker(self) -> FakeSession:
        """The worker that attached last."""
        return [s for s in self.sessions.values() if s.attach][-1]

    def busy(self) -> set[int]:
        return {word for session in self.sessions.values() for word in session.busy()}

    def fill(self, layer: int, *experts: int) -> list[int]:
        """Make experts of the only model resident, and return their words."""
        with self.lock:
            return [self.model.fill(layer, expert, self.busy()) for expert in experts]

    def evict(self, layer: int, *experts: int) -> None:
        """Take slots away at once, even from a worker that pinned them."""
        with self.lock:
            for expert in experts:
                self.model.evict(layer, expert)

    # --- to override -----------------------------------------------------------------------------
    def attached(self, session: FakeSession, attach: Attach) -> tuple[Message, list[int]]:
        """Return the reply to an attach and the descriptors that go with it."""
        if self.refuse is not None:
            raise self.refuse
        model = self.models.get(attach.path)
        if model is None:
            model = FakeModel(attach, self.slots, self.layers_per_slab)
            self.models[attach.path] = model
        quota = min(attach.quota_wanted, self.quota or attach.quota_wanted)
        layout = PageLayout(quota, len(attach.layers), attach.experts)
        session.shared = Shared(layout.nbytes)
        page = session.shared.map
        session.attach, session.model = attach, model
        session.page = PageView(
            layout.header(page),
            layout.hazards(page),
            layout.counters(page),
            layout.uses(page),
        )
        reply = Attached(
            model=0,
            quota=quota,
            slabs=tuple(SlabInfo(slots=x.slots, nbytes=x.nbytes) for x in model.layouts),
            slab_of_layer=model.slab_of_layer,
            budget_bytes=sum(x.nbytes for x in model.layouts),
        )
        readers = [slab.read_only() for slab in model.slabs]
        return reply, [model.shared.read_only(), session.shared.fd, *readers]

    def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
        """Return the frames that answer a miss request."""
        return [self.grant(session, miss)]

    def grant(self, session: FakeSession, miss: Miss) -> bytes:
        """Fill what is missing, and grant all that was asked for."""
        assert session.model is not None
        words: list[int] = []
        joined = 0
        for expert in miss.experts:
            joined += (miss.layer, expert) in session.model.words
            busy = self.busy() | set(words)
            words.append(session.model.fill(miss.layer, expert, busy))
        session.grants[miss.seq] = tuple(words)
        reply = MissReply(miss.seq, tuple(words), joined, len(words) - joined)
        return codec.encode_reply(reply)

    # --- the thread ------------------------------------------------------------------------------
    def _serve(self) -> None:
        poller = zmq.Poller()
        for waiting in (self._router, self._listener.fileno(), self._stop.fileno()):
            poller.register(waiting, zmq.POLLIN)
        by_fd: dict[int, FakeSession] = {}
        while True:
            ready = dict(poller.poll())
            if self._stop.fileno() in ready:
                return
            with self.lock:
                if self._listener.fileno() in ready:
                    session = FakeSession(self._listener.accept()[0])
                    session.conn.settimeout(5)
                    by_fd[session.conn.fileno()] = session
                    self.sessions[session.id] = session
                    poller.register(session.conn.fileno(), zmq.POLLIN)
                for fd in ready.keys() & by_fd.keys():
                    if not self._handshake(by_fd[fd]):
                        poller.unregister(fd)
                        session = by_fd.pop(fd)
                        session.close()
                        del self.sessions[session.id]
                if self._router in ready:
                    self._request(*self._router.recv_multipart())

    def _handshake(self, session: FakeSession) -> bool:
        try:
            head = session.conn.recv(4, socket.MSG_WAITALL)
            size = int.from_bytes(head, "big")
            data = session.conn.recv(size, socket.MSG_WAITALL) if len(head) == 4 else b""
            if not data:
                return False
            fds: list[int] = []
            reply: Message
            try:
                reply, fds = self._control(session, codec.decode(data))
            except errors.ExpertdError as exc:
                reply = Failure(code=exc.code, message=exc.message)
            body = codec.encode(reply)
            frame = len(body).to_bytes(4, "big") + body
            sent = socket.send_fds(session.conn, [frame], fds) if fds else 0
            session.conn.sendall(frame[sent:])
        except OSError:
            return False
        return True

    def _control(self, session: FakeSession, message: AnyMessage) -> tuple[Message, list[int]]:
        match message:
            case Hello():
                session.hello = message
                return self._welcome(session), []
            case Inspect():
                return Inspected(path=message.path, shards=1, tensors=1, nbytes=0), []
            case Attach():
                return self.attached(session, message)
            case Detach():
                session.attach = session.page = None
                return Detached(), []
        raise errors.ProtocolError(f"{message.kind!r} does not belong on the attach socket")

    def _welcome(self, session: FakeSession) -> Welcome:
        return Welcome(
            daemon_version="0-fake",
            daemon_pid=os.getpid(),
            epoch=self.epoch,
            session=session.id,
            endpoint=self.endpoints.router_url,
            max_in_flight=4,
        )

    def _request(self, session_id: bytes, data: bytes) -> None:
        session = self.sessions.get(session_id)
        frames: list[bytes]
        if codec.is_miss(data):
            miss = codec.decode_miss(data)
            self.requests.append(miss)
            frames = [] if session is None else self.answer(session, miss)
        elif isinstance(codec.decode(data), StatsRequest):
            frames = [codec.encode(StatsReply(stats=self._stats()))]
        else:
            assert isinstance(codec.decode(data), Ping)
            frames = [codec.encode(Pong(epoch=self.epoch))]
        for frame in frames:
            self._router.send_multipart([session_id, frame])

    def _stats(self) -> Stats:
        zero = dict.fromkeys(Stats.model_fields, 0)
        return Stats.model_validate(
            {
                **zero,
                "version": "0-fake",
                "pid": os.getpid(),
                "epoch": self.epoch,
                "run_dir": os.fspath(self.endpoints.run_dir),
                "slots": SlotCounts(),
                "prefill": Counters(),
                "decode": Counters(),
                "total": Counters(),
                "prefetch": Prefetched(),
                "miss_latency": Latency(),
                "models": (),
                "sessions": (),
            }
        )

    def stop(self) -> None:
        """End like a killed daemon: every connection breaks, the socket files stay; idempotent."""
        if self._wake.fileno() < 0:
            return
        self._wake.close()
        self._thread.join(timeout=10)
        self._listener.close()
        self._stop.close()
        self._router.close(0)
        self._context.term()
        for session in self.sessions.values():
            session.close()
        for model in self.models.values():
            model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


class SilentDaemon(FakeDaemon):
    """Takes miss requests, says so on standard output, and never answers."""

    def answer(self, session: FakeSession, miss: Miss) -> list[bytes]:
        print("miss", miss.seq, flush=True)
        return []


def main(run_dir: str, kind: str = "") -> None:
    """Serve until standard input ends; say "ready" when the sockets are open."""
    daemon = SilentDaemon if kind == "silent" else FakeDaemon
    with daemon(Path(run_dir)):
        print("ready", flush=True)
        select.select([sys.stdin], [], [])


if __name__ == "__main__":
    main(*sys.argv[1:])
