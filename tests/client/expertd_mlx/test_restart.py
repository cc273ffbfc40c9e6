"""A new daemon in the middle of a text: another arena, perhaps smaller; the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn
import pytest

from expertd_mlx import stream_of
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.fake_experts import FakeExperts
from tests.tiny_models import TinyModel


@pytest.mark.parametrize("view", ["map", "copy"])
@pytest.mark.parametrize(
    ("restarts", "length"),
    [
        ({1: 16}, 5),  # before anything was read
        ({12: 16, 20: 8}, 5),  # in decode
        ({2: 3}, 64),  # between the waves of a prefill, with a smaller quota
        ({13: 3}, 5),  # in decode, with a quota below the top-k: a prefix is pinned, then waves
    ],
)
def test_tokens_stay_the_same_over_a_restart(
    view: str,
    restarts: dict[int, int],
    length: int,
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
) -> None:
    model = tiny("qwen3_moe")
    client = FakeExperts(16, 8 if length == 64 else 16, restart_before_pin=restarts)
    ours = streamed(model, client, view)

    logits = greedy(ours, prompt(length, 1), 12)

    assert first_difference(logits, greedy(resident(model.path), prompt(length, 1), 12)) is None
    assert client.arena.serial == 1 + len(restarts)
    assert stream_of(ours).view.serial == client.arena.serial
    assert client.old_arenas == 0  # nothing of the old one is mapped any more
