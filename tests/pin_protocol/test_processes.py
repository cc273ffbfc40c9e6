"""Real daemon, real workers, self-describing slots: who stops at the worst moment computes with right bytes.

And the controls: who leaves a part of the protocol out, and stops there until its slot was reused,
computes with wrong ones. No race is left to chance: the slot is seen to be reused before the worker goes on.
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Iterator
from random import Random

import numpy as np
import psutil
import pytest

from expertd_client import Client
from expertd_client.arena import SlabMap
from expertd_protocol.layout import PAGE_BYTES, Phase, unpack_word
from tests.pin_protocol.careless import Fault
from tests.pin_protocol.stamped_worker import EXPERTS, LAYERS, QUOTA
from tests.system.daemon import RealDaemon, demo_minimum, demo_source, real_daemon, wait_until
from tests.system.test_processes import Worker, workers

WORKER, DAEMON = "tests.pin_protocol.stamped_worker", "tests.pin_protocol.stamping_daemon"


@pytest.fixture(scope="module")
def daemon() -> Iterator[RealDaemon]:
    with stamping_daemon(n_workers=2) as daemon:
        yield daemon


@contextlib.contextmanager
def stamping_daemon(n_workers: int) -> Iterator[RealDaemon]:
    """As small as it can be: slots for the quotas and one in reserve, and the workers' pages."""
    budget = demo_minimum(n_workers * QUOTA) + (n_workers - 1) * PAGE_BYTES
    with real_daemon(str(budget), "--read-mode", "buffered", module=DAEMON) as daemon:
        yield daemon


def result(worker: Worker) -> tuple[int, int, int]:
    """Words compared, wrong ones, mismatches counted."""
    assert worker.end() == 0, worker.lines
    found = re.fullmatch(r"done words=(\d+) wrong=(\d+) mismatches=(\d+)", worker.lines[-1])
    assert found is not None, worker.lines
    words, wrong, mismatches = map(int, found.groups())
    return words, wrong, mismatches


def stopped_with(worker: Worker) -> int:
    """Wait until the worker has stopped itself; return the word it has read."""
    worker.wait_for("stopped")
    process = psutil.Process(worker.process.pid)
    wait_until("the worker stands still", lambda: process.status() == psutil.STATUS_STOPPED)
    return int(worker.lines[-1].split()[1])


class Churn:
    """Pins one expert after another, so that the daemon needs slots."""

    def __init__(self, client: Client) -> None:
        client.attach(demo_source(), quota_min=QUOTA, quota_wanted=QUOTA)
        self.client = client
        self._n = 0

    def pin_one_more(self) -> None:
        layer, expert = self._n % LAYERS, 1 + self._n // LAYERS % (EXPERTS - 1)
        self._n += 1
        self.client.pin(layer, np.array([expert], np.intp), Phase.DECODE)
        assert self.client.verify()
        self.client.unpin()

    def slab(self, number: int) -> SlabMap:
        return self.client.arena.slabs[number]

    def until_reused(self, word: int) -> None:
        """Go on until the slot of `word` belongs to another expert that is ready."""
        generation, slab, slot = unpack_word(word)

        def has_another() -> bool:
            self.pin_one_more()
            found = [unpack_word(w) for w in self.client.arena.directory.ravel().tolist() if w]
            return any((s, n) == (slab, slot) and g != generation for g, s, n in found)

        wait_until(f"slot {slot} of slab {slab} is reused", has_another)

    def until_all_others_are_reused(self, word: int) -> None:
        """Go on until every slot but that of `word` has been reused, and more than once."""
        _, slab, slot = unpack_word(word)
        before = self.slab(slab).generations.copy()

        def all_others() -> bool:
            self.pin_one_more()
            grown = self.slab(slab).generations - before
            assert grown[slot] == 0
            return bool((np.delete(grown, slot) >= 2).all())

        wait_until(f"all but slot {slot} of slab {slab} are reused", all_others)


@pytest.mark.parametrize(
    ("fault", "stop_at", "wrong_bytes", "mismatches"),
    [
        (None, "look", False, 0),
        (None, "use", False, 0),
        (Fault.PUBLISH, "use", True, 1),
        (Fault.SECOND_LOOK, "look", True, 1),
        (Fault.EVALUATED, "use", True, 0),  # its hazards are gone: there is nothing to compare
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else str(value),
)
def test_a_worker_that_stops_where_its_slot_is_wanted(
    daemon: RealDaemon, fault: Fault | None, stop_at: str, wrong_bytes: bool, mismatches: int
) -> None:
    """Without a fault no word is wrong; with one all words of the slot are."""
    flags = ["--stop-at", stop_at, *(["--fault", fault.name] if fault else [])]
    with (
        workers(daemon, tuple(flags), module=WORKER) as (worker,),
        Client.connect(daemon.run_dir, name="churn") as client,
    ):
        churn = Churn(client)
        word = stopped_with(worker)
        if (fault, stop_at) == (None, "use"):
            churn.until_all_others_are_reused(word)
        else:
            churn.until_reused(word)
        worker.process.send_signal(signal.SIGCONT)
        words, wrong, counted = result(worker)

        assert wrong == (
            words // 2 if wrong_bytes else 0
        )  # it computed twice, the first time undisturbed
        assert words > 0
        assert counted == mismatches


def test_three_workers_that_are_stopped_at_random_see_no_wrong_word() -> None:
    flags = [("--seed", str(n), "--passes", "100") for n in range(3)]
    dice = Random(0)
    with (
        stamping_daemon(n_workers=3) as daemon,
        workers(daemon, *flags, module=WORKER) as started,
    ):
        while running := [w for w in started if w.process.poll() is None]:
            process = dice.choice(running).process
            process.send_signal(signal.SIGSTOP)
            time.sleep(dice.random() * 0.02)  # longer than the grace, more often than not
            process.send_signal(signal.SIGCONT)
            time.sleep(dice.random() * 0.005)
        results = [result(worker) for worker in started]
        stats = daemon.stats()

        assert all(words > 0 for words, _, _ in results)
        assert [(wrong, mismatches) for _, wrong, mismatches in results] == [(0, 0)] * 3
        assert stats.evictions > 200  # 450 experts were pinned, and there are 7 slots
