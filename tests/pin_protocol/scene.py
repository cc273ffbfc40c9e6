"""Real workers and the real cache over real shared memory, one step at a time in whatever order a test likes.

Each worker and the daemon have a thread, and only the one whose turn it is runs: until its next seam, or
to its end. Seams are the places where another process could come in between: every fence of `Pins` and of
`ExpertCache`, between a look and its hazards, between the choice of victims and the end of their words, and
in the middle of a slot that is read or filled. So a test that draws the order finds the same every time.

Every word of a slot says whose it is and of which generation (`stamp`), and a worker compares all of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from random import Random
from unittest import mock

import numpy as np

from expertd.cache.arena import Arena as DaemonArena
from expertd.cache.budget import ArenaPlan, SlabPlan
from expertd.cache.eviction import NextUse
from expertd.cache.experts import ExpertCache
from expertd.cache.requests import Holder
from expertd.cache.shm import SharedMemory, create
from expertd_client import pins
from expertd_client.arena import Arena
from expertd_client.pins import Pins
from expertd_client.session import Patience, Session
from expertd_client.testing import tiny_source
from expertd_protocol import errors
from expertd_protocol.fence import fence as real_fence
from expertd_protocol.ids import SessionId
from expertd_protocol.layout import (
    DirectoryLayout,
    Ints,
    PageLayout,
    Phase,
    SlabLayout,
    unpack_word,
)
from expertd_protocol.messages import Attached, Miss, MissError, MissReply, Wish
from tests.fakes import GRACE, FakeArena
from tests.pin_protocol.careless import Fault, Row, stamp

#: Enough for the others to have a slot reused.
MOST_SLEEP_STEPS = 200
_HANGS_SECONDS = 30.0  # no step takes long: longer is a test that hangs


class WrongBytesError(AssertionError):
    """A worker computed with bytes that are not those of the expert it wanted."""


class MismatchError(AssertionError):
    """Rule 6 found a generation that had changed."""


class _StoppedError(BaseException):
    """The test is over; unwinds a thread that is between two steps."""


class Actor(threading.Thread):
    """Runs jobs step by step: `step` returns at the next `pause` of the job, or at its end."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.at = ""  # the seam it stands at, if that has a name
        self._job: Callable[[], object] | None = None
        self._error: BaseException | None = None
        self._stopped = False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.start()

    @property
    def idle(self) -> bool:
        return self._job is None

    def begin(self, job: Callable[[], object]) -> None:
        assert self.idle
        self._job = job

    def step(self) -> None:
        self.at = ""
        self._go.release()
        if not self._done.acquire(timeout=_HANGS_SECONDS):
            raise TimeoutError(f"{self.name} made no step in {_HANGS_SECONDS:g} s")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        self._stopped = True
        self._go.release()
        self.join(_HANGS_SECONDS)

    def wait_for_turn(self) -> None:
        self._go.acquire()
        if self._stopped:
            raise _StoppedError

    def pause(self) -> None:
        self._done.release()
        self.wait_for_turn()

    def run(self) -> None:
        try:
            while True:
                self.wait_for_turn()
                try:
                    if self._job is not None:
                        self._job()
                except Exception as exc:
                    self._error = exc
                self._job = None
                self._done.release()
        except _StoppedError:
            self._job = None


def seam(at: str = "") -> None:
    """A place where others may run; none outside of an actor."""
    me = threading.current_thread()
    if isinstance(me, Actor):
        me.at = at
        me.pause()


def fence() -> None:
    real_fence()
    seam()


class Slow(NextUse):
    """Takes its time to choose: workers may pin a victim meanwhile."""

    def victims(self, layers: Ints, experts: Ints, need: int, now: float) -> Ints:
        chosen = super().victims(layers, experts, need, now)
        seam("choice")
        return chosen


class Local(Session):
    """A session without sockets: its requests lie in `Scene.post` until the daemon takes them."""

    def __init__(self, worker: Worker) -> None:
        self.seq = 0
        self.lost = False
        self.pins = worker.pins
        self._worker = worker

    def _ask(
        self, layer: int, experts: tuple[int, ...], phase: int, patience: Patience, deadline: float
    ) -> MissReply:
        self.seq += 1
        worker = self._worker
        worker.scene.post.append((worker, Miss(self.seq, layer, phase, experts)))
        while not worker.is_impatient:
            replies = [reply for reply in worker.replies if reply.seq == self.seq]
            worker.replies.clear()
            for reply in replies:
                if isinstance(reply, MissError):
                    raise errors.from_wire(reply.code, reply.message)
                return reply
            seam()
        raise errors.DeadlineExceeded("waited long enough")


