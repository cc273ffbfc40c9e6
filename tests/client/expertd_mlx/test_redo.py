"""Rule 6: a pass whose slots were reused is done again, and nobody can tell afterwards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from expertd_mlx import stream_of
from expertd_mlx.snapshot import CacheSnapshot
from expertd_protocol.errors import StaleExperts
from tests.client.expertd_mlx.decoding import first_difference, greedy, prompt
from tests.fake_experts import FakeExperts
from tests.tiny_models import TinyModel

#: name -> (family, changes of its config, caches from a model, batch)
CACHES: dict[str, tuple[str, dict[str, Any], Callable[[nn.Module], list[Any]], int]] = {
    "kv": ("qwen3_moe", {}, make_prompt_cache, 1),
    "kv, batch 3": ("qwen3_moe", {}, make_prompt_cache, 3),
    "rotating": ("qwen3_moe", {}, partial(make_prompt_cache, max_kv_size=16), 1),
    "rotating and kv": ("gpt_oss", {}, make_prompt_cache, 3),
    "arrays and kv": ("nemotron_h", {}, make_prompt_cache, 3),
    "quantized": (
        "qwen3_moe",
        {"head_dim": 32},
        lambda m: [QuantizedKVCache(group_size=32) for _ in m.layers],
        1,
    ),
    "batch": ("qwen3_moe", {}, lambda m: [BatchKVCache([2, 0, 1]) for _ in m.layers], 3),
    "batch rotating": (
        "qwen3_moe",
        {},
        lambda m: [BatchRotatingKVCache(16, [2, 0, 1]) for _ in m.layers],
        3,
    ),
}


@pytest.mark.parametrize("where", ["first layer", "last layer"])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("view", ["map", "copy"])
def test_a_mismatch_in_prefill_and_in_decode_changes_nothing(
    view: str,
    kind: str,
    where: str,
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
) -> None:
    family, changes, caches, batch = CACHES[kind]
    model = tiny(family, **changes)
    client = FakeExperts(model.layers * model.experts, model.experts)
    ours = streamed(model, client, view)
    plain = resident(model.path)
    tokens = prompt(20, batch)
    theirs = greedy(plain, tokens, 12, caches(plain))
    at = 1 if where == "first layer" else model.layers
    # One pin per layer and pass, so: the prefill, the fourth token, and a token done again twice.
    # A repeated pass pins again from its first layer on.
    passes = {0: 1, 4: 1, 8: 2}
    pin = 0
    for number in range(13):
        for _ in range(passes.get(number, 0)):
            client.reused_after_pin.add(pin + at)
            pin += at
        pin += model.layers

    logits = greedy(ours, tokens, 12, caches(ours))

    assert first_difference(logits, theirs) is None
    assert client.mismatches == 4
    assert client.pins == pin
    assert len(client.passes) == 13  # a pass that was repeated counts once


def test_a_mismatch_in_a_wave_repeats_the_wave_only(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
) -> None:
    model = tiny("qwen3_moe")
    client = FakeExperts(5, 5, hostile=True, reused_after_pin={1, 2, 4})
    ours = streamed(model, client)
    theirs = greedy(resident(model.path), prompt(64, 1), 0)

    assert first_difference(greedy(ours, prompt(64, 1), 0), theirs) is None
    assert client.mismatches == 3
    used = [{e for i, es, _ in client.pinned_experts if i == layer for e in es} for layer in (0, 1)]
    waves = [-(-len(experts) // 5) for experts in used]
    assert min(waves) > 1
    assert client.pins == sum(waves) + 3


def test_slots_that_are_never_stable_end_in_one_clear_error(
    tiny: Callable[..., TinyModel],
    resident: Callable[[Path], nn.Module],
    streamed: Callable[..., nn.Module],
) -> None:
    model = tiny("qwen3_moe")
    client = FakeExperts(32, 16, reused_after_pin=set(range(3, 6)))
    ours = streamed(model, client)
    cache = make_prompt_cache(ours)
    mx.eval(ours(prompt(5, 1), cache=cache))  # pins 1 and 2

    with pytest.raises(StaleExperts, match="slots changed while pinned"):
        ours(mx.array([[1]]), cache=cache)

    assert cache[0].offset == 5
    plain = resident(model.path)
    theirs = make_prompt_cache(plain)
    plain(prompt(5, 1), cache=theirs)
    again = first_difference(
        greedy(ours, mx.array([[1]]), 3, cache), greedy(plain, mx.array([[1]]), 3, theirs)
    )
    assert again is None  # the model is as usable as before


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["pin", "read_back"])
def test_an_interrupted_pass_leaves_no_pin_and_the_caches_as_they_were(
    where: str,
    error: type[BaseException],
    tiny: Callable[..., TinyModel],
    streamed: Callable[..., nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before `read_back` the layer before is not evaluated yet, but the caches are built on it."""
    model = tiny("qwen3_moe")
    client = FakeExperts(16, 16, hostile=True)
    ours = streamed(model, client)
    undisturbed = greedy(ours, prompt(6, 1), 3)
    cache = make_prompt_cache(ours)
    owner = client if where == "pin" else stream_of(ours)
    original, calls = getattr(owner, where), []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise error("stop")
        return original(*args)

    monkeypatch.setattr(owner, where, interrupted)
    with pytest.raises(error, match="stop"):
        ours(prompt(6, 1), cache=cache)
    monkeypatch.undo()

    client.begin_pass()  # asserts that nothing is pinned
    assert all(c.offset == 0 and c.keys is None for c in cache)
    assert first_difference(greedy(ours, prompt(6, 1), 3, cache), undisturbed) is None


def test_a_snapshot_holds_what_a_pass_changes_in_place() -> None:
    one, left = KVCache(), ArraysCache(2, [3, 1])
    nested = CacheList(RotatingKVCache(8), CacheList(left, one))
    before = CacheSnapshot([nested, None, QuantizedKVCache()])
    for _ in range(2):
        one.update_and_fetch(mx.ones((1, 1, 4, 8)), mx.ones((1, 1, 4, 8)))
        left[0] = mx.ones((2, 3))
        left.advance(2)
        nested[0].update_and_fetch(mx.ones((1, 1, 1, 8)), mx.ones((1, 1, 1, 8)))

        before.restore()

        assert (one.offset, one.keys) == (0, None)
        assert left.cache == [None, None]
        assert left.left_padding.tolist() == [3, 1]
        assert (nested[0].offset, nested[0]._idx) == (0, 0)


def test_a_snapshot_makes_no_copy_of_keys_and_values() -> None:
    """A second reference would make MLX copy the whole context on every token."""
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 4, 8)), mx.ones((1, 1, 4, 8)))
    keys = cache.keys

    CacheSnapshot([cache]).restore()

    assert cache.keys is keys
