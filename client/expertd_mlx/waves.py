"""Waves: which pairs of (token, expert) go through the experts together.

Pure arithmetic over numpy arrays: no MLX, no client. A prefill may route to more experts than the
worker may hold at once, so its pairs are sorted by expert and cut into waves; each expert
belongs to exactly one wave, so it is pinned once per layer and batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertd_protocol.layout import Ints

#: From this many pairs on, mlx-lm sorts them by expert (`switch_layers.SwitchGLU`).
SORT_PAIRS = 64
#: Sorted quantised gathers of more rows are wrong on some GPUs unless they are whole blocks of 64
#: (ml-explore/mlx#3856), so calls are cut here.
MAX_ROWS = 32768


@dataclass(frozen=True)
class Waves:
    """All pairs of one call of a layer, in the order of `experts`.

    `experts[i]` has rank i; pair `order[j]` of the flattened ids has rank `ranks[j]`, and `ranks`
    never decreases. Pairs of rank i are `ends[i-1]` to `ends[i]`.
    """

    experts: Ints
    order: Ints
    ranks: Ints
    ends: Ints

    @property
    def pairs(self) -> int:
        return len(self.order)

    def slice(self, first: int, stop: int) -> slice:
        """Return where the pairs of ranks first to stop - 1 are."""
        return slice(int(self.ends[first - 1]) if first else 0, int(self.ends[stop - 1]))

    def unsort(self) -> npt.NDArray[np.uint32]:
        """Return, for each pair in its first order, where it stands now."""
        where = np.empty(self.pairs, np.uint32)
        where[self.order] = np.arange(self.pairs, dtype=np.uint32)
        return where


def plan(ids: Ints, counts: Ints, resident: npt.NDArray[np.bool_]) -> Waves:
    """Order the pairs: resident experts first, so that they are used before anything is read.

    Args:
        ids: expert of each pair, flat.
        counts: pairs of each expert, [E].
        resident: whether each expert can be used without waiting, [E]; a hint.
    """
    wanted = np.flatnonzero(counts)
    here = resident[wanted]
    experts = np.concatenate((wanted[here], wanted[~here]))
    rank_of = np.empty(len(counts), np.intp)
    rank_of[experts] = np.arange(len(experts))
    ranks = rank_of[ids]
    order = np.argsort(ranks, kind="stable")
    return Waves(experts, order, ranks[order], np.cumsum(counts[experts]))


def takes_sorted_kernel(pairs: int, experts: int, quantized: bool) -> bool:
    """Say whether a resident run would reach the kernel for sorted rows on Metal.

    MLX takes it for sorted ids of at least 16 rows, and for quantised weights only when there are 4
    rows or more per expert *in the array passed* (mlx/backend/metal/quantized.cpp,
    GatherQMM::eval_gpu). Its sums differ in the last bits, so a wave must fall on the side the
    whole model would fall on.
    """
    return pairs >= SORT_PAIRS and (not quantized or pairs // experts >= 4)


def rows_for_sorted_kernel(experts: int) -> int:
    """Return the fewest rows that reach the sorted kernel with `experts` in the array passed."""
    return max(16, 4 * experts)
