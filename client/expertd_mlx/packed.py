"""Packed: a packed folder looks to mlx-lm like the folder it was made from.

In place of each tensor of records, the stacked tensors it stands for are handed to the family's own
`sanitize` and quantisation as lazy zeros of the right shape and type. Promises that none of them is
ever computed with: what is not streamed afterwards is refused (`refuse_leftovers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import mlx.core as mx
from safetensors import safe_open

from expertd_mlx.planes import MX_DTYPES
from expertd_protocol.errors import BadHeader, UnsupportedLayout
from expertd_protocol.messages import LayerSource
from expertd_protocol.packed import LAYER_KEY, RECORDS_SUFFIX, PackedLayer, parse_layer


def unpacked(
    weights: Mapping[str, mx.array], folder: Path | None
) -> tuple[dict[str, mx.array], frozenset[str]]:
    """Return the weights with stand-ins for packed experts, and the names of the stand-ins.

    Raises:
        UnsupportedLayout: there are records, but nothing that says what is in them.
    """
    result = dict(weights)
    records = {name for name in weights if name.endswith(RECORDS_SUFFIX)}
    if not records:
        return result, frozenset()
    layers = {layer.records: layer for layer in _layers(folder)} if folder else {}
    names: set[str] = set()
    for record in records:
        if record not in layers:
            raise UnsupportedLayout(
                f"no shard of {folder or 'the model'} says what is in {record}; pack the model again"
            )
        del result[record]
        for part in layers[record].parts:
            if part.tensor in result or part.dtype not in MX_DTYPES:
                raise UnsupportedLayout(
                    f"{part.tensor} of {folder} is there twice or of a type that MLX does not have "
                    f"({part.dtype}); pack the model again"
                )
            shape = (layers[record].experts, *part.shape)
            result[part.tensor] = mx.zeros(shape, MX_DTYPES[part.dtype])
            names.add(part.tensor)
    return result, frozenset(names)


def refuse_leftovers(
    stand_ins: frozenset[str], layers: Iterable[LayerSource], folder: Path | None
) -> None:
    """Refuse a model that would compute with a stand-in, because it does not stream it."""
    left = stand_ins - {part.tensor for layer in layers for part in layer.parts}
    if left:
        raise UnsupportedLayout(
            f"{folder} has {min(left)} and {len(left) - 1} other tensors packed that this mlx-lm does "
            "not use as streamed experts; pack the original model again with this version"
        )


def _layers(folder: Path) -> Iterable[PackedLayer]:
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                text = (file.metadata() or {}).get(LAYER_KEY)
            if text is not None:
                yield parse_layer(text)
        except Exception as exc:  # the library raises a class of its own, and OSError
            raise BadHeader(f"{path} does not say what it has packed: {exc}") from exc
