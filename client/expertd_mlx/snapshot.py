"""Snapshot: what a forward pass changes in its KV caches, so that it can be done again (pin rule 6).

Taken before every pass, so it must cost microseconds: it remembers attributes, not buffers. Keys
and values need no copy: the second try writes the same positions again before anything reads them,
and where a cache grew or was cut, it holds a new array and the old one is still here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx


def _copied(value: Any) -> Any:
    """Copy what a pass may change in place: lists, and small arrays (`offset += n` changes the array)."""
    if isinstance(value, mx.array):
        # A second array object over the same data: `+=` and `[...] =` on the first do not reach it.
        # Not for buffers: one more reference would make MLX copy them on every write.
        return mx.array(value) if value.ndim <= 1 else value
    if isinstance(value, list):
        return [_copied(v) for v in value]
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    return value


def _nested(value: Any) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [found for v in value for found in _nested(v)]
    if isinstance(value, Mapping):
        return [found for v in value.values() for found in _nested(v)]
    return [value] if _is_cache(value) else []


def _is_cache(value: Any) -> bool:
    """A cache of any family is an object with attributes; arrays and numbers are not."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, (mx.array, type))
        and not callable(value)
    )


class CacheSnapshot:
    """The state of `cache` (a list of caches, possibly nested, or None) as it is now."""

    def __init__(self, cache: Any) -> None:
        self._saved: list[tuple[Any, dict[str, Any]]] = []
        pending = _nested(cache)
        seen: set[int] = set()
        while pending:
            one = pending.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            self._saved.append((one, {k: _copied(v) for k, v in vars(one).items()}))
            for value in vars(one).values():
                pending.extend(_nested(value))

    def restore(self) -> None:
        """Put everything back; may be called again after another try."""
        for one, attributes in self._saved:
            vars(one).clear()
            vars(one).update({k: _copied(v) for k, v in attributes.items()})
