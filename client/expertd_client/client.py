"""The worker's client: attach to a model, pin experts, survive the daemon's restart.

Owned by one thread of one process. A hit is answered from shared memory; only misses send a message,
one per pin (B14). A pin waits, with deadlines, and never raises because the daemon restarted: it attaches
again, keeps the old arena readable, and starts over against the new one. The rules are in
daemon/README.md; the memory side of them is in `pins`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from pathlib import Path
from types import TracebackType

import numpy as np
import zmq

from expertd_client.admin import ask
from expertd_client.arena import Arena
from expertd_client.attach import AttachSocket, attach_path
from expertd_client.dealer import Dealer
from expertd_client.pins import Pins
from expertd_client.source import ModelSource
from expertd_protocol import codec, errors
from expertd_protocol.layout import U64, Counter, Header, Ints, Phase
from expertd_protocol.messages import (
    Attach,
    Attached,
    Detach,
    Detached,
    Inspect,
    Inspected,
    Miss,
    MissError,
    MissReply,
    StatsReply,
    StatsRequest,
    Welcome,
)
from expertd_protocol.stats import Stats

log = logging.getLogger(__name__)

#: Seconds a living daemon may take for one miss, and a dead one to be replaced.
MISS_DEADLINE_ENV, MISS_DEADLINE_SECONDS = "EXPERTD_MISS_DEADLINE_SECONDS", 120.0
DAEMON_DEADLINE_ENV, DAEMON_DEADLINE_SECONDS = "EXPERTD_DAEMON_DEADLINE_SECONDS", 60.0
#: `begin_pass` looks for a new daemon this long, and not again before the pause is over.
PASS_ATTACH_SECONDS, PASS_PAUSE_SECONDS = 1.0, 1.0
#: Grants that do not match the directory, in one pin, before the daemon is called broken.
MAX_RETRIES = 64
#: First and longest pause between two tries to attach again.
BACKOFF_SECONDS = (0.01, 0.5)

#: Errors of an attach that the next try may not meet: no daemon yet, an old one going, memory not free yet.
_TRANSIENT = (
    errors.DaemonUnavailable,
    errors.DeadlineExceeded,
    errors.Draining,
    errors.BudgetExhausted,
)

_clients: weakref.WeakSet[Client]


class _Lost(Exception):
    """The session is over; whether the daemon is gone already or only about to go."""


class Client:
    """One worker's session. Use it as a context manager, or `close` it."""

    def __init__(
        self,
        path: Path,
        attach: AttachSocket,
        *,
        name: str = "",
        deadline_seconds: float = 10,
        miss_deadline_seconds: float | None = None,
        daemon_deadline_seconds: float | None = None,
    ) -> None:
        self.welcome: Welcome = attach.welcome
        self._path = path
        self._name = name
        self._attach = attach
        self._deadline_seconds = deadline_seconds
        self._miss_seconds = _seconds(
            miss_deadline_seconds, MISS_DEADLINE_ENV, MISS_DEADLINE_SECONDS
        )
        self._daemon_seconds = _seconds(
            daemon_deadline_seconds, DAEMON_DEADLINE_ENV, DAEMON_DEADLINE_SECONDS
        )
        self._pid = os.getpid()
        self._thread: int | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._dealer: Dealer | None = None
        self._wanted: tuple[ModelSource, int, int] | None = None
        self._pins: Pins | None = None
        self._old: list[Pins] = []
        self._lost = False
        self._closed = False
        self._seq = 0
        self._reattaches = 0
        self._resident_bytes = 0
        self._next_try = 0.0
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
        """Connect to the daemon at `socket`, a run directory or its attach.sock; None = the usual one.

        Args:
            name: what `expertctl ps` calls this worker.
            deadline_seconds: how long connecting, inspecting and attaching may take, each.
            miss_deadline_seconds: how long a living daemon may take for one pin.
            daemon_deadline_seconds: how long a pin waits for a new daemon when the old one is gone.

        Raises:
            DaemonUnavailable: nobody listens there; the message says how to start a daemon.
        """
        path = attach_path(socket)
        attach = AttachSocket.connect(path, "worker", name, time.monotonic() + deadline_seconds)
        return cls(
            path,
            attach,
            name=name,
            deadline_seconds=deadline_seconds,
            miss_deadline_seconds=miss_deadline_seconds,
            daemon_deadline_seconds=daemon_deadline_seconds,
        )

    # --- attach ----------------------------------------------------------------------------------
    def inspect(self, path: Path) -> Inspected:
        """Let the daemon read and check the headers of a model folder."""
        self._check_open()
        deadline = time.monotonic() + self._deadline_seconds
        return self._attach.request(Inspect(path=os.fspath(path)), Inspected, deadline)

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
        wanted = (source, quota_min, quota_wanted)
        deadline = time.monotonic() + self._deadline_seconds
        arena, dealer = self._attach_to(self._attach, wanted, deadline)
        self._wanted, self._dealer, self._pins = wanted, dealer, Pins(arena)
        log.info("attached path=%s quota=%d epoch=%d", source.path, arena.quota, arena.epoch)
        return arena

    @property
    def arena(self) -> Arena:
        """The current arena; another one, with a higher `serial`, after the daemon restarted."""
        return self._attached().arena

    @property
    def quota(self) -> int:
        """The most experts that can be pinned at once."""
        return self._attached().quota

    def resident(self, layer: int) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Return which experts of `layer` are in memory now, bool[E]: a hint, true when it was read."""
        self._check_open()
        return self._attached().arena.directory[layer] != 0

    # --- pins ------------------------------------------------------------------------------------
    def pin(self, layer: int, experts: Ints, phase: Phase) -> U64:
        """Pin `experts` of `layer` (unique ids) and return their directory words, all non-zero.

        Blocks on misses. Returns a prefix of `experts` only when the daemon restarted and the new one
        granted a smaller quota; then `arena` is another one, too.

        Raises:
            DeadlineExceeded: the daemon lives but did not answer in time.
            DaemonUnavailable: the daemon went away and none came back in time.
            ModelError: an expert could not be read, or its file changed.
        """
        pins = self._pins
        if pins is not None and len(experts) <= pins.quota - pins.held and len(experts):
            words = pins.hold(layer, experts, phase)
            if words is not None:
                return words
        return self._pin_slowly(layer, experts, phase)

    def verify(self) -> bool:
        """Rule 6: tell whether the slots pinned since the last `unpin` still hold what was pinned.

        False is counted as a mismatch; what was computed from these slots must not be used.
        """
        stale = self._attached().stale()
        for old in self._old:
            stale |= old.stale()
        return not stale

    def unpin(self) -> None:
        """Let go of everything pinned; only after the output that used it was evaluated (rule 3)."""
        self._attached().clear()
        for old in self._old:
            old.clear()

    def begin_pass(self) -> None:
        """Look whether the daemon is still there; if not, try once to attach to a new one.

        Cheap when it is. When there is none, hits go on with the old maps, which nobody writes any more.
        """
        pins = self._attached()
        if not self._lost and not self._attach.gone():
            return
        self._check_open()
        self._mark_lost()
        now = time.monotonic()
        if now < self._next_try:
            return
        try:
            self._attach_again(now + PASS_ATTACH_SECONDS)
        except errors.ExpertdError as exc:
            # The pin that needs a daemon raises this, with its own deadline; hits need none.
            self._next_try = time.monotonic() + PASS_PAUSE_SECONDS
            log.debug("no new daemon yet path=%s error=%s", pins.arena.source.path, exc)

    def end_pass(self, tokens: int, phase: Phase) -> None:
        """Count one forward pass of `tokens` tokens, the whole batch included."""
        self._attached().count(phase, {Counter.PASSES: 1, Counter.TOKENS: tokens})

    def report_resident_bytes(self, n: int) -> None:
        """Tell the daemon how many bytes of weights this worker keeps for itself."""
        self._resident_bytes = n
        self._attached().set_header(Header.RESIDENT_BYTES, n)

    def drop_old_arenas(self) -> None:
        """Unmap the arenas of daemons that are gone; views that still exist stay readable (D16)."""
        self._check_open()
        while self._old:
            _release(self._old.pop())

    # --- the rest --------------------------------------------------------------------------------
    def stats(self) -> Stats:
        self._check_open()
        if self._dealer is None:
            self._dealer = self._new_dealer(self._attach)
        return ask(self._dealer, StatsRequest(), StatsReply, self._deadline_seconds).stats

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
        if not self._lost:
            with contextlib.suppress(errors.ExpertdError):
                deadline = time.monotonic() + min(self._deadline_seconds, 1.0)
                self._attach.request(Detach(), Detached, deadline)
        self._attach.close()
        if self._dealer is not None:
            self._dealer.close()
        if self._context is not None:
            self._context.term()
        for each in (*self._old, pins):
            if each is not None:
                _release(each)
        self._old.clear()

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
        where = "closed" if self._closed else "lost" if self._lost else "connected"
        return f"Client({where}, pid={self._pid}, arena={self._pins and self._pins.arena})"

    # --- misses ----------------------------------------------------------------------------------
    def _pin_slowly(self, layer: int, experts: Ints, phase: int) -> U64:
        self._check_open()
        self._check_thread()
        outage_ends: float | None = None
        restarts = 0
        waited_from = time.monotonic_ns()
        while True:
            pins = self._attached()
            wanted = self._fit(pins, experts)
            if not len(wanted):
                return np.zeros(0, np.uint64)
            try:
                words = pins.hold(layer, wanted, phase)
                if words is None:
                    words = self._fetch(pins, layer, wanted, phase, waited_from)
                return words
            except _Lost as lost:
                pins.abandon()
                restarts += 1
                now = time.monotonic()
                # One budget for all outages of this pin: a daemon that dies of our request must not
                # keep us for ever.
                outage_ends = outage_ends or now + self._daemon_seconds
                if now >= outage_ends and restarts > 1:
                    raise errors.DaemonUnavailable(
                        f"the daemon at {self._path} went away {restarts} times while layer {layer} "
                        f"waited for it, {self._daemon_seconds:g} s in all; look at its log"
                    ) from lost
                self._mark_lost()
                self._attach_again(outage_ends)
            except BaseException:
                pins.abandon()
                pins.acknowledge(self._seq)
                raise

    def _fetch(self, pins: Pins, layer: int, experts: Ints, phase: int, waited_from: int) -> U64:
        """Ask the daemon for what `hold` did not find (rule 2), until all is pinned."""
        deadline = time.monotonic() + self._miss_seconds
        missing = pins.missing(len(experts))
        joins = misses = requests = 0
        while len(missing):
            if requests > MAX_RETRIES:
                raise errors.ProtocolError(
                    f"daemon {self.welcome.daemon_pid} granted experts of layer {layer} that its "
                    f"directory does not have, {requests} times"
                )
            ids = tuple(experts[missing].tolist())
            reply = self._ask(Miss(self._seq + 1, layer, int(phase), ids), deadline)
            if min(reply.joined, reply.missed) < 0 or reply.joined + reply.missed != len(ids):
                raise errors.ProtocolError(
                    f"the daemon counted {reply.joined} joins and {reply.missed} misses "
                    f"for {len(ids)} experts"
                )
            if not requests:  # an expert that has to be asked for again is still one lookup
                joins, misses = reply.joined, reply.missed
            requests += 1
            missing = pins.grant(reply.seq, layer, experts, missing, reply.words)
        waited_ns = time.monotonic_ns() - waited_from
        return pins.complete(layer, experts, phase, joins, misses, waited_ns, requests)

    def _ask(self, miss: Miss, deadline: float) -> MissReply:
        """Send one request and return its reply; replies to requests that were given up are skipped."""
        dealer = self._dealer
        if dealer is None or self._lost:
            raise _Lost
        self._seq = miss.seq
        dealer.send(codec.encode_miss(miss))
        while True:
            try:
                data = dealer.receive(deadline)
            except errors.DaemonUnavailable as exc:
                raise _Lost from exc
            if data is None:
                raise errors.DeadlineExceeded(
                    f"daemon {self.welcome.daemon_pid} lives but did not deliver "
                    f"{len(miss.experts)} experts of layer {miss.layer} within "
                    f"{self._miss_seconds:g} s; look at its log and at the disk"
                )
            if not codec.is_miss(data):  # a late answer to `stats`
                continue
            reply = codec.decode_reply(data)
            if reply.seq not in (miss.seq, 0):
                continue
            if isinstance(reply, MissReply):
                if reply.seq:
                    return reply
                continue
            self._raise_refusal(reply)

    def _raise_refusal(self, refusal: MissError) -> None:
        error = errors.from_wire(refusal.code, refusal.message)
        if isinstance(error, errors.UnknownSession):
            raise _Lost from error
        if isinstance(error, errors.Draining):
            deadline = time.monotonic() + self._daemon_seconds
            assert self._dealer is not None
            try:
                while self._dealer.receive(deadline) is not None:
                    continue
            except errors.DaemonUnavailable:
                raise _Lost from error
            raise errors.DaemonUnavailable(
                f"daemon {self.welcome.daemon_pid} is stopping and still there after "
                f"{self._daemon_seconds:g} s; look at its log"
            ) from error
        raise error

    def _fit(self, pins: Pins, experts: Ints) -> Ints:
        """Return what the quota has room for: all, or a prefix after a re-attach made it smaller."""
        room = pins.quota - pins.held
        if len(experts) <= room:
            return experts
        if self._reattaches == 0 or room < 1:
            raise errors.QuotaExceeded(
                f"{len(experts)} experts cannot be pinned at once: the quota is {pins.quota}, "
                f"{pins.held} are held"
            )
        return experts[:room]

    # --- sessions --------------------------------------------------------------------------------
    def _mark_lost(self) -> None:
        if not self._lost:
            log.info("daemon gone pid=%d path=%s", self.welcome.daemon_pid, self._path)
        self._lost = True
        self._attach.close()
        if self._dealer is not None:
            self._dealer.close()
            self._dealer = None

    def _attach_again(self, deadline: float) -> None:
        """Attach to the next daemon with the same source.

        Raises:
            DaemonUnavailable: none came until `deadline`.
            BudgetExhausted: one came, but it never had room for us.
        """
        assert self._wanted is not None
        old = self._attached()
        pause, longest = BACKOFF_SECONDS
        while True:
            try:
                attach = AttachSocket.connect(self._path, "worker", self._name, deadline)
                try:
                    arena, dealer = self._attach_to(attach, self._wanted, deadline)
                except BaseException:
                    attach.close()
                    raise
                break
            except _TRANSIENT as exc:
                left = deadline - time.monotonic()
                if left <= 0:
                    if isinstance(exc, errors.BudgetExhausted):
                        raise
                    raise errors.DaemonUnavailable(
                        f"the daemon at {self._path} went away and none came back in time "
                        f"({exc}); start one with 'expertd'"
                    ) from exc
                time.sleep(min(pause, left))
                pause = min(pause * 2, longest)
        pins = Pins(arena)
        self._reattaches += 1
        pins.set_header(Header.REATTACHES, self._reattaches)
        pins.set_header(Header.MISMATCHES, old.get_header(Header.MISMATCHES))
        pins.set_header(Header.RESIDENT_BYTES, self._resident_bytes)
        self.welcome, self._attach, self._dealer = attach.welcome, attach, dealer
        self._pins, self._seq, self._lost = pins, 0, False
        self._old.append(old)
        log.info("attached again pid=%d quota=%d", self.welcome.daemon_pid, arena.quota)

    def _attach_to(
        self, attach: AttachSocket, wanted: tuple[ModelSource, int, int], deadline: float
    ) -> tuple[Arena, Dealer]:
        source, quota_min, quota_wanted = wanted
        request = Attach(
            path=os.fspath(source.path),
            experts=source.experts,
            layers=source.layers,
            quota_min=quota_min,
            quota_wanted=quota_wanted,
        )
        attached, fds = attach.request_fds(request, Attached, deadline)
        serial = 1 if self._pins is None else self._pins.arena.serial + 1
        arena = Arena(source, attached, fds, serial=serial, epoch=attach.welcome.epoch)
        try:
            if arena.quota < quota_min:
                raise errors.ProtocolError(
                    f"the daemon granted a quota of {arena.quota}, at least {quota_min} was asked for"
                )
            return arena, self._new_dealer(attach)
        except BaseException:
            arena.close()
            raise

    def _new_dealer(self, attach: AttachSocket) -> Dealer:
        if self._context is None:
            self._context = zmq.Context()
        return Dealer(self._context, attach)

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
        assert self._thread == me, "a Client belongs to one thread"


_clients = weakref.WeakSet()


def _after_fork_in_child() -> None:
    """Take the hot path away from clients that a fork carried over (D12); costs nothing per pin."""
    for client in _clients:
        client._pins = None


os.register_at_fork(after_in_child=_after_fork_in_child)


def _release(pins: Pins) -> None:
    arena = pins.arena
    pins.release()
    arena.close()


def _seconds(given: float | None, env: str, default: float) -> float:
    text = os.environ.get(env)
    if given is not None or not text:
        return default if given is None else given
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise errors.BadConfig(f"{env} is {text!r}; it is a number of seconds above 0")
    return seconds
