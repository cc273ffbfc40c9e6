"""Who leaves: victim choice over plain arrays. Never touches memory, never blocks, never reads a clock.

Goal: keep the experts that some session will need soonest. LRU cannot: a pass visits every layer in the
same order, so what was used longest ago is what comes next, and a cache smaller than one pass of all
sessions hits almost nothing.

`NextUse` rules:

1. A session visits its layers in a fixed order, so the daemon knows how many layers away each one is.
   A visit that is `d` passes away is worth `DISCOUNT ** d`.
2. Whether an expert is used on the next visit of its layer, and on the visit after that, is voted by the
   remembered passes, of all sessions, that look most like this session's latest layers (`recall.py`).
   The experts of the first layers nearly tell which token it is, and models repeat themselves.
3. Where no remembered pass is alike, and for all later visits, a table decides that is learned while it
   runs: how often did experts return that a session used so often and so long ago (`returns.py`).
4. The worth of an expert is the expected discount of its next use, added up over sessions. The least
   worthy leave. A session that stands still counts half after `IDLE_HALF_SECONDS`, and so on.
5. A layer that used more than half of its experts at once was swept by a prefill or a large batch: that
   says nothing about what comes next. It is not counted, so a prefill cannot flush the decode set.
6. None of this is believed before it has proved itself: its choices duel with those of plain LRU (`duel.py`)
   over who names the expert that is needed later, and LRU decides until the lead is clear.

Limits: what a worker did since its last miss is seen only at the next miss, by any session; visits
in between that cannot be told apart any more count as one. Slots are compared within one slab.

When not to use it: uniform random routing, where no policy beats the cache fraction. Measured by
`expertctl trace simulate`, which runs this class; the numbers are in docs/replacement.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from expertd.cache.duel import Duel
from expertd.cache.recall import F32, PASSES, Bools, Place, Recall
from expertd.cache.returns import NEVER, Returns
from expertd_protocol.ids import SessionId
from expertd_protocol.layout import U32, Ints

#: A use that is one pass further away is worth this much less.
DISCOUNT = np.float32(0.5)
#: Visits after which an old use counts half: in the average of a session, and in that of all sessions.
SESSION_VISITS, SHARED_VISITS = 128.0, 512.0
#: Visits that the beginning counts for: an average moves by at least 1 / (visits + this).
FIRST_VISITS = 8
#: Weight of the table against the votes of neighbours; a perfect match votes 1.
TABLE_VOTES = np.float32(0.15)
#: A session that makes no pass for so long will need its experts half as likely.
IDLE_HALF_SECONDS = 10.0
#: A session is looked at anew when it has visited one in so many layers; each, as long as LRU decides.
LOOKS_PER_PASS = 12
#: Up to here argmin again and again beats one argpartition (1.3 us each against 24 of 8,000 slots).
FEW = 12


class EvictionPolicy(ABC):
    """Learns from the workers' pages and orders candidates."""

    @abstractmethod
    def observe(self, session: SessionId, uses: U32, now: float) -> None:
        """Take in one worker's page: u32[L, E], changed with every use, as read now; `now` in seconds."""

    @abstractmethod
    def forget(self, session: SessionId) -> None:
        """The session is over."""

    @abstractmethod
    def victims(self, layers: Ints, experts: Ints, need: int, now: float) -> Ints:
        """Return indices into the candidates `(layers[i], experts[i])`, best victim first, at most `need`."""


@dataclass
class Habits:
    """What one session tends to use, and how much each expert is worth to it now. Arrays are [L, E]."""

    place: Place
    #: The page at the last look.
    seen: U32
    #: Average use, visits since the last use, and the cell of `Returns` that both make.
    average: F32
    age: F32
    cells: npt.NDArray[np.uint8]
    #: Visits of each layer, [L, 1].
    visits: F32
    #: Chance of a use on the next visit, and the expected discount of a first use after two visits.
    soon: F32
    tail: F32
    worth: F32
    moved_at: float
    stale: bool = True


