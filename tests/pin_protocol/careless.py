"""What tests of the pin protocol do to a worker: a seam where others may run, and faults that must show.

A slot that is filled with its `stamp` says in every word whose it is.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from expertd_protocol.layout import U64, Ints


class Fault(Enum):
    """What a careless worker leaves out."""

    PUBLISH = auto()
    SECOND_LOOK = auto()
    EVALUATED = auto()


def stamp(layer: int, expert: int, generation: int) -> int:
    """What every u32 of a slot holds."""
    return layer << 28 | expert << 20 | generation & 0xFFFFF


class Row:
    """A row of the directory with a seam between the look and the hazards."""

    def __init__(self, row: U64, between: Callable[[], object], *, looks_again: bool) -> None:
        self._row = row
        self._between = between
        self._looks_again = looks_again
        self._seen: U64 | None = None

    def take(self, experts: Ints, axis: None, out: U64, mode: str) -> None:
        self._seen = self._row.take(experts)
        self._between()
        out[:] = self._seen

    def __getitem__(self, experts: Ints) -> U64:
        seen, self._seen = self._seen, None
        return self._row[experts] if self._looks_again or seen is None else seen
