"""Textbook replacement policies over (layer, expert) keys, to compare the daemon's with.

Each holds at most `capacity` keys and takes one step at a time: the experts of one layer of one
token, looked up together. A step's own keys may not push each other out, as in the daemon, where
they are pinned. Keys are plain integers; nothing here knows layers, sessions or time.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Sequence

Keys = Sequence[int]


class Policy(ABC):
    """A cache of keys that counts hits."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity

    @abstractmethod
    def resident(self) -> set[int]:
        """Return the keys that are held now."""

    @abstractmethod
    def step(self, keys: Keys) -> int:
        """Look up `keys` (all different, at most `capacity`), take in what is missing, return the hits."""


class LeastRecent(Policy):
    """LRU: out goes what was used longest ago."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._held: OrderedDict[int, None] = OrderedDict()

    def resident(self) -> set[int]:
        return set(self._held)

    def step(self, keys: Keys) -> int:
        held = self._held
        before = len(held)
        hits = 0
        for key in keys:
            if key in held:
                hits += 1
                held.move_to_end(key)
            else:
                held[key] = None
        if len(held) != before:
            for _ in range(len(held) - self.capacity):  # this step's keys are at the other end
                held.popitem(last=False)
        return hits


class LeastFrequent(Policy):
    """LFU: out goes what was used least since it came in; among equals the least recent."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._count: dict[int, int] = {}
        self._by_count: dict[int, OrderedDict[int, None]] = {}

    def resident(self) -> set[int]:
        return set(self._count)

    def step(self, keys: Keys) -> int:
        present = [key for key in keys if key in self._count]
        for key in present:
            self._move(key, self._count[key] + 1)
        if len(present) == len(keys):
            return len(present)
        own = set(keys)
        for key in keys:
            if key not in self._count:
                if len(self._count) >= self.capacity:
                    self._evict(own)
                self._move(key, 1)
        return len(present)

    def _move(self, key: int, count: int) -> None:
        old = self._count.get(key)
        if old is not None:
            self._drop(key, old)
        self._count[key] = count
        self._by_count.setdefault(count, OrderedDict())[key] = None

    def _drop(self, key: int, count: int) -> None:
        keys = self._by_count[count]
        del keys[key]
        if not keys:
            del self._by_count[count]

    def _evict(self, own: set[int]) -> None:
        for count in sorted(self._by_count):
            for key in self._by_count[count]:
                if key not in own:
                    self._drop(key, count)
                    del self._count[key]
                    return


class S3Fifo(Policy):
    """S3-FIFO (SOSP 2023): a small queue of a tenth for newcomers, a main queue, a ghost queue."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._small_size = max(capacity // 10, 1)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghost: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}  # of what is held, at most 3

    def resident(self) -> set[int]:
        return set(self._uses)

    def step(self, keys: Keys) -> int:
        uses = self._uses
        hits = 0
        missing = []
        for key in keys:
            if key in uses:
                hits += 1
                if uses[key] < 3:
                    uses[key] += 1
            else:
                missing.append(key)
        if missing:
            own = set(keys)
            for key in missing:
                while len(uses) >= self.capacity:
                    self._evict(own)
                if key in self._ghost:
                    del self._ghost[key]
                    self._main.append(key)
                else:
                    self._small.append(key)
                uses[key] = 0
        return hits

    def _evict(self, own: set[int]) -> None:
        if (len(self._small) >= self._small_size or not self._main) and self._from_small(own):
            return
        if not self._from_main(own):  # all of it belongs to this step
            self._from_small(own)

    def _from_small(self, own: set[int]) -> bool:
        for _ in range(len(self._small)):
            key = self._small.popleft()
            if key in own:
                self._small.append(key)
            elif self._uses[key] > 1:
                self._uses[key] = 0
                self._main.append(key)
            else:
                del self._uses[key]
                self._ghost[key] = None
                if len(self._ghost) > self.capacity:
                    self._ghost.popitem(last=False)
                return True
        return False

    def _from_main(self, own: set[int]) -> bool:
        for _ in range(4 * len(self._main)):  # three rounds of credit at most, and the last
            key = self._main.popleft()
            if key in own:
                self._main.append(key)
            elif self._uses[key] > 0:
                self._uses[key] -= 1
                self._main.append(key)
            else:
                del self._uses[key]
                return True
        return False


class Sieve(Policy):
    """SIEVE (NSDI 2024): one queue in order of arrival, a visited bit, a hand that moves to the new end."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._visited: dict[int, bool] = {}
        # a ring linked both ways; -1 is between the newest and the oldest
        self._newer: dict[int, int] = {-1: -1}
        self._older: dict[int, int] = {-1: -1}
        self._hand = -1

    def resident(self) -> set[int]:
        return set(self._visited)

    def step(self, keys: Keys) -> int:
        visited = self._visited
        missing = []
        for key in keys:
            if key in visited:
                visited[key] = True
            else:
                missing.append(key)
        if missing:
            own = set(keys)
            for key in missing:
                if len(visited) >= self.capacity:
                    self._evict(own)
                newest = self._older[-1]
                self._newer[newest] = self._older[-1] = key
                self._newer[key], self._older[key] = -1, newest
                visited[key] = False
        return len(keys) - len(missing)

    def _evict(self, own: set[int]) -> None:
        hand = self._hand
        while hand == -1 or self._visited[hand] or hand in own:
            if hand != -1 and hand not in own:
                self._visited[hand] = False
            hand = self._newer[hand]
        newer, older = self._newer.pop(hand), self._older.pop(hand)
        self._newer[older], self._older[newer] = newer, older
        del self._visited[hand]
        self._hand = newer


