"""Prefetch: what workers wish for, and what became of experts that were read before anybody asked (rule 21).

A worker wishes for experts of the layer it comes to next. A new wish replaces the session's last one, and a
wish whose layer has come is void: dropping it costs nothing. An expert that was ordered is **early** until
it is known what it was worth: a request came while it was being read (late), the worker's page says that
it was used (useful), or its layer has passed without (wasted). Every one becomes exactly one of the three.

Plain state that takes `now`; the cache orders, publishes and retires. Only counts are kept for ever: there is
one wish per session, and early experts are as many as the cache lets be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from expertd.cache.requests import Holder
from expertd_protocol.ids import ExpertKey, SessionId
from expertd_protocol.layout import U32

#: A worker that was not heard of for so long has passed its layer, or stands still.
PATIENCE_SECONDS = 1.0


@dataclass
class Wish:
    """Experts of one layer, and the layer's uses in the worker's page when it came."""

    layer: int
    experts: list[int]
    uses: U32


@dataclass
class Early:
    """An expert in a slot that was taken for a wish."""

    key: ExpertKey
    slab: int
    slot: int
    session: SessionId
    #: What the worker's page said of the expert when it wished: another number means that it was used.
    use: int
    ordered_at: float
    ready: bool = False
    #: Its layer has passed while it was still being read.
    passed: bool = False


class Prefetch:
    """The wishes and early experts of one model.

    Args:
        holders: the sessions, as the cache has them.
    """

    def __init__(self, layers: int, holders: Mapping[SessionId, Holder]) -> None:
        #: Experts that were ordered, by layer; `useful + late + wasted + len(early)` are as many.
        self.ordered = np.zeros(layers, np.int64)
        self.useful = self.late = self.wasted = 0
        self.early: dict[ExpertKey, Early] = {}
        self._holders = holders
        self._wishes: dict[SessionId, Wish] = {}

    # --- wishes ------------------------------------------------------------------------------
    def wish(self, session: SessionId, layer: int, experts: Sequence[int]) -> None:
        """Replace the session's wish."""
        self.take_back(session)
        self._wishes[session] = Wish(
            layer, list(experts)[::-1], self._holders[session].uses[layer].copy()
        )

    def take_back(self, session: SessionId) -> None:
        """Drop the session's wish."""
        self._wishes.pop(session, None)

    def next(self) -> tuple[SessionId, ExpertKey, int] | None:
        """Take the next expert that is still wished for: (session, expert, use); sessions take turns."""
        while self._wishes:
            session = next(iter(self._wishes))
            wish = self._wishes.pop(session)
            uses = self._holders[session].uses[wish.layer]
            if wish.experts and (uses == wish.uses).all():  # else its layer has come
                expert = wish.experts.pop()
                self._wishes[session] = wish
                return session, ExpertKey(wish.layer, expert), int(wish.uses[expert])
        return None

    # --- early experts -----------------------------------------------------------------------
    def order(self, early: Early) -> None:
        """Remember an expert that is being read from now on."""
        self.ordered[early.key.layer] += 1
        self.early[early.key] = early

    def in_slab(self, slab: int) -> list[int]:
        """Return the slots of a slab that hold early experts, the oldest first."""
        return [early.slot for early in self.early.values() if early.slab == slab]

    def asked(self, key: ExpertKey) -> None:
        """Note that somebody asked for an expert, whatever its state."""
        early = self.early.pop(key, None)
        if early is not None and early.ready:
            self.useful += 1
        elif early is not None:
            self.late += 1

    def filled(self, key: ExpertKey) -> list[Early]:
        """Note that an expert was read; return it when nobody is going to use it by now."""
        early = self.early.get(key)
        if early is None:
            return []
        early.ready = True
        return self._settle([early]) if early.passed else []

    def lost(self, key: ExpertKey) -> None:
        """Note that an expert could not be read, or that its slot was taken for another."""
        if self.early.pop(key, None) is not None:
            self.wasted += 1

    def passed(self, session: SessionId, layer: int | None = None) -> list[Early]:
        """Settle what was read for a session that was heard of again; return what it did not use.

        Args:
            layer: where it is now, whose experts it may still use; None where it has been there.
        """
        return self._settle(
            [e for e in self.early.values() if e.session == session and e.key.layer != layer]
        )

    def overdue(self, now: float) -> list[Early]:
        """Settle what was ordered too long ago, whatever its session does; return what was not used."""
        late = []
        for early in self.early.values():
            if early.ordered_at > now - PATIENCE_SECONDS:
                break  # the others came later
            late.append(early)
        return self._settle(late)

    def _settle(self, passed: Iterable[Early]) -> list[Early]:
        return list(self._unused(passed))

    def _unused(self, passed: Iterable[Early]) -> Iterator[Early]:
        for early in passed:
            if not early.ready:
                early.passed = True
                continue
            del self.early[early.key]
            holder = self._holders.get(early.session)
            if holder is not None and int(holder.uses[early.key]) != early.use:
                self.useful += 1
            else:
                self.wasted += 1
                yield early

    def __repr__(self) -> str:
        return (
            f"<Prefetch ordered={int(self.ordered.sum())} useful={self.useful} late={self.late} "
            f"wasted={self.wasted} early={len(self.early)} wishes={len(self._wishes)}>"
        )
