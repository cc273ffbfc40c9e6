"""Tiny Mixture-of-Experts models, written as real mlx-lm folders with seeded random weights."""

from __future__ import annotations

import importlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.switch_layers import SwitchLinear

VOCABULARY = 128

_ATTENTION = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

#: hidden 64, expert width 96 (not square), 2-3 layers. Top-k 2-4 of 8-16 experts.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **_ATTENTION,
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],  # one dense layer between two of experts
        "norm_topk_prob": True,
    },
    "mixtral": {
        **_ATTENTION,
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "olmoe": {
        **_ATTENTION,
        "model_type": "olmoe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    "deepseek_v3": {
        **_ATTENTION,
        "model_type": "deepseek_v3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    "gpt_oss": {
        **_ATTENTION,
        "model_type": "gpt_oss",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 32,  # shorter than the prompts: the window rotates
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 1024,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": False,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
        "hybrid_override_pattern": ["M", "E", "*", "E"],
        "num_hidden_layers": 4,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "time_step_limit": [0.0, 1e6],
    },
    "gemma4": {
        "model_type": "gemma4",
        "vocab_size": VOCABULARY,
        "text_config": {
            **_ATTENTION,
            "model_type": "gemma4_text",
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 96,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "tie_word_embeddings": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 32,
        },
    },
    "qwen3": {  # dense
        **_ATTENTION,
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "head_dim": 16,
    },
}


@dataclass(frozen=True)
class Quantization:
    """How the experts are stored; everything else stays in float."""

    mode: str
    bits: int
    group_size: int
    #: Bits of the last projection, when they differ (B11).
    down_bits: int | None = None

    def of(self, path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not isinstance(module, SwitchLinear):
            return False
        if self.down_bits and path.endswith(("down_proj", "fc2")):
            return {"mode": self.mode, "bits": self.down_bits, "group_size": self.group_size}
        return True


QUANTIZATIONS: dict[str, Quantization | None] = {
    "float32": None,
    "affine3": Quantization("affine", 3, 32),
    "affine4": Quantization("affine", 4, 32),
    "affine8": Quantization("affine", 8, 32),
    "mxfp4": Quantization("mxfp4", 4, 32),
    "mixed": Quantization("affine", 4, 32, down_bits=8),
}


@dataclass(frozen=True)
class TinyModel:
    """A folder, and what a test needs to know of it."""

    path: Path
    family: str
    layers: int
    experts: int
    top_k: int

    @property
    def switch_attribute(self) -> str:
        """The last step of the path of an expert layer."""
        return {"gpt_oss": "experts", "gemma4": "switch_glu"}.get(self.family, "switch_mlp")


def write_tiny_model(
    path: Path,
    family: str,
    quantization: str = "float32",
    *,
    seed: int = 0,
    dtype: mx.Dtype = mx.float32,
    **changes: Any,
) -> TinyModel:
    """Write `family` to the folder `path`. `changes` go into its config (inner one included)."""
    config = json.loads(json.dumps(CONFIGS[family]))
    config.get("text_config", config).update(changes)
    model = make_model(config, seed, dtype)
    how = QUANTIZATIONS[quantization]
    if how is not None:
        nn.quantize(
            model,
            how.group_size,
            how.bits,
            mode=how.mode,
            class_predicate=how.of,
        )
        config["quantization"] = {
            "group_size": how.group_size,
            "bits": how.bits,
            "mode": how.mode,
        }
    weights = dict(tree_flatten(model.parameters()))
    path.mkdir(parents=True, exist_ok=True)
    write_shards(path, weights)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    inner = config.get("text_config", config)
    experts = next(
        (inner[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in inner),
        0,
    )
    top_k = inner.get("num_experts_per_tok", inner.get("top_k_experts", 0))
    layers = sum(
        1 for _, m in model.named_modules() if type(m).__name__ in ("SwitchGLU", "SwitchMLP")
    )
    return TinyModel(path, family, layers, experts, top_k)


def make_model(config: dict[str, Any], seed: int, dtype: mx.Dtype = mx.float32) -> nn.Module:
    """Build the family's own model; no parameter is zero, biases and router corrections included."""
    arch = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model: nn.Module = arch.Model(arch.ModelArgs.from_dict(config))
    mx.random.seed(seed)
    new = []
    for name, value in tree_flatten(model.parameters()):
        noise = mx.random.normal(value.shape)
        if value.ndim < 2 or value.shape[-1] == 1:  # norms, biases, state-space and convolution
            value = value + 0.1 * noise
        else:
            value = noise / math.sqrt(value.shape[-1])
        new.append((name, value.astype(dtype)))
    model.update(tree_unflatten(new))
    mx.eval(model.parameters())
    return model


def write_shards(path: Path, weights: dict[str, mx.array], shards: int = 2) -> None:
    """Write `weights` as that many shards with an index, the way mlx-lm saves big models."""
    names = list(weights)
    each = -(-len(names) // shards)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[i * each : (i + 1) * each]}
        mx.save_safetensors(str(path / file), part, metadata={"format": "mlx"})
        weight_map.update(dict.fromkeys(part, file))
    total = sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
