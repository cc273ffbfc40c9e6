"""Text: a prompt to tokens, tokens to text, with mlx-lm's own generation.

The same functions serve a streamed and a resident model, so that two runs differ in nothing else.
Owns no model and no daemon connection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper


@dataclass(frozen=True)
class Piece:
    """One token and the text that became readable with it (may be empty)."""

    text: str
    token: int
    prompt_tokens: int
    prompt_tps: float
    tokens: int
    tps: float
    #: None while it goes on, then `length` or `stop`.
    finish_reason: str | None


def load_resident(path: str | Path) -> tuple[nn.Module, TokenizerWrapper]:
    """Load with plain mlx-lm: every weight in this process, no daemon."""
    model, tokenizer = mlx_lm.load(str(path))[:2]
    return model, tokenizer


def encode(tokenizer: TokenizerWrapper, text: str, *, chat: bool) -> list[int]:
    """Return token ids; `chat` puts the text into the tokenizer's chat template, if it has one."""
    if chat and tokenizer.has_chat_template:
        messages = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    return list(tokenizer.encode(text))


def pieces(
    model: nn.Module,
    tokenizer: TokenizerWrapper,
    prompt: list[int],
    *,
    max_tokens: int,
    temp: float = 0.0,
    top_p: float = 0.0,
    seed: int | None = None,
    ignore_eos: bool = False,
) -> Iterator[Piece]:
    """Generate after `prompt`.

    `ignore_eos` bans the tokens that end a text, so that exactly `max_tokens` come.
    """
    if seed is not None:
        mx.random.seed(seed)
    bans = dict.fromkeys(tokenizer.eos_token_ids, float("-inf")) if ignore_eos else None
    for response in mlx_lm.stream_generate(
        model,
        tokenizer,
        prompt,
        max_tokens=max_tokens,
        sampler=make_sampler(temp=temp, top_p=top_p),
        logits_processors=make_logits_processors(logit_bias=bans),
    ):
        yield Piece(
            response.text,
            int(response.token),
            response.prompt_tokens,
            response.prompt_tps,
            response.generation_tokens,
            response.generation_tps,
            response.finish_reason,
        )