class NextUse(EvictionPolicy):
    """The experts whose next use is furthest away leave first."""

    def __init__(self, layers: int, experts: int, passes: int = PASSES) -> None:
        self.recall = Recall(layers, experts, passes)
        self.returns = Returns(experts)
        self.duel = Duel()
        self.habits: dict[SessionId, Habits] = {}
        #: Chance of each expert on a visit of its layer, over all sessions that ever were.
        self.shared: F32 = np.full((layers, experts), 1 / experts, np.float32)
        self._shared_visits = np.zeros((layers, 1), np.float32)
        #: The last use of every expert, in layers that were looked at; what LRU goes by.
        self.last_tick = np.zeros((layers, experts), np.int64)
        self._tick = 0
        steps = np.arange(layers, dtype=np.float32)[:, None] / np.float32(layers)
        self._discounts: F32 = np.tile(DISCOUNT**steps, (2, 1))
        self._look_after = max(layers // LOOKS_PER_PASS, 1)
        self._first = np.arange(layers) * experts

    def observe(self, session: SessionId, uses: U32, now: float) -> None:
        habits = self.habits.get(session)
        if habits is None:  # what it did before the first look has no order
            self.habits[session] = self._new(uses, now)
            return
        changed = uses != habits.seen
        rows: Ints = np.flatnonzero(changed.any(1))
        if len(rows) < (self._look_after if self.duel.trusts_new else 1):
            return
        # the order of visits: from where the session was, round to where it is
        split = int(np.searchsorted(rows, habits.place.layer, side="right"))
        if 0 < split < len(rows):
            rows = np.concatenate((rows[split:], rows[:split]))
        used = changed[rows]
        habits.seen[rows] = uses[rows]
        habits.moved_at, habits.stale = now, True
        self.recall.see(habits.place, rows, used)
        told = used.sum(1) <= max(used.shape[1] // 2, 1)
        if not told.all():
            rows, used = rows[told], used[told]
        if len(rows):
            self._learn(habits, rows, used)

    def forget(self, session: SessionId) -> None:
        habits = self.habits.pop(session, None)
        if habits is not None:
            self.recall.forget(habits.place)

    def victims(self, layers: Ints, experts: Ints, need: int, now: float) -> Ints:
        keys = self._first[layers] + experts
        last_tick = self.last_tick.ravel()
        worth = self._worth(now).ravel().take(keys)
        new = _least(worth, need)
        old = _least(last_tick.take(keys), need)
        self.duel.settle(last_tick)
        self.duel.meet(keys[old], keys[new], self._tick)
        return new if self.duel.trusts_new else old

    def _new(self, uses: U32, now: float) -> Habits:
        shape = layers, _ = self.shared.shape
        habits = Habits(
            place=self.recall.place(),
            seen=uses.copy(),
            average=self.shared.copy(),
            age=np.full(shape, NEVER, np.float32),
            cells=np.zeros(shape, np.uint8),
            visits=np.zeros((layers, 1), np.float32),
            soon=np.zeros(shape, np.float32),
            tail=np.zeros(shape, np.float32),
            worth=np.zeros(shape, np.float32),
            moved_at=now,
        )
        self._expect(habits, np.arange(layers), habits.age, habits.average)
        return habits

    def _learn(self, habits: Habits, rows: Ints, used: Bools) -> None:
        self.returns.learn(habits.cells[rows], used)
        row, expert = np.nonzero(used)
        average = _moved(habits.average, habits.visits, rows, (row, expert), _SESSION_RATE)
        _moved(self.shared, self._shared_visits, rows, (row, expert), _SHARED_RATE)
        age = habits.age[rows]
        age += 1
        age[row, expert] = 1
        habits.age[rows] = age
        self.last_tick[rows[row], expert] = self._tick + 1 + row
        self._tick += len(rows)
        self._expect(habits, rows, age, average)

    def _expect(self, habits: Habits, rows: Ints, age: F32, average: F32) -> None:
        log_age = np.log2(age)
        habits.cells[rows] = cells = self.returns.cells(log_age, average)
        chance = self.returns.chances(cells, log_age)
        habits.soon[rows] = chance * TABLE_VOTES
        # over all later visits: the chance that the first use is then, discounted
        chance *= DISCOUNT
        habits.tail[rows] = DISCOUNT * chance / (1 - DISCOUNT + chance)

    def _worth(self, now: float) -> F32:
        """The worth of every expert to all sessions."""
        total = self.shared * np.float32(1e-3)  # decides when no session wants anything
        for habits in self.habits.values():
            if habits.stale:
                self._value(habits)
            idle = now - habits.moved_at
            if idle < IDLE_HALF_SECONDS / 10:
                total += habits.worth
            else:
                total += habits.worth * np.float32(0.5 ** (idle / IDLE_HALF_SECONDS))
        return total

    def _value(self, habits: Habits) -> None:
        """Worth = distance x (used on the next visit, or else on the one after it), or else later."""
        votes, cast = self.recall.guess(habits.place)
        chances = votes.astype(np.float32)
        chances += habits.soon
        chances *= (1 / (cast + TABLE_VOTES)).astype(np.float32)
        first, second = chances
        later = (1 - first) * (1 - second)
        later *= habits.tail
        second *= DISCOUNT
        first += (1 - first) * second
        layers = len(first)
        at = layers - 1 - habits.place.layer
        first *= self._discounts[at : at + layers]
        first += later  # so far away that the layer's distance is nothing
        habits.worth = first
        habits.stale = False


def _moved(
    averages: F32, visits: F32, rows: Ints, used: tuple[Ints, Ints], rate: np.float32
) -> F32:
    """Count one visit of `rows` in averages that move by `rate`, or faster at first; return those rows."""
    mine = averages[rows]
    before = visits[rows]
    rates = np.maximum(rate, 1 / (before + FIRST_VISITS))
    visits[rows] = before + 1
    mine *= 1 - rates
    mine[used] += rates[used[0], 0]
    averages[rows] = mine
    return mine


def _least(values: npt.NDArray[Any], need: int) -> Ints:
    """Return the indices of the `need` least values, the least first. Changes `values`."""
    if need >= len(values):
        return np.argsort(values, kind="stable")
    if need > FEW:
        least = np.argpartition(values, need)[:need]
        return least[np.argsort(values[least], kind="stable")]
    most = np.inf if values.dtype.kind == "f" else np.iinfo(values.dtype).max
    found = np.empty(need, np.intp)
    for n in range(need):
        found[n] = at = values.argmin()
        values[at] = most
    return found


_SESSION_RATE = np.float32(1 - 0.5 ** (1 / SESSION_VISITS))
_SHARED_RATE = np.float32(1 - 0.5 ** (1 / SHARED_VISITS))
