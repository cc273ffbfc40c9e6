"""Write a large model of random weights for benchmarks: real shapes, real layout, no meaning.

    python tools/write_synthetic_model.py bench/data/synthetic

A qwen3_moe folder as mlx-lm writes it (experts stacked and quantised in 4 bits, groups of 64), with
the tokenizer of the bundled demo model, so that workers load it. By default one expert has the
shape of Qwen3-30B-A3B's (2.53 MiB), and 16 layers x 64 experts are 2.7 GB. No byte is sparse.

The router prefers some experts as trained ones do: the first component of the residual stream is
constant, and each router row weighs it by a skewed number, so that popularity falls with an expert's
rank while the text still decides. By default the most wanted quarter gets about 56 % of the choices
(DeepSeek-V2-Lite on real text: 48 to 70 %, by layer).
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DEMO_MODEL = Path(__file__).resolve().parents[1] / "client" / "expertctl" / "demo_model"
GROUP, BITS = 64, 4
#: mlx-lm cuts at 5 GB; smaller here, so that the benchmark has several shards.
SHARD_BYTES = 1 << 30


@dataclass(frozen=True)
class Shape:
    layers: int
    experts: int
    hidden: int
    width: int
    top_k: int
    skew: float
    vocabulary: int
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 64


def config(shape: Shape) -> dict[str, Any]:
    """Return config.json."""
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "moe_intermediate_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "vocab_size": shape.vocabulary,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "quantization": {"group_size": GROUP, "bits": BITS, "mode": "affine"},
    }


Tensor = tuple[str, str, tuple[int, ...], float | None]


def tensors(shape: Shape) -> Iterator[Tensor]:
    """Yield (name, dtype, shape, deviation); random bits where there is no deviation."""
    h, q, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", "BF16", (shape.vocabulary, h), 1.0
    yield "model.norm.weight", "BF16", (h,), 0.0
    for layer in range(shape.layers):
        base = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{base}.{norm}.weight", "BF16", (h,), 0.0
        for norm in ("q_norm", "k_norm"):
            yield f"{base}.self_attn.{norm}.weight", "BF16", (shape.head_dim,), 0.0
        for name, out, into in (
            ("q_proj", q, h), ("k_proj", kv, h), ("v_proj", kv, h), ("o_proj", h, q)
        ):  # fmt: skip
            yield f"{base}.self_attn.{name}.weight", "BF16", (out, into), into**-0.5
        yield f"{base}.mlp.gate.weight", "BF16", (shape.experts, h), 1.0 * h**-0.5
        for name, out, into in (
            ("gate_proj", shape.width, h), ("up_proj", shape.width, h), ("down_proj", h, shape.width)
        ):  # fmt: skip
            stack = f"{base}.mlp.switch_mlp.{name}"
            groups = (shape.experts, out, into // GROUP)
            yield f"{stack}.weight", "U32", (shape.experts, out, into * BITS // 32), None
            # values are scale * (0..15) + bias: about centred, and as large as a trained layer's
            yield f"{stack}.scales", "BF16", groups, 0.02 * into**-0.5
            yield f"{stack}.biases", "BF16", groups, 0.02 * into**-0.5


def nbytes(tensor: Tensor) -> int:
    return int(np.prod(tensor[2])) * {"U32": 4, "BF16": 2}[tensor[1]]


def values(tensor: Tensor, shape: Shape, rng: np.random.Generator) -> bytes:
    """Return the bytes of one tensor."""
    name, _, dims, deviation = tensor
    if deviation is None:
        return rng.bytes(nbytes(tensor))
    if not deviation:  # a norm
        return bf16(np.ones(dims, np.float32))
    array = rng.standard_normal(dims, np.float32) * np.float32(deviation)
    if name.endswith("embed_tokens.weight"):
        array[:, 0] = 4.0  # the constant component
    elif name.endswith("o_proj.weight") or ".down_proj." in name:
        array *= np.float32(0.1)  # so that the constant stays one through all layers
    elif name.endswith("mlp.gate.weight"):
        rank = rng.permutation(shape.experts) + 1
        array[:, 0] = -shape.skew * np.log(rank)
    return bf16(array)


def bf16(array: np.ndarray[Any, Any]) -> bytes:
    return (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def write(folder: Path, shape: Shape, seed: int) -> int:
    """Write the folder; returns the bytes of its tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(DEMO_MODEL / name, folder / name)
    shards: list[list[Tensor]] = [[]]
    for tensor in tensors(shape):
        if shards[-1] and sum(map(nbytes, shards[-1])) + nbytes(tensor) > SHARD_BYTES:
            shards.append([])
        shards[-1].append(tensor)
    rng = np.random.default_rng(seed)
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
        at = 0
        for tensor in shard:
            end = at + nbytes(tensor)
            header[tensor[0]] = {"dtype": tensor[1], "shape": tensor[2], "data_offsets": [at, end]}
            weight_map[tensor[0]] = file_name
            at = end
        text = json.dumps(header, separators=(",", ":")).encode()
        with (folder / file_name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for tensor in shard:
                file.write(values(tensor, shape, rng))
    total = sum(nbytes(t) for shard in shards for t in shard)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(config(shape), indent=2))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--skew", type=float, default=0.13, help="0: every expert is as likely")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty")
    if args.hidden % GROUP or args.width % GROUP:
        parser.error(f"hidden and width must be multiples of {GROUP}")
    vocabulary = json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"]
    shape = Shape(
        args.layers, args.experts, args.hidden, args.width, args.top_k, args.skew, vocabulary
    )
    print(f"{args.out}: {write(args.out, shape, args.seed):,} bytes of tensors")


if __name__ == "__main__":
    main()
