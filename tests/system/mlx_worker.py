"""A worker process with MLX: greedy tokens of the bundled model, one per line, then `done`."""

from __future__ import annotations

import argparse
from pathlib import Path

import mlx.core as mx
from mlx_lm.generate import generate_step

import expertd_mlx
from tests.system.daemon import DEMO_MODEL


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    model, tokenizer = expertd_mlx.load(DEMO_MODEL, socket=args.run_dir, name=args.prompt[:20])
    prompt = mx.array(tokenizer.encode(args.prompt))
    for token, _ in generate_step(prompt, model, max_tokens=args.tokens):
        print("token", token, flush=True)
    expertd_mlx.close(model)
    print("done", flush=True)


if __name__ == "__main__":
    main()