class Worker:
    """One worker process: the product's `Pins` and `Session.fetch` over a page and an arena of its own."""

    def __init__(self, scene: Scene, number: int, quota: int, fault: Fault | None) -> None:
        self.scene = scene
        self.id = SessionId(bytes([number + 1]) * 16)
        self.actor = Actor(f"worker {number}")
        self.quota = quota
        self.fault = fault
        self.replies: list[MissReply | MissError] = []
        self.is_impatient = False
        layout = PageLayout(quota, scene.layers, scene.experts)
        self._page: SharedMemory = create(layout.nbytes, workers_write=True)
        page = self._page.buffer
        scanned = layout.hazards(bytearray(layout.nbytes) if fault is Fault.PUBLISH else page)
        self.holder = Holder(quota, layout.header(page), scanned, layout.uses(page))
        self.pins = Pins(scene.map(self._page.share_fd, quota))
        self.pins._rows = tuple(
            Row(row, partial(seam, "look"), looks_again=fault is not Fault.SECOND_LOOK)
            for row in self.pins.arena.directory
        )
        self.session = Local(self)

    @property
    def asked(self) -> bool:
        return not self.actor.idle

    def receive(self, message: MissReply | MissError) -> None:
        self.replies.append(message)

    def pin_and_use(self, layer: int, experts: tuple[int, ...]) -> None:
        """What `Client.pin`, the computation, `Client.verify` and `Client.unpin` do, in this order."""
        wanted = np.array(experts, np.intp)
        self.is_impatient = False
        try:
            words = self.pins.hold(layer, wanted, Phase.DECODE)
            if words is None:
                patience = Patience(_HANGS_SECONDS, _HANGS_SECONDS)
                words = self.session.fetch(layer, wanted, Phase.DECODE, patience, 0)
        except (errors.ReadFailed, errors.DeadlineExceeded):  # as `Client.pin` does
            self.session.give_up()
            return
        early = self.fault is Fault.EVALUATED
        if early:
            self.pins.clear()
        else:
            seam()
        wrong = [
            e for e, w in zip(experts, words.tolist(), strict=True) if not self._is(layer, e, w)
        ]
        if self.pins.stale():
            raise MismatchError(f"layer {layer}, experts {experts}, wrong: {wrong}")
        if wrong:
            raise WrongBytesError(f"layer {layer}, experts {wrong}")
        self.pins.clear()

    def _is(self, layer: int, expert: int, word: int) -> bool:
        """Read every word of the slot, with a seam in the middle of it."""
        generation, slab, slot = unpack_word(word)
        right = True
        for part in range(len(self.pins.arena.slabs[slab].layout.parts)):
            seam("read")
            plane = self.pins.arena.slabs[slab].plane(part)
            right &= bool((plane[slot].view(np.uint32) == stamp(layer, expert, generation)).all())
        return right

    def close(self) -> None:
        arena = self.pins.arena
        self.pins.release()
        arena.close()
        del self.holder
        self._page.close()


