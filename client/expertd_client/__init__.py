"""The blocking client of the expertd daemon: attach, map, pin; no MLX and no event loop.

A `Client` belongs to one thread of one process. A hit costs no message; only a miss asks the
daemon. Importing this package opens nothing, starts nothing and loads numpy
only when a worker needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expertd_client.admin import Admin
    from expertd_client.arena import Arena, SlabMap
    from expertd_client.client import Client
    from expertd_client.source import ModelSource

__all__ = ["Admin", "Arena", "Client", "ModelSource", "SlabMap"]

_HOMES = {
    "Admin": "admin",
    "Arena": "arena",
    "Client": "client",
    "ModelSource": "source",
    "SlabMap": "arena",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use: `expertctl stats` needs `Admin` alone, and no numpy."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
