"""Looking ahead: the guess is the family's own routing, changes nothing, and stays where it is faster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from expertd_mlx import stream_of
from expertd_mlx.foresight import (
    AFTER_LOSS,
    AFTER_LOSSES_MOST,
    AFTER_WIN,
    BEFORE_FIRST,
    LEAD,
    Foresight,
    Trial,
    router_of,
)
from expertd_protocol.layout import Phase
from tests.client.expertd_mlx.conftest import Budget
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.tiny_models import TinyModel

FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "nemotron_h", "gemma4")


class Always:
    """Looks ahead in every pass."""

    looks_ahead = True

    def __init__(self) -> None:
        self.passes: list[int] = []

    def took(self, seconds: float, tokens: int) -> None:
        assert seconds > 0
        self.passes.append(tokens)


def looking_ahead(model: nn.Module) -> Always:
    always = Always()
    stream_of(model).foresight.trial = always
    return always


# --- exact ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
def test_logits_are_those_of_plain_mlx_lm_and_the_wishes_are_for_the_next_layer(
    family: str,
    batch: int,
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    experts: Callable[[TinyModel, Budget], Any],
    streamed: Callable[..., nn.Module],
) -> None:
    model = tiny(family, "affine4")
    # the experts of three tokens go through in waves where not all can be pinned: no guess there
    client = experts(model, Budget.QUARTER if batch == 1 else Budget.ALL)
    client.reads_ahead = True
    ours = streamed(model, client)
    always = looking_ahead(ours)
    theirs = greedy(resident(model.path), prompt(9, batch), 12)

    assert first_difference(greedy(ours, prompt(9, batch), 12), theirs) is None

    assert always.passes == [batch] * sum(phase is Phase.DECODE for _, phase in client.passes)
    assert len(client.wishes) == len(always.passes) * (model.layers - 1)
    for layer, wished in client.wishes:
        assert 0 < layer < model.layers
        assert 1 <= len(wished) <= batch * model.top_k
        assert 0 <= min(wished) <= max(wished) < model.experts


def test_the_guess_is_what_the_next_router_says_to_the_same_input(
    tiny: Callable[..., TinyModel],
    experts: Callable[[TinyModel, Budget], Any],
    streamed: Callable[..., nn.Module],
) -> None:
    model = tiny("olmoe")
    client = experts(model, Budget.ALL)
    client.reads_ahead = True
    ours = streamed(model, client)
    looking_ahead(ours)
    inputs = []
    first, second = (layer.mlp for layer in ours.model.layers)
    family = type(first)

    class Noting(family):  # type: ignore[misc, valid-type]
        def __call__(self, x: mx.array) -> mx.array:
            inputs.append(x)
            return super().__call__(x)

    first.__class__ = Noting
    ours(prompt(1, 1))
    expected = np.argsort(-np.array(second.gate(inputs[-1])).ravel())[: model.top_k]

    assert client.wishes == [(1, tuple(sorted(expected.tolist())))]


def test_nothing_is_wished_for_in_prefill_or_when_nobody_wants_it(
    tiny: Callable[..., TinyModel],
    experts: Callable[[TinyModel, Budget], Any],
    streamed: Callable[..., nn.Module],
) -> None:
    model = tiny("olmoe")
    client = experts(model, Budget.QUARTER)
    ours = streamed(model, client)
    always = looking_ahead(ours)

    ours(prompt(1, 1))
    client.reads_ahead = True
    ours(prompt(5, 1))
    ours(prompt(1, 40))  # so many sequences that their pairs are sorted

    assert client.wishes == []
    assert always.passes == []


# --- which module is asked -----------------------------------------------------------------------
class Block(nn.Module):
    """Routes for the experts inside, as mlx-lm's blocks do."""

    def __init__(self, sight: Foresight | None = None, layer: int = 0) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 8)
        self._sight, self._layer = sight, layer
        self.used = 0

    def __call__(self, x: mx.array, extra: Any = None) -> mx.array:
        indices = mx.argsort(self.gate(x))[..., :2]
        assert self._sight is not None
        self._sight.reached(self._layer, indices)
        self.used += 1
        return x


def two_blocks(kind: type[Block] = Block) -> tuple[Foresight, list[Block]]:
    blocks = [kind(), kind()]
    sight = Foresight(blocks)
    for layer, block in enumerate(blocks):
        block._sight, block._layer = sight, layer
    return sight, blocks


