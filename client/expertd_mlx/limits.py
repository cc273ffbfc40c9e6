"""Limits: what MLX may keep to itself in a worker, beside the arena.

Two of MLX's defaults are made for a process that has the machine to itself: its pool of freed
buffers may grow to nearly all of RAM, and mlx-lm raises the wired limit to the most the GPU may use
for every generation, which would wire the whole arena in every worker (mlx-lm#1252: 464 of 512 GB).
"""

from __future__ import annotations

import importlib
import os
import resource
from collections.abc import Callable

import mlx.core as mx

from expertd_protocol.errors import BadConfig

#: Megabytes of freed buffers that MLX may keep for reuse.
CACHE_LIMIT_ENV = "EXPERTD_MLX_CACHE_MB"
DEFAULT_CACHE_LIMIT_MB = 256
#: KV cache and activations are wired beside the weights.
WIRED_HEADROOM_BYTES = 2 << 30
#: What mlx-lm sets RLIMIT_NOFILE to when it is imported: the soft limit to 2048, the hard one to this.
MLX_LM_OPEN_FILES = 4096


def import_mlx_lm() -> None:
    """Import mlx-lm, which fails where it may not set its limit of open files (D25).

    Raises:
        BadConfig: the process may not have that many.
    """
    try:
        importlib.import_module("mlx_lm")
    except ValueError as exc:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        if hard == resource.RLIM_INFINITY or hard >= MLX_LM_OPEN_FILES:
            raise
        raise BadConfig(
            f"mlx-lm needs a limit of {MLX_LM_OPEN_FILES} open files, this process may have {hard} at "
            f"most; start it where `ulimit -Hn` says {MLX_LM_OPEN_FILES} or more"
        ) from exc


def bound_free_buffers() -> None:
    """Bound MLX's pool of freed buffers."""
    text = os.environ.get(CACHE_LIMIT_ENV, str(DEFAULT_CACHE_LIMIT_MB))
    if not text.isdecimal():
        raise BadConfig(f"{CACHE_LIMIT_ENV} is {text!r}, wanted a whole number of megabytes")
    mx.set_cache_limit(int(text) << 20)


class WiredCap:
    """Stands in for `mx.set_wired_limit`: the same, but never above the worker's own bytes."""

    def __init__(self, set_wired_limit: Callable[[int], int]) -> None:
        self._set = set_wired_limit
        self.most_bytes = WIRED_HEADROOM_BYTES

    def __call__(self, limit: int) -> int:
        return self._set(min(limit, self.most_bytes))


def cap_wired_memory(resident_bytes: int) -> None:
    """Let this process wire `resident_bytes` more, whoever asks for how much.

    mlx-lm calls `mx.set_wired_limit` by that name on each generation and has no option for it, so
    the name is what has to change; once per process. No effect on Linux. Not run on macOS yet.
    """
    if not isinstance(mx.set_wired_limit, WiredCap):
        mx.set_wired_limit = WiredCap(mx.set_wired_limit)
    mx.set_wired_limit.most_bytes += resident_bytes
