"""Routing: what a model's config says about its experts. Keys differ by family; shapes are the truth.

Only used to ask for the smallest quota and to word errors. Routing itself is never changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: Experts per token, by family (config keys of mlx_lm.models.*).
TOP_K_KEYS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "num_selected_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
#: Routed experts per layer, by family.
EXPERTS_KEYS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)


def _numbers(config: Mapping[str, Any], keys: Iterable[str]) -> Iterator[int]:
    """Yield every number under one of `keys`, at any depth (`text_config`, `ffn_config`, ...)."""
    wanted = frozenset(keys)
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, keys)
        elif key in wanted:
            for one in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(one, int) and not isinstance(one, bool):
                    yield one


def top_k(*configs: Mapping[str, Any]) -> int:
    """Return how many experts one token is routed to, 1 when no config says it.

    The largest, where layers differ. The first config that says it counts: the file before
    defaults.
    """
    for config in configs:
        if found := [n for n in _numbers(config, TOP_K_KEYS) if n > 0]:
            return max(found)
    return 1


def declared_experts(config: Mapping[str, Any]) -> int:
    """Return how many experts a layer has, as the config says; 0 for a dense model."""
    return max(_numbers(config, EXPERTS_KEYS), default=0)
