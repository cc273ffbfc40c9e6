"""Facts of a model that follow from its safetensors headers and its config; no weight is read.

A layer of experts is found by its tensors: projections of one owner whose parts are all stacked
`[experts, ...]` (layout A). That is a rule about names, for headers are all there is here; a worker
walks the family's own model instead, and the daemon checks what it found when it attaches.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from expertctl.context import context_length
from expertd_client.model_folder import read_config
from expertd_client.routing import declared_experts, top_k
from expertd_protocol.errors import DenseModel, UnsupportedLayout
from expertd_protocol.layout import Part

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "fc1", "fc2")
_PART = re.compile(
    rf"(?P<owner>.+)\.(?P<projection>{'|'.join(_PROJECTIONS)})"
    r"\.(?P<tensor>weight|scales|biases|bias|global_scale)"
)
_ONE_TENSOR_PER_EXPERT = re.compile(r"\.experts\.\d+\.")


class TensorHeader(Protocol):
    """What this module needs to know of a tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class ExpertLayer:
    """One MoE layer: its module path, its experts, and the parts of one expert."""

    path: str
    experts: int
    parts: tuple[Part, ...]

    @property
    def expert_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


@dataclass(frozen=True)
class ModelFacts:
    """What `expertctl show` prints."""

    folder: Path
    family: str
    context: int | None
    top_k: int | None
    layers: tuple[ExpertLayer, ...]
    total_bytes: int
    quantization: str
    warnings: tuple[str, ...]
    #: Of one packed expert, the largest; 0 when the experts are read in place.
    record_bytes: int = 0

    @property
    def experts(self) -> int:
        return max(layer.experts for layer in self.layers)

    @property
    def all_experts_bytes(self) -> int:
        return sum(layer.experts * layer.expert_bytes for layer in self.layers)

    @property
    def other_bytes(self) -> int:
        """Weights that every worker keeps for itself."""
        return self.total_bytes - self.all_experts_bytes

    @property
    def largest_expert_bytes(self) -> int:
        return max(layer.expert_bytes for layer in self.layers)

    @property
    def token_bytes(self) -> int | None:
        """Expert bytes that one token goes through: top-k of every layer."""
        k = self.top_k
        return sum(min(k, x.experts) * x.expert_bytes for x in self.layers) if k else None

    @property
    def kinds(self) -> tuple[tuple[Part, int], ...]:
        """Each different part, and how many layers have it."""
        seen: Counter[Part] = Counter(p for layer in self.layers for p in layer.parts)
        return tuple(seen.items())


def expert_layers(tensors: Mapping[str, TensorHeader]) -> tuple[ExpertLayer, ...]:
    """Return the stacked MoE layers, in the order of their numbers."""
    owners: dict[str, dict[str, TensorHeader]] = defaultdict(dict)
    for name, tensor in tensors.items():
        if match := _PART.fullmatch(name):
            owners[match["owner"]][f"{match['projection']}.{match['tensor']}"] = tensor
    found = [_layer(owner, parts) for owner, parts in owners.items()]
    return tuple(sorted((x for x in found if x), key=lambda x: _natural(x.path)))


def _layer(owner: str, parts: Mapping[str, TensorHeader]) -> ExpertLayer | None:
    weights = [t for name, t in parts.items() if name.endswith(".weight")]
    if len(weights) < 2 or any(len(t.shape) != 3 for t in weights):
        return None
    n = weights[0].shape[0]
    if any(not t.shape or t.shape[0] != n for t in parts.values()):
        return None
    return ExpertLayer(
        owner, n, tuple(Part(name, t.dtype, t.shape[1:]) for name, t in sorted(parts.items()))
    )


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(s), "") if s.isdigit() else (-1, s) for s in path.split(".")]


def model_facts(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorHeader],
    warnings: tuple[str, ...] = (),
    record_bytes: int = 0,
) -> ModelFacts:
    """Return the facts.

    Raises:
        DenseModel: the model has no routed experts.
        UnsupportedLayout: it has, but not where this module looks for them.
    """
    layers = expert_layers(tensors)
    if not layers:
        raise _no_layers(folder, config, tensors)
    return ModelFacts(
        folder=folder,
        family=str(config.get("model_type", "unknown")),
        context=context_length(config),
        top_k=top_k(config),
        layers=layers,
        total_bytes=sum(t.nbytes for t in tensors.values()),
        quantization=_quantization(config),
        warnings=warnings,
        record_bytes=record_bytes,
    )


def _no_layers(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]
) -> DenseModel | UnsupportedLayout:
    n = declared_experts(config)
    separate = any(_ONE_TENSOR_PER_EXPERT.search(name) for name in tensors)
    if n is None and not separate:
        return DenseModel(f"{folder} has no routed experts; plain mlx-lm runs it")
    if separate:
        error = UnsupportedLayout(
            f"{folder} has {n or 'several'} experts per layer, stored as one tensor per expert, "
            "which is not read in place"
        )
        error.add_note(f"mlx_lm.convert --hf-path {folder} --mlx-path CONVERTED")
        return error
    return UnsupportedLayout(
        f"config.json of {folder} declares {n} experts per layer, but no expert layer was recognised "
        f"by its tensor names: two or more stacks [experts, out, in] named {', '.join(_PROJECTIONS)}; "
        "expertctl run asks the model itself where its experts are, so it may still work"
    )


def _quantization(config: Mapping[str, Any]) -> str:
    found = config.get("quantization")
    if not isinstance(found, dict) or "bits" not in found:
        return "none"
    mode, bits, group = found.get("mode", "affine"), found["bits"], found.get("group_size")
    own = [v for v in found.values() if isinstance(v, dict)]
    mixed = f", {len(own)} modules of their own" if own else ""
    return f"{mode}, {bits} bits, groups of {group}{mixed}"


def read_facts(folder: Path) -> ModelFacts:
    """Read headers and config of a folder."""
    from expertd.store.index import build_index

    config = read_config(folder)
    index = build_index(folder)
    record_bytes = max((r.layer.record_bytes for r in index.records), default=0)
    return model_facts(folder, config, index.tensors, index.warnings, record_bytes)


def minimum_budget(facts: ModelFacts) -> int | None:
    """Return the smallest budget, bytes, for one worker; None when top-k is not in the config."""
    from expertd.cache import budget

    if facts.top_k is None:
        return None
    return budget.minimum_budget(
        [layer.parts for layer in facts.layers], facts.experts, facts.top_k
    )


def part_bits(layer: ExpertLayer, part: Part, config: Mapping[str, Any]) -> float | None:
    """Return the bits of one packed weight; None for a part that is not packed.

    The shapes are the truth: 32-bit words per row against the groups of its scales.
    """
    projection, _, tensor = part.name.rpartition(".")
    scales = next((p for p in layer.parts if p.name == f"{projection}.scales"), None)
    if tensor != "weight" or part.dtype != "U32" or scales is None:
        return None
    quantization = config.get("quantization")
    if not isinstance(quantization, dict):
        return None
    own = quantization.get(f"{layer.path}.{projection}")
    group = (own if isinstance(own, dict) else quantization).get("group_size")
    if not isinstance(group, int) or group <= 0:
        return None
    return part.shape[-1] * 32 / (scales.shape[-1] * group)
