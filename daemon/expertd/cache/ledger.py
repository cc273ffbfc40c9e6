"""The account of the one budget: what exists in memory, by kind, and the highest it ever was.

Bytes are taken before they are allocated and given back after they are freed, so the sum never
passes the budget, not even for a moment.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

from expertd_protocol.errors import BudgetExhausted

Kind = Literal["slab", "directory", "page", "read_buffer"]


class Ledger:
    """Plain numbers; raises instead of overdrawing."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.peak_bytes = 0
        self._held: Counter[str] = Counter()

    @property
    def committed_bytes(self) -> int:
        return self._held.total()

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.committed_bytes

    def held(self, kind: Kind) -> int:
        return self._held[kind]

    def take(self, kind: Kind, nbytes: int, what: str) -> None:
        """Take `nbytes` for `what`.

        Raises:
            BudgetExhausted: the budget would be exceeded; nothing is taken.
        """
        if nbytes > self.free_bytes:
            held = ", ".join(f"{k} {n:,}" for k, n in sorted(self._held.items()) if n)
            raise BudgetExhausted(
                f"{what} needs {nbytes:,} bytes, {self.free_bytes:,} of the budget of "
                f"{self.budget_bytes:,} are free (held: {held or 'nothing'}); "
                "end a session or give a larger budget"
            )
        self._held[kind] += nbytes
        self.peak_bytes = max(self.peak_bytes, self.committed_bytes)

    def give(self, kind: Kind, nbytes: int) -> None:
        if nbytes > self._held[kind]:
            raise ValueError(f"{nbytes} bytes of {kind} given back, {self._held[kind]} were taken")
        self._held[kind] -= nbytes

    def __repr__(self) -> str:
        return (
            f"<Ledger {self.committed_bytes:,} of {self.budget_bytes:,} bytes {dict(self._held)}>"
        )
