"""Visits every state of the model, and tells the shortest way to each thing that goes wrong.

To read what goes wrong without the worker's second look, or without both fences of an eviction:

    python -m tests.pin_protocol.explore SECOND_LOOK
    python -m tests.pin_protocol.explore UNPUBLISH_FENCE SCAN_FENCE
"""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass

from tests.pin_protocol.model import Flaw, Ingredient, Order, Protocol, Slot, State, start

#: Without grants a slot may be taken from under every reply, for ever; here, so many times. Nothing
#: else comes near it: each reuse needs a request.
MOST_REUSES = 6
#: Two workers that take the only slot from each other: all that can go wrong can go wrong here.
TUG = [start(experts=2, slots=1, wants=((0,), (1, 0)))]


@dataclass(frozen=True)
class Explored:
    """What was found, with a shortest way to each flaw."""

    states: int
    flaws: dict[Flaw, list[str]]
    #: A way into a state from which the workers cannot all end with every slot free; None: there is none.
    stuck: list[str] | None


def explore(protocol: Protocol, starts: list[State]) -> Explored:
    """Visit every state, breadth first. Behind a flaw nothing is looked at, nor is anybody called stuck."""
    states = list(starts)
    numbers = {state: n for n, state in enumerate(states)}
    came_from = [-1] * len(states)
    into: list[list[int]] = [[] for _ in states]
    flaws: dict[Flaw, list[str]] = {}
    gc.disable()  # it would look at every state again and again; there are no cycles here
    try:
        for before, state in enumerate(states):  # grows meanwhile
            for step in protocol.steps(state):
                if step.flaw is not None:
                    if step.flaw not in flaws:
                        flaws[step.flaw] = [*_way(protocol, states, came_from, before), step.text]
                    continue
                n = numbers.setdefault(step.state, len(states))
                if n == len(states):
                    if max(step.state.generation) > MOST_REUSES:
                        del numbers[step.state]
                        continue
                    states.append(step.state)
                    came_from.append(before)
                    into.append([])
                into[n].append(before)
    finally:
        gc.enable()
    dead = None if flaws else _dead(states, into)
    return Explored(
        len(states),
        flaws,
        None if dead is None else _way(protocol, states, came_from, dead),
    )


def _dead(states: list[State], into: list[list[int]]) -> int | None:
    """Return the first state from which no end can be reached."""
    back = [n for n, state in enumerate(states) if _ended(state)]
    alive = set(back)
    while back:
        for n in into[back.pop()]:
            if n not in alive:
                alive.add(n)
                back.append(n)
    return next((n for n in range(len(states)) if n not in alive), None)


def _ended(state: State) -> bool:
    return (
        not any(worker.wants for worker in state.workers)
        and not any(state.buffers)
        and all(what is Slot.FREE for what, _ in state.daemon.slots)
    )


def _way(protocol: Protocol, states: list[State], came_from: list[int], n: int) -> list[str]:
    """The steps from a start to state `n`, in words."""
    way = []
    while (before := came_from[n]) >= 0:
        way.append(next(s.text for s in protocol.steps(states[before]) if s.state == states[n]))
        n = before
    return way[::-1]


def main() -> None:
    """Print the shortest ways to what goes wrong without the ingredients named on the command line."""
    without = [Ingredient[name] for name in sys.argv[1:]]
    found = explore(Protocol(Order.ARM64, *without), TUG)
    print(f"{found.states} states")
    ways = {flaw.value: way for flaw, way in found.flaws.items()}
    if found.stuck is not None:
        ways["not everybody can end with every slot free"] = found.stuck
    for what, way in ways.items():
        print(f"{what}:", *way, sep="\n    ")


if __name__ == "__main__":
    main()
