"""What a worker streams: the model folder and, per MoE layer, the tensors of its experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from expertd_protocol.layout import Part
from expertd_protocol.messages import LayerSource


@dataclass(frozen=True)
class ModelSource:
    """Found by walking the mlx-lm model; the daemon checks it against the safetensors headers."""

    path: Path
    experts: int
    layers: tuple[LayerSource, ...]

    @cached_property
    def parts(self) -> tuple[tuple[Part, ...], ...]:
        """Parts of one expert, per MoE layer: what decides the planes of its slab."""
        return tuple(
            tuple(Part(part.name, part.dtype, part.shape) for part in layer.parts)
            for layer in self.layers
        )

    @cached_property
    def expert_bytes(self) -> tuple[int, ...]:
        """Bytes of one expert, per MoE layer."""
        return tuple(sum(part.nbytes for part in parts) for parts in self.parts)
