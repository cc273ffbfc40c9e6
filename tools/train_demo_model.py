#!/usr/bin/env python3
"""Train a small Mixture-of-Experts language model like the bundled demo model.

Reads any folder of text files and writes two model folders:

    OUT/hf-bf16    one tensor per expert, the names of Hugging Face's Qwen3-MoE
    OUT/mlx-4bit   the stacked layout of mlx-lm: 4-bit, router gate 8-bit, float32 scales

The defaults are the recipe of the bundled model: 8.5 M parameters, of which 2.3 M are active
per token. It wants 5 to 10 MB of simple English text, and takes 30 to 60 minutes on one core.
Needs expertd's own environment, and PyTorch, which expertd does not depend on:

    .venv/bin/pip install 'torch>=2.9'
    .venv/bin/python tools/train_demo_model.py TEXT_FOLDER OUT
    .venv/bin/python tools/train_demo_model.py TEXT_FOLDER OUT --preset tiny --steps 20
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
except ModuleNotFoundError:
    sys.exit("train_demo_model: needs PyTorch: pip install 'torch>=2.9'")

import mlx.core as mx
import mlx_lm
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|endoftext|>"  # id 0: between documents, and the end of a generation
SPECIAL_TOKENS = [END, "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{% if not loop.last %}\n\n{% endif %}{% endfor %}"
)
NORM_EPS = 1e-6
ROPE_THETA = 10_000.0
INIT_STD = 0.02
GROUP_SIZE = 64  # of the quantisation: every input width must be a multiple of it

PRESETS: dict[str, dict[str, int]] = {
    "demo": {},
    "tiny": {
        "vocab": 512,
        "hidden": 64,
        "layers": 2,
        "heads": 2,
        "head_dim": 32,
        "experts": 8,
        "top_k": 2,
        "expert_width": 64,
        "sequence": 64,
        "warmup": 5,
    },
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small Qwen3-MoE model and write it for mlx-lm.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("text", type=Path, help="folder of text files, read recursively")
    parser.add_argument("out", type=Path, help="folder to write; hf-bf16 and mlx-4bit go in it")
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="sizes to start from")
    parser.add_argument("--suffixes", nargs="+", default=[".txt", ".md", ".py"], help="to read")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads")

    size = parser.add_argument_group("model")
    size.add_argument("--vocab", type=int, default=4096, help="byte-level BPE tokens")
    size.add_argument("--hidden", type=int, default=192, help="width of the residual stream")
    size.add_argument("--layers", type=int, default=6, help="layers, each with experts")
    size.add_argument("--heads", type=int, default=3, help="query heads")
    size.add_argument("--kv-heads", type=int, default=1, help="key and value heads")
    size.add_argument("--head-dim", type=int, default=64, help="width of a head")
    size.add_argument("--experts", type=int, default=32, help="experts per layer")
    size.add_argument("--top-k", type=int, default=4, help="experts per token")
    size.add_argument("--expert-width", type=int, default=64, help="inner width of an expert")

    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=int, default=3500, help="2,048 tokens each by default")
    train.add_argument("--sequence", type=int, default=256, help="tokens in a sequence")
    train.add_argument("--batch", type=int, default=8, help="sequences in a step")
    train.add_argument("--peak-lr", type=float, default=3e-3, help="learning rate after warm-up")
    train.add_argument("--warmup", type=int, default=100, help="steps of linear warm-up")
    train.add_argument("--final-lr-share", type=float, default=0.05, help="where the cosine ends")
    train.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.95), help="of AdamW")
    train.add_argument("--weight-decay", type=float, default=0.1, help="of AdamW, on matrices")
    train.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    train.add_argument("--balance-loss", type=float, default=8e-3, help="Switch loss, per layer")
    train.add_argument("--z-loss", type=float, default=1e-3, help="router z-loss, per layer")
    train.add_argument("--held-out", type=float, default=0.01, help="share of text for evaluation")

    preset = parser.parse_known_args()[0].preset
    parser.set_defaults(**PRESETS[preset])
    args = parser.parse_args()
    for name in ("hidden", "expert_width"):
        if getattr(args, name) % GROUP_SIZE:
            parser.error(f"--{name.replace('_', '-')} must be a multiple of {GROUP_SIZE}")
    if args.heads * args.head_dim % GROUP_SIZE:
        parser.error(f"--heads times --head-dim must be a multiple of {GROUP_SIZE}")
    if args.heads % args.kv_heads:
        parser.error("--heads must be a multiple of --kv-heads")
    if args.vocab < 256 + len(SPECIAL_TOKENS):
        parser.error(f"--vocab must be at least {256 + len(SPECIAL_TOKENS)}: all bytes are tokens")
    for folder in ("hf-bf16", "mlx-4bit"):
        if (args.out / folder).exists():
            parser.error(f"{args.out / folder} exists already")
    return args


# Text


def read_documents(folder: Path, suffixes: list[str]) -> list[str]:
    paths = sorted(p for p in folder.rglob("*") if p.suffix in suffixes and p.is_file())
    documents = [p.read_text(encoding="utf-8", errors="replace") for p in paths]
    return [document for document in documents if document.strip()]


def train_tokenizer(documents: list[str], vocab: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(documents):
        ids += [*encoding.ids, 0]
    return torch.tensor(ids)


def random_batches(ids: Tensor, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets, `[batch, sequence]`, from random places, without end."""
    generator = torch.Generator().manual_seed(args.seed)
    offsets = torch.arange(args.sequence + 1)
    while True:
        starts = torch.randint(len(ids) - args.sequence, (args.batch, 1), generator=generator)
        rows = ids[starts + offsets]
        yield rows[:, :-1], rows[:, 1:]


