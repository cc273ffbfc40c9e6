"""The pin protocol (daemon/README.md, rules 1 to 6) as a machine small enough to visit all its states.

Workers and the daemon take one step at a time, in every possible order. A store goes into its thread's
buffer first and becomes visible later; a fence waits until the buffer is empty. That is all a memory model
is here: `Order.X86` lets stores out in their order, `Order.ARM64` lets stores to different places overtake
each other, and lets a worker read a slot before its second look. Messages are ordered, they pass through the
kernel: who has received one sees what its sender had stored.

There is no clock. A scan may follow a retirement at once, and a worker may stop between any two steps for
as long as it likes; so what holds here does not stand on the grace. The daemon may retire every slot
that is not granted, pinned ones too; so it does not stand on the choice of victims either. A worker pins one
expert at a time. Left out: failed reads, deaths, quotas, hostile pages; `tests/daemon/cache/test_experts.py`
has those.

| step of a worker | rule | step of the daemon | rule |
| --- | --- | --- | --- |
| look, and store the word as hazard | 1 | take a word away | 4, retire |
| look again | 1 | a slot is retired, after a fence | 4, rest |
| ask, look at the grant, acknowledge | 2 | see who holds it | 4, scan |
| read | 3, the read may be late: it is the GPU's | a new generation, and the slot is free | 4, reuse; 6 |
| find the generation, clear the hazard | 6, 3 | bring a retired slot back | 4, last sentence |
| | | bytes, then their word | 5 |

Each `Ingredient` can be left out; `test_model.py` says what goes wrong then.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, IntEnum, StrEnum, auto
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Ingredient(StrEnum):
    """What the protocol is made of, by the rule that asks for it."""

    PUBLISH = "rule 1: the word is stored as a hazard"
    WORKER_FENCE = "rule 1: a fence before the second look"
    SECOND_LOOK = "rule 1: look again"
    GRANT = "rule 2: a slot that was granted stays until the worker acknowledges"
    GRANT_FENCE = "rule 2: a fence between the hazard of a grant and its look"
    ACK_FENCE = "rule 2: a fence between the hazard of a grant and its acknowledgement"
    EVALUATED = "rule 3: hazards are cleared only after the output was evaluated"
    CLEAR = "rule 3: hazards are cleared"
    UNPUBLISH_FENCE = "rule 4: a fence after the word is gone"
    SCAN_FENCE = "rule 4: a fence before the scan"
    SCAN = "rule 4: a slot that a hazard names is not reused"
    BUMP = "rule 4: the generation goes up before a slot is reused"
    FILL_FENCE = "rule 5: a fence between the bytes and their word"
    BUMP_FENCE = "rule 6: a fence between the new generation and new bytes"
    CHECK = "rule 6: generations are compared after use"


class Order(IntEnum):
    """When a store becomes visible."""

    X86 = auto()
    ARM64 = auto()


class Flaw(Enum):
    """What must not happen."""

    SILENT = "wrong bytes were used and nobody noticed"
    CAUGHT = "wrong bytes were used and rule 6 noticed"
    ALARM = "rule 6 noticed a slot that was being taken away, its bytes were still right"


class Slot(IntEnum):
    FREE = auto()
    FILLING = auto()
    READY = auto()
    RETIRED = auto()


Word = tuple[int, int] | None  # generation, slot; None: not resident
Store = tuple[str, int, object]  # field of `State`, index, value


class Worker(NamedTuple):
    at: str
    wants: tuple[int, ...]  # experts, the first one is being pinned
    word: Word = None
    seen: int | None = None  # the expert whose bytes were read


class Daemon(NamedTuple):
    slots: tuple[tuple[Slot, int | None], ...]  # state and expert of each
    asked: tuple[int | None, ...]  # by worker: the expert it waits for
    granted: tuple[int | None, ...]  # by worker: the slot it was granted and has not acknowledged
    at: str = "idle"
    slot: int = 0
    scanned: int = 0  # workers whose hazards were read


class State(NamedTuple):
    """Shared memory, then what each thread knows. The daemon's buffer is the last one."""

    directory: tuple[Word, ...]  # by expert
    generation: tuple[int, ...]  # by slot
    content: tuple[int, ...]  # by slot: whose bytes it has
    hazard: tuple[Word, ...]  # by worker
    buffers: tuple[tuple[Store, ...], ...]
    workers: tuple[Worker, ...]
    daemon: Daemon


class Step(NamedTuple):
    text: str
    state: State
    flaw: Flaw | None = None


