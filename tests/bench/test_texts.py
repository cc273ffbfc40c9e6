"""bench/texts.py: what sessions say."""

from __future__ import annotations

import numpy as np
import pytest
from bench import texts

from tests.bench.tiny import SHIPPED


def test_different_texts_are_disjoint_parts_and_identical_ones_are_the_same() -> None:
    found = texts.find(SHIPPED)
    different = found.sessions("different", 4, 50)
    identical = found.sessions("identical", 4, 50)

    assert [len(ids) for ids in different + identical] == [50] * 8
    assert all((ids == identical[0]).all() for ids in identical)
    assert not any((ids == different[0]).all() for ids in different[1:])
    assert texts.union_over_sum(identical) == 0.25
    assert 0.25 < texts.union_over_sum(different) <= 1
    assert found.kinds == ("different", "identical")


def test_an_expert_that_was_not_routed_is_no_look_up() -> None:
    row = np.array([7, 0xFFFF, 3, 7], np.uint16)
    assert texts.experts_of(row) == [3, 7]
    assert texts.expert_set(row[None, None]) == {(0, 3), (0, 7)}


def test_no_trace_is_one_sentence(tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(SystemExit, match="has none of the traces"):
        texts.find(tmp_path_factory.mktemp("empty"))
