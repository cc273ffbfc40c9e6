"""What each message means: attach requests, misses, admin requests, the end of a read, of a process.

All state changes happen here, in the loop's thread, between two awaits. After each one `_flush` does
what the cache left to do: reads go to the devices, answers to the ROUTER, and a timer is set for the
next slot that may be reclaimed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from expertd import __version__
from expertd.attach import Connection
from expertd.cache.ledger import Ledger
from expertd.cache.shm import create
from expertd.models import Ended, Model, Models
from expertd.peer import DeathWatch
from expertd.sessions import Session, WorkerPage, new_session_id
from expertd.snapshot import Daemon, snapshot
from expertd_protocol import codec
from expertd_protocol.errors import (
    Draining,
    ErrorCode,
    ExpertdError,
    ProtocolError,
    TooManySessions,
    UnknownSession,
)
from expertd_protocol.ids import SessionId
from expertd_protocol.layout import PageLayout
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
    Message,
    MissError,
    Noted,
    Ping,
    Pong,
    Record,
    Records,
    RecordsRequest,
    StatsReply,
    StatsRequest,
    Welcome,
)
from expertd_protocol.stats import Stats

if TYPE_CHECKING:
    from expertd.server import Router

log = logging.getLogger(__name__)


class Handlers:
    """The daemon's state, and one method per thing that can happen to it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        daemon: Daemon,
        ledger: Ledger,
        models: Models,
        *,
        max_sessions: int,
        max_in_flight: int,
        warm: bool = True,
        prefetch: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sessions: dict[SessionId, Session] = {}
        self.router: Router | None = None
        self._loop = loop
        self._daemon = daemon
        self._ledger = ledger
        self._models = models
        self._max_sessions = max_sessions
        self._max_in_flight = max_in_flight
        self._warm = warm
        self._prefetch = prefetch
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None
        self._draining = False

    # --- attach socket -------------------------------------------------------------------------

    async def serve(self, connection: Connection) -> None:
        """Serve one attach connection until it ends."""
        hello = await connection.read(patient=False)
        if hello is None:
            return
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the first message must be hello, got {hello.kind}")
        session = self._welcome(connection, hello)
        try:
            await connection.write(self._greeting(session))
            while (message := await connection.read(patient=True)) is not None:
                try:
                    if await self._attach_request(connection, session, message):
                        return
                except ExpertdError as exc:
                    log.info(
                        "request_refused kind=%s code=%s reason=%s", message.kind, exc.code, exc
                    )
                    await connection.write(Failure(code=exc.code, message=exc.message))
        finally:
            self._connection_ended(session)

    def _welcome(self, connection: Connection, hello: Hello) -> Session:
        if self._draining:
            raise Draining(f"expertd (pid {os.getpid()}) is stopping")
        workers = sum(s.role == "worker" for s in self.sessions.values())
        if hello.role == "worker" and workers >= self._max_sessions:
            raise TooManySessions(
                f"{workers} workers are attached, {self._max_sessions} are allowed; "
                "end one, or raise max_sessions"
            )
        session = Session(
            new_session_id(),
            hello.role,
            hello.name,
            connection.peer,
            connection.sock,
            self._clock(),
        )
        self.sessions[session.id] = session
        return session

    def _greeting(self, session: Session) -> Welcome:
        assert self.router is not None
        return Welcome(
            daemon_version=__version__,
            daemon_pid=os.getpid(),
            epoch=self._daemon.epoch,
            session=session.id,
            endpoint=self._daemon.endpoints.router_url,
            max_in_flight=self._max_in_flight,
        )

    async def _attach_request(
        self, connection: Connection, session: Session, message: AnyMessage
    ) -> bool:
        """Answer one request; True when the session is over."""
        match message:
            case Inspect(path=path):
                index = await self._models.inspect(Path(path))
                await connection.write(
                    Inspected(
                        path=str(index.folder),
                        shards=len(index.shards),
                        tensors=len(index.tensors),
                        nbytes=index.nbytes,
                        warnings=index.warnings,
                    )
                )
            case Attach():
                if session.role != "worker" or session.model is not None:
                    raise ProtocolError("attach is for a worker that is not attached yet")
                self._end_replaced(session, message.replaces)
                model = await self._models.open(message)
                if connection.ended():  # it lives, so a session given to it now would never end
                    log.info("attach_given_up session=%s", session.id.hex())
                    return True
                attached = self._attach(session, model, message)
                assert session.page is not None
                directory, *slabs = model.arena.share_fds()
                await connection.write(attached, [directory, session.page.memory.share_fd, *slabs])
            case Detach():
                self._session_over(session, "detached")
                await connection.write(Detached())
                return True
            case _:
                raise ProtocolError(f"{message.kind} is not a request of the attach socket")
        return False

    def _end_replaced(self, session: Session, replaced: bytes) -> None:
        """End a lost session by the word of its own process (rule 13: nobody else may)."""
        old = self.sessions.get(SessionId(replaced))
        if old is not None and old is not session and old.peer.pid == session.peer.pid:
            self._session_over(old, "replaced")

    def _attach(self, session: Session, model: Model, request: Attach) -> Attached:
        if self._draining:
            raise Draining(f"expertd (pid {os.getpid()}) is stopping")
        quota = self._models.grant(model, request)
        layout = PageLayout(quota, len(model.layers), model.index.experts)
        self._ledger.take("page", layout.nbytes, "the page of one more worker")
        try:
            page = WorkerPage(layout, create(layout.nbytes, workers_write=True))
            try:
                session.death = DeathWatch(
                    self._loop,
                    session.connection,
                    session.peer.pid,
                    lambda: self._session_over(session, "exited"),
                )
            except BaseException:
                page.close()
                raise
        except BaseException:
            self._ledger.give("page", layout.nbytes)
            raise
        session.model, session.page = model, page
        model.sessions.append(session)
        model.cache.add(session.id, page.holder())
        if self._prefetch and model.cache.takes_wishes:
            session.take_wishes(0)
        self._flush(model)
        log.info(
            "session_attached session=%s pid=%d name=%r model=%s quota=%d",
            session.id.hex(), session.peer.pid, session.name, model.path, quota,
        )  # fmt: skip
        return Attached(
            model=list(self._models.by_path).index(model.path),
            quota=quota,
            slabs=tuple(slab.info for slab in model.arena.slabs),
            slab_of_layer=tuple(model.cache.slab_of_layer),
            budget_bytes=self._ledger.budget_bytes,
        )

    def _connection_ended(self, session: Session) -> None:
        """EOF: stop serving it. Its pins end only with its process."""
        if session.model is None:
            self.sessions.pop(session.id, None)
            return
        if session.serving:
            session.serving = False
            log.info("session_detached session=%s pid=%d", session.id.hex(), session.peer.pid)
            session.model.cache.stop_serving(session.id, self._clock())
            self._flush(session.model)

    def _session_over(self, session: Session, how: str) -> None:
        """The process is dead, or holds nothing by its own word: everything of it is free again."""
        if self.sessions.pop(session.id, None) is None:
            return
        session.serving = False
        if session.death is not None:
            session.death.close()
        model, page = session.model, session.page
        if model is None or page is None:
            return
        prefill, decode = page.read_counters()
        model.gone = (model.gone[0] + prefill, model.gone[1] + decode)
        model.sessions.remove(session)
        model.cache.remove(session.id, self._clock())
        session.model = session.page = None
        nbytes = page.layout.nbytes
        page.close()
        self._ledger.give("page", nbytes)
        log.info("session_over session=%s pid=%d how=%s", session.id.hex(), session.peer.pid, how)
        self._flush(model)

    # --- ROUTER --------------------------------------------------------------------------------

    def on_message(self, peer: bytes, payload: bytes) -> None:
        """Serve one message from the ROUTER; whatever it is but a wish, it gets an answer."""
        session = self.sessions.get(SessionId(peer))
        if codec.is_wish(payload):
            self._wish(session, payload)
            return
        miss = codec.is_miss(payload)
        seq = 0
        try:
            if session is None or not session.serving:
                raise UnknownSession("this session is not known here; attach (again)")
            if miss:
                request = codec.decode_miss(payload)
                seq = request.seq
                if session.model is None:
                    raise ProtocolError("a miss needs an attached model")
                if self._draining:
                    raise Draining(f"expertd (pid {os.getpid()}) is stopping")
                session.model.cache.request(session.id, request, self._clock())
                self._flush(session.model)
            else:
                self._reply(peer, codec.encode(self._control(session, codec.decode(payload))))
        except Exception as exc:
            # only its words are kept: the error itself, in a local name, would be a cycle that
            # holds the frames below, and so views of a page that can then not be unmapped
            if isinstance(exc, ExpertdError):
                code, message = exc.code, exc.message
            else:  # a bug; who asked must not wait for ever
                log.exception("message_failed session=%s", peer.hex())
                code = ErrorCode.INTERNAL
                message = f"expertd failed on this message ({exc!r:.200}); see its log"
            if miss:
                self._reply(peer, codec.encode_reply(MissError(seq, code, message)))
            else:
                self._reply(peer, codec.encode(Failure(code=code, message=message)))

    def _wish(self, session: Session | None, payload: bytes) -> None:
        """Take a wish, which nobody waits for: one that is not allowed is dropped (rule 21)."""
        if not self._prefetch or session is None or not session.serving or session.model is None:
            return
        try:
            session.model.cache.wish(session.id, codec.decode_wish(payload), self._clock())
        except ProtocolError as exc:
            log.debug("wish_refused session=%s reason=%s", session.id.hex(), exc)
        session.take_wishes(1)
        self._flush(session.model)

    def _reply(self, peer: bytes, payload: bytes) -> None:
        """Send an answer; a session that it does not reach is cut, and so never waits for it (D06)."""
        session = self.sessions.get(SessionId(peer))
        if not self._send(peer, payload) and session is not None:
            self._cut(session)

    def _control(self, session: Session, message: AnyMessage) -> Message:
        match message:
            case Ping():
                return Pong(epoch=self._daemon.epoch)
            case StatsRequest():
                return StatsReply(stats=self.stats())
            case Record(session=wanted):
                worker = self.sessions.get(SessionId(wanted))
                if worker is None or worker.page is None or not worker.serving:
                    raise UnknownSession(
                        f"no attached worker has session {wanted.hex()}; see 'expertctl ps'"
                    )
                worker.note(message)
                return Noted()
            case RecordsRequest():
                return Records(wanted=session.take_records())
        raise ProtocolError(f"{message.kind} is not a request of the ROUTER")

    def stats(self) -> Stats:
        return snapshot(
            self._daemon, self._ledger, self._models, list(self.sessions.values()), self._clock()
        )

    # --- reads and time ------------------------------------------------------------------------

    def on_reads_ended(self, model: Model, ended: Sequence[Ended]) -> None:
        for order, error in ended:
            if error is None:
                model.cache.filled(order, self._clock())
            else:
                model.cache.failed(order, error, self._clock())
        self._flush(model)

    def _flush(self, model: Model) -> None:
        cache = model.cache
        if self._warm and model.stale is None and not self._draining:
            cache.warm(self._models.idle_reads())
        if self._prefetch and model.stale is None and not self._draining:
            cache.read_ahead(self._models.spare_reads(), self._clock())
        while cache.fills:
            orders, cache.fills = cache.fills, []
            for order, error in self._models.submit(model, orders):
                cache.failed(order, error, self._clock())
        for key, phase in cache.hurried:
            self._models.hurry(model, key, phase)
        cache.hurried.clear()
        answers, cache.answers = cache.answers, []
        for answer in answers:
            session = self.sessions.get(answer.session)
            if session is None or not session.serving:
                continue
            session.latency.add(answer.seconds)
            model.latency.add(answer.seconds)
            if not self._send(session.id, codec.encode_reply(answer.message)):
                self._cut(session)
        self._schedule()

    def _send(self, peer: bytes, payload: bytes) -> bool:
        assert self.router is not None
        return self.router.send(peer, payload)

    def _cut(self, session: Session) -> None:
        """A peer that does not take its answers gets EOF: it attaches again when it runs again."""
        if session.cut:
            return
        session.cut = True
        log.warning("session_cut session=%s reason=answers_unread", session.id.hex())
        try:
            session.connection.shutdown(socket.SHUT_RDWR)
        except OSError as exc:
            log.debug("shutdown session=%s reason=%s", session.id.hex(), exc)

    def _schedule(self) -> None:
        now = self._clock()
        due = [m.cache.next_due(now) for m in self._models.by_path.values()]
        when = min((d for d in due if d is not None), default=None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if when is not None:
            self._timer = self._loop.call_later(max(when - now, 0.0) + 0.0005, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for model in list(self._models.by_path.values()):
            model.cache.tick(self._clock())
            self._flush(model)

    # --- the end -------------------------------------------------------------------------------

    async def drain(self, deadline_seconds: float) -> None:
        """Finish what is asked for, refuse what comes, then fail what is left."""
        self._draining = True
        end = self._clock() + deadline_seconds
        while self._clock() < end and any(
            holder.waiting
            for model in self._models.by_path.values()
            for holder in model.cache.holders.values()
        ):
            await asyncio.sleep(0.01)
        error = Draining(f"expertd (pid {os.getpid()}) has stopped")
        for model in self._models.by_path.values():
            model.cache.fail_all(error, self._clock())
            self._flush(model)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