class Arc(Policy):
    """ARC (FAST 2003): once used (t1) and used again (t2), with ghosts (b1, b2) that shift the border."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._t1: OrderedDict[int, None] = OrderedDict()
        self._t2: OrderedDict[int, None] = OrderedDict()
        self._b1: OrderedDict[int, None] = OrderedDict()
        self._b2: OrderedDict[int, None] = OrderedDict()
        self._p = 0.0

    def resident(self) -> set[int]:
        return {*self._t1, *self._t2}

    def step(self, keys: Keys) -> int:
        t1, t2 = self._t1, self._t2
        missing = []
        for key in keys:
            if key in t1:
                del t1[key]
                t2[key] = None
            elif key in t2:
                t2.move_to_end(key)
            else:
                missing.append(key)
        if missing:
            own = set(keys)
            for key in missing:
                self._take_in(key, own)
        return len(keys) - len(missing)

    def _take_in(self, key: int, own: set[int]) -> None:
        t1, t2, b1, b2, c = self._t1, self._t2, self._b1, self._b2, self.capacity
        full = len(t1) + len(t2) >= c
        if key in b1:
            self._p = min(self._p + max(len(b2) / len(b1), 1), c)
            if full:
                self._replace(own, False)
            del b1[key]
            t2[key] = None
        elif key in b2:
            self._p = max(self._p - max(len(b1) / len(b2), 1), 0)
            if full:
                self._replace(own, True)
            del b2[key]
            t2[key] = None
        else:
            if full:
                self._replace(own, False)
            t1[key] = None
            while len(t1) + len(b1) > c and b1:
                b1.popitem(last=False)
            while len(t1) + len(t2) + len(b1) + len(b2) > 2 * c and b2:
                b2.popitem(last=False)

    def _replace(self, own: set[int], in_b2: bool) -> None:
        t1 = len(self._t1)
        first = t1 > 0 and (t1 > self._p or (in_b2 and t1 == self._p))
        once, again = (self._t1, self._b1), (self._t2, self._b2)
        for held, ghosts in (once, again) if first else (again, once):
            for key in held:
                if key not in own:
                    del held[key]
                    ghosts[key] = None
                    return


class Belady(Policy):
    """The best possible: out goes what is used again last. It is told the whole trace beforehand."""

    def __init__(self, capacity: int, steps: Sequence[Keys]) -> None:
        super().__init__(capacity)
        never = len(steps)
        coming: dict[int, int] = {}
        self._next: list[list[int]] = [[]] * len(steps)
        for at in range(len(steps) - 1, -1, -1):
            keys = steps[at]
            self._next[at] = [coming.get(key, never) for key in keys]
            for key in keys:
                coming[key] = at
        self._at = 0
        self._held: dict[int, int] = {}  # key -> its next use
        self._furthest: list[
            tuple[int, int]
        ] = []  # (-next use, key); entries that changed are stale

    def resident(self) -> set[int]:
        return set(self._held)

    def step(self, keys: Keys) -> int:
        held, furthest = self._held, self._furthest
        before = len(held)
        hits = 0
        own: list[tuple[int, int]] = []
        for key, again in zip(keys, self._next[self._at], strict=True):
            if key in held:
                hits += 1
            held[key] = again
            own.append((-again, key))
        self._at += 1
        if len(held) != before:
            own_keys = set(keys)
            while len(held) > self.capacity:
                when, key = heapq.heappop(furthest)
                if key not in own_keys and held.get(key) == -when:
                    del held[key]
        for entry in own:
            heapq.heappush(furthest, entry)
        return hits
