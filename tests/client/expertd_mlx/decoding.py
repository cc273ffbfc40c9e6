"""Run a model over a prompt and then token by token, and keep every logit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from tests.tiny_models import VOCABULARY

DECODED = 32


def prompt(length: int, batch: int, seed: int = 0) -> mx.array:
    key = mx.random.key(1000 * length + 10 * batch + seed)
    return mx.random.randint(0, VOCABULARY, (batch, length), key=key)


def greedy(
    model: nn.Module, tokens: mx.array, steps: int = DECODED, cache: Any = None
) -> list[mx.array]:
    """Return the logits of the prompt and of `steps` tokens, each the likeliest one."""
    cache = make_prompt_cache(model) if cache is None else cache
    logits = [model(tokens, cache=cache)]
    for _ in range(steps):
        logits.append(model(mx.argmax(logits[-1][:, -1:], axis=-1), cache=cache))
        mx.eval(logits[-1])
    return logits


def first_difference(ours: list[mx.array], theirs: list[mx.array]) -> int | None:
    """Return the first step whose logits differ in any bit, None when there is none."""
    assert len(ours) == len(theirs)
    assert not any(mx.isnan(logits).any().item() for logits in theirs)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if not mx.array_equal(a, b):
            return step
    return None
