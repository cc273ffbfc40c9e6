"""A model that fits the budget: tokens per second, streamed against plain mlx-lm, in one process.

    .venv/bin/python bench/resident.py [--json] [--save] [--model FOLDER]

Both models are loaded in this process and run in turns, so that whatever else the machine does hits
both. Decode is timed over --tokens greedy tokens after a short prompt, prefill over --prompt tokens;
each round starts with the other side. The daemon is private, with room for every expert, and all
experts are resident before the first round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from record import circumstances, finish

import expertd_mlx
from expertctl.private_daemon import private_daemon
from expertd_client import Admin

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "client" / "expertctl" / "demo_model"
WARM_SECONDS = 300.0


def decode_seconds(model: nn.Module, prompt: mx.array, tokens: int) -> float:
    """Return the seconds of `tokens` greedy tokens as mlx-lm generates them, prefill apart."""
    steps = generate_step(prompt, model, max_tokens=tokens + 1)
    next(steps)
    start = time.perf_counter()
    n = sum(1 for _ in steps)
    assert n == tokens
    return time.perf_counter() - start


def prefill_seconds(model: nn.Module, prompt: mx.array) -> float:
    """Return the seconds of one prefill as mlx-lm does it: caches evaluated, logits dropped."""
    cache = make_prompt_cache(model)
    start = time.perf_counter()
    model(prompt[None], cache=cache)
    mx.eval([c.state for c in cache])
    return time.perf_counter() - start


def interleaved(
    rounds: int, ours: Callable[[], float], theirs: Callable[[], float]
) -> tuple[list[float], list[float]]:
    """Run both `rounds` times in turns, after one of each that does not count."""
    ours(), theirs()
    mine: list[float] = []
    plain: list[float] = []
    for n in range(rounds):
        for measure, into in [(ours, mine), (theirs, plain)][:: 1 if n % 2 else -1]:
            into.append(measure())
    return mine, plain


def ratio(mine: list[float], plain: list[float]) -> float:
    """Median of the rounds' own ratios: speed of ours as a share of plain."""
    return round(statistics.median(p / m for m, p in zip(mine, plain, strict=True)), 3)


def wait_until_resident(admin: Admin) -> None:
    end = time.monotonic() + WARM_SECONDS
    while True:
        (model,) = admin.stats().models
        if model.resident_bytes == model.total_expert_bytes:
            return
        if time.monotonic() > end:
            raise SystemExit(f"not resident after {WARM_SECONDS:g} s: {model.slots}")
        time.sleep(0.05)


def measure(folder: Path, rounds: int, tokens: int, length: int) -> dict[str, object]:
    with private_daemon("auto") as daemon:
        plain, tokenizer = mlx_lm.load(str(folder))
        ours, _ = expertd_mlx.load(folder, socket=daemon.socket)
        short = mx.array(tokenizer.encode("Once upon a time"))
        text = mx.random.randint(0, 4000, (length,), key=mx.random.key(1))
        with Admin.connect(daemon.socket) as admin:
            wait_until_resident(admin)
            decode = interleaved(
                rounds,
                lambda: decode_seconds(ours, short, tokens),
                lambda: decode_seconds(plain, short, tokens),
            )
            prefill = interleaved(
                rounds, lambda: prefill_seconds(ours, text), lambda: prefill_seconds(plain, text)
            )
            stats = admin.stats()
        expertd_mlx.close(ours)
    return {
        "decode_ratio": ratio(*decode),
        "prefill_ratio": ratio(*prefill),
        "decode_tokens_per_second": round(tokens / statistics.median(decode[0]), 1),
        "plain_decode_tokens_per_second": round(tokens / statistics.median(decode[1]), 1),
        "prefill_tokens_per_second": round(length / statistics.median(prefill[0]), 1),
        "plain_prefill_tokens_per_second": round(length / statistics.median(prefill[1]), 1),
        "requests": stats.total.requests,
        "model": folder.name,
        "rounds": rounds,
        "tokens": tokens,
        "prompt_tokens": length,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="write bench/results/resident.json")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prefill")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    figures = measure(args.model, args.rounds, args.tokens, args.prompt)
    finish("resident", figures | circumstances(load), as_json=args.json, save=args.save)


if __name__ == "__main__":
    main()