def put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def start(experts: int, slots: int, wants: tuple[tuple[int, ...], ...]) -> State:
    """Expert s is in slot s, as long as there are slots; `wants` are the experts each worker will pin."""
    n = len(wants)
    return State(
        directory=tuple((1, e) if e < slots else None for e in range(experts)),
        generation=(1,) * slots,
        content=tuple(range(slots)),
        hazard=(None,) * n,
        buffers=((),) * (n + 1),
        workers=tuple(Worker("look", mine) for mine in wants),
        daemon=Daemon(tuple((Slot.READY, s) for s in range(slots)), (None,) * n, (None,) * n),
    )


class Protocol:
    """The steps that are possible in a state, with some ingredients left out."""

    def __init__(self, order: Order, *without: Ingredient) -> None:
        self.order = order
        self._has = frozenset(Ingredient) - frozenset(without)

    def steps(self, state: State) -> Iterator[Step]:
        for thread, buffer in enumerate(state.buffers):
            yield from self._drain(state, thread, buffer)
        for n, worker in enumerate(state.workers):
            yield from self._worker(state, n, worker)
        yield from self._daemon(state)

    # --- memory ----------------------------------------------------------------------------------
    def _store(self, state: State, thread: int, store: Store) -> State:
        return state._replace(buffers=put(state.buffers, thread, (*state.buffers[thread], store)))

    def _drain(self, state: State, thread: int, buffer: tuple[Store, ...]) -> Iterator[Step]:
        places = set()
        for i, store in enumerate(buffer):
            if store[:2] in places:  # stores to one place keep their order everywhere
                continue
            places.add(store[:2])
            rest = put(state.buffers, thread, (*buffer[:i], *buffer[i + 1 :]))
            who = f"worker {thread}" if thread < len(state.workers) else "the daemon"
            what = f"{store[0]} {store[1]} = {named(store[2])}"
            yield Step(
                f"{who}'s store becomes visible: {what}",
                visible(state, store)._replace(buffers=rest),
            )
            if self.order is Order.X86:
                return

    def _passes(self, fence: Ingredient, buffer: tuple[Store, ...]) -> bool:
        """Whether a thread with this buffer gets past a fence."""
        return not buffer or fence not in self._has

    # --- a worker --------------------------------------------------------------------------------
    def _worker(self, state: State, n: int, worker: Worker) -> Iterator[Step]:
        buffer = state.buffers[n]
        if not worker.wants:
            return
        expert, word = worker.wants[0], worker.word

        def then(at: str, word: Word = word, seen: int | None = worker.seen) -> State:
            moved = Worker(at, worker.wants, word, seen)
            return state._replace(workers=put(state.workers, n, moved))

        def clear(state: State) -> State:
            return self._store(state, n, ("hazard", n, None))

        if worker.at == "look":
            found = state.directory[expert]
            if found is None:
                yield Step(f"worker {n} looks: expert {expert} is not there", then("ask"))
                return
            after = then("look again", found)
            text = f"worker {n} looks: expert {expert} is in {named(found)}"
            if Ingredient.PUBLISH in self._has:
                after = self._store(after, n, ("hazard", n, found))
                text += ", and stores that as its hazard"
            yield Step(text, after)
        elif worker.at == "look again":
            if not self._passes(Ingredient.WORKER_FENCE, buffer):
                return
            if (
                self.order is Order.ARM64
                and worker.seen is None
                and Ingredient.SECOND_LOOK in self._has
            ):
                yield from self._read(state, n, worker, "look again", "early")
            if Ingredient.SECOND_LOOK not in self._has:
                yield Step(f"worker {n} trusts its first look", then("read"))
            elif state.directory[expert] == word:
                yield Step(f"worker {n} looks again: still {named(word)}", then("read"))
            else:
                yield Step(f"worker {n} looks again: it is gone", clear(then("ask", None, None)))
        elif worker.at == "ask":
            if not buffer:  # a message is ordered
                asked = put(state.daemon.asked, n, expert)
                after = then("wait", None)
                daemon = state.daemon._replace(asked=asked)
                yield Step(f"worker {n} asks for expert {expert}", after._replace(daemon=daemon))
        elif worker.at == "look at the grant":
            if not self._passes(Ingredient.GRANT_FENCE, buffer):
                return
            if state.directory[expert] == word:
                yield Step(f"worker {n} looks at its grant: {named(word)}", then("acknowledge"))
            else:
                yield Step(f"worker {n}'s grant is gone again", clear(then("acknowledge", None)))
        elif worker.at == "acknowledge":
            if not self._passes(Ingredient.ACK_FENCE, buffer):
                return
            daemon = state.daemon._replace(granted=put(state.daemon.granted, n, None))
            after = then("read" if word else "ask")
            yield Step(f"worker {n} acknowledges", after._replace(daemon=daemon))
        elif worker.at == "read":
            if worker.seen is not None:
                yield Step(f"worker {n} computes with what it read", then("check"))
            elif Ingredient.EVALUATED in self._has:
                yield from self._read(state, n, worker, "check", "and computes")
            else:
                yield Step(f"worker {n} starts to compute, the reading comes later", then("check"))
        elif worker.at == "check":
            yield from self._check(state, n, worker)
        elif worker.at == "read too late":
            yield from self._read(state, n, worker, "look", "too late")

    def _read(self, state: State, n: int, worker: Worker, at: str, how: str) -> Iterator[Step]:
        assert worker.word is not None
        expert, seen = worker.wants[0], state.content[worker.word[1]]
        text = f"worker {n} reads slot {worker.word[1]}, {how}: the bytes of expert {seen}"
        if at == "look":  # the pin is over already
            moved = Worker(at, worker.wants[1:])
            flaw = None if seen == expert else Flaw.SILENT
        else:
            moved, flaw = worker._replace(at=at, seen=seen), None
        yield Step(text, state._replace(workers=put(state.workers, n, moved)), flaw)

    def _check(self, state: State, n: int, worker: Worker) -> Iterator[Step]:
        """Rule 6, and the end of the pin."""
        assert worker.word is not None
        generation, slot = worker.word
        text, flaw = f"worker {n} is done", None
        wrong = worker.seen is not None and worker.seen != worker.wants[0]
        if Ingredient.CHECK in self._has:
            text = f"worker {n} finds generation {state.generation[slot]} in slot {slot}"
            if state.generation[slot] != generation:
                flaw = Flaw.CAUGHT if wrong else Flaw.ALARM
        if flaw is None and wrong:
            flaw = Flaw.SILENT
        if Ingredient.EVALUATED in self._has:
            moved = Worker("look", worker.wants[1:])
        else:
            moved = worker._replace(at="read too late")
        after = state._replace(workers=put(state.workers, n, moved))
        if Ingredient.CLEAR in self._has:
            after = self._store(after, n, ("hazard", n, None))
            text += " and clears its hazard"
        yield Step(text, after, flaw)

    # --- the daemon ------------------------------------------------------------------------------
    def _daemon(self, state: State) -> Iterator[Step]:
        daemon, me = state.daemon, len(state.workers)
        buffer = state.buffers[me]
        slot = daemon.slot
        if daemon.at == "idle":
            for n, expert in enumerate(daemon.asked):
                if expert is not None:
                    yield from self._serve(state, n, expert)
            for slot in range(len(daemon.slots)):
                yield from self._begin(state, slot)
        elif daemon.at == "retiring":
            if self._passes(Ingredient.UNPUBLISH_FENCE, buffer):
                yield Step(f"the daemon has retired slot {slot}", self._become(state, Slot.RETIRED))
        elif daemon.at == "scanning":
            # The first look at a page comes after the fence; what follows it needs no other.
            if daemon.scanned or self._passes(Ingredient.SCAN_FENCE, buffer):
                yield from self._scan(state)
        elif daemon.at == "bumping":
            if self._passes(Ingredient.BUMP_FENCE, buffer):
                after = self._become(state, Slot.FREE)
                yield Step(f"slot {slot} is free, generation {own_generation(state, slot)}", after)
        elif daemon.at == "publishing" and self._passes(Ingredient.FILL_FENCE, buffer):
            expert = daemon.slots[slot][1]
            assert expert is not None
            # the daemon wrote the generation itself: it knows it without looking at its buffer
            word = (own_generation(state, slot), slot)
            after = self._store(self._become(state, Slot.READY), me, ("directory", expert, word))
            waiting = zip(daemon.asked, daemon.granted, strict=True)
            granted = tuple(slot if asked == expert else held for asked, held in waiting)
            after = after._replace(daemon=after.daemon._replace(granted=granted))
            yield Step(f"the daemon publishes expert {expert}: {named(word)}", after)

    def _become(self, state: State, become: Slot) -> State:
        """End what the daemon does with its slot; the slot is now `become`."""
        daemon = state.daemon
        expert = None if become is Slot.FREE else daemon.slots[daemon.slot][1]
        slots = put(daemon.slots, daemon.slot, (become, expert))
        return state._replace(daemon=Daemon(slots, daemon.asked, daemon.granted))

    def _serve(self, state: State, n: int, expert: int) -> Iterator[Step]:
        """Worker `n` waits for `expert`: have it read, or bring it back, and grant it."""
        daemon, me = state.daemon, len(state.workers)
        slot = daemon.granted[n]
        if slot is not None:
            if not state.buffers[me]:  # a message is ordered
                yield self._answer(state, n, slot)
            return
        for slot, (what, whose) in enumerate(daemon.slots):
            if whose != expert:
                continue
            if what is Slot.FILLING:
                return
            granted = put(daemon.granted, n, slot)
            slots = put(daemon.slots, slot, (Slot.READY, expert))
            after = state._replace(daemon=daemon._replace(slots=slots, granted=granted))
            text = f"the daemon grants expert {expert} to worker {n}"
            if what is Slot.RETIRED:
                word = (own_generation(state, slot), slot)
                after = self._store(after, me, ("directory", expert, word))
                text += f" and gives it its word back: {named(word)}"
            yield Step(text, after)
            return
        for slot, (what, _) in enumerate(daemon.slots):
            if what is Slot.FREE:
                slots = put(daemon.slots, slot, (Slot.FILLING, expert))
                after = state._replace(daemon=daemon._replace(slots=slots))
                yield Step(f"the daemon has expert {expert} read into slot {slot}", after)
                return

    def _answer(self, state: State, n: int, slot: int) -> Step:
        daemon = state.daemon
        word = (own_generation(state, slot), slot)
        granted = daemon.granted if Ingredient.GRANT in self._has else put(daemon.granted, n, None)
        worker = state.workers[n]._replace(at="look at the grant", word=word)
        after = state._replace(
            workers=put(state.workers, n, worker),
            daemon=daemon._replace(asked=put(daemon.asked, n, None), granted=granted),
        )
        text = f"worker {n} is granted {named(word)}"
        if Ingredient.PUBLISH in self._has:
            after = self._store(after, n, ("hazard", n, word))
            text += ", and stores that as its hazard"
        return Step(text, after)

    def _begin(self, state: State, slot: int) -> Iterator[Step]:
        """What an idle daemon may do with a slot."""
        daemon, me = state.daemon, len(state.workers)
        what, expert = daemon.slots[slot]
        if what is Slot.FILLING:
            after = state._replace(daemon=daemon._replace(at="publishing", slot=slot))
            after = self._store(after, me, ("content", slot, expert))
            yield Step(f"slot {slot} gets the bytes of expert {expert}", after)
        elif what is Slot.READY and slot not in daemon.granted:
            assert expert is not None
            after = state._replace(daemon=daemon._replace(at="retiring", slot=slot))
            after = self._store(after, me, ("directory", expert, None))
            yield Step(f"the daemon takes the word of expert {expert} away", after)
        elif what is Slot.RETIRED:
            after = state._replace(daemon=daemon._replace(at="scanning", slot=slot))
            if Ingredient.SCAN in self._has:
                yield from self._daemon(after)
            else:
                yield from self._bump(after, "nobody is asked")

    def _scan(self, state: State) -> Iterator[Step]:
        daemon = state.daemon
        slot, n = daemon.slot, daemon.scanned
        if state.hazard[n] == (own_generation(state, slot), slot):
            after = state._replace(daemon=Daemon(daemon.slots, daemon.asked, daemon.granted))
            yield Step(f"the daemon sees that worker {n} holds slot {slot}: it stays", after)
        elif n + 1 == len(state.workers):
            yield from self._bump(state, f"worker {n} does not hold slot {slot} either")
        else:
            after = state._replace(daemon=daemon._replace(scanned=n + 1))
            yield Step(f"the daemon sees that worker {n} does not hold slot {slot}", after)

    def _bump(self, state: State, why: str) -> Iterator[Step]:
        daemon = state.daemon
        after = state._replace(daemon=daemon._replace(at="bumping", scanned=0))
        if Ingredient.BUMP in self._has:
            generation = state.generation[daemon.slot] + 1
            after = self._store(after, len(state.workers), ("generation", daemon.slot, generation))
        yield Step(f"{why}: the daemon takes it for another expert", after)


def visible(state: State, store: Store) -> State:
    field, index, value = store
    changed: dict[str, Any] = {field: put(getattr(state, field), index, value)}
    return state._replace(**changed)


def named(value: object) -> str:
    """A word, a generation or an expert, for people."""
    if isinstance(value, tuple):
        return f"slot {value[1]} generation {value[0]}"
    return "nothing" if value is None else str(value)


def own_generation(state: State, slot: int) -> int:
    """The slot's generation as the daemon knows it: its own latest store, visible or not."""
    for field, index, value in reversed(state.buffers[-1]):
        if (field, index) == ("generation", slot):
            assert isinstance(value, int)
            return value
    return state.generation[slot]
