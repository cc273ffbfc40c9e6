"""Every state of the model: nothing goes wrong, and each ingredient is there for something that does."""

import pytest

from tests.pin_protocol.explore import TUG, Explored, explore
from tests.pin_protocol.model import Flaw, Ingredient, Order, Protocol, start

NOTHING: set[Flaw] = set()
NOTICED = {Flaw.CAUGHT, Flaw.ALARM}
SILENT = {Flaw.SILENT}

#: What goes wrong without these ingredients, as x86 orders stores and as arm64 may.
WITHOUT = {
    (Ingredient.PUBLISH,): (NOTICED, NOTICED),
    (Ingredient.WORKER_FENCE,): (NOTICED, NOTICED),
    (Ingredient.SECOND_LOOK,): (NOTICED, NOTICED),
    (Ingredient.SCAN,): (NOTICED, NOTICED),
    (Ingredient.UNPUBLISH_FENCE, Ingredient.SCAN_FENCE): (NOTICED, NOTICED),
    (Ingredient.GRANT_FENCE, Ingredient.ACK_FENCE): (NOTICED, NOTICED),
    (Ingredient.EVALUATED,): (SILENT, SILENT),
    (Ingredient.FILL_FENCE,): (NOTHING, SILENT),
    (Ingredient.BUMP,): (NOTHING, SILENT),
    # One of two is enough; both are there so that nobody must know what stands next to them.
    (Ingredient.UNPUBLISH_FENCE,): (NOTHING, NOTHING),
    (Ingredient.SCAN_FENCE,): (NOTHING, NOTHING),
    (Ingredient.GRANT_FENCE,): (NOTHING, NOTHING),
    (Ingredient.ACK_FENCE,): (NOTHING, NOTHING),
    # The second line: these notice what the others should have prevented.
    (Ingredient.CHECK,): (NOTHING, NOTHING),
    (Ingredient.BUMP_FENCE,): (NOTHING, NOTHING),
}


def found(order: Order, *without: Ingredient) -> Explored:
    return explore(Protocol(order, *without), TUG)


@pytest.mark.parametrize(
    ("experts", "slots", "wants"),
    [
        (3, 2, ((0, 2), (2,))),
        (3, 1, ((0, 1), (2, 0))),
        (2, 1, ((0,), (1,), (0,))),
    ],
)
def test_nothing_goes_wrong_and_everybody_ends_with_every_slot_free(
    experts: int, slots: int, wants: tuple[tuple[int, ...], ...]
) -> None:
    """As arm64 orders stores, which allows all that x86 does."""
    result = explore(Protocol(Order.ARM64), [start(experts, slots, wants)])

    print(f"{len(wants)} workers, {slots} slots, {experts} experts: {result.states} states")
    assert result.flaws == {}
    assert result.stuck is None
    assert result.states > 2000


@pytest.mark.parametrize("without", WITHOUT, ids=lambda without: " ".join(i.name for i in without))
def test_what_goes_wrong_without(without: tuple[Ingredient, ...]) -> None:
    for order, expected in zip((Order.X86, Order.ARM64), WITHOUT[without], strict=True):
        result = found(order, *without)
        for flaw, way in result.flaws.items():
            print(f"{order.name}: {flaw.value}:", *way, sep="\n    ")

        assert set(result.flaws) == expected, order
        if not expected:
            assert result.stuck is None


@pytest.mark.parametrize(
    "first",
    [
        (Ingredient.PUBLISH,),
        (Ingredient.WORKER_FENCE,),
        (Ingredient.SECOND_LOOK,),
        (Ingredient.SCAN,),
    ],
    ids=lambda f: f[0].name,
)
@pytest.mark.parametrize(
    "second", [Ingredient.CHECK, Ingredient.BUMP, Ingredient.BUMP_FENCE], ids=lambda i: i.name
)
def test_rule_6_is_what_notices(first: tuple[Ingredient, ...], second: Ingredient) -> None:
    """On x86 the generation is visible before the bytes without its fence: a buffer keeps its order."""
    assert Flaw.SILENT in found(Order.ARM64, *first, second).flaws
    assert (Flaw.SILENT in found(Order.X86, *first, second).flaws) == (
        second is not Ingredient.BUMP_FENCE
    )


def test_a_hazard_that_is_never_cleared_keeps_its_slot_for_ever() -> None:
    result = found(Order.ARM64, Ingredient.CLEAR)

    assert result.flaws == {}
    assert result.stuck is not None


def test_grants_are_for_progress_and_not_for_safety() -> None:
    """Without them a slot may be taken from under every reply; the look at the grant notices it."""
    result = found(Order.ARM64, Ingredient.GRANT)

    assert result.flaws == {}
    assert result.states > found(Order.ARM64).states


def test_the_shortest_way_to_wrong_bytes_without_the_workers_fence() -> None:
    """One of the traces word for word, so that what docs/pin-protocol.md tells is what the model does."""
    assert found(Order.X86, Ingredient.WORKER_FENCE).flaws[Flaw.CAUGHT] == [
        "worker 0 looks: expert 0 is in slot 0 generation 1, and stores that as its hazard",
        "worker 0 looks again: still slot 0 generation 1",
        "worker 1 looks: expert 1 is not there",
        "worker 1 asks for expert 1",
        "the daemon takes the word of expert 0 away",
        "the daemon's store becomes visible: directory 0 = nothing",
        "the daemon has retired slot 0",
        "the daemon sees that worker 0 does not hold slot 0",
        "worker 1 does not hold slot 0 either: the daemon takes it for another expert",
        "the daemon's store becomes visible: generation 0 = 2",
        "slot 0 is free, generation 2",
        "the daemon has expert 1 read into slot 0",
        "slot 0 gets the bytes of expert 1",
        "the daemon's store becomes visible: content 0 = 1",
        "worker 0 reads slot 0, and computes: the bytes of expert 1",
        "worker 0 finds generation 2 in slot 0 and clears its hazard",
    ]