def test_a_router_that_is_asked_stops_before_its_experts() -> None:
    sight, (first, second) = two_blocks()
    sight.begin(True)
    x = mx.random.normal((1, 4))

    first(x)
    guess = sight.guess(0)

    assert guess is not None
    assert guess.tolist() == mx.argsort(second.gate(x))[..., :2].tolist()
    assert (first.used, second.used) == (1, 0)
    assert sight.guess(0) is None  # once for each call
    assert second(x) is x  # and computes again when it is its turn
    assert sight.guess(1) is None  # the last layer


def test_a_router_that_could_get_a_cache_is_never_asked() -> None:
    sight, (first, second) = two_blocks()
    sight.begin(True)

    first(mx.zeros((1, 4)), [])

    assert sight.guess(0) is None
    assert second.used == 0
    assert not sight.works


class Broken(Block):
    def __call__(self, x: mx.array, extra: Any = None) -> mx.array:
        if self._layer:
            raise ValueError("another shape, please")
        return super().__call__(x, extra)


def test_a_router_that_fails_when_it_is_asked_is_not_asked_again() -> None:
    sight, (first, _) = two_blocks(Broken)
    sight.begin(True)

    first(mx.zeros((1, 4)))

    assert sight.guess(0) is None
    assert not sight.works
    sight.begin(True)
    assert not sight.on


def test_a_model_with_a_layer_that_nobody_routes_for_is_left_alone() -> None:
    blocks = [Block(), Block()]

    assert not Foresight([blocks[0], None]).works
    assert not Foresight([blocks[0], blocks[0]]).works  # one router for two layers
    assert not Foresight([blocks[0]]).works  # no next layer
    assert type(blocks[0]) is Block


class Experts(nn.Module):
    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        return x


class Layer(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        return x


def test_the_router_is_the_block_around_the_experts_or_stands_beside_them() -> None:
    block, beside = Block(), nn.Linear(2, 2)
    block.experts = Experts()
    block.experts.switch = Experts()
    alone = Experts()
    alone.switch = Experts()
    model = Layer()
    model.layers = [
        Layer(mlp=block),
        Layer(experts=alone, router=beside),
        Layer(experts=Experts()),
    ]
    modules = dict(model.named_modules())

    assert router_of(modules, "layers.0.mlp.experts.switch") is block
    assert router_of(modules, "layers.1.experts.switch") is beside
    assert router_of(modules, "layers.2.experts") is None


# --- whether it pays -----------------------------------------------------------------------------
def passes(trial: Trial, n: int, ahead: float, without: float) -> list[bool]:
    """Let `n` passes take these seconds; return which looked ahead."""
    looked = []
    for _ in range(n):
        looked.append(trial.looks_ahead)
        trial.took(ahead if looked[-1] else without, 1)
    return looked


def test_at_first_nothing_is_looked_ahead_and_then_every_other_pass() -> None:
    trial = Trial()

    assert not any(passes(trial, BEFORE_FIRST, 1.0, 1.0))
    assert passes(trial, 8, 1.0, 0.9) == [True, False, False, True] * 2


def test_what_is_faster_stays_and_is_tried_again_later() -> None:
    trial = Trial()
    passes(trial, BEFORE_FIRST + 2 * LEAD, ahead=0.9, without=1.0)

    assert trial.pays
    assert all(passes(trial, AFTER_WIN, 0.9, 1.0))
    passes(trial, 2 * LEAD, ahead=1.1, without=1.0)
    assert not trial.pays


def test_what_is_slower_is_left_for_longer_each_time() -> None:
    trial = Trial()
    passes(trial, BEFORE_FIRST, 1.1, 1.0)
    rests = []
    for _ in range(6):
        passes(trial, 2 * LEAD, ahead=1.1, without=1.0)
        rest = 0
        while not trial.looks_ahead and rest <= AFTER_LOSSES_MOST:
            passes(trial, 1, 1.1, 1.0)
            rest += 1
        rests.append(rest)

    assert rests == [min(AFTER_LOSS << n, AFTER_LOSSES_MOST) for n in range(6)]


def test_a_machine_that_gets_slower_all_the_time_favours_neither_side() -> None:
    trial = Trial()
    passes(trial, BEFORE_FIRST, 1.0, 1.0)
    seconds = 1.0
    for _ in range(40 * LEAD):
        seconds *= 1.01
        trial.took(seconds, 1)

    assert not trial.pays
    assert "lead=0" in repr(trial)


def test_passes_of_different_size_are_not_compared() -> None:
    trial = Trial()
    passes(trial, BEFORE_FIRST, 1.0, 1.0)
    for _ in range(40 * LEAD):
        tokens = 1 if trial.looks_ahead else 2
        trial.took(float(tokens), tokens)

    assert not trial.pays
    assert "lead=0" in repr(trial)