class Scene(FakeArena):
    """The daemon: the product's `ExpertCache` over the product's shared memory; reads end when told to."""

    LAYERS, EXPERTS = 2, 4

    def __init__(
        self, slots: int, quotas: tuple[int, ...], faults: tuple[Fault | None, ...]
    ) -> None:
        super().__init__(layers=self.LAYERS, experts=self.EXPERTS, slots=slots)
        self.source = tiny_source(layers=self.LAYERS, experts=self.EXPERTS, width=4)
        slab_of_layer = (0,) * self.LAYERS
        slab = SlabPlan(SlabLayout(self.source.parts[0], slots), tuple(range(self.LAYERS)))
        directory = DirectoryLayout(self.LAYERS, self.EXPERTS)
        plan = ArenaPlan((slab,), slab_of_layer, directory.nbytes)
        self._arena = DaemonArena(plan, self.LAYERS, self.EXPERTS)
        self.tables = [slab.table for slab in self._arena.slabs]
        self.cache = ExpertCache(
            self._arena.directory,
            self.tables,
            slab_of_layer,
            Slow(self.LAYERS, self.EXPERTS),
            fence,
            grace_seconds=GRACE,
            clean=lambda slab, slot: self._arena.slabs[slab].poison(slot),
        )
        self.daemon = Actor("daemon")
        self.post: list[tuple[Worker, Miss]] = []
        self._patch = mock.patch.object(pins, "fence", fence)
        self._patch.start()
        self.cast = [
            Worker(self, n, quota, fault)
            for n, (quota, fault) in enumerate(zip(quotas, faults, strict=True))
        ]
        self.workers: dict[SessionId, Worker] = {}  # type: ignore[assignment]
        for worker in self.cast:
            self.workers[worker.id] = worker
            self.cache.add(worker.id, worker.holder)

    def map(self, page_fd: int, quota: int) -> Arena:
        """The arena as a worker gets it: directory and slabs cannot be written."""
        directory, *slabs = self._arena.share_fds()
        attached = Attached(
            model=0,
            quota=quota,
            slabs=tuple(slab.info for slab in self._arena.slabs),
            slab_of_layer=self._arena.plan.slab_of_layer,
            budget_bytes=self._arena.nbytes,
        )
        fds = [os.dup(fd) for fd in (directory, page_fd, *slabs)]
        return Arena(self.source, attached, fds, serial=1, epoch=1)

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.cast if worker.id in self.workers]

    def hear(self) -> None:
        """Take the oldest request of a worker; one that is not allowed is answered with the error."""
        worker, miss = self.post.pop(0)
        if worker.id not in self.workers:
            return
        try:
            self.cache.request(worker.id, miss, self.now)
        except errors.ExpertdError as exc:  # given up, and its worker has pinned something else
            worker.receive(MissError(miss.seq, exc.code, exc.message))
        self.pump()

    def wish(self, worker: Worker, layer: int) -> None:
        """Take a worker's guess at its next layer: rule 21 retires what nobody used."""
        self.cache.wish(worker.id, Wish(layer, (0, self.experts - 1)), self.now)
        self.pump()

    def finish_read(self, which: int = 0) -> None:
        order = self.reading[which]
        generation = int(self.tables[order.slab].generations[order.slot])
        for row in self._arena.slabs[order.slab].destinations(order.slot):
            seam()
            np.frombuffer(row, np.uint32)[:] = stamp(*order.key, generation)
        super().finish_read(which)

    def kill(self, worker: Worker) -> None:  # type: ignore[override]
        """SIGKILL, wherever it is: it makes no further step, and its page stays as it is until now."""
        super().kill(worker)  # type: ignore[arg-type]

    def play(self, random: Random, steps: int) -> None:
        """Make so many steps in random order. Now and then somebody stands still for long, wherever it is."""
        asleep: dict[Worker | None, int] = dict.fromkeys([None, *self.alive], 0)  # None: the daemon
        for now in range(steps):
            awake = [who for who, until in asleep.items() if until <= now]
            if not awake:
                continue
            # as often as all workers together: it is the daemon's steps that take slots away
            who = None if None in awake and random.random() < 0.5 else random.choice(awake)
            actor = self.daemon if who is None else who.actor
            if who is not None:
                who.is_impatient = random.random() < 0.01
            if actor.idle:
                actor.begin(self._work(random) if who is None else self._pass(random, who))
            actor.step()
            # most often in the windows that matter: those that have a name
            if random.random() < (0.2 if actor.at else 0.02):
                asleep[who] = now + random.randrange(MOST_SLEEP_STEPS)

    def _pass(self, random: Random, worker: Worker) -> Callable[[], object]:
        """Something for an idle worker to do."""
        layer = random.randrange(self.layers)
        wanted = tuple(random.sample(range(self.experts), random.randint(1, worker.quota)))
        return partial(worker.pin_and_use, layer, wanted)

    def _work(self, random: Random) -> Callable[[], object]:
        """Something for an idle daemon to do."""
        choices: list[Callable[[], object]] = [partial(self.advance, GRACE / 5)]
        choices += [partial(self.advance, GRACE)] * 2
        choices += [self.hear] * (3 if self.post else 0)
        if self.alive:
            choices += [
                partial(self.wish, random.choice(self.alive), random.randrange(self.layers))
            ]
        if self.reading:
            which = random.randrange(len(self.reading))
            choices += [partial(self.finish_read, which)] * 4
            choices += [partial(self.fail_read, which)] * (random.random() < 0.1)
        return random.choice(choices)

    def play_on(self) -> None:
        """Let everybody go on in turn until nobody has anything left to do.

        A request that its worker gave up is something: the daemon learns of it with the next one.
        """
        for _ in range(2000):
            if self.daemon.idle:
                if self.post:
                    self.daemon.begin(self.hear)
                elif self.reading:
                    self.daemon.begin(self.finish_read)
                elif all(worker.actor.idle for worker in self.alive) and not self.cache.busy:
                    return
                else:
                    self.daemon.begin(partial(self.advance, GRACE))
            self.daemon.step()
            for worker in self.alive:
                if not worker.actor.idle:
                    worker.actor.step()
        raise AssertionError(f"somebody waits for ever: {self.tables}, {self.alive}")

    def close(self) -> None:
        self._patch.stop()
        for actor in (self.daemon, *(worker.actor for worker in self.cast)):
            actor.stop()
        self.workers.clear()
        self.cache.holders.clear()
        del self.cache
        self.tables.clear()
        with contextlib.suppress(BufferError):  # the traceback of a failure still has views
            for worker in self.cast:
                worker.close()
            self._arena.close()
