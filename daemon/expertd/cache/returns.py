"""Returns: how likely an expert comes back, by how often and how long ago a session used it.

A table that is learned while it runs, over all sessions and layers of one model: every visit of a layer
tells for each of its experts whether it was used, so a few passes fill it. One half-life does not fit all
models; the table needs none, because it counts what age and frequency were worth here. Plain
arrays of a fixed size, no clock.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from expertd.cache.recall import F32, F64, Bools

#: Levels of frequency: powers of two around the even distribution, from 1/32 of it.
LEVELS, LEVEL_LEAST = 8, -5
#: Levels of age: powers of two of the layer's visits since the last use.
AGES = 16
#: Age of what was never used.
NEVER = float(1 << (AGES - 1))
#: What was counted is worth this much less with every look (half after 1,400).
FADE = 0.9995
#: Guesses that each cell begins with: as often as the frequency says.
GUESSES = 30


class Returns:
    """Counts of uses and of visits, by age and frequency."""

    def __init__(self, experts: int) -> None:
        self._even = 1 / experts
        middle = 2.0 ** (np.arange(LEVELS) + LEVEL_LEAST + 0.5)
        self._guess: F64 = np.tile(np.minimum(middle * self._even, 0.9), AGES) * GUESSES
        self._uses: F64 = np.zeros(AGES * LEVELS)
        self._visits: F64 = np.zeros(AGES * LEVELS)

    def learn(self, cells: npt.NDArray[np.uint8], used: Bools) -> None:
        """Count one visit of some layers: the cell each expert was in, and whether it was used."""
        self._visits *= FADE
        self._visits += np.bincount(cells.ravel(), minlength=AGES * LEVELS)
        self._uses *= FADE
        self._uses += np.bincount(cells[used], minlength=AGES * LEVELS)

    def cells(self, log_ages: F32, averages: F32) -> npt.NDArray[np.uint8]:
        """Return the cell of each expert, by the binary logarithm of its age."""
        levels = np.log2(averages * np.float32(1 / self._even) + np.float32(0.02)) - LEVEL_LEAST
        cells = log_ages.astype(np.uint8)
        np.minimum(cells, AGES - 1, out=cells)
        cells *= LEVELS
        cells += np.clip(levels, 0, LEVELS - 1).astype(np.uint8)
        return cells

    def chances(self, cells: npt.NDArray[np.uint8], log_ages: F32) -> F32:
        """Return the chance of a use on the next visit. Within a cell the more recent comes first."""
        table = ((self._uses + self._guess) / (self._visits + GUESSES)).astype(np.float32)
        chances: F32 = table[cells] * (1 - np.float32(0.01) * log_ages)
        return chances
