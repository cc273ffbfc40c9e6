"""Routing: top-k by the keys of many families."""

from __future__ import annotations

from typing import Any

import pytest

from expertd_mlx.routing import declared_experts, top_k


@pytest.mark.parametrize(
    ("config", "k"),
    [
        ({"num_experts_per_tok": 8}, 8),
        ({"num_experts_per_token": 16}, 16),
        ({"text_config": {"top_k_experts": 4, "num_experts": 64}}, 4),
        ({"moe_topk": [1, 2, 8, 4]}, 8),
        ({"ffn_config": {"moe_top_k": 4}}, 4),
        ({"moe_k": 6}, 6),
        ({"hidden_size": 64}, 1),
        ({"num_experts_per_tok": None}, 1),
        ({"num_experts_per_tok": True}, 1),
    ],
)
def test_top_k_is_found_by_the_key_of_the_family(config: dict[str, Any], k: int) -> None:
    assert top_k(config) == k


def test_the_file_comes_before_the_defaults_of_the_family() -> None:
    assert top_k({"num_experts_per_tok": 2}, {"num_experts_per_tok": 4}) == 2
    assert top_k({}, {"num_experts_per_tok": 4}) == 4


@pytest.mark.parametrize(
    ("config", "n"),
    [
        ({"num_local_experts": 8}, 8),
        ({"text_config": {"n_routed_experts": 256}}, 256),
        ({"num_experts": [8, 16]}, 16),
        ({"n_routed_experts": None}, 0),
        ({}, 0),
    ],
)
def test_how_many_experts_a_config_declares(config: dict[str, Any], n: int) -> None:
    assert declared_experts(config) == n
