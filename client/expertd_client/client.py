"""The worker's client: attach to a model, pin experts, survive the daemon's restart.

Owned by one thread of one process. A hit is answered from shared memory; only misses send a
message, one per pin (B14). A pin waits, with deadlines, and never raises because the daemon restarted:
it opens the next session, keeps the old arena readable, and starts over against the new one.
The pin rules are in daemon/README.md; `pins` is their worker's side.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import zmq

from expertd_client.admin import ask
from expertd_client.arena import Arena
from expertd_client.attach import AttachSocket, attach_path
from expertd_client.pins import Pins
from expertd_client.session import Patience, Session, SessionLost, Wanted
from expertd_client.source import ModelSource
from expertd_protocol import errors
from expertd_protocol.layout import U64, Counter, Header, Ints, Phase, check_range
from expertd_protocol.messages import (
    Inspect,
    Inspected,
    Record,
    Records,
    RecordsRequest,
    StatsReply,
    StatsRequest,
    Welcome,
)
from expertd_protocol.stats import Stats

log = logging.getLogger(__name__)

#: Seconds that a living daemon may take for one pin.
MISS_DEADLINE_ENV, MISS_DEADLINE_SECONDS = "EXPERTD_MISS_DEADLINE_SECONDS", 120.0
#: Seconds that a pin waits for the next daemon when the old one is gone.
DAEMON_DEADLINE_ENV, DAEMON_DEADLINE_SECONDS = "EXPERTD_DAEMON_DEADLINE_SECONDS", 60.0
#: The first worker of a model waits while its arena is allocated: about 0.3 s per GiB.
ATTACH_SECONDS = 120.0
#: `begin_pass` looks for a new daemon this long, and not again before the pause is over.
PASS_ATTACH_SECONDS, PASS_PAUSE_SECONDS = 1.0, 1.0
#: What a worker waits for the daemon to say what it is to record; then it computes on without.
RECORDS_SECONDS = 1.0
#: First and longest pause between two tries to attach again.
BACKOFF_SECONDS = (0.01, 0.5)

#: What the next try to attach may not meet: no daemon yet, one going, memory not free yet.
_TRANSIENT = (
    errors.DaemonUnavailable,
    errors.DeadlineExceeded,
    errors.Draining,
    errors.BudgetExhausted,
)


class Client:
    """One worker. Use it as a context manager, or `close` it."""

    def __init__(
        self, path: Path, attach: AttachSocket, name: str, deadline_seconds: float, wait: Patience
    ) -> None:
        self._path = path
        self._name = name
        self._deadline_seconds = deadline_seconds
        self._patience = wait
        self._pid = os.getpid()
        self._thread: int | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._session = Session(attach, self._context)
        self._wanted: Wanted | None = None
        self._pins: Pins | None = None  # of the session; here because every pin looks at it
        self._old: list[Pins] = []
        self._closed = False
        self._reattaches = 0
        self._resident_bytes = 0
        self._next_try = 0.0
        self._records_asked = 0  # of this session
        _clients.add(self)

    @classmethod
    def connect(
        cls,
        socket: Path | None = None,
        *,
        name: str = "",
        deadline_seconds: float = 10,
        miss_deadline_seconds: float | None = None,
        daemon_deadline_seconds: float | None = None,
    ) -> Client:
        """Connect to the daemon at `socket`: a run directory, its attach.sock, or None = the usual.

        Args:
            name: what `expertctl ps` calls this worker.
            deadline_seconds: how long connecting and inspecting may take, each.
            miss_deadline_seconds: how long a living daemon may take for one pin.
            daemon_deadline_seconds: how long a pin waits for a new daemon when the old one is gone.

        Raises:
            DaemonUnavailable: nobody listens there; the message says how to start a daemon.
        """
        path = attach_path(socket)
        wait = Patience(
            _seconds(miss_deadline_seconds, MISS_DEADLINE_ENV, MISS_DEADLINE_SECONDS),
            _seconds(daemon_deadline_seconds, DAEMON_DEADLINE_ENV, DAEMON_DEADLINE_SECONDS),
        )
        attach = AttachSocket.connect(path, "worker", name, time.monotonic() + deadline_seconds)
        return cls(path, attach, name, deadline_seconds, wait)

    # --- attach ----------------------------------------------------------------------------------
    def inspect(self, path: Path) -> Inspected:
        """Let the daemon read and check the headers of a model folder."""
        self._check_open()
        deadline = time.monotonic() + self._deadline_seconds
        return self._session.attach.request(Inspect(path=os.fspath(path)), Inspected, deadline)

    def attach(self, source: ModelSource, *, quota_min: int, quota_wanted: int) -> Arena:
        """Attach to a model and map its arena; once per client.

        Args:
            quota_min: the fewest experts this worker must pin at once, its top-k.
            quota_wanted: the most it can use; `quota` says what was granted.
        """
        self._check_open()
        if self._pins is not None:
            raise errors.ProtocolError(
                f"this client is attached to {self._pins.arena.source.path}; use one per model"
            )
        wanted = Wanted(source, quota_min, quota_wanted)
        patience = max(self._deadline_seconds, ATTACH_SECONDS)
        self._pins = self._session.map(wanted, 1, time.monotonic() + patience)
        self._wanted = wanted
        log.info("attached path=%s quota=%d", source.path, self._pins.quota)
        return self._pins.arena

    @property
    def welcome(self) -> Welcome:
        """Who the daemon is: version, pid, epoch."""
        return self._session.attach.welcome

    @property
    def arena(self) -> Arena:
        """The current arena; another one, with a higher `serial`, after the daemon restarted."""
        return self._attached().arena

    @property
    def quota(self) -> int:
        """The most experts that can be pinned at once."""
        return self._attached().quota

    def resident(self, layer: int) -> npt.NDArray[np.bool_]:
        """Return which experts of `layer` are in memory now, bool[E]; a hint, it changes any time."""
        directory = self._attached().arena.directory
        check_range("layer", layer, 0, len(directory))
        present: npt.NDArray[np.bool_] = directory[layer] != 0
        return present

    def is_whole(self, layer: int) -> bool:
        """Tell whether all experts of `layer` are in memory for as long as the arena is (rule 20).

        Then expert e is in slot `arena.first_slot(layer) + e`, and nothing needs to be pinned.
        """
        return self._attached().is_whole(layer)

    # --- pins ------------------------------------------------------------------------------------
    def pin(self, layer: int, experts: Ints, phase: Phase) -> U64:
        """Pin `experts` of `layer` (unique ids) and return their directory words, all non-zero.

        Blocks on misses. Returns a prefix of `experts` only when the daemon restarted and the new
        one granted a smaller quota. After a restart `arena` is another one; the words belong to it.

        Raises:
            DeadlineExceeded: the daemon lives but did not answer in time.
            DaemonUnavailable: the daemon went away and none came back in time.
            ModelError: an expert could not be read, or its file changed.
        """
        pins = self._pins
        if pins is not None and layer >= 0:
            try:
                words = pins.hold(layer, experts, phase)
            except IndexError:  # no such layer or expert: said in full below
                words = None
            if words is not None:
                return words
        return self._pin_slowly(layer, experts, phase)

    def takes_wishes(self) -> bool:
        """Tell whether the daemon reads ahead what `wish` names (rule 21)."""
        return self._session.takes_wishes()

    def wish(self, layer: int, experts: Ints) -> None:
        """Name experts of `layer` that will probably be pinned next, before they are known.

        Only a hint: it never waits, and says nothing when all of them are in memory already.
        """
        row = self._attached().arena.directory[layer]
        known = experts[(experts >= 0) & (experts < len(row))]
        absent = {*known[row[known] == 0].tolist()}
        if absent:
            self._check_thread()
            self._session.wish(layer, tuple(absent))

    def verify(self) -> bool:
        """Rule 6: tell whether the slots pinned since the last `unpin` still hold what was pinned.

        False is counted as a mismatch; what was computed from these slots must not be used.
        """
        stale = self._attached().stale()
        for old in self._old:
            stale |= old.stale()
        return not stale

    def unpin(self) -> None:
        """Let go of everything; only after the output that used it was evaluated (rule 3)."""
        (self._pins or self._attached()).clear()
        for old in self._old:
            old.clear()

    def begin_pass(self) -> None:
        """Look whether the daemon is still there; if not, try once to attach to a new one.

        Cheap while it is. While there is none, hits go on with the old maps, which nobody writes
        any more.
        """
        self._attached()
        if not self._session.lost and not self._session.attach.gone():
            return
        self._check_open()
        self._check_thread()
        self._end_session()
        now = time.monotonic()
        if now < self._next_try:
            return
        try:
            self._open_session(now + PASS_ATTACH_SECONDS)
        except errors.ExpertdError as exc:
            # The pin that needs a daemon meets this again, with its own deadline; hits need none.
            self._next_try = time.monotonic() + PASS_PAUSE_SECONDS
            log.debug("no new daemon yet path=%s error=%s", self._path, exc)

    def records(self) -> tuple[Record, ...]:
        """Return the recordings wanted since the last call: none, and no message, nearly always."""
        asked = self._attached().get_header(Header.RECORDS)
        if asked == self._records_asked or self._session.lost:
            return ()
        self._records_asked = asked
        try:
            self._check_open()
            self._check_thread()
            return ask(self._session.dealer, RecordsRequest(), Records, RECORDS_SECONDS).wanted
        except errors.ExpertdError as exc:  # no reason to fail a forward pass
            log.warning("no recording path=%s error=%s", self._path, exc)
            return ()

    def end_pass(self, tokens: int, phase: Phase, hits: int = 0, hit_bytes: int = 0) -> None:
        """Count one forward pass of `tokens` tokens, the whole batch included.

        Args:
            hits: routed pairs of layers that are complete, which were used without a pin.
            hit_bytes: the bytes of their experts.
        """
        grown = {Counter.PASSES: 1, Counter.TOKENS: tokens}
        if hits:
            grown |= {Counter.LOOKUPS: hits, Counter.HITS: hits, Counter.HIT_BYTES: hit_bytes}
        self._attached().count(phase, grown)

    def report_resident_bytes(self, n: int) -> None:
        """Tell the daemon how many bytes of weights this worker keeps for itself."""
        self._attached().set_header(Header.RESIDENT_BYTES, n)
        self._resident_bytes = n

    def drop_old_arenas(self) -> None:
        """Unmap the arenas of daemons that are gone; views that still exist stay readable (D16)."""
        self._check_open()
        while self._old:
            _unmap(self._old.pop())

    # --- the rest --------------------------------------------------------------------------------
    def stats(self) -> Stats:
        """Return the daemon's snapshot of everything, this worker's latest hits included."""
        self._check_open()
        self._check_thread()
        if self._session.lost:
            raise errors.DaemonUnavailable(f"the daemon at {self._path} is gone")
        if self._pins is not None:
            self._pins.publish()
        dealer = self._session.dealer
        return ask(dealer, StatsRequest(), StatsReply, self._deadline_seconds).stats

    def close(self) -> None:
        """Let go of everything and give the session back; idempotent and silent.

        In a forked child it does nothing: the session belongs to the parent.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        pins, self._pins = self._pins, None
        if pins is not None:
            pins.clear()
            self._old.append(pins)
        while self._old:  # first: what is given back may be room for another model at once
            _unmap(self._old.pop())
        self._session.detach()
        self._context.term()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "lost" if self._session.lost else "connected"
        return f"Client({state}, pid={self._pid}, arena={self._pins and self._pins.arena})"

    # --- misses and restarts ---------------------------------------------------------------------
    def _pin_slowly(self, layer: int, experts: Ints, phase: int) -> U64:
        self._check_open()
        self._check_thread()
        started, waited_from = time.monotonic(), time.monotonic_ns()
        restarts = 0
        while True:
            pins, session = self._attached(), self._session
            if not len(experts):
                return np.zeros(0, np.uint64)
            wanted = self._fit(pins, experts)
            try:
                pins.check(layer, wanted)
                words = pins.hold(layer, wanted, phase)
                if words is None:
                    words = session.fetch(layer, wanted, phase, self._patience, waited_from)
                return words
            except SessionLost as lost:
                pins.abandon()
                restarts += 1
                self._wait_for_daemon(layer, restarts, started, lost)
            except BaseException:
                session.give_up()
                raise

    def _wait_for_daemon(
        self, layer: int, restarts: int, started: float, lost: SessionLost
    ) -> None:
        """Open the next session for a pin that lost its own `restarts` times."""
        self._end_session()
        now, patience = time.monotonic(), self._patience
        # A daemon that dies of this very request, again and again, must not keep us for ever.
        ends = max(now, started + patience.miss_seconds) + patience.daemon_seconds
        if restarts > 1:
            ends = started + patience.miss_seconds + patience.daemon_seconds
            if now >= ends:
                raise errors.DaemonUnavailable(
                    f"the daemon at {self._path} went away {restarts} times while layer {layer} "
                    f"waited for it, {now - started:.0f} s in all; look at its log"
                ) from lost
            time.sleep(min(BACKOFF_SECONDS[0] * 2**restarts, BACKOFF_SECONDS[1], ends - now))
        self._open_session(min(ends, now + patience.daemon_seconds), keep_trying=True)

    def _fit(self, pins: Pins, experts: Ints) -> Ints:
        """Return what the quota has room for: all, or a prefix once a re-attach made it smaller."""
        room = pins.quota - pins.held
        if len(experts) <= room:
            return experts
        if self._reattaches == 0 or room < 1:
            raise errors.QuotaExceeded(
                f"{len(experts)} experts cannot be pinned at once: the quota is {pins.quota}, "
                f"{pins.held} are held"
            )
        return experts[:room]

    def _end_session(self) -> None:
        if not self._session.lost:
            log.info("daemon gone pid=%d path=%s", self._session.daemon_pid, self._path)
            self._session.end()

    def _open_session(self, deadline: float, *, keep_trying: bool = False) -> None:
        """Attach to the next daemon with the same source.

        Raises:
            DaemonUnavailable: none came until `deadline`.
            BudgetExhausted: one came, but it never had room for us.
        """
        wanted, old = self._wanted, self._attached()
        assert wanted is not None
        old.publish()  # the daemon may live, and counts what its old page says
        pause, longest = BACKOFF_SECONDS
        serial = old.arena.serial + 1
        # What is still pinned there is still being read: then the old session must outlive us.
        replaces = b"" if old.held else self._session.attach.welcome.session
        full: errors.BudgetExhausted | None = None
        while True:
            try:
                session = Session.open(
                    self._path, self._name, self._context, wanted, serial, deadline, replaces
                )
                break
            except _TRANSIENT as exc:
                full = exc if isinstance(exc, errors.BudgetExhausted) else full
                left = deadline - time.monotonic()
                if left > 0 and keep_trying:
                    time.sleep(min(pause, left))
                    pause = min(pause * 2, longest)
                    continue
                if full is not None:
                    raise full from None
                raise errors.DaemonUnavailable(
                    f"the daemon at {self._path} went away and none came back in time: {exc}"
                ) from exc
        pins = session.pins
        assert pins is not None
        self._reattaches += 1
        pins.set_header(Header.REATTACHES, self._reattaches)
        pins.set_header(Header.MISMATCHES, old.get_header(Header.MISMATCHES))
        pins.set_header(Header.RESIDENT_BYTES, self._resident_bytes)
        self._session, self._pins, self._records_asked = session, pins, 0
        self._old.append(old)
        log.info("attached again pid=%d quota=%d", session.daemon_pid, pins.quota)

    def _attached(self) -> Pins:
        if self._pins is None:
            self._check_open()
            raise errors.ProtocolError("this client is not attached to a model; call attach first")
        return self._pins

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise errors.Forked(
                f"this client belongs to process {self._pid} and cannot be used after a fork in "
                f"process {os.getpid()}; connect again there, or start workers with 'spawn'"
            )
        if self._closed:
            raise errors.ProtocolError("this client is closed")

    def _check_thread(self) -> None:
        """The thread that first waits for the daemon owns the client."""
        me = threading.get_ident()
        if self._thread is None:
            self._thread = me
        if self._thread != me:
            raise errors.ProtocolError(
                f"this client belongs to thread {self._thread} and was used in thread {me}; make one "
                "client per thread"
            )


_clients: weakref.WeakSet[Client] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Take the hot path from clients that a fork carried over (D12): no check per pin is needed."""
    for client in _clients:
        for pins in [client._pins, *client._old]:
            if pins is not None:
                pins.arena.close_in_child()
        client._pins = None


os.register_at_fork(after_in_child=_after_fork_in_child)


def _unmap(pins: Pins) -> None:
    arena = pins.arena
    pins.release()
    arena.close()


def _seconds(given: float | None, env: str, default: float) -> float:
    if given is not None:
        return given
    text = os.environ.get(env)
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise errors.BadConfig(f"{env} is {text!r}; it is a number of seconds above 0")
    return seconds