# Model: parameter names are those of Qwen3MoeForCausalLM, so that saving is a plain loop.


class Attention(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = args.heads, args.kv_heads, args.head_dim
        self.q_proj = nn.Linear(args.hidden, args.heads * args.head_dim, bias=False)
        self.k_proj = nn.Linear(args.hidden, args.kv_heads * args.head_dim, bias=False)
        self.v_proj = nn.Linear(args.hidden, args.kv_heads * args.head_dim, bias=False)
        self.o_proj = nn.Linear(args.heads * args.head_dim, args.hidden, bias=False)
        self.q_norm = nn.RMSNorm(args.head_dim, eps=NORM_EPS)
        self.k_norm = nn.RMSNorm(args.head_dim, eps=NORM_EPS)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        def split(y: Tensor, heads: int) -> Tensor:
            return y.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

        def rotate(y: Tensor) -> Tensor:
            first, second = y.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

        v = split(self.v_proj(x), self.kv_heads)
        q = rotate(self.q_norm(split(self.q_proj(x), self.heads).float())).to(v.dtype)
        k = rotate(self.k_norm(split(self.k_proj(x), self.kv_heads).float())).to(v.dtype)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """A router and its experts, stacked as `[experts, out, in]`."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.top_k, self.z_loss, self.balance_loss = args.top_k, args.z_loss, args.balance_loss
        n, width, hidden = args.experts, args.expert_width, args.hidden
        self.gate = nn.Linear(hidden, n, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(n, width, hidden))
        self.up_proj = nn.Parameter(torch.empty(n, width, hidden))
        self.down_proj = nn.Parameter(torch.empty(n, hidden, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output and this layer's router losses."""
        tokens = x.flatten(0, 1)
        n = self.gate.out_features
        logits = self.gate(tokens).float()
        probabilities = logits.softmax(dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)

        counts = torch.bincount(chosen.flatten(), minlength=n)
        share = counts / chosen.numel()
        balance = n * (share * probabilities.mean(dim=0)).sum()
        z = logits.logsumexp(dim=-1).square().mean()

        # Sorted by expert, each expert's tokens are one slice. Cast here once: under autocast
        # every one of the small products below would cast its own operands.
        order = chosen.flatten().argsort()
        rows = order // self.top_k
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        parts = [
            F.linear(F.silu(F.linear(part, gate)) * F.linear(part, up), down)
            for part, gate, up, down in zip(
                tokens.to(dtype)[rows].split(counts.tolist()),
                self.gate_proj.to(dtype).unbind(),
                self.up_proj.to(dtype).unbind(),
                self.down_proj.to(dtype).unbind(),
                strict=True,
            )
        ]
        scaled = torch.cat(parts).float() * weights.flatten()[order].unsqueeze(-1)
        y = torch.zeros_like(tokens, dtype=torch.float32).index_add(0, rows, scaled)
        return y.view_as(x), self.balance_loss * balance + self.z_loss * z


class Layer(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(args.hidden, eps=NORM_EPS)
        self.self_attn = Attention(args)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden, eps=NORM_EPS)
        self.mlp = Experts(args)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y, router_losses = self.mlp(self.post_attention_layernorm(x))
        return x + y, router_losses


class Model(nn.Module):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab, args.hidden)
        self.layers = nn.ModuleList(Layer(args) for _ in range(args.layers))
        self.norm = nn.RMSNorm(args.hidden, eps=NORM_EPS)
        half = torch.arange(0, args.head_dim, 2) / args.head_dim
        angles = torch.arange(args.sequence).unsqueeze(-1) / ROPE_THETA**half
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the router losses, summed over layers."""
        x = self.embed_tokens(ids)
        router_losses = x.new_zeros(())
        for layer in self.layers:
            x, losses = layer(x, self.cos, self.sin)
            router_losses = router_losses + losses
        return F.linear(self.norm(x), self.embed_tokens.weight), router_losses


# Training


def learning_rate(step: int, args: argparse.Namespace) -> float:
    if step < args.warmup:
        return args.peak_lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    cosine = (1 + math.cos(math.pi * done)) / 2
    return args.peak_lr * (args.final_lr_share + (1 - args.final_lr_share) * cosine)


def train(model: Model, ids: Tensor, args: argparse.Namespace) -> None:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": args.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=tuple(args.betas),
        fused=True,
    )
    batches = random_batches(ids, args)
    started = time.monotonic()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args)
        inputs, targets = next(batches)
        # Weights and optimizer state stay float32; only the matrix products are bfloat16.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits, router_losses = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        (loss + router_losses).backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == args.steps:
            tokens = (step + 1) * args.batch * args.sequence
            rate = tokens / (time.monotonic() - started)
            print(
                f"step {step + 1}/{args.steps} loss {loss.item():.3f}"
                f" router {router_losses.item():.4f} tokens/s {rate:.0f}",
                flush=True,
            )


def held_out_rows(ids: Tensor, args: argparse.Namespace, limit: int = 64) -> Tensor:
    n_rows = min(limit, len(ids) // (args.sequence + 1))
    return ids[: n_rows * (args.sequence + 1)].view(n_rows, args.sequence + 1)


@torch.no_grad()
def torch_loss(model: Model, rows: Tensor) -> float:
    losses = [
        F.cross_entropy(model(row[None, :-1])[0].flatten(0, 1), row[1:]).item() for row in rows
    ]
    return sum(losses) / len(losses)


def mlx_loss(folder: Path, rows: Tensor) -> float:
    model, _ = mlx_lm.load(str(folder))
    losses = []
    for row in rows.tolist():
        logits = model(mx.array([row[:-1]]))[0].astype(mx.float32)
        targets = mx.array(row[1:])[:, None]
        scores = mx.take_along_axis(logits, targets, axis=-1)[:, 0]
        losses.append((mx.logsumexp(logits, axis=-1) - scores).mean().item())
    return sum(losses) / len(losses)


# Output


def hf_config(args: argparse.Namespace) -> dict[str, object]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": args.vocab,
        "hidden_size": args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.head_dim,
        "num_experts": args.experts,
        "num_experts_per_tok": args.top_k,
        "moe_intermediate_size": args.expert_width,
        "intermediate_size": args.expert_width * args.top_k,  # required, but no layer is dense
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "router_aux_loss_coef": args.balance_loss,
        "output_router_logits": False,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "max_position_embeddings": 4 * args.sequence,
        "tie_word_embeddings": True,
        "initializer_range": INIT_STD,
        "use_sliding_window": False,
        "sliding_window": None,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def hf_tensors(model: Model) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        value = value.bfloat16()
        prefix, _, projection = name.rpartition(".")
        if value.ndim == 3:
            for expert, matrix in enumerate(value):
                key = f"model.{prefix}.experts.{expert}.{projection}.weight"
                tensors[key] = matrix.contiguous()
        else:
            tensors[f"model.{name}"] = value
    return tensors


def write_hf(folder: Path, model: Model, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "bos_token": None,
        "pad_token": END,
        "unk_token": None,
        "model_max_length": 4 * args.sequence,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    folder.mkdir(parents=True)
    save_file(hf_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {
        "config.json": hf_config(args),
        "tokenizer_config.json": tokenizer_config,
        "special_tokens_map.json": {"eos_token": END, "pad_token": END},
    }.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)

    documents = read_documents(args.text, args.suffixes)
    if not documents:
        sys.exit(f"train_demo_model: no text in {args.text} ({' '.join(args.suffixes)})")
    tokenizer = train_tokenizer(documents, args.vocab)
    if tokenizer.get_vocab_size() < args.vocab:
        sys.exit(f"train_demo_model: too little text for {args.vocab} tokens; lower --vocab")
    ids = encode(tokenizer, documents)
    n_held_out = max(int(len(ids) * args.held_out), args.sequence + 1)
    if len(ids) < 2 * n_held_out:
        sys.exit(f"train_demo_model: {len(ids)} tokens of text are too few")
    train_ids, held_out = ids[:-n_held_out], held_out_rows(ids[-n_held_out:], args)

    model = Model(args)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(documents)} files, {len(ids):,} tokens, {n_parameters:,} parameters")
    train(model, train_ids, args)

    hf, quantised = args.out / "hf-bf16", args.out / "mlx-4bit"
    write_hf(hf, model, tokenizer, args)
    # mlx-lm's own rule for this family keeps the router gate at 8 bits.
    mlx_lm.convert(
        str(hf), str(quantised), quantize=True, q_group_size=GROUP_SIZE, q_bits=4, dtype="float32"
    )
    print(f"held-out loss: torch float32 {torch_loss(model, held_out):.4f}")
    print(f"held-out loss: mlx 4-bit     {mlx_loss(quantised, held_out):.4f}")


if __name__ == "__main__":
    main()
