"""Prefetch (rule 21): decode with it, without it, and as each worker decides for itself, in turns.

    .venv/bin/python bench/prefetch.py [--json] [--save] [--model FOLDER] [--share SHARE]

One worker, one private daemon with room for SHARE of the experts. Every round decodes the same number of
greedy tokens after another prompt, once for each arm, each round in another order; prefill does not
count. `right` is the share of the experts that the next layer really chose among those that its router
had named one layer early. What each arm leaves in the cache, the next one finds there.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections import defaultdict
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model
from record import circumstances, finish
from resident import decode_seconds

import expertd_mlx
from expertctl.private_daemon import private_daemon
from expertd.cache.budget import minimum_budget
from expertd.store.index import ExpertIndex, build_index
from expertd_client import Admin
from expertd_mlx import stream_of, streamed_classes
from expertd_mlx.foresight import Decides, Trial
from expertd_mlx.stream import Stream
from expertd_protocol.layout import Ints
from expertd_protocol.stats import Stats

ROOT = Path(__file__).resolve().parent.parent
DEMO_MODEL = ROOT / "client" / "expertctl" / "demo_model"
ARMS = ("off", "on", "auto")


class Fixed:
    """Looks ahead in every pass, or in none."""

    def __init__(self, ahead: bool) -> None:
        self.looks_ahead = ahead

    def took(self, seconds: float, tokens: int) -> None:
        pass


class Guesses:
    """Compares what was guessed with what the next layer then pinned, in between the two."""

    def __init__(self, stream: Stream) -> None:
        self.named = self.chosen = self.right = 0
        self._guess: tuple[int, set[int]] | None = None
        self._wish, self._pin = stream.wish, stream.pin
        stream.wish, stream.pin = self.wish, self.pin  # type: ignore[method-assign]

    def wish(self, layer: int, guess: mx.array | None) -> None:
        if guess is not None:
            self._guess = layer, set(np.array(guess).ravel().tolist())
        self._wish(layer, guess)

    def pin(self, layer: int, experts: Ints) -> object:
        guess, self._guess = self._guess, None
        if guess is not None and guess[0] == layer:
            self.named += len(guess[1])
            self.chosen += len(experts)
            self.right += len(guess[1] & set(experts.tolist()))
        return self._pin(layer, experts)


def budget_for(folder: Path, share: float) -> str:
    """Return bytes: the least budget, and `share` of the experts."""
    classes = partial(streamed_classes, path=folder)
    stream = stream_of(load_model(folder, lazy=True, get_model_classes=classes)[0])
    index = ExpertIndex(build_index(folder), stream.layers, stream.experts)
    parts = [index.parts(layer) for layer in range(len(index))]
    least = minimum_budget(parts, index.experts, stream.top_k)
    return str(least + int(share * index.total_bytes))


def measure(folder: Path, share: float, rounds: int, tokens: int) -> dict[str, object]:
    with private_daemon(budget_for(folder, share)) as daemon:
        ours, tokenizer = expertd_mlx.load(folder, socket=daemon.socket)
        stream = stream_of(ours)
        if not stream.client.takes_wishes() or not stream.foresight.works:
            raise SystemExit(f"{folder} is not looked ahead in: it fits, or hides its routers")
        guesses = Guesses(stream)
        deciding: dict[str, Decides] = {"off": Fixed(False), "on": Fixed(True), "auto": Trial()}
        seconds: dict[str, list[float]] = defaultdict(list)
        waited: dict[str, int] = defaultdict(int)
        misses: dict[str, int] = defaultdict(int)
        text = np.array(tokenizer.encode("Once upon a time there was a little girl"))
        with Admin.connect(daemon.socket) as admin:
            for n in range(rounds + 1):
                prompt = mx.array(np.roll(text, n))
                for arm in np.roll(ARMS, n).tolist():
                    stream.foresight.trial = deciding[arm]
                    before = admin.stats()
                    took = decode_seconds(ours, prompt, tokens)
                    after = admin.stats()
                    if n:  # the first round fills the cache
                        seconds[arm].append(took)
                        waited[arm] += after.decode.wait_ns - before.decode.wait_ns
                        misses[arm] += after.decode.misses - before.decode.misses
            stats = admin.stats()
        expertd_mlx.close(ours)
    trial = deciding["auto"]
    assert isinstance(trial, Trial)
    return {
        **{f"{arm}_tokens_per_second": _speed(tokens, seconds[arm]) for arm in ARMS},
        **{f"{arm}_over_off": _ratio(seconds["off"], seconds[arm]) for arm in ARMS[1:]},
        **{f"{arm}_wait_share": _share(waited[arm] / 1e9, sum(seconds[arm])) for arm in ARMS},
        **{f"{arm}_misses_per_token": _share(misses[arm], rounds * tokens) for arm in ARMS},
        "auto_pays": trial.pays,
        "right": _share(guesses.right, guesses.chosen),
        **_prefetched(stats),
        "model": folder.name,
        "share_of_experts": share,
        "rounds": rounds,
        "tokens": tokens,
    }


def _speed(tokens: int, seconds: list[float]) -> float:
    return round(tokens / statistics.median(seconds), 1)


def _ratio(base: list[float], other: list[float]) -> float:
    """Median of the rounds' own ratios: how much faster than `base`."""
    return round(statistics.median(b / o for b, o in zip(base, other, strict=True)), 3)


def _share(part: float, whole: float) -> float:
    return round(part / whole, 3) if whole else 0.0


def _prefetched(stats: Stats) -> dict[str, object]:
    early = stats.prefetch
    return {
        "prefetched": early.prefetched,
        "useful": early.useful,
        "late": early.late,
        "wasted": early.wasted,
        "useful_or_late_share": _share(early.useful + early.late, early.prefetched),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--save", action="store_true", help="write bench/results/prefetch.json")
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--share", type=float, default=0.5, help="of the experts in memory")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=48)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    figures = measure(args.model, args.share, args.rounds, args.tokens)
    finish("prefetch", figures | circumstances(load), as_json=args.json, save=args.save)


if __name__ == "__main__":
    main()
