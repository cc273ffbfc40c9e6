"""Routing: what a model's config says about its experts. Keys differ by family; shapes are the truth.

Only used to ask for the smallest quota, to show figures and to word errors. Routing itself is never
changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

#: Experts per token, by family (config keys of mlx_lm.models.*).
TOP_K_KEYS = frozenset({
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "num_selected_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
})  # fmt: skip
#: Routed experts per layer, by family.
EXPERTS_KEYS = frozenset({
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_moe_experts",
    "num_routed_experts",
})  # fmt: skip
#: Where the config of the language model is, when the model is more than that.
_LANGUAGE_KEYS = ("text_config", "language_config", "llm_config")


def language_configs(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the config of the language model first where it is nested, then all of it."""
    nested = (config.get(key) for key in _LANGUAGE_KEYS)
    return (*(part for part in nested if isinstance(part, Mapping)), config)


def top_k(*configs: Mapping[str, Any]) -> int | None:
    """Return how many experts one token is routed to, None when no config says it.

    The largest, where layers differ. The first config that says it counts: the file before
    defaults.
    """
    return next((k for config in configs if (k := _largest(config, TOP_K_KEYS))), None)


def declared_experts(config: Mapping[str, Any]) -> int | None:
    """Return how many routed experts a layer has, as the config says; None for a dense model."""
    n = _largest(config, EXPERTS_KEYS)
    return n if n > 1 else None


def _largest(config: Mapping[str, Any], keys: frozenset[str]) -> int:
    """Return the largest number under one of `keys`, the language model's before others; else 0."""
    for part in language_configs(config):
        if (n := max(_numbers(part, keys), default=0)) > 0:
            return n
    return 0


def _numbers(config: Mapping[str, Any], keys: frozenset[str]) -> Iterator[int]:
    """Yield every number under one of `keys`, at any depth (`ffn_config` of dbrx, for one)."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, keys)
        elif key in keys:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(one, int) and not isinstance(one, bool):
                    yield one
