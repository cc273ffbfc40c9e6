"""The context: how many tokens a model can look at, and what that means for a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expertd_client.routing import language_configs
from expertd_protocol.errors import ContextExceeded

_LENGTH_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions")
#: These rope types already count their stretching in max_position_embeddings.
_NOT_STRETCHED = ("default", "llama3", "su", "longrope", "mrope", "proportional")


def context_length(config: Mapping[str, Any]) -> int | None:
    """Return how many tokens the model can look at, rope scaling included; None when unsaid.

    `original x factor` wins over max_position_embeddings when it is larger: some configs carry
    the stretched length already (deepseek_v3, gpt-oss), others do not (Qwen3 with YaRN).
    """
    parts = language_configs(config)
    length = next(
        (n for part in parts for key in _LENGTH_KEYS if (n := _positive(part, key))), None
    )
    if length is None:
        return None
    for part in parts:
        rope = part.get("rope_scaling") or part.get("rope_parameters")
        if not isinstance(rope, Mapping):
            continue
        kind = rope.get("rope_type") or rope.get("type") or "default"
        factor = rope.get("factor")
        if kind in _NOT_STRETCHED or not isinstance(factor, int | float):
            continue
        base = _positive(rope, "original_max_position_embeddings") or length
        return max(length, int(base * factor))
    return length


def _positive(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def check_context(prompt_tokens: int, context: int | None) -> None:
    """Refuse a prompt that the model cannot look at.

    Raises:
        ContextExceeded: the sentence has both numbers.
    """
    if context is not None and prompt_tokens > context:
        raise ContextExceeded(
            f"the prompt has {prompt_tokens:,} tokens, the context of this model is "
            f"{context:,}; shorten the prompt by {prompt_tokens - context:,} tokens"
        )


def tokens_left(max_tokens: int, prompt_tokens: int, context: int | None) -> int:
    """Return how many tokens may be written: the last one needs no room of its own."""
    if context is None:
        return max_tokens
    return max(1, min(max_tokens, context - prompt_tokens + 1))
