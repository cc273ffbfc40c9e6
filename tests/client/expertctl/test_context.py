"""The context: what config.json says, and what fits."""

from __future__ import annotations

from typing import Any

import pytest

from expertctl.context import check_context, context_length, tokens_left
from expertd_protocol.errors import ContextExceeded


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({}, None),
        ({"max_position_embeddings": 1024}, 1024),
        ({"max_position_embeddings": "1024"}, None),
        ({"text_config": {"max_position_embeddings": 262144}}, 262144),
        ({"max_position_embeddings": 8, "text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": 1024, "rope_scaling": None}, 1024),
        # Qwen3 with YaRN: the stretched length is not in the config
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        # deepseek_v3: it is
        (
            {
                "max_position_embeddings": 163840,
                "rope_scaling": {
                    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                },
            },
            163840,
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}},
            8192,
        ),
        # llama3 scaling: max_position_embeddings is already the long one
        (
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
                },
            },
            131072,
        ),
    ],
)  # fmt: skip
def test_the_context_counts_nesting_and_rope_scaling(
    config: dict[str, Any], length: int | None
) -> None:
    assert context_length(config) == length


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers() -> None:
    with pytest.raises(ContextExceeded, match=r"2,002 tokens.* 1,024; .* by 978 tokens"):
        check_context(2002, 1024)


@pytest.mark.parametrize(("tokens", "context"), [(1024, 1024), (1, 1024), (10**6, None)])
def test_a_prompt_that_fits_is_accepted(tokens: int, context: int | None) -> None:
    check_context(tokens, context)


@pytest.mark.parametrize(
    ("wanted", "prompt", "context", "left"),
    [(256, 10, None, 256), (256, 10, 1024, 256), (256, 1000, 1024, 25), (256, 1024, 1024, 1)],
)
def test_no_more_is_written_than_the_context_holds(
    wanted: int, prompt: int, context: int | None, left: int
) -> None:
    assert tokens_left(wanted, prompt, context) == left
