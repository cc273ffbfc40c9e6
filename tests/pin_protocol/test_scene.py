"""The product's own worker and cache, interleaved at every seam in any order: rules 1 to 6 hold."""

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from expertd.cache import experts
from tests.pin_protocol.careless import Fault
from tests.pin_protocol.scene import MismatchError, Scene, WrongBytesError

QUOTAS = (2, 1, 1)
#: The fewest that rule 2 allows: nearly every miss takes somebody's.
SLOTS = sum(QUOTAS) + 1


class Interleaved(RuleBasedStateMachine):
    """Three workers and a daemon take steps in an order that follows from a seed."""

    def __init__(self) -> None:
        super().__init__()
        self.is_sound = True
        self.scene = Scene(SLOTS, QUOTAS, (None, None, None))

    @rule(seed=st.integers(0, 2**32 - 1), steps=st.integers(200, 1000))
    def play(self, seed: int, steps: int) -> None:
        self.is_sound = False
        self.scene.play(Random(seed), steps)
        self.is_sound = True

    @precondition(lambda self: self.scene.daemon.idle and len(self.scene.alive) > 1)
    @rule(who=st.integers(0, len(QUOTAS) - 1), dice=st.integers(0, 9))
    def kill(self, who: int, dice: int) -> None:
        """SIGKILL, wherever it is."""
        alive = self.scene.alive
        if dice == 9:
            self.scene.kill(alive[who % len(alive)])

    @invariant()
    def tables_and_directory_agree(self) -> None:
        if self.scene.daemon.idle:
            self.scene.cache.check()

    def teardown(self) -> None:
        """Everybody who waits is served, and no slot is lost."""
        try:
            if self.is_sound:
                self.finish()
        finally:
            self.scene.close()

    def finish(self) -> None:
        scene = self.scene
        scene.play_on()
        assert not scene.cache.busy
        assert scene.cache.held(0) == 0
        for worker in scene.alive:
            scene.kill(worker)
        scene.cache.check()
        assert not scene.tables[0].grants.any()


TestInterleaved = Interleaved.TestCase
TestInterleaved.settings = settings(
    max_examples=15,
    stateful_step_count=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [
        (Fault.PUBLISH, MismatchError),
        (Fault.SECOND_LOOK, MismatchError),
        (Fault.EVALUATED, WrongBytesError),
    ],
    ids=lambda value: value.name if isinstance(value, Fault) else "",
)
def test_the_same_steps_find_a_worker_without(fault: Fault, noticed: type[Exception]) -> None:
    """Controls: one careless worker of three. Rule 6 notices what it can."""
    assert play_until_it_fails(fault) is noticed


def test_the_same_steps_find_a_daemon_that_does_not_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "held_words", lambda pages: set())

    assert play_until_it_fails(None) is MismatchError


def play_until_it_fails(fault: Fault | None) -> type[Exception]:
    scene = Scene(SLOTS, QUOTAS, (fault, None, None))
    try:
        with pytest.raises(AssertionError) as failed:
            scene.play(Random(0), 500_000)  # 15,000 are enough on average
        return failed.type
    finally:
        scene.close()
