"""The promise: logits of a streamed model equal those of plain mlx-lm, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.client.expertd_mlx.conftest import Budget
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.tiny_models import TinyModel

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "nemotron_h")

#: Every quantisation, every budget with every view; each of them for every family.
CASES = (
    ("float32", Budget.MINIMUM, "map"),
    ("affine3", Budget.QUARTER, "copy"),
    ("affine4", Budget.ALL, "map"),
    ("affine8", Budget.MINIMUM, "copy"),
    ("mxfp4", Budget.QUARTER, "map"),
    ("float32", Budget.ALL, "copy"),
)
LENGTHS = (1, 7, 63, 64, 300)


def prompts(case: int) -> list[tuple[int, int]]:
    """Return (length, batch) of each prompt; every other case swaps batches of 1 and 3."""
    return [(length, 1 if (i + case) % 2 else 3) for i, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{q}-{b.value}-{v}" for q, b, v in CASES])
def test_logits_equal_plain_mlx_lm(
    family: str,
    case: int,
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    experts: Callable[[TinyModel, Budget], Any],
    streamed: Callable[..., nn.Module],
) -> None:
    """A22 too: gpt_oss has biases in every expert, none of them zero."""
    quantization, budget, view = CASES[case]
    model = tiny(family, quantization)
    plain = resident(model.path)
    ours = streamed(model, experts(model, budget), view)

    differing = {}
    for length, batch in prompts(case):
        theirs = greedy(plain, prompt(length, batch))
        step = first_difference(greedy(ours, prompt(length, batch)), theirs)
        if step is not None:
            differing[length, batch] = step

    assert differing == {}


@pytest.mark.parametrize("family", [*FAMILIES, "gemma4"])
def test_square_experts_are_not_mixed_up_A21(
    family: str,
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    experts: Callable[[TinyModel, Budget], Any],
    streamed: Callable[..., nn.Module],
) -> None:
    """All projections have one shape: only their names tell them apart."""
    model = tiny(family, intermediate_size=64, moe_intermediate_size=64)
    ours = streamed(model, experts(model, Budget.QUARTER))

    theirs = greedy(resident(model.path), prompt(20, 1), 4)

    assert first_difference(greedy(ours, prompt(20, 1), 4), theirs) is None


@pytest.mark.parametrize("view", ["map", "copy"])
def test_projections_of_different_bits_B11(
    view: str,
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    experts: Callable[[TinyModel, Budget], Any],
    streamed: Callable[..., nn.Module],
) -> None:
    model = tiny("qwen3_moe", "mixed")
    ours = streamed(model, experts(model, Budget.QUARTER), view)

    theirs = greedy(resident(model.path), prompt(40, 1), 8)

    assert first_difference(greedy(ours, prompt(40, 1), 8), theirs) is None


def test_a_context_that_grows_in_chunks(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    experts: Callable[[TinyModel, Budget], Any],
    streamed: Callable[..., nn.Module],
) -> None:
    """As mlx-lm prefills: several calls whose logits are dropped unevaluated."""
    from mlx_lm.models.cache import make_prompt_cache

    model = tiny("gpt_oss", "mxfp4")
    ours = streamed(model, experts(model, Budget.MINIMUM))
    logits = []
    for one in (ours, resident(model.path)):
        cache = make_prompt_cache(one)
        for seed in range(3):
            one(prompt(50, 1, seed), cache=cache)
            mx.eval([c.state for c in cache])
        logits.append(greedy(one, prompt(1, 1), 4, cache))

    assert first_difference(*logits) is None
