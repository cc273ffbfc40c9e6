"""Waves: every pair once, in an order that can be promised as sorted."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expertd_mlx.waves import plan, rows_for_sorted_kernel, takes_sorted_kernel

E = 12


@given(
    ids=st.lists(st.integers(0, E - 1), min_size=1, max_size=200),
    resident=st.lists(st.booleans(), min_size=E, max_size=E),
    size=st.integers(1, E),
)
def test_waves_hold_every_pair_once_and_sorted(
    ids: list[int], resident: list[bool], size: int
) -> None:
    flat, here = np.array(ids, np.intp), np.array(resident)
    waves = plan(flat, np.bincount(flat, minlength=E), here)

    assert sorted(waves.experts) == sorted(set(ids))  # each expert once: pinned once (B39)
    hints = here[waves.experts]
    assert not (np.diff(hints.astype(int)) > 0).any()  # resident ones first
    seen: list[int] = []
    for first in range(0, len(waves.experts), size):
        stop = min(first + size, len(waves.experts))
        pairs = waves.slice(first, stop)
        ranks = waves.ranks[pairs]
        assert (np.diff(ranks) >= 0).all()
        assert first <= ranks.min()
        assert ranks.max() < stop
        assert (flat[waves.order[pairs]] == waves.experts[ranks]).all()
        seen.extend(waves.order[pairs])
    assert sorted(seen) == list(range(len(ids)))
    assert (waves.order[waves.unsort()] == np.arange(len(ids))).all()


def test_pairs_of_one_expert_keep_their_order() -> None:
    ids = np.array([3, 1, 3, 3, 1])
    waves = plan(ids, np.bincount(ids, minlength=4), np.ones(4, bool))

    assert waves.order.tolist() == [1, 4, 0, 2, 3]


def test_the_sorted_kernel_is_decided_by_the_whole_model() -> None:
    assert not takes_sorted_kernel(63, 8, quantized=True)
    assert not takes_sorted_kernel(63, 8, quantized=False)
    assert takes_sorted_kernel(64, 16, quantized=True)
    assert not takes_sorted_kernel(64, 17, quantized=True)
    assert takes_sorted_kernel(64, 17, quantized=False)
    assert rows_for_sorted_kernel(1) == 16
    assert rows_for_sorted_kernel(5) == 20
