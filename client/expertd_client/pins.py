"""What one worker holds in one arena: publish, re-read, check, clear hazards (rules 1, 2, 3, 6).

Every MoE layer of every token comes through here, so buffers and views are made once and reused. It
sends nothing, waits for nothing, and writes nothing but the worker's own page. Hazards are words
of that page, which the daemon scans before it reuses a slot; clearing them is how to let go.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import numpy as np

from expertd_client.arena import Arena
from expertd_protocol.errors import ProtocolError
from expertd_protocol.fence import fence
from expertd_protocol.layout import (
    U64,
    Counter,
    Header,
    Ints,
    Phase,
    unpack_word,
    word_generations,
    word_slabs,
    word_slots,
)

_ACK, _VERSION = int(Header.ACK), int(Header.COUNTER_VERSION)
#: x86 orders everything but a store before a later load, the case of rule 1; arm64 orders nothing.
_WEAKLY_ORDERED = platform.machine().lower() not in ("x86_64", "amd64", "i686")
_MASK32 = 0xFFFF_FFFF
#: Up to here a plain loop over memoryviews beats numpy's fancy indexing.
_FEW = 16


class Window:
    """Positions [base, base + n) of the hazards, as an array and as a memoryview."""

    __slots__ = ("hazards", "view")

    def __init__(self, hazards: U64) -> None:
        self.hazards = hazards
        self.view = hazards.data  # compares eight words with an array in a tenth of numpy's time


class Pins:
    """The pins of one worker in `arena`; `held` of them are complete."""

    def __init__(self, arena: Arena) -> None:
        layers, experts = arena.directory.shape
        page = arena.page
        self.arena = arena
        self.quota = arena.quota
        self.held = 0
        self._reach = 0  # hazards from here on are 0, whatever interrupted us
        self._layers, self._experts = layers, experts
        self._pinned = 0  # the number of the last complete pin, modulo 2^32
        #: Hits that are not in `_totals` yet, and their bytes; then what the page shows. By phase.
        self._hits, self._hit_bytes = [0] * len(Phase), [0] * len(Phase)
        self._totals = [[0] * len(Counter) for _ in Phase]
        self._version = 0
        self._rows = tuple(arena.directory)
        self._expert_bytes = arena.source.expert_bytes
        self._first_slots = [arena.first_slot(layer) for layer in range(layers)]
        self._whole = [False] * layers
        #: Slots of the slabs that a layer may live in, by slab.
        self._slots = [
            {n: s.layout.slots for n, s in enumerate(arena.slabs) if s.layout.parts == parts}
            for parts in arena.source.parts
        ]
        self._seen: U64 = np.zeros(0, np.uint64)  # second read of a `hold` that returned None
        self._windows: dict[tuple[int, int], Window] = {}
        self._hazards = page.hazards
        self._uses = tuple(page.uses)
        self._generations = tuple(slab.generations.data for slab in arena.slabs)
        self._header = page.header.data
        self._counters = page.counters

    def hold(self, layer: int, experts: Ints, phase: int) -> U64 | None:
        """Pin `experts` of `layer` when all are resident, and return their words; else None.

        After None their hazards are published nevertheless: `missing` says which are pinned. More
        than the quota allows, or none, is None with nothing published. Ids that do not exist are None
        or an IndexError: `check` first says so properly, on the slow path.
        """
        n, base = len(experts), self.held
        window = self._windows.get((base, n))
        if window is None:
            if not 0 < n <= self.quota - base:
                return None
            window = self._window(base, n)
        row = self._rows[layer]
        self._reach = base + n
        row.take(experts, None, window.hazards, "clip")  # rule 1: read and publish,
        fence()
        words: U64 = row[experts]  # and read again
        if window.view != words or 0 in words.tolist():
            self._seen = words
            return None
        self.held = base + n
        self._pinned = self._uses[layer][experts] = self._pinned + 1 & _MASK32
        self._hits[phase] += n  # `count` writes them: three counters here would cost 1 us
        self._hit_bytes[phase] += n * self._expert_bytes[layer]
        return words

    def check(self, layer: int, experts: Ints) -> None:
        """Raise `ProtocolError` when the model has no such layer or experts."""
        low, high = int(experts.min()), int(experts.max())
        if not (0 <= layer < self._layers and low >= 0 and high < self._experts):
            raise ProtocolError(
                f"layer {layer}, experts {low} to {high} wanted; the model has "
                f"{self._layers} MoE layers of {self._experts} experts"
            )

    def is_whole(self, layer: int) -> bool:
        """Rule 20: tell whether all experts of `layer` are in memory for good."""
        first = self._first_slots[layer]
        if first is not None and not self._whole[layer]:
            words = self._rows[layer].copy()
            fence()  # the experts are read after their words
            home = np.arange(first, first + self._experts)
            self._whole[layer] = bool((word_slots(words) == home).all())
        return self._whole[layer]

    def missing(self, n: int) -> Ints:
        """Return the positions of the last `hold` that are not pinned, and clear their hazards."""
        hazards = self._window(self.held, n).hazards
        positions: Ints = np.flatnonzero((hazards == 0) | (hazards != self._seen))
        hazards[positions] = 0
        return positions

    def grant(
        self, seq: int, layer: int, experts: Ints, missing: Ints, words: Sequence[int]
    ) -> Ints:
        """Take the daemon's reply to `seq` for positions `missing`; return those still not pinned.

        All experts of a layer are used from one slab, that of the reply: what was found elsewhere,
        before the layer moved (rule 22), is let go and must be asked for again.

        Raises:
            ProtocolError: a word that points outside of the slabs that fit the layer.
        """
        if len(words) != len(missing):
            raise ProtocolError(
                f"the daemon granted {len(words)} experts, {len(missing)} were asked for"
            )
        slabs = set()
        for word in words:
            if not 0 < word < 1 << 64:
                raise ProtocolError(f"the daemon granted {word}, which is no directory word")
            _, slab, slot = unpack_word(word)
            slots = self._slots[layer].get(slab, 0)
            if not 0 <= slot < slots:
                raise ProtocolError(
                    f"the daemon granted slot {slot} of slab {slab} for layer {layer}, "
                    f"which has {slots} slots for it"
                )
            slabs.add(slab)
        if len(slabs) > 1:
            raise ProtocolError(
                f"the daemon granted layer {layer} from slabs {sorted(slabs)} at once"
            )
        hazards = self._window(self.held, len(experts)).hazards
        hazards[missing] = words
        fence()
        changed = missing[hazards[missing] != self._rows[layer][experts[missing]]]
        again: Ints = np.union1d(changed, np.flatnonzero(word_slabs(hazards) != slab))
        hazards[again] = 0
        self.acknowledge(seq)
        return again

    def complete(
        self, layer: int, experts: Ints, phase: int, joins: int, misses: int, waited_ns: int,
        requests: int,
    ) -> U64:  # fmt: skip
        """Count a pin that needed the daemon, and return its words."""
        n = len(experts)
        words = self._window(self.held, n).hazards.copy()
        self.held += n
        self._pinned = self._uses[layer][experts] = self._pinned + 1 & _MASK32
        hits, nbytes = n - joins - misses, self._expert_bytes[layer]
        self.count(
            phase,
            {
                Counter.LOOKUPS: n,
                Counter.HITS: hits,
                Counter.JOINS: joins,
                Counter.MISSES: misses,
                Counter.HIT_BYTES: hits * nbytes,
                Counter.MISS_BYTES: (joins + misses) * nbytes,
                Counter.WAIT_NS: waited_ns,
                Counter.REQUESTS: requests,
            },
        )
        return words

    def abandon(self) -> None:
        """Clear the hazards of a pin that did not complete; complete ones stay."""
        self._hazards[self.held : self._reach] = 0
        self._reach = self.held

    def stale(self) -> bool:
        """Rule 6: tell whether a slot that is held changed its generation, and count it if so."""
        fence()  # what was read from the slots was read before this look
        words, generations = self._hazards[: self.held], self._generations
        try:
            if self.held <= _FEW:
                same = True
                for word in words.tolist():
                    generation, slab, slot = unpack_word(word)
                    same &= generations[slab][slot] == generation
            else:
                slabs, slots = word_slabs(words), word_slots(words)
                wanted = word_generations(words)
                same = all(
                    (self.arena.slabs[slab].generations[slots[slabs == slab]]
                     == wanted[slabs == slab]).all()
                    for slab in set(slabs.tolist())
                )  # fmt: skip
        except IndexError:  # a word that points outside of the arena holds nothing
            same = False
        if not same:
            self._header[Header.MISMATCHES] += 1
        return not same

    def clear(self) -> None:
        """Rule 3: let go of everything. Only after the output that used it was evaluated."""
        if self._reach:
            if _WEAKLY_ORDERED:  # loads of the slots must not move behind their release
                fence()
            self._hazards.fill(0)  # the whole of it, three times as fast as a slice
            self.held = self._reach = 0

    def acknowledge(self, seq: int) -> None:
        """Tell the daemon that the grants up to `seq` are hazards by now, or given up."""
        fence()
        self._header[_ACK] = seq

    def count(self, phase: int, grown: dict[Counter, int]) -> None:
        """Add `grown` and the hits since the last time to the counters of `phase`.

        The version is odd meanwhile, so that no reader sees half of it. The sums are kept here and
        written whole: what a Ctrl-C leaves half written, the next call writes again.
        """
        totals, hits = self._totals[phase].copy(), self._hits[phase]
        totals[Counter.LOOKUPS] += hits
        totals[Counter.HITS] += hits
        totals[Counter.HIT_BYTES] += self._hit_bytes[phase]
        for counter, by in grown.items():
            totals[counter] += by
        self._hits[phase] = self._hit_bytes[phase] = 0
        self._totals[phase] = totals
        self._header[_VERSION] = self._version + 1
        fence()
        self._counters[phase] = totals
        fence()
        self._version += 2
        self._header[_VERSION] = self._version

    def publish(self) -> None:
        """Bring the counters in the page up to date; a miss and the end of a pass do it, too."""
        for phase in Phase:
            self.count(phase, {})

    def release(self) -> None:
        """Drop every view of the arena, so that it can be unmapped; the end of this object (D16)."""
        self.publish()
        self._windows.clear()
        for name in [n for n in self.__dict__ if n != "arena"]:
            del self.__dict__[name]

    def set_header(self, word: Header, value: int) -> None:
        self._header[word] = value

    def get_header(self, word: Header) -> int:
        return int(self._header[word])

    def _window(self, base: int, n: int) -> Window:
        window = self._windows.get((base, n))
        if window is None:
            if n < 1 or base + n > self.quota:
                raise ProtocolError(
                    f"{n} experts cannot be pinned: {base} of a quota of {self.quota} are held"
                )
            window = Window(self._hazards[base : base + n])
            self._windows[base, n] = window
        return window
