"""Routing: top-k by the keys of many families."""

from __future__ import annotations

from typing import Any

import pytest

from expertd_client.routing import declared_experts, top_k


@pytest.mark.parametrize(
    ("config", "k"),
    [
        ({"num_experts_per_tok": 8}, 8),
        ({"num_experts_per_token": 16}, 16),
        ({"text_config": {"top_k_experts": 4, "num_experts": 64}}, 4),
        ({"moe_topk": [1, 2, 8, 4]}, 8),
        ({"ffn_config": {"moe_top_k": 4}}, 4),
        ({"moe_k": 6}, 6),
        ({"num_selected_experts": 2}, 2),
        ({"text_config": {"ffn_config": {"moe_top_k": 4}}}, 4),
        ({"num_experts_per_tok": 8, "text_config": {"num_experts_per_tok": 4}}, 4),
        ({"num_experts_per_tok": 8, "text_config": {"num_experts_per_tok": 0}}, 8),
        ({"hidden_size": 64}, None),
        ({"num_experts_per_tok": None}, None),
        ({"num_experts_per_tok": 0}, None),
        ({"num_experts_per_tok": True}, None),
        ({"num_experts_per_tok": "8"}, None),
    ],
)
def test_top_k_is_found_by_the_key_of_the_family(config: dict[str, Any], k: int | None) -> None:
    assert top_k(config) == k


def test_the_file_comes_before_the_defaults_of_the_family() -> None:
    assert top_k({"num_experts_per_tok": 2}, {"num_experts_per_tok": 4}) == 2
    assert top_k({}, {"num_experts_per_tok": 4}) == 4
    assert top_k({}, {}) is None


@pytest.mark.parametrize(
    ("config", "n"),
    [
        ({"num_local_experts": 8}, 8),
        ({"text_config": {"n_routed_experts": 256}}, 256),
        ({"num_experts": [8, 16]}, 16),
        ({"ffn_config": {"moe_num_experts": 16}}, 16),
        ({"num_moe_experts": 32}, 32),
        ({"num_routed_experts": 64}, 64),
        ({"vision_config": {"num_experts": 256}, "text_config": {"num_experts": 128}}, 128),
        ({"n_routed_experts": None}, None),
        ({"num_experts": 1}, None),
        ({"num_experts": 0}, None),
        ({}, None),
    ],
)
def test_how_many_experts_a_config_declares(config: dict[str, Any], n: int | None) -> None:
    assert declared_experts(config) == n
